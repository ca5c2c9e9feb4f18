#!/usr/bin/env bash
# PyLate 1.6.0: if a word of the skip list is not in the vocabulary, every unknown word of a document loses its vector.
# ColBERT maps the words to skip to token ids, and a word that the vocabulary lacks becomes the id of [UNK]. The skip
# list is all punctuation by default, so one missing mark is enough. The documentation speaks of the words of the list
# only. MultiVectorMask of sentence-transformers 6.2 leaves out words that the vocabulary lacks.
# Models of one vocabulary with and without a full stop encode the same two texts, whose skip list is the full stop.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check pylate==1.6.0 torch==2.11.0 \
  sentence-transformers==5.3.0 transformers==5.3.0 || exit 2
cat >"$folder/show.py" <<'PYTHON'
import pathlib
import sys
import warnings

import pylate
import torch
import transformers
from pylate import models

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
print("pylate", pylate.__version__)
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[Q]", "[D]", "the", "cat", "sat"]
for name, more in (("without the full stop", []), ("with the full stop", ["."])):
    place = pathlib.Path(sys.argv[1], name.replace(" ", "_"))
    place.mkdir()
    (place / "vocab.txt").write_text("\n".join(words + more))
    tokenizer = transformers.BertTokenizerFast(vocab=str(place / "vocab.txt"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(place)
    tokenizer.save_pretrained(place)
    model = models.ColBERT(
        str(place), embedding_size=8, skiplist_words=["."], query_prefix="[Q]", document_prefix="[D]", device="cpu"
    )
    for text in ("the cat sat", "the zebra sat"):
        vectors = model.encode([text], is_query=False, show_progress_bar=False)[0]
        print(f"{name}: {len(vectors)} vectors for {text!r}, {tokenizer.tokenize(text)}")
PYTHON
"$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
pylate 1.6.0
without the full stop: 6 vectors for 'the cat sat', ['the', 'cat', 'sat']
without the full stop: 5 vectors for 'the zebra sat', ['the', '[UNK]', 'sat']
with the full stop: 6 vectors for 'the cat sat', ['the', 'cat', 'sat']
with the full stop: 6 vectors for 'the zebra sat', ['the', '[UNK]', 'sat']
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
