"""What the SamToNe paper looks at in an embedding space (Moiseev et al. 2023, section 4), as numbers.

All functions take embeddings of length 1, so that a dot product is the cosine similarity.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from beartype import beartype
from jaxtyping import Float, jaxtyped

from jaxir.core.errors import UserError

FOLDS = 5
NEIGHBOURS = 10
MIN_PAIRS = 4 * NEIGHBOURS
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
ALIKE = 1e-6  # vectors of length 1 differ by so much in no number of theirs but by rounding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Separability:
    """How well two towers' embeddings can be told apart: 0.5 each where they overlap, 1 where they are apart.

    Attributes:
      auc: area under the ROC curve of a linear classifier of the tower, on pairs it was not fitted to.
      accuracy: its accuracy.
      neighbours: how many of an embedding's nearest neighbours are of its own tower (Schilling 1986), as a
        share; it sees separations that no hyperplane makes.
    """

    auc: float
    accuracy: float
    neighbours: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """A distribution of numbers.

    Attributes:
      count: how many.
      mean: their mean.
      deviation: their standard deviation.
      quantiles: "0.5" to the median, and so on for each of `QUANTILES`.
    """

    count: int
    mean: float
    deviation: float
    quantiles: dict[str, float]

    @property
    def median(self) -> float:
        """The centre."""
        return self.quantiles["0.5"]

    @property
    def interquartile_range(self) -> float:
        """From the lower to the upper quartile."""
        return self.quantiles["0.75"] - self.quantiles["0.25"]


@jaxtyped(typechecker=beartype)
def separability(
    query: Float[np.ndarray, "N D"], passage: Float[np.ndarray, "N D"], *, seed: int = 0
) -> Separability:
    """Measures whether two towers fill one space (Figure 1 of the paper shows it).

    The classifier is a linear discriminant with shrinkage (Ledoit and Wolf), cross-validated over pairs: both
    sides of a pair are in the same fold. For the neighbours, queries of one half of the pairs meet passages
    of the other half, for a query's own passage is its neighbour by design. Queries and passages are
    different texts: even one tower for both has 0.5 only where its embeddings do not show which is which.
    Nor may a passage be in several pairs: it would be told, and found, by its copies.

    Args:
      query: [N, D] embeddings, row i pairs with row i of `passage`.
      passage: [N, D].
      seed: of folds and halves.

    Raises:
      UserError: there are fewer than `MIN_PAIRS` pairs.
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


@jaxtyped(typechecker=beartype)
def similarity_ratios(
    query: Float[np.ndarray, "N D"],
    passage: Float[np.ndarray, "N D"],
    *,
    samples: int = 100_000,
    seed: int = 0,
) -> tuple[Float[np.ndarray, " S"], Float[np.ndarray, " S"]]:
    """Returns sim(q_i, q_j) and sim(q_i, p_j), [S] each, for random i and j != i (Figure 6 has the ratio).

    Row i of `query` [N, D] pairs with row i of `passage` [N, D].

    Raises:
      UserError: there are fewer than two pairs.
    """
    if len(query) < 2:
        raise UserError("a ratio of similarities needs at least two pairs")
    rng = np.random.default_rng(seed)
    i = rng.integers(0, len(query), samples)
    j = (i + rng.integers(1, len(query), samples)) % len(query)
    rows = np.einsum("sd,sd->s", query[i], query[j]), np.einsum("sd,sd->s", query[i], passage[j])
    return rows[0].astype(np.float64), rows[1].astype(np.float64)


@jaxtyped(typechecker=beartype)
def spread(values: Float[np.ndarray, " S"]) -> Spread:
    """Describes a sample [S]."""
    return Spread(
        count=len(values),
        mean=float(values.mean()),
        deviation=float(values.std()),
        quantiles={str(q): float(np.quantile(values, q)) for q in QUANTILES},
    )


@jaxtyped(typechecker=beartype)
def project(vectors: Float[np.ndarray, "N D"], *, seed: int = 0) -> Float[np.ndarray, "N 2"]:
    """Lays embeddings [N, D] out in the plane by t-SNE (van der Maaten and Hinton 2008) of cosines.

    Those that do not differ, by more than rounding, are one point: there t-SNE's code reads beyond its arrays
    and ends the process.
    """
    from sklearn.manifold import TSNE

    if np.ptp(vectors, axis=0).max() <= ALIKE:
        return np.zeros((len(vectors), 2), np.float32)
    perplexity = min(30.0, (len(vectors) - 1) / 3)
    init = "pca" if vectors.shape[1] > 1 else "random"
    return TSNE(metric="cosine", init=init, perplexity=perplexity, random_state=seed).fit_transform(vectors)


def check_pairs(count: int) -> None:
    """Raises a UserError where there are too few pairs to tell towers apart."""
    if count < MIN_PAIRS:
        raise UserError(
            f"telling towers apart needs at least {MIN_PAIRS} queries, not {count}, each with a passage"
            " of its own"
        )


def _labelled(query: np.ndarray, passage: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns both towers' embeddings under one another, and 0 for a query, 1 for a passage."""
    return np.concatenate([query, passage]), np.repeat([0, 1], [len(query), len(passage)])
