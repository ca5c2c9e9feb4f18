"""Searches any kind of index with texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import MalformedRecord, has_text
from jaxir.data.formats.sparse_vectors import parse_weights
from jaxir.retrieval.indexes.base_index import Index, load_index

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.text_encoder import DualEncoder


class Searcher:
    """An index with the model that encodes its queries (None if it takes texts). Use `Searcher.open`."""

    def __init__(self, index: Index, encoder: DualEncoder | None = None):
        if (index.query_kind == "vectors") != (encoder is not None):
            raise UserError(
                f"an index of engine {index.info.engine} takes {index.query_kind}:"
                f" {'it needs a model for queries' if encoder is None else 'it needs no model'}"
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
        dtype: Literal["float32", "bfloat16"] = "float32",
    ) -> Searcher:
        """Opens an index (a directory, or a loaded one) and the model of its queries (None: as it names)."""
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

        encoder = DualEncoder.load(model, dtype=dtype)
        loaded.require_model(encoder.fingerprint, *encoder.made_by)
        return cls(loaded, encoder)

    def search(
        self, texts: Sequence[str], k: int, *, show_progress: bool = False
    ) -> tuple[np.ndarray, list[list[str]]]:
        """As `Index.search`, for texts; refuses a text of white space and control characters."""
        for text in texts:
            if not has_text(text):
                raise UserError(f"the question {text!r:.40} has no text")
        if self.encoder is None:
            return self.index.search(list(texts), k)
        return self.index.search(self.encoder.encode_queries(list(texts), show_progress=show_progress), k)


class WeightsSearcher:
    """An impact index, searched with token weights in JSON: {"token": 12, ...}."""

    def __init__(self, index: Index):
        self.index = index

    def search(self, texts: Sequence[str], k: int) -> tuple[np.ndarray, list[list[str]]]:
        """As `Index.search`, for JSON objects of whole numbers."""
        try:
            return self.index.search([parse_weights(text) for text in texts], k)
        except MalformedRecord as fault:
            raise UserError(
                'an impact index needs queries of token weights, written as {"token": 12, ...}:'
                f" {fault.kind} {fault.detail}"
            ) from None
