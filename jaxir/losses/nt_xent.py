"""NT-Xent: every other text of the batch, on either side, is a negative."""

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, PositiveNumber
from jaxir.losses._tiles import GradientPrecision
from jaxir.losses._types import Keys, Metrics, NegativeKeys, Negatives, Scalar, Vectors
from jaxir.losses.guide import Guide
from jaxir.losses.samtone import samtone


@checked_shapes
def nt_xent(
    query: Vectors,
    passage: Vectors,
    negatives: Negatives | None = None,
    *,
    query_key: Keys | None = None,
    passage_key: Keys | None = None,
    negative_key: NegativeKeys | None = None,
    guide: Guide | None = None,
    temperature: PositiveNumber = 0.05,
    block_size: Count | None = None,
    gradient_precision: GradientPrecision = "highest",
) -> tuple[Scalar, Metrics]:
    """The normalised temperature-scaled cross-entropy (Chen et al. 2020; Wang 2022, eq. 2.7 to 2.9).

    With s(a, b) = a . b / temperature, and x_i, y_i the two sides of pair i:

        l(x_i) = -log( exp s(x_i, y_i) / (sum_j exp s(x_i, y_j) + sum_{j != i} exp s(x_i, x_j)) )
        loss   = 1 / (2 B) sum_i (l(x_i) + l(y_i))

    This loss is half of `samtone` with same_tower="both", which documents the arguments. The metrics are also
    those of `samtone`; the losses of the two directions are not halved.
    """
    keys = {"query_key": query_key, "passage_key": passage_key, "negative_key": negative_key}
    how = {"temperature": temperature, "block_size": block_size, "gradient_precision": gradient_precision}
    loss, metrics = samtone(query, passage, negatives, **keys, **how, guide=guide, same_tower="both")
    return loss / 2, metrics
