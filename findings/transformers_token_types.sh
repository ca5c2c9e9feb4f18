#!/usr/bin/env bash
# A tokenizer folder whose class is PreTrainedTokenizerFast gives token types for a pair of texts in
# transformers 4.57.6, and none in transformers 5.24.0. A BERT cross-encoder that was trained with the types
# therefore gives other scores after the upgrade, without a warning. Naming the class BertTokenizerFast, or
# listing token_type_ids in model_input_names, keeps the types in both.
#
# Run:    bash findings/transformers_token_types.sh
# Result: exit status 0 while both versions behave so, 1 if one of them changes.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cat > "$place/show.py" <<'PYTHON'
import json
import pathlib
import sys

import tokenizers
import transformers

folder = pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "cat", "dog"]
library = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
library.normalizer = tokenizers.normalizers.BertNormalizer()
library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
library.post_processor = tokenizers.processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)
library.save(str(folder / "tokenizer.json"))
(folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
for named in ("PreTrainedTokenizerFast", "BertTokenizerFast"):
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named, "pad_token": "[PAD]"}))
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    found = loaded("a cat", "a dog").get("token_type_ids")
    print(f"transformers {transformers.__version__}, {named}: token_type_ids {found}")
PYTHON
for version in 4.57.6 5.24.0; do
  python3 -m venv "$place/$version"
  "$place/$version/bin/pip" install --quiet --disable-pip-version-check "transformers==$version"
  "$place/$version/bin/python" "$place/show.py" "$place/folder" 2>/dev/null
done | tee "$place/seen"
cat > "$place/expected" <<'TEXT'
transformers 4.57.6, PreTrainedTokenizerFast: token_type_ids [0, 0, 0, 0, 1, 1, 1]
transformers 4.57.6, BertTokenizerFast: token_type_ids [0, 0, 0, 0, 1, 1, 1]
transformers 5.24.0, PreTrainedTokenizerFast: token_type_ids None
transformers 5.24.0, BertTokenizerFast: token_type_ids [0, 0, 0, 0, 1, 1, 1]
TEXT
diff "$place/expected" "$place/seen" && echo "as described"
