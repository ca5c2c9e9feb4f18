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
    from jaxir.retrieval.encoding.text_encoder import DualEncoder


class Searcher:
    """An index and the model that encodes its queries; None for a text index. Use `Searcher.open`."""

    def __init__(self, index: Index, encoder: DualEncoder | None = None):
        if (index.query_kind == "vectors") != (encoder is not None):
            raise UserError(
                f"an index of engine {index.info.engine} is searched with {index.query_kind}:"
                f" {'give a model that encodes queries' if encoder is None else 'give no model'}"
            )
        if index.query_kind == "weights":
            raise UserError(
                "an impact index needs queries with the token weights of a learned sparse model, not texts:"
                " use python -m jaxir.search"
            )
        self.index, self.encoder = index, encoder

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

        `weights` is how the model is quantised (see `DualEncoder.load`); None: as for the index's documents.
        """
        name = str(index) if isinstance(index, (str, Path)) else "the index"
        loaded = load_index(index) if isinstance(index, (str, Path)) else index
        if loaded.query_kind != "vectors":
            if model is not None:
                raise UserError(f"{name} is searched by {loaded.info.similarity}: leave out --model")
            return cls(loaded)
        model = model or loaded.info.model
        if model is None:
            raise UserError(f"{name} does not name the model that made it: give --model")
        from jaxir.retrieval.encoding.text_encoder import DualEncoder  # imports JAX

        encoder = DualEncoder.load(model, dtype=dtype, weights=weights or loaded.info.weights)
        loaded.require_model(encoder.fingerprint, *encoder.made_by)
        return cls(loaded, encoder)

    def search(
        self, texts: Sequence[str], k: int, *, show_progress: bool = False
    ) -> tuple[np.ndarray, list[list[str]]]:
        """Like `Index.search`, but for texts. Raises a UserError if a text has no visible characters."""
        for text in texts:
            if not has_text(text):
                raise UserError(f"the question {text!r:.40} has no visible characters: write a text")
        if self.encoder is None:
            return self.index.search(list(texts), k)
        return self.index.search(self.encoder.encode_queries(list(texts), show_progress=show_progress), k)


class WeightsSearcher:
    """Searches an impact index with queries that are token weights in JSON: {"token": 12, ...}."""

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
