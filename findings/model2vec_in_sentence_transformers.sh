#!/usr/bin/env bash
# model2vec 0.9.0 saves folders that sentence-transformers 6.2.0 opens (they have a modules.json), but the two
# libraries give other vectors for the same folder. model2vec leaves unknown words out of the mean, so a text of
# unknown words has a zero vector; sentence-transformers averages the vector of [UNK] in. Also,
# StaticEmbedding.from_model2vec drops the normalisation that the folder asks for, and
# SentenceTransformer(folder) keeps it. torch makes the download large, some 3 GB on Linux.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  model2vec==0.9.0 sentence-transformers==6.2.0 || exit 2
cat >"$folder/show.py" <<'PYTHON'
import sys
import warnings
from importlib.metadata import version

warnings.simplefilter("ignore")
import numpy as np
from model2vec import StaticModel
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

words = {"[PAD]": 0, "[UNK]": 1, "cat": 2, "dog": 3}
tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
vectors = np.array([[0, 0], [8, 8], [1, 0], [0, 1]], dtype=np.float32)
print(*(f"{name} {version(name)}" for name in ("model2vec", "sentence-transformers")), sep=", ")
for normalize in (False, True):
    place = f"{sys.argv[1]}/{normalize}"
    StaticModel(vectors, tokenizer, {"normalize": normalize}).save_pretrained(place)
    opened = {
        "model2vec": StaticModel.from_pretrained(place),
        "SentenceTransformer(folder)": SentenceTransformer(place, device="cpu"),
        "from_model2vec": SentenceTransformer(modules=[StaticEmbedding.from_model2vec(place)], device="cpu"),
    }
    for text in ("cat dog", "cat zebra"):
        for name, model in opened.items():
            print(f"normalize {normalize}, {text!r}, {name}: {np.round(model.encode([text])[0], 2).tolist()}")
PYTHON
"$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
model2vec 0.9.0, sentence-transformers 6.2.0
normalize False, 'cat dog', model2vec: [0.5, 0.5]
normalize False, 'cat dog', SentenceTransformer(folder): [0.5, 0.5]
normalize False, 'cat dog', from_model2vec: [0.5, 0.5]
normalize False, 'cat zebra', model2vec: [1.0, 0.0]
normalize False, 'cat zebra', SentenceTransformer(folder): [4.5, 4.0]
normalize False, 'cat zebra', from_model2vec: [4.5, 4.0]
normalize True, 'cat dog', model2vec: [0.71, 0.71]
normalize True, 'cat dog', SentenceTransformer(folder): [0.71, 0.71]
normalize True, 'cat dog', from_model2vec: [0.5, 0.5]
normalize True, 'cat zebra', model2vec: [1.0, 0.0]
normalize True, 'cat zebra', SentenceTransformer(folder): [0.75, 0.66]
normalize True, 'cat zebra', from_model2vec: [4.5, 4.0]
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
