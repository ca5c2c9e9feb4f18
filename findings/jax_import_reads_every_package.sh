#!/usr/bin/env bash
# `import jax` (0.10.2 on Python 3.11, newest 0.12.0.1 on 3.12) parses the metadata of every installed package, to look for
# a ROCm plugin, also on machines without one. So its time grows with the environment, because Python reads METADATA with its
# parser of e-mails: 256 packages take 45 ms, a tenth of the import.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}
version=0.10.2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' && version=0.12.0.1
{
  "$python" -m venv "$folder/venv" &&
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "jax==$version" "jaxlib==$version"
} || exit 2
cat >"$folder/count.py" <<'EOF'
import importlib.metadata
import time

parsed = []
original = importlib.metadata.Distribution.metadata.fget
importlib.metadata.Distribution.metadata = property(lambda self: (parsed.append(self), original(self))[1])
started = time.process_time()
import jax  # noqa: E402

print(len(parsed), f"{time.process_time() - started:.2f}", jax.__version__)
EOF
site=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$folder/venv/bin/python" "$folder/count.py" >/dev/null # writes bytecode
read -r before seconds found < <("$folder/venv/bin/python" "$folder/count.py")
# 300 packages with 120 header lines, such as a research environment has.
for n in $(seq 300); do
  mkdir "$site/filler$n-1.0.dist-info"
  {
    printf 'Metadata-Version: 2.1\nName: filler%s\nVersion: 1.0\n' "$n"
    for m in $(seq 120); do echo "Requires-Dist: other$m>=1.0; extra == 'all'"; done
  } >"$site/filler$n-1.0.dist-info/METADATA"
done
read -r after seconds_after _ < <("$folder/venv/bin/python" "$folder/count.py")
echo "jax $found: $before packages' metadata parsed, $seconds CPU s; with 300 more packages $after, $seconds_after CPU s"
if ((after - before == 300)); then
  echo "as described: import jax parses the metadata of every installed package"
else
  echo "changed"
  exit 1
fi
