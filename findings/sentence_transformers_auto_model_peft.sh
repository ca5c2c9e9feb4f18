#!/usr/bin/env bash
# sentence-transformers 6.2.0: model[0].auto_model = peft.get_peft_model(...), the usual way to add LoRA in version 5,
# saves a folder whose adapted weights are random when it is opened. In version 6, auto_model is a read-only property
# of `model`. torch's Module stores the assigned value elsewhere and raises nothing, and training works, for peft
# changes the layers in place. save() then writes those layers under peft's names (query.base_layer.weight), which
# SentenceTransformer(folder) does not know. It draws the layers' weights anew, so two loads give different vectors.
# The documented add_adapter() raises with peft 0.21.2, the newest peft on 2026-11-29: transformers 5.24.0 requires
# 0.22.0. load_adapter() has no such check, but save() has, so a model trained from an adapter cannot be saved.
# What to do: assign model[0].model (saves and opens as an adapter folder), and open what you saved before a long run.
# torch makes the download large, some 3 GB on Linux.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  sentence-transformers==6.2.0 transformers==5.24.0 peft==0.21.2 torch==2.13.0 || exit 2
cat >"$folder/show.py" <<'PYTHON'
import sys
from importlib.metadata import version

import numpy as np
import peft
import torch
import transformers
from sentence_transformers import SentenceTransformer, models
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

folder = sys.argv[1]
print(*(f"{name} {version(name)}" for name in ("sentence-transformers", "transformers", "peft")), sep=", ")
torch.manual_seed(0)
words = Tokenizer(WordLevel({"[PAD]": 0, "[UNK]": 1, "cat": 2}, unk_token="[UNK]"))
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", model_max_length=8)
fast.save_pretrained(f"{folder}/base")
sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
transformers.BertModel(transformers.BertConfig(vocab_size=3, **sizes)).save_pretrained(f"{folder}/base")
lora = peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
opened = lambda place: SentenceTransformer(place, device="cpu")
for name in ("auto_model", "model"):
    model = SentenceTransformer(modules=[models.Transformer(f"{folder}/base"), models.Pooling(32)], device="cpu")
    setattr(model[0], name, peft.get_peft_model(getattr(model[0], name), lora))
    print(f"{name} is then a {type(getattr(model[0], name)).__name__}")
    model.save(f"{folder}/{name}")
    vectors = [each.encode(["cat"]) for each in (model, opened(f"{folder}/{name}"), opened(f"{folder}/{name}"))]
    first, second = (np.abs(vector - vectors[0]).max() < 1e-6 for vector in vectors[1:])
    same = np.abs(vectors[1] - vectors[2]).max() < 1e-6
    print(f"opened as saved: {first}, {second}; two loads are equal: {same}")
model[0].model.save_pretrained(f"{folder}/adapter")
model = opened(f"{folder}/base")
model.load_adapter(f"{folder}/adapter")
for name, call in {"add_adapter": lambda: model.add_adapter(lora), "save": lambda: model.save(folder)}.items():
    try:
        print(f"{name}: {call()}")
    except ValueError as error:
        print(f"{name}: {error}")
PYTHON
"$folder/venv/bin/python" "$folder/show.py" "$folder" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
sentence-transformers 6.2.0, transformers 5.24.0, peft 0.21.2
auto_model is then a BertModel
opened as saved: False, False; two loads are equal: False
model is then a PeftModel
opened as saved: True, True; two loads are equal: True
add_adapter: The version of PEFT you are using is not compatible, please use a version >= 0.22.0
save: The version of PEFT you are using is not compatible, please use a version >= 0.22.0
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
