#!/usr/bin/env bash
# SentenceTransformer.encode of sentence-transformers 5.0.0 strips the white space at both ends of a text, and
# that of 6.2.0 keeps it. Both add empty prompts `query` and `document` to a folder when they save it, so that
# encode_document uses neither its `passage` nor its `corpus` prompt. The model has random weights: one RoBERTa
# layer with a byte-level BPE tokenizer. torch makes the download large, some 3 GB on Linux.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
install() { "$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" || exit 2; }
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
cat >"$folder/show.py" <<'EOF'
import json
import logging
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

warnings.simplefilter("ignore")
import numpy as np
import torch
import transformers
from sentence_transformers import SentenceTransformer, models
from tokenizers import Tokenizer, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

logging.disable(logging.WARNING)
transformers.logging.disable_progress_bar()
folder, expected = Path(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = Tokenizer(BPE())
tokenizer.pre_tokenizer = bytes_
special = ["<s>", "<pad>", "</s>", "<unk>"]
trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=bytes_.alphabet())
tokenizer.train_from_iterator(["dogs chase cats"], trainer)
tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=30, **names)
fast.save_pretrained(folder / "encoder")
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
config = transformers.RobertaConfig(
    vocab_size=len(fast), max_position_embeddings=40, pad_token_id=1, **sizes
)
transformers.RobertaModel(config).save_pretrained(folder / "encoder")
modules = [models.Transformer(str(folder / "encoder")), models.Pooling(32)]
SentenceTransformer(modules=modules, device="cpu").save(str(folder / "model"))
path = folder / "model" / "config_sentence_transformers.json"
prompts = {"query": "cats ", "passage": "dogs ", "corpus": "chase "}
path.write_text(json.dumps(json.loads(path.read_text()) | {"prompts": prompts}))

print(*(f"{p} {version(p)}" for p in ("sentence-transformers", "transformers", "torch")), sep=", ")
model = SentenceTransformer(str(folder / "model"), device="cpu")
near = lambda left, right: bool(np.abs(left - right).max() < 1e-5)
seen = set()
for text in (" dogs chase", "dogs chase ", "dogs chase\n"):
    found = "strips" if near(model.encode([text]), model.encode([text.strip()])) else "keeps"
    seen.add(found)
    print(f"encode of {text!r}: {found} the white space")
unprompted = near(model.encode_document(["dogs"]), model.encode(["dogs"], prompt=""))
prompted = near(model.encode_query(["dogs"]), model.encode(["cats dogs"], prompt=""))
print(f"prompts {prompts}: encode_query uses query: {prompted}; encode_document uses none: {unprompted}")
model.save(str(folder / "again"))
again = json.loads((folder / "again" / path.name).read_text())["prompts"]
print(f"prompts after save: {again}")
if seen != {expected} or not (unprompted and prompted) or again != {"document": "", **prompts}:
    print(f"changed: expected that encode {expected} the white space, and that an empty document hides passage")
    sys.exit(1)
EOF
changed=0
install sentence-transformers==5.0.0 transformers==4.53.3 torch==2.13.0
"$folder/venv/bin/python" "$folder/show.py" "$folder/five" strips || changed=1
install sentence-transformers==6.2.0 transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" "$folder/show.py" "$folder/six" keeps || changed=1
exit $changed
