"""Makes splade.npz: losses of sentence-transformers' SpladeLoss over mlm_*/, and their gradients.

pip install torch==2.13.0 transformers==5.24.0 sentence-transformers==6.2.0
python tests/golden/make_splade.py
"""

import numpy as np
import torch
from make_golden import HERE
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.callbacks import SpladeRegularizerWeightSchedulerCallback
from sentence_transformers.sparse_encoder.losses import (
    CachedSpladeLoss,
    SparseDistillKLDivLoss,
    SparseMarginMSELoss,
    SparseMultipleNegativesRankingLoss,
    SpladeLoss,
)
from sentence_transformers.sparse_encoder.modules import SpladePooling

COLUMNS = (
    ["the cat sat on the mat", "a dog and a cat", "mice eat cheese", "last night"],
    [
        "cats sit on mats",
        "Dogs chase cats; cats chase mice.",
        "the cheese that mice eat",
        "the night was long",
    ],
    ["the table", "a mat for a table", "dogs sat", "cheese on the table last night, and more of it"],
)
SCORES = np.array([[3.0, 1.0], [2.5, 2.0], [4.0, -1.0], [0.5, 0.25]], np.float32)
LAMBDAS = {"document_regularizer_weight": 3e-3, "query_regularizer_weight": 5e-3}
POOLINGS = {"max": ("bert", "max", "relu"), "sum": ("distilbert", "sum", "log1p_relu")}


def losses_of(model: SparseEncoder) -> dict[str, tuple[torch.nn.Module, torch.Tensor | None]]:
    scores = torch.tensor(SCORES)
    ranking = SparseMultipleNegativesRankingLoss(model)
    return {
        "in_batch": (SpladeLoss(model, ranking, **LAMBDAS), None),
        "cached": (CachedSpladeLoss(model, ranking, mini_batch_size=2, **LAMBDAS), None),
        "margin_mse": (SpladeLoss(model, SparseMarginMSELoss(model), **LAMBDAS), scores[:, 0] - scores[:, 1]),
        "kl": (SpladeLoss(model, SparseDistillKLDivLoss(model, temperature=1.0), **LAMBDAS), scores),
    }


def main() -> None:
    found = {"scores": SCORES}
    for name, (folder, pooling, activation) in POOLINGS.items():
        transformer = Transformer(
            str(HERE / f"mlm_{folder}"), transformer_task="fill-mask", max_seq_length=24
        )
        modules = [transformer, SpladePooling(pooling, activation)]
        model = SparseEncoder(modules=modules, device="cpu", similarity_fn_name="dot").eval()
        modules[1].train()  # in evaluation mode the module overwrites values that gradients need
        for loss_name, (loss, labels) in losses_of(model).items():
            features = [model.preprocess(column) for column in COLUMNS]
            model.zero_grad()
            parts = loss(features, labels)
            total = sum(parts.values())
            if total.requires_grad:
                total.backward()
            bias = next(
                p for n, p in model.named_parameters() if n.endswith(("predictions.bias", "projector.bias"))
            )
            table = next(p for n, p in model.named_parameters() if n.endswith("word_embeddings.weight"))
            place = f"{name}/{loss_name}"
            found[f"{place}/loss"] = total.detach().numpy()
            for part, value in parts.items():
                found[f"{place}/{part}"] = value.detach().numpy()
            found[f"{place}/bias"], found[f"{place}/table"] = (
                bias.grad.numpy().copy(),
                table.grad.numpy().copy(),
            )
            print(place, {part: value.item() for part, value in parts.items()})
    schedule = SpladeRegularizerWeightSchedulerCallback(losses_of(model)["in_batch"][0], warmup_ratio=1 / 3)
    schedule.warmup_steps = 5
    found["ramp"] = np.array([schedule._calculate_weight_value(step, 1.0) for step in range(8)], np.float32)
    np.savez_compressed(HERE / "splade.npz", **found)


if __name__ == "__main__":
    main()
