#!/usr/bin/env bash
# FlagEmbedding 1.4.2: while BGE-M3 is trained, the padding of a passage takes part in MaxSim.
# The vectors of padding tokens are set to zeros, and the maximum over a passage's tokens includes them. A query token
# whose products with all real tokens are negative scores 0 instead, so the score, the loss and the gradient of a pair
# depend on the longest passage of its batch. Inference (BGEM3FlagModel.compute_score) cuts the padding off.
# One pair is scored twice by the training code, with no padding and with four padding tokens.
# Exits 0 if that is still so, 1 if the behaviour has changed, 2 if the packages cannot be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv" || exit 2
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check FlagEmbedding==1.4.2 torch==2.11.0 \
  transformers==4.57.6 datasets==4.5.0 sentence-transformers==5.3.0 || exit 2
cat >"$folder/show.py" <<'PYTHON'
from importlib.metadata import version

import torch
import transformers
from FlagEmbedding.finetune.embedder.encoder_only.m3.modeling import EncoderOnlyEmbedderM3Model

print("FlagEmbedding", version("FlagEmbedding"))
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
config = transformers.XLMRobertaConfig(vocab_size=20, pad_token_id=1, **sizes)
parts = {
    "model": transformers.XLMRobertaModel(config, add_pooling_layer=False),
    "colbert_linear": torch.nn.Linear(16, 16),
    "sparse_linear": torch.nn.Linear(16, 1),
}


class Words:
    cls_token_id, pad_token_id, eos_token_id, unk_token_id = 0, 1, 2, 3


model = EncoderOnlyEmbedderM3Model(parts, tokenizer=Words, normalize_embeddings=True).eval()
# Vectors of tokens that point away from each other: the second half of the vocabulary against the first.
with torch.no_grad():
    for parameter in parts["model"].embeddings.parameters():
        parameter.zero_()
    table = parts["model"].embeddings.word_embeddings.weight
    table[4:12] = torch.randn(16)
    table[12:20] = -table[4]
    parts["model"].embeddings.LayerNorm.weight.fill_(1.0)
    for name, parameter in parts["model"].encoder.named_parameters():
        parameter.fill_(1.0 if "LayerNorm.weight" in name else 0.0)
    parts["colbert_linear"].weight.copy_(torch.eye(16))
    parts["colbert_linear"].bias.zero_()
    query, passage = torch.tensor([[0, 4, 5]]), torch.tensor([[0, 12, 13]])
    for padding in (0, 4):
        ids = torch.cat([passage, torch.ones([1, padding], dtype=torch.long)], 1)
        sides = [{"input_ids": x, "attention_mask": (x != 1).long()} for x in (query, ids)]
        q, p = (model.encode(side)[2] for side in sides)
        score = model.compute_colbert_score(q, p, q_mask=sides[0]["attention_mask"]).item()
        print(f"{padding} padding tokens: {round(score, 4) + 0.0}")
PYTHON
"$folder/venv/bin/python" "$folder/show.py" 2>/dev/null | tee "$folder/seen"
cat >"$folder/expected" <<'TEXT'
FlagEmbedding 1.4.2
0 padding tokens: -1.0
4 padding tokens: 0.0
TEXT
diff "$folder/expected" "$folder/seen" && echo "as described"
