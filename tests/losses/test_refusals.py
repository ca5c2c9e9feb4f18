"""Settings that losses refuse."""

import pytest

from jaxir.core.errors import UserError
from jaxir.losses.in_batch import in_batch_softmax
from jaxir.losses.matryoshka import matryoshka
from jaxir.losses.pair import pair
from jaxir.losses.samtone import samtone
from tests.losses.loss_cases import make_case, to_jax


@pytest.mark.parametrize(
    ("loss", "settings", "sentence"),
    [
        (in_batch_softmax, {"temperature": 0.0}, "temperature"),
        (in_batch_softmax, {"block_size": 0}, "block_size"),
        (samtone, {"temperature": -1}, "temperature"),
        (samtone, {"same_tower": "passage", "bidirectional": False}, "bidirectional"),
        (samtone, {"same_tower": "both", "bidirectional": False}, "bidirectional"),
        (samtone, {"gradient_precision": "high"}, "needs a block_size"),
        (pair, {"alpha": 1.5}, "alpha"),
        (matryoshka, {"dimensions": [4, 0]}, "dimensions must lie between 1 and .* not 0"),
        (matryoshka, {"dimensions": [999]}, "dimensions must lie between 1 and .* not 999"),
        (matryoshka, {"dimensions": [4, 4]}, r"dimensions has a number twice: .* not \[4, 4\]"),
        (matryoshka, {"dimensions": []}, "dimensions is empty"),
        (matryoshka, {"dimensions": [4, 2], "weights": [1.0]}, "weights must have 2 numbers"),
    ],
)
def test_losses_refuse_bad_settings(loss, settings, sentence):
    case = to_jax(make_case(negatives=0, keys=False))
    with pytest.raises(UserError, match=sentence):
        loss(**case, **settings)
