"""The in-batch softmax loss: every other passage of the batch is a negative."""

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Count, PositiveNumber
from jaxir.losses import _rows, _sums
from jaxir.losses._tiles import GradientPrecision
from jaxir.losses._types import Embedded, EmbeddedNegatives, Keys, Metrics, NegativeKeys, Scalar
from jaxir.losses.guide import Guide


@checked_shapes
def in_batch_softmax(
    query: Embedded,
    passage: Embedded,
    negatives: EmbeddedNegatives | None = None,
    *,
    query_key: Keys | None = None,
    passage_key: Keys | None = None,
    negative_key: NegativeKeys | None = None,
    guide: Guide | None = None,
    temperature: PositiveNumber = 0.01,
    bidirectional: bool = True,
    block_size: Count | None = None,
    gradient_precision: GradientPrecision = "highest",
    xtr_k: Count | None = None,
) -> tuple[Scalar, Metrics]:
    """In-batch sampled softmax (Henderson et al. 2017; Moiseev et al. 2023, eq. 1).

    For row i, with s(a, b) = a . b / temperature:

        loss_i = -log( exp s(q_i, p_i) / (sum_j exp s(q_i, p_j) + sum_h exp s(q_i, n_h)) )

    where j runs over the batch and h over the hard negatives of all rows. The loss is the mean over rows. The
    bidirectional loss (Yang et al. 2019) adds the mean of the passage-to-query direction, which compares p_i
    with all q_j and has no hard negatives.

    Args:
      query: [B, D], float32; row i pairs with row i of `passage`. With `TokenVectors` of [B, L, D] for all
        texts, MaxSim takes the place of the dot product (Khattab and Zaharia 2020).
      passage: [B, D].
      negatives: [B, N, D] hard negatives; each is a negative of every query.
      query_key: [B, 2] halves of a 64-bit hash of the query's id. A row j != i whose query key or passage key
        equals row i's is masked in all sums of row i, in both directions. None masks nothing.
      passage_key: [B, 2], likewise for passages.
      negative_key: [B, N, 2]; a hard negative with row i's passage key is masked in row i's sum.
      guide: the vectors of another model, whose similarities mask negatives that are too near (see `Guide`);
        None masks nothing.
      temperature: divides the similarities; positive.
      bidirectional: whether to add the passage-to-query direction.
      block_size: None computes [B, B] matrices. A number computes the same loss and gradient in tiles of at
        most this many rows and columns, in memory linear in B. On a mesh the tiles go round a ring of the
        devices that split the batch (docs/large_batches.md).
      gradient_precision: with a block_size, the precision of the products that compute gradients from the
        slopes of the logits: "high" and "default" are faster on accelerators, with a small error
        (docs/large_batches.md).
      xtr_k: with `TokenVectors`, score by XTR instead of MaxSim: only the xtr_k nearest tokens of all
        passages and hard negatives count for a query token (`losses.xtr`). None: MaxSim.

    Returns:
      The loss and metrics, all float32 scalars: `accuracy` (the share of rows whose own passage scores higher
      than every kept column), `positive_similarity`, `rows_without_negatives` (the share of rows whose other
      columns are all masked: such rows have no loss and no gradient), `loss_query_to_passage`, and
      `loss_passage_to_query` if bidirectional.

    Raises:
      UserError: the temperature, block_size or xtr_k is not positive, `TokenVectors` are given a block_size,
        or vectors of texts an xtr_k.
    """
    keys = (query_key, passage_key, negative_key)
    sums = _sums.of_batch(
        query, passage, negatives, keys, guide, temperature, block_size, gradient_precision, xtr_k
    )
    terms = sums.in_batch(bidirectional=bidirectional)
    return _rows.softmax_loss(terms, temperature=temperature, bidirectional=bidirectional)
