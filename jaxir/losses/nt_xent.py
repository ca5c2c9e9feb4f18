"""NT-Xent: every other text of the batch, of either side, is a negative."""

from beartype import beartype
from jaxtyping import Array, Float32, Int32, jaxtyped

from jaxir.core.values import Count, PositiveNumber
from jaxir.losses._tiles import GradientPrecision
from jaxir.losses.samtone import samtone


@jaxtyped(typechecker=beartype)
def nt_xent(
    query: Float32[Array, "B D"],
    passage: Float32[Array, "B D"],
    negatives: Float32[Array, "B N D"] | None = None,
    *,
    query_key: Int32[Array, "B 2"] | None = None,
    passage_key: Int32[Array, "B 2"] | None = None,
    negative_key: Int32[Array, "B N 2"] | None = None,
    temperature: PositiveNumber = 0.05,
    block_size: Count | None = None,
    gradient_precision: GradientPrecision = "highest",
) -> tuple[Float32[Array, ""], dict[str, Float32[Array, ""]]]:
    """The normalised temperature-scaled cross-entropy (Chen et al. 2020; Wang 2022, eq. 2.7 to 2.9).

    With s(a, b) = a . b / temperature, and x_i, y_i the two sides of pair i:

        l(x_i) = -log( exp s(x_i, y_i) / (sum_j exp s(x_i, y_j) + sum_{j != i} exp s(x_i, x_j)) )
        loss   = 1 / (2 B) sum_i (l(x_i) + l(y_i))

    It is half of `samtone` with same_tower="both", which says what the arguments are.

    Returns:
      The loss and the metrics of `samtone`; its two directions are not halved.
    """
    keys = {"query_key": query_key, "passage_key": passage_key, "negative_key": negative_key}
    how = {"temperature": temperature, "block_size": block_size, "gradient_precision": gradient_precision}
    loss, metrics = samtone(query, passage, negatives, **keys, **how, same_tower="both")
    return loss / 2, metrics
