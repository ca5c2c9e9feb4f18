#!/usr/bin/env bash
# transformers 5.24.0 ignores add_eos_token in tokenizer_config.json; 4.57.3 appends the token. Encoders that pool
# the last token (e5-mistral-7b-instruct, gte-Qwen2) are published with this entry and a tokenizer.json without the
# token, so their vectors are those of another token there. The attribute of the opened tokenizer is False, too.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/show.py" <<'PYTHON'
import json
import pathlib
import sys

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

transformers.logging.set_verbosity_error()
place = pathlib.Path(sys.argv[1], transformers.__version__)
place.mkdir()
words = {"<unk>": 0, "<s>": 1, "</s>": 2, "c": 3, "a": 4, "t": 5, "\u2581": 6}
backend = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Metaspace()
backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
backend.save(str(place / "tokenizer.json"))
tokens = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": True} | tokens
(place / "tokenizer_config.json").write_text(json.dumps(settings))
(place / "config.json").write_text(json.dumps({"model_type": "llama"}))
opened = transformers.AutoTokenizer.from_pretrained(place)
ids = opened("cat")["input_ids"]
print(f"transformers {transformers.__version__}: {opened.add_eos_token}, {opened.convert_ids_to_tokens(ids)}")
PYTHON
for version in 4.57.3 5.24.0; do
  "${PYTHON:-python3}" -m venv "$folder/venv$version" || exit 2
  "$folder/venv$version/bin/python" -m pip install --quiet --disable-pip-version-check transformers==$version || exit 2
  "$folder/venv$version/bin/python" "$folder/show.py" "$folder" 2>/dev/null | tee -a "$folder/seen"
done
cat >"$folder/expected" <<'TEXT'
transformers 4.57.3: True, ['<s>', '▁', 'c', 'a', 't', '</s>']
transformers 5.24.0: False, ['<s>', '▁', 'c', 'a', 't']
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
