"""Texts in, documents out, whatever kind of index lies behind."""

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
    """An index together with what its queries need. Use `Searcher.open`.

    Attributes:
      index: the index.
      encoder: the model that encodes queries; None where the index takes texts as they are.
    """

    def __init__(self, index: Index, encoder: DualEncoder | None = None):
        if (index.query_kind == "vectors") != (encoder is not None):
            raise UserError(
                f"an index of engine {index.info.engine} takes {index.query_kind}:"
                f" {'it needs a model for queries' if encoder is None else 'no model belongs to it'}"
            )
        if index.query_kind == "weights":
            raise UserError(
                "an impact index is searched with the token weights of a learned sparse model, not with texts"
                " (python -m jaxir.search takes them)"
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
        """Reads an index directory (unless it is read already) and, where it takes vectors, its model.

        Args:
          index: the directory, or what `load_index` returned.
          model: the model that encodes queries; None takes the one recorded in the index.
          dtype: type of the model's matrix products.

        Raises:
          UserError: it is no index, its model is unknown or another than `model`, or a model is given to an
            index that takes texts.
        """
        name = str(index) if isinstance(index, (str, Path)) else "the index"
        loaded = load_index(index) if isinstance(index, (str, Path)) else index
        if loaded.query_kind != "vectors":
            if model is not None:
                raise UserError(f"{name} is searched by {loaded.info.similarity}: no model belongs to it")
            return cls(loaded)
        model = model or loaded.info.model
        if model is None:
            raise UserError(f"{name} does not say which model made it: give --model")
        from jaxir.retrieval.encoding.text_encoder import DualEncoder  # imports JAX, which words do not need

        encoder = DualEncoder.load(model, dtype=dtype)
        loaded.require_model(encoder.fingerprint, *encoder.made_by)
        return cls(loaded, encoder)

    def search(
        self, texts: Sequence[str], k: int, *, show_progress: bool = False
    ) -> tuple[np.ndarray, list[list[str]]]:
        """Returns the nearest documents of each text, best first.

        Args:
          texts: Q queries.
          k: how many documents for each.
          show_progress: whether the encoding of queries shows a bar.

        Returns:
          (float32 scores [Q, K], for each query at most K ids), as `Index.search`.

        Raises:
          UserError: there is nothing but white space and control characters in a text.
        """
        for text in texts:
            if not has_text(text):
                raise UserError(f"there is no text in the question {text!r:.40}")
        if self.encoder is None:
            return self.index.search(list(texts), k)
        return self.index.search(self.encoder.encode_queries(list(texts), show_progress=show_progress), k)


class WeightsSearcher:
    """An impact index and queries that are typed as token weights: {"token": 12, ...}, in JSON.

    Attributes:
      index: the index.
    """

    def __init__(self, index: Index):
        self.index = index

    def search(self, texts: Sequence[str], k: int) -> tuple[np.ndarray, list[list[str]]]:
        """Returns the documents of the greatest inner product with each query, as `Index.search`.

        Raises:
          UserError: a text is not a JSON object of whole numbers.
        """
        try:
            return self.index.search([parse_weights(text) for text in texts], k)
        except MalformedRecord as fault:
            raise UserError(
                'an impact index is searched with token weights, typed as {"token": 12, ...}:'
                f" {fault.kind} {fault.detail}"
            ) from None
