"""Makes losses.npz: the losses and their gradients by torch's cross-entropy.

pip install torch==2.13.0
python tests/golden/make_losses.py
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy, normalize

BATCH, NEGATIVES, WIDTH, TEMPERATURE = 8, 2, 16, 0.2


def main() -> None:
    torch.manual_seed(0)
    shapes = {"query": (BATCH, WIDTH), "passage": (BATCH, WIDTH), "negatives": (BATCH, NEGATIVES, WIDTH)}
    embeddings = {name: normalize(torch.randn(shape), dim=-1) for name, shape in shapes.items()}
    # Passages are nearer to their own query than to others, as in training.
    embeddings["passage"] = normalize(embeddings["passage"] + embeddings["query"], dim=-1)
    found = {name: value.numpy() for name, value in embeddings.items()}

    target = torch.arange(BATCH)
    itself = torch.full((BATCH, BATCH), 0.0).fill_diagonal_(-torch.inf)
    for loss in ("in_batch", "samtone_query", "samtone_both"):
        leaves = {name: value.clone().requires_grad_() for name, value in embeddings.items()}
        query, passage, negatives = leaves.values()
        queries = [query @ passage.T, query @ negatives.reshape(-1, WIDTH).T]
        passages = [passage @ query.T]
        if loss != "in_batch":
            queries.append(query @ query.T + itself)
        if loss == "samtone_both":
            passages.append(passage @ passage.T + itself)
        value = sum(cross_entropy(torch.cat(side, 1) / TEMPERATURE, target) for side in (queries, passages))
        value.backward()
        found[loss] = value.detach().numpy()
        found |= {f"{loss} {name}": leaf.grad.numpy() for name, leaf in leaves.items()}
    np.savez(Path(__file__).with_name("losses.npz"), temperature=np.float32(TEMPERATURE), **found)


if __name__ == "__main__":
    main()
