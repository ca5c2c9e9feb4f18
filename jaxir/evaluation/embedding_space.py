"""Measures of an embedding space from the SamToNe paper (Moiseev et al. 2023, section 4).

All functions need embeddings of length 1, so that a dot product is the cosine similarity.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float

from jaxir.core.errors import UserError
from jaxir.core.shapes import checked_shapes

FOLDS = 5  # folds of the cross-validation of the towers' linear classifier
NEIGHBOURS = 10  # nearest neighbours per embedding
MIN_PAIRS = 4 * NEIGHBOURS  # minimum number of pairs of a query and a passage
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
ALIKE = 1e-6  # rounding error: numbers of equal vectors of length 1 differ by less than this


@dataclasses.dataclass(frozen=True, kw_only=True)
class Separability:
    """How separable two towers' embeddings are: each measure is 0.5 if they overlap, 1 if they do not."""

    auc: float  # ROC AUC of a linear classifier that predicts an embedding's tower, on held-out pairs
    accuracy: float  # accuracy of the same classifier
    # The share of an embedding's nearest neighbours that are from its own tower (Schilling 1986). This
    # measure also detects separations that are not linear.
    neighbours: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Statistics of a sample of numbers; `quantiles` maps str(q) to the q-quantile, for q in `QUANTILES`."""

    count: int
    mean: float
    deviation: float
    quantiles: dict[str, float]

    @property
    def median(self) -> float:
        return self.quantiles["0.5"]

    @property
    def interquartile_range(self) -> float:
        return self.quantiles["0.75"] - self.quantiles["0.25"]


@checked_shapes
def separability(
    query: Float[np.ndarray, "N D"], passage: Float[np.ndarray, "N D"], *, seed: int = 0
) -> Separability:
    """Measures whether the embeddings of two towers overlap (Moiseev et al. 2023, figure 1).

    The classifier is a linear discriminant with shrinkage (Ledoit and Wolf), cross-validated over pairs: both
    sides of a pair are in the same fold. Neighbours are searched among queries of one half of the pairs and
    passages of the other half, because a query's own passage is its neighbour by design. Queries and passages
    differ as texts, so even a shared tower gets 0.5 only if its embeddings do not show that difference. Each
    passage must be in one pair only, because the classifier would recognise its copies.

    Row i of `query` pairs with row i of `passage`; there must be at least `MIN_PAIRS` pairs.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
    from sklearn.metrics import roc_auc_score

    count = len(query)
    check_pairs(count)
    order = np.random.default_rng(seed).permutation(count)
    aucs, accuracies = [], []
    for fold in range(FOLDS):
        held_out = np.zeros(count, bool)
        held_out[order[fold::FOLDS]] = True
        classifier = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto")
        classifier.fit(*_labelled(query[~held_out], passage[~held_out]))
        vectors, towers = _labelled(query[held_out], passage[held_out])
        aucs.append(roc_auc_score(towers, classifier.decision_function(vectors)))
        accuracies.append(classifier.score(vectors, towers))
    half = count // 2
    vectors, towers = _labelled(query[order[:half]], passage[order[half : 2 * half]])
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    nearest = np.argpartition(-similarity, NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
    return Separability(
        auc=float(np.mean(aucs)),
        accuracy=float(np.mean(accuracies)),
        neighbours=float(np.mean(towers[nearest] == towers[:, None])),
    )


@checked_shapes
def similarity_ratios(
    query: Float[np.ndarray, "N D"],
    passage: Float[np.ndarray, "N D"],
    *,
    samples: int = 100_000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, " S"], Float[np.ndarray, " S"]]:
    """Returns sim(q_i, q_j) and sim(q_i, p_j), [S] each, for random i and j != i.

    Figure 6 of Moiseev et al. 2023 shows their ratio.

    Row i of `query` pairs with row i of `passage`.
    """
    if len(query) < 2:
        raise UserError("a ratio of similarities needs at least two pairs: give more queries and passages")
    rng = np.random.default_rng(seed)
    i = rng.integers(0, len(query), samples)
    j = (i + rng.integers(1, len(query), samples)) % len(query)
    rows = np.einsum("sd,sd->s", query[i], query[j]), np.einsum("sd,sd->s", query[i], passage[j])
    return rows[0].astype(np.float64), rows[1].astype(np.float64)


@checked_shapes
def spread(values: Float[np.ndarray, " S"]) -> Spread:
    return Spread(
        count=len(values),
        mean=float(values.mean()),
        deviation=float(values.std()),
        quantiles={str(q): float(np.quantile(values, q)) for q in QUANTILES},
    )


@checked_shapes
def project(vectors: Float[np.ndarray, "N D"], *, seed: int = 0) -> Float[np.ndarray, "N 2"]:
    """Projects embeddings [N, D] to 2 dimensions by t-SNE (van der Maaten and Hinton 2008), with cosines."""
    from sklearn.manifold import TSNE

    # If all embeddings are equal, scikit-learn's t-SNE reads outside its arrays and crashes the process.
    if np.ptp(vectors, axis=0).max() <= ALIKE:
        return np.zeros((len(vectors), 2), np.float32)
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    init = "pca" if vectors.shape[1] > 1 else "random"
    return TSNE(metric="cosine", init=init, perplexity=perplexity, random_state=seed).fit_transform(vectors)


def check_pairs(count: int) -> None:
    if count < MIN_PAIRS:
        raise UserError(
            f"measuring whether towers are separable needs at least {MIN_PAIRS} queries, each with its own"
            f" passage, but there are {count}: use a larger dataset, split or --queries"
        )


def _labelled(query: np.ndarray, passage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns all embeddings in one array, with their labels: 0 for a query, 1 for a passage."""
    return np.concatenate([query, passage]), np.repeat([0, 1], [len(query), len(passage)])
