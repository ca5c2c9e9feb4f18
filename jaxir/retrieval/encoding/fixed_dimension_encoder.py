"""A multi-vector encoder that gives one vector for each text, by MUVERA (`fixed_dimension`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.text.truncation import Truncation
from jaxir.models.dual_encoder import Tower
from jaxir.retrieval.encoding.fixed_dimension import FixedDimension, fixed_dimensions
from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
from jaxir.storage import fingerprints


class FixedDimensionEncoder:
    """Encodes texts as `MultiVectorEncoder` does, then combines each text's token vectors into one vector
    [F].

    Attributes:
      encoder: the `MultiVectorEncoder`.
      how: the settings of the vectors.
      fingerprint: identifies weights, tokenizer and `how`; vectors of two fingerprints must not be compared.
      dimension: F.
      similarity_fn_name: "dot"; products approximate the encoder's MaxSim.
    """

    similarity_fn_name, weights = "dot", None

    def __init__(self, encoder: MultiVectorEncoder, how: FixedDimension):
        """Raises a UserError if the encoder's tokens have too few components for `how`."""
        try:
            how.check(encoder.dimension)
        except ValueError as error:
            raise UserError(f"--fde: {error}") from None
        self.encoder, self.how = encoder, how
        self.tokenizer, self.settings = encoder.tokenizer, encoder.settings
        self.model, self.spec, self.step = encoder.model, encoder.spec, encoder.step
        self.made_by = encoder.made_by
        self.fingerprint = fingerprint_of(encoder.fingerprint, dataclasses.asdict(how))
        self.dimension = how.dimension

    def encode_queries(self, texts: Sequence[str], *, show_progress: bool = True) -> np.ndarray:
        """Returns float32 vectors [N, F] of N queries."""
        return self.encode(texts, tower="query", show_progress=show_progress)

    def encode(self, texts: Sequence[str], *, tower: Tower, show_progress: bool = True) -> np.ndarray:
        """Returns float32 vectors [N, F] of N texts."""
        found = self.encoder.encode(list(texts), tower=tower, show_progress=show_progress)
        return self._fixed(found, tower)

    def encode_tokens(
        self, windows: Iterable[list[np.ndarray]], *, tower: Tower, **how: Any
    ) -> Iterator[np.ndarray]:
        """Yields float32 vectors [n, F] for each list of texts, as `MultiVectorEncoder.encode_tokens`."""
        for found in self.encoder.encode_tokens(windows, tower=tower, **how):
            yield self._fixed(found, tower)

    def tokens(
        self, texts: Sequence[str], tower: Tower, truncation: Truncation | None = None
    ) -> list[np.ndarray]:
        """Returns the token ids of texts, as `MultiVectorEncoder.tokens`."""
        return self.encoder.tokens(texts, tower, truncation)

    def text_settings(self, tower: Tower) -> tuple[str, int]:
        """Returns (prompt, maximum length in tokens) of a tower."""
        return self.encoder.text_settings(tower)

    def _fixed(self, found: Sequence[np.ndarray], tower: Tower) -> np.ndarray:
        lengths = np.array([len(vectors) for vectors in found], np.int64)
        vectors = np.concatenate([np.empty((0, self.encoder.dimension), np.float32), *found])
        fixed = fixed_dimensions(vectors, lengths, tower, self.how)
        if tower == "query" and self.encoder.similarity_fn_name == "meanmaxsim":
            fixed /= np.maximum(lengths, 1).astype(np.float32)[:, None]
        return fixed


def fingerprint_of(model: str, fde: Mapping[str, int] | None) -> str:
    """Returns the fingerprint of vectors made with settings `fde` by the model with fingerprint `model`."""
    return model if fde is None else fingerprints.of_values(model, sorted(fde.items()))
