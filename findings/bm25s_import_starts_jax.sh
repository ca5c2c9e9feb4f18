#!/usr/bin/env bash
# Importing bm25s 0.3.16 runs a JAX program: JAX's devices are then fixed, and jax.distributed.initialize fails.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
{
  "${PYTHON:-python3}" -m venv "$folder/venv" &&
    "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check bm25s==0.3.16 jax==0.10.2 jaxlib==0.10.2
} || exit 2
cat >"$folder/start.py" <<'EOF'
import importlib
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
import jax

try:
    jax.distributed.initialize("127.0.0.1:29431", num_processes=1, process_id=0)
    print("jax.distributed.initialize: works")
except RuntimeError as error:
    print(f"jax.distributed.initialize: RuntimeError: {str(error).splitlines()[0]}")
EOF
"$folder/venv/bin/python" -c 'from importlib.metadata import version; print("bm25s", version("bm25s"), "jax", version("jax"))'
without=$(JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/start.py" 2>/dev/null | tail -1)
with=$(JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/start.py" bm25s 2>/dev/null | tail -1)
echo "without bm25s:      $without"
echo "after import bm25s: $with"
if [[ $without == *works && $with == *RuntimeError* ]]; then
  echo "as described: import bm25s starts JAX, so a program of several processes must connect them before"
else
  echo "changed"
  exit 1
fi
