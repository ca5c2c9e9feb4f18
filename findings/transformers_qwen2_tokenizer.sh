#!/usr/bin/env bash
# transformers 5.24.0: a Qwen2 folder whose tokenizer is not a byte-level BPE changes its tokens on a round trip.
# save_pretrained writes the tokenizer's class and a whole tokenizer.json. For model_type "qwen2", AutoTokenizer
# ignores the class and builds a Qwen2Tokenizer of the vocabulary alone. Words become other tokens or vanish, without
# a warning. For "qwen3" and "llama" the same files give the saved tokens, and so does PreTrainedTokenizerFast.
# A sentence encoder that was trained with such a tokenizer has other vectors when sentence-transformers opens it.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 || exit 2
cat >"$folder/show.py" <<'PYTHON'
import json
import pathlib
import sys

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

transformers.logging.set_verbosity_error()
print("transformers", transformers.__version__)
words = {"[PAD]": 0, "[UNK]": 1, "cat": 2, "dog": 3, "c": 4, "a": 5, "t": 6}
backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
saved = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
for model_type in ("llama", "qwen3", "qwen2"):
    place = pathlib.Path(sys.argv[1], model_type)
    saved.save_pretrained(place)
    (place / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": len(words)}))
    opened = transformers.AutoTokenizer.from_pretrained(place)
    print(f"{model_type}: {type(opened).__name__}, {saved.tokenize('cat dog')} -> {opened.tokenize('cat dog')}")
again = transformers.PreTrainedTokenizerFast.from_pretrained(place)
print(f"PreTrainedTokenizerFast: {again.tokenize('cat dog')}")
PYTHON
"$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
transformers 5.24.0
llama: TokenizersBackend, ['cat', 'dog'] -> ['cat', 'dog']
qwen3: TokenizersBackend, ['cat', 'dog'] -> ['cat', 'dog']
qwen2: Qwen2Tokenizer, ['cat', 'dog'] -> ['c', 'a', 't']
PreTrainedTokenizerFast: ['cat', 'dog']
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
