"""Hierarchical pooling of token vectors: similar tokens of a text become one vector (Clavié et al. 2024)."""

import dataclasses

import numpy as np
from jaxtyping import Float32

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Natural, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TokenPooling:
    """How the vectors of a text are pooled, as by HierarchicalTokenPooling of sentence-transformers 6.2.

    The source is arXiv:2409.14683.

    Attributes:
      factor: about 1 / factor of the vectors are kept; at least 1.
      protected: number of vectors at the start of a text, such as that of [CLS], that are kept as they are.
      normalize: whether the results get length 1.
      queries: whether queries are pooled, too; else only passages.
    """

    factor: float
    protected: Natural = 1
    normalize: bool = True
    queries: bool = False

    def __post_init__(self):
        if not self.factor >= 1:
            raise ValueError(f"a pooling factor must be at least 1, not {self.factor}")


@checked_shapes
def pool_tokens(vectors: Float32[np.ndarray, "L D"], how: TokenPooling) -> Float32[np.ndarray, "M D"]:
    """Returns the pooled vectors [M, D] of a text: first the protected ones, then a mean for each cluster.

    The clusters are made by Ward's linkage of cosine distances. The vectors [L, D] have length 1.
    """
    protected, rest = vectors[: how.protected], vectors[how.protected :]
    count = max(int(len(rest) // how.factor), 1)
    if count < len(rest):
        from scipy.cluster import hierarchy  # takes 0.2 s to import
        from scipy.spatial.distance import squareform

        distances = np.clip(1.0 - rest @ rest.T, 0.0, 2.0)
        linkage = hierarchy.linkage(squareform(distances, checks=False), method="ward")
        _, cluster = np.unique(
            hierarchy.fcluster(linkage, t=count, criterion="maxclust"), return_inverse=True
        )
        sums = np.zeros((cluster.max() + 1, rest.shape[1]), np.float32)
        np.add.at(sums, cluster, rest)
        vectors = np.concatenate([protected, sums / np.bincount(cluster)[:, None].astype(np.float32)])
    if not how.normalize:
        return vectors
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))
