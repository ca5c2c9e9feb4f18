#!/usr/bin/env bash
# FlagEmbedding 1.4.2: with the newest transformers that its requirements allow, `import FlagEmbedding` fails.
# Its requirement is transformers>=4.44.2,<6. Modules for rerankers import transformers.modeling_attn_mask_utils, which
# transformers 5.24 no longer has, and the package imports them all, for BGE-M3 too. transformers 4.57.6 works, and
# needs datasets below 5, because datasets 5.2 requires a newer huggingface_hub than transformers 4 allows.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check FlagEmbedding==1.4.2 torch==2.11.0 \
  transformers==5.24.0 datasets==5.2.0 sentence-transformers==6.2.0 || exit 2
"$folder/venv/bin/python" -m pip check >"$folder/check" || true
cat >"$folder/show.py" <<'PYTHON'
from importlib.metadata import requires, version

print("FlagEmbedding", version("FlagEmbedding"), "transformers", version("transformers"))
print(next(line for line in requires("FlagEmbedding") if line.startswith("transformers")))
try:
    import FlagEmbedding
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("imported", FlagEmbedding.__name__)
PYTHON
{
  grep -i flagembedding "$folder/check" || echo "pip check has no complaint about FlagEmbedding"
  "$folder/venv/bin/python" "$folder/show.py" 2>/dev/null
} | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
pip check has no complaint about FlagEmbedding
FlagEmbedding 1.4.2 transformers 5.24.0
transformers<6.0.0,>=4.44.2
ModuleNotFoundError: No module named 'transformers.modeling_attn_mask_utils'
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
