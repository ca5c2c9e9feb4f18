"""What a SavedModel offers: its signatures, and an index within its graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import tensorflow as tf


class Signature(NamedTuple):
    """A signature: its function, and descriptions of its inputs and outputs by name."""

    function: Any
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


class GraphSearch(Protocol):
    """An index in a graph (see `retrieval.saved_search`).

    Attributes:
      state: what a SavedModel must hold.
      packages: the packages whose operations it uses.
      about: a sentence about it for the README.
      k: documents for each query.
    """

    state: Any
    packages: tuple[str, ...]
    about: str
    k: int

    def __call__(self, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (document ids, string [B, K], scores, float32 [B, K]) of vectors [B, D]."""
