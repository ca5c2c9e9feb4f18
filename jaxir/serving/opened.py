"""Opens the indexes that are served."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from jaxir.core.errors import UserError
from jaxir.models.quantized import Scheme
from jaxir.retrieval.indexes.base_index import Index, load_index
from jaxir.retrieval.searcher import Searcher
from jaxir.runtime.cpu import Dtype
from jaxir.serving.rankings import RERANKED


@dataclasses.dataclass(frozen=True)
class Opened:
    """A served index with its model, and its name in requests and answers."""

    name: str
    searcher: Searcher

    @property
    def index(self) -> Index:
        return self.searcher.index

    @property
    def kind(self) -> Literal["dense", "multi_vector", "sparse"]:
        if self.searcher.token_encoder is not None:
            return "multi_vector"
        return "sparse" if self.searcher.encoder is None else "dense"


def named(spec: str) -> tuple[str, str]:
    """Splits NAME=DIR into (NAME, DIR). A DIR without a name is named after its last part."""
    name, equals, directory = spec.partition("=")
    if not equals or "/" in name:
        # Not Path.resolve, which fails on link loops.
        name, directory = Path(os.path.realpath(spec)).name, spec
    if not name or not directory:
        raise UserError(f"--index={spec!r} lacks a {'directory' if name else 'name'}; write --index=NAME=DIR")
    return name, directory


def searcher_of(
    directory: str,
    opened: Sequence[Opened],
    model: str | None,
    dtype: Dtype,
    weights: Scheme | None,
) -> Searcher:
    """Opens an index. If an index that is already open has the same model, reuses the model."""
    index = load_index(directory)
    if index.query_kind != "vectors":
        how = {"model": model, "dtype": dtype} if index.query_kind in ("sparse", "token_vectors") else {}
        return Searcher.open(index, **how)
    for other in opened:
        encoder, name = other.searcher.encoder, model or index.info.model
        if encoder is None or encoder.weights != (weights or index.info.weights):
            continue
        if name == (model or other.index.info.model):
            index.require_model(encoder.fingerprint, *encoder.made_by)
            return Searcher(index, encoder)
    return Searcher.open(index, model=model, dtype=dtype, weights=weights)


def check_texts(opened: Sequence[Opened]) -> None:
    """Raises a UserError if a document's text is not stored: the reranker would read an empty text."""
    stored = [o for o in opened if o.index.documents is not None]
    if not stored:
        raise UserError(f"{RERANKED}: no index stores texts; build one with jaxir.index --corpus")
    without = [o for o in opened if o.index.documents is None]
    read = set().union(*(o.index.ids for o in stored)) if without else set()
    for each in without:
        lacking = [doc_id for doc_id in each.index.ids if doc_id not in read]
        if lacking:
            raise UserError(
                f"{RERANKED}: no index stores the text of {len(lacking):,} of the documents of the index"
                f" {each.name} (such as {lacking[0]!r}); build it with jaxir.index --corpus"
            )
