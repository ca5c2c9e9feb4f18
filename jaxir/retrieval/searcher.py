"""`Searcher`: searches any kind of index with texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import MalformedRecord, has_text
from jaxir.data.formats.sparse_vectors import parse_weights
from jaxir.retrieval.indexes.base_index import Index, load_index
from jaxir.runtime.cpu import Dtype

if TYPE_CHECKING:
    from jaxir.models.quantized import Scheme
    from jaxir.retrieval.encoding.fixed_dimension_encoder import FixedDimensionEncoder
    from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
    from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder
    from jaxir.retrieval.encoding.text_encoder import DualEncoder


class Searcher:
    """An index and the model that encodes its queries; None for a text index. Use `Searcher.open`.

    Attributes:
      index: the index.
      encoder: the dual encoder of an index of vectors.
      sparse_encoder: the sparse encoder of an index of token weights.
      token_encoder: the multi-vector encoder of an index of token vectors, or of single vectors that `encode
          --fde` made from token vectors.
    """

    def __init__(
        self,
        index: Index,
        encoder: DualEncoder | None = None,
        *,
        sparse_encoder: SparseEncoder | None = None,
        token_encoder: MultiVectorEncoder | FixedDimensionEncoder | None = None,
    ):
        given = {"vectors": encoder, "sparse": sparse_encoder, "token_vectors": token_encoder}
        if index.info.fde is not None:
            given |= {"vectors": token_encoder, "token_vectors": None}
        if any((index.query_kind == kind) != (model is not None) for kind, model in given.items()):
            raise UserError(
                f"an index of engine {index.info.engine} is searched with {index.query_kind}:"
                f" {'give a model that encodes queries' if index.query_kind in given else 'give no model'}"
            )
        if index.query_kind == "weights":
            raise UserError(
                "an impact index needs queries with the token weights of a learned sparse model, not texts:"
                " use python -m jaxir.search"
            )
        self.index, self.encoder = index, encoder
        self.sparse_encoder, self.token_encoder = sparse_encoder, token_encoder

    @classmethod
    def open(
        cls,
        index: str | Path | Index,
        *,
        model: str | None = None,
        dtype: Dtype = "float32",
        weights: Scheme | None = None,
    ) -> Searcher:
        """Opens an index (a directory or a loaded index) and `model`, or the index's own model if None.

        `weights` is how the model is quantised (see `DualEncoder.load`); None: as it was for the index's
        documents.
        """
        name = str(index) if isinstance(index, (str, Path)) else "the index"
        loaded = load_index(index) if isinstance(index, (str, Path)) else index
        if loaded.query_kind not in ("vectors", "sparse", "token_vectors"):
            if model is not None:
                by = loaded.info.similarity
                raise UserError(f"{name} is searched by {by}, without a model: leave out --model")
            return cls(loaded)
        model = model or loaded.info.model
        if model is None:
            raise UserError(f"{name} does not name the model that made it: give --model")
        if loaded.query_kind == "sparse":
            return cls._of_weights(loaded, model, dtype=dtype, weights=weights)
        if loaded.query_kind == "token_vectors" or loaded.info.fde is not None:
            return cls._of_tokens(loaded, model, dtype=dtype, weights=weights)
        from jaxir.retrieval.encoding.text_encoder import DualEncoder  # imports JAX, so only if needed

        encoder = DualEncoder.load(model, dtype=dtype, weights=weights or loaded.info.weights)
        loaded.require_model(encoder.fingerprint, *encoder.made_by)
        return cls(loaded, encoder)

    @classmethod
    def _of_weights(cls, index: Index, model: str, *, dtype: Dtype, weights: Scheme | None) -> Searcher:
        # Imports JAX, so only if needed.
        from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder

        if weights is not None:
            raise UserError("a sparse encoder is not quantised: leave out --weights")
        encoder = SparseEncoder.load(model, dtype=dtype)
        index.require_model(encoder.fingerprint, encoder.spec)
        return cls(index, sparse_encoder=encoder)

    @classmethod
    def _of_tokens(cls, index: Index, model: str, *, dtype: Dtype, weights: Scheme | None) -> Searcher:
        from jaxir.retrieval.encoding.fixed_dimension import FixedDimension
        from jaxir.retrieval.encoding.fixed_dimension_encoder import FixedDimensionEncoder  # imports JAX
        from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder

        if weights is not None:
            raise UserError("a multi-vector encoder is not quantised: leave out --weights")
        encoder = MultiVectorEncoder.load(model, dtype=dtype)
        if index.info.fde is not None:
            encoder = FixedDimensionEncoder(encoder, FixedDimension(**index.info.fde))
        index.require_model(encoder.fingerprint, *encoder.made_by)
        return cls(index, token_encoder=encoder)

    @property
    def any_encoder(
        self,
    ) -> DualEncoder | SparseEncoder | MultiVectorEncoder | FixedDimensionEncoder | None:
        """The model of any kind; None for a text index."""
        return self.encoder or self.sparse_encoder or self.token_encoder

    def search(
        self, texts: Sequence[str], k: int, *, show_progress: bool = False
    ) -> tuple[np.ndarray, list[list[str]]]:
        """Like `Index.search`, but for texts. Raises a UserError if a text has no visible characters."""
        for text in texts:
            if not has_text(text):
                raise UserError(f"the question {text!r:.40} has no visible characters: write a text")
        if (encoder := self.any_encoder) is None:
            return self.index.search(list(texts), k)
        return self.index.search(encoder.encode_queries(list(texts), show_progress=show_progress), k)


class WeightsSearcher:
    """Searches an index with queries that are token weights in JSON: {"token": 12, ...}."""

    def __init__(self, index: Index):
        self.index = index

    def search(self, texts: Sequence[str], k: int) -> tuple[np.ndarray, list[list[str]]]:
        """Like `Index.search`, but for JSON objects of tokens and whole numbers."""
        try:
            return self.index.search([parse_weights(text) for text in texts], k)
        except MalformedRecord as fault:
            raise UserError(
                'an impact index needs queries of token weights, written as {"token": 12, ...}:'
                f" {fault.kind} {fault.detail}"
            ) from None
