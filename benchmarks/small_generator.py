"""Trains a small masked language model for DiffCSE without a download, for docs/results/unsupervised.md.

MiniLM's first two layers and a new head learn to fill masks in the texts of a BEIR folder. Needs an
environment with torch and transformers; uses a GPU if torch finds one.

    python benchmarks/small_generator.py BEIR_FOLDER MINILM_FOLDER OUTPUT STEPS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertModel

LAYERS = 2
BATCH_SIZE = 64
LENGTH = 32
MASKING = 0.2
LEARNING_RATE = 5e-4


def main(data: Path, source: str, output: str, steps: int) -> None:
    """Trains the model and writes it as a folder of transformers, with its tokenizer."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = BertForMaskedLM(
        BertConfig.from_pretrained(source, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    )
    model.bert.load_state_dict(BertModel.from_pretrained(source).state_dict(), strict=False)
    model.tie_weights()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    texts = [json.loads(line)["text"] for line in (data / "corpus.jsonl").read_text().splitlines()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, steps, pct_start=0.1)
    model.train()
    for step in range(1, steps + 1):
        drawn = [texts[i] for i in rng.integers(len(texts), size=BATCH_SIZE)]
        batch = tokenizer(drawn, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
        batch = batch.to(device)
        ids = batch["input_ids"]
        special = torch.isin(ids, torch.tensor(tokenizer.all_special_ids, device=device))
        chosen = torch.from_numpy(rng.random(ids.shape) < MASKING).to(device) & ~special
        masked = torch.where(chosen, tokenizer.mask_token_id, ids)
        hidden = model.bert(input_ids=masked, attention_mask=batch["attention_mask"]).last_hidden_state
        logits = model.cls(hidden[chosen])
        loss = torch.nn.functional.cross_entropy(logits, ids[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            accuracy = (logits.argmax(-1) == ids[chosen]).float().mean()
            print(
                f"step {step}: loss {loss:.3f}, {100 * accuracy:.1f} % of the masked tokens right", flush=True
            )
    model.eval().save_pretrained(output)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__.rpartition("    ")[2].strip())
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
