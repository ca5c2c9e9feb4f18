"""Makes gist.npz: the losses GISTEmbedLoss and CachedGISTEmbedLoss and their gradients.

pip install torch==2.14.0 transformers==5.24.0 sentence-transformers==6.2.0
python tests/golden/make_gist.py
"""

from pathlib import Path

import numpy as np
import torch
from sentence_transformers.sentence_transformer.losses import CachedGISTEmbedLoss, GISTEmbedLoss
from torch.nn.functional import normalize
from transformers import AutoTokenizer

HERE = Path(__file__).parent
BATCH, NEGATIVES, WIDTH, GUIDE_WIDTH, TEMPERATURE = 8, 2, 16, 12, 0.2
# {name of a case: (number of negatives in each row, settings of the loss)}
CASES = {
    "gist": (1, {}),
    "gist_absolute": (1, {"margin": 0.1}),
    "gist_relative": (2, {"margin": 0.3, "margin_strategy": "relative"}),
    "gist_query": (1, {"contrast_positives": False}),
    "in_batch": (2, {"contrast_anchors": False, "contrast_positives": False}),
}


class Given(torch.nn.Sequential):
    """Stands for a sentence-transformers model whose vectors are given in the features."""

    max_seq_length = 8

    def __init__(self, name: str):
        super().__init__(torch.nn.Identity())
        self.name, self.tokenizer = name, AutoTokenizer.from_pretrained(HERE / "bert")

    def forward(self, features):
        return {"sentence_embedding": features[self.name]}


def main() -> None:
    torch.manual_seed(0)
    found = {"temperature": np.float32(TEMPERATURE)}
    columns = []
    for model, width in (("model", WIDTH), ("guide", GUIDE_WIDTH)):
        of_query = normalize(torch.randn(BATCH, width), dim=-1)
        near = [normalize(torch.randn(BATCH, width) * 0.5 + of_query, dim=-1) for _ in range(3)]
        # In each model's vectors, a hard negative is sometimes nearer to the query than the passage is.
        columns.append([of_query, *near])
        found |= {f"{model} query": of_query, f"{model} passage": near[0]}
        found |= {f"{model} negatives": torch.stack(near[1:], 1)}
    for case, (count, settings) in CASES.items():
        leaves = [x.clone().requires_grad_() for x in columns[0][: 2 + count]]
        guides = columns[1][: 2 + count]
        how = {"temperature": TEMPERATURE, **settings}
        if count == 1:
            loss = GISTEmbedLoss(Given("model"), Given("guide"), **how)
            value = loss([{"model": m, "guide": g} for m, g in zip(leaves, guides, strict=True)], None)
        else:  # only the loss with gradient caching reads several negatives
            loss = CachedGISTEmbedLoss(Given("model"), Given("guide"), mini_batch_size=3, **how)
            value = loss.calculate_loss(
                [list(x.split(3)) for x in leaves], [list(x.split(3)) for x in guides]
            )
        value.backward()
        found[case] = value.detach()
        found |= {f"{case} {name}": leaves[i].grad for i, name in enumerate(("query", "passage"))}
        found[f"{case} negatives"] = torch.stack([leaf.grad for leaf in leaves[2:]], 1)
    np.savez(HERE / "gist.npz", **{name: np.asarray(value) for name, value in found.items()})


if __name__ == "__main__":
    main()
