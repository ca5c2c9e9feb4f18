"""Builds inverted indexes of token weights: from a model and a corpus, or from a file of vectors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import sparse

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.data.formats.lines import OnBadInput, Policy
from jaxir.data.formats.sources import read_documents
from jaxir.data.formats.sparse_vectors import read_sparse_vectors
from jaxir.retrieval.encoding.batch_runner import WINDOW
from jaxir.retrieval.encoding.sparse_similarity import check_searched
from jaxir.retrieval.indexes.keyword_index import BLANK
from jaxir.retrieval.indexes.sparse_index import SparseIndex, Storage

if TYPE_CHECKING:
    from jaxir.retrieval.encoding.sparse_text_encoder import SparseEncoder


def build_of_texts(
    encoder: SparseEncoder,
    corpus: str | Path,
    *,
    storage: Storage = "float32",
    on_bad_input: Policy = "stop",
) -> SparseIndex:
    """Encodes the documents of a corpus and indexes their weights. Documents without text are left out.

    Memory holds all weights above 0, 8 bytes each.

    Args:
      encoder: the model, which also encodes queries later; it must have been loaded or saved (`spec`).
      corpus: the corpus file, in a format that `read_documents` reads.
      storage: see `SparseIndex.build`.
      on_bad_input: stop at the first malformed line, or skip and count malformed lines.
    """
    check_searched(encoder.similarity_fn_name, str(encoder.spec))
    collector, ids, found = OnBadInput(on_bad_input), [], []
    documents = (d for d in read_documents(corpus, collector) if d.contents.strip(BLANK))
    with progress(what="encoding", unit="documents") as bar:
        for window in iter(lambda: list(itertools.islice(documents, WINDOW)), []):
            ids += [document.id for document in window]
            texts = [document.contents for document in window]
            found.append(encoder.encode(texts, tower="passage", show_progress=False))
            bar.update(len(texts))
    collector.report(noted="left out")
    if not ids:
        raise UserError("there are no documents to index: give a corpus with texts")
    weights = sparse.vstack(found, format="csr")
    return SparseIndex.build(weights, ids, storage=storage, **_facts(encoder))


def build_of_vectors(
    vectors: str | Path,
    *,
    encoder: SparseEncoder | None = None,
    storage: Storage = "float32",
    on_bad_input: Policy = "stop",
) -> SparseIndex:
    """Indexes a file of learned sparse vectors. Documents without any weight are left out.

    Args:
      vectors: a .jsonl[.gz] of {"id", "vector": {token: whole number}} (see `read_sparse_vectors`).
      encoder: the model that made the vectors and encodes queries later; None: queries are token weights.
      storage: see `SparseIndex.build`.
      on_bad_input: stop at the first malformed line, or skip and count malformed lines.

    Raises:
      UserError: a token is not in the vocabulary of `encoder`.
    """
    if encoder is not None:
        check_searched(encoder.similarity_fn_name, str(encoder.spec))
    collector, ids = OnBadInput(on_bad_input), []
    known: dict[str, int] = {}
    if encoder is not None:
        known = {token: number for number, token in enumerate(encoder.token_names)}
    columns, weights, ends = [], [], [0]
    for vector in progress(read_sparse_vectors(vectors, collector), what="reading", unit="documents"):
        if not vector.weights:
            continue
        if encoder is not None and (unknown := vector.weights.keys() - known.keys()):
            raise UserError(
                f"{vectors}: the token {min(unknown)!r:.40} of document {vector.id!r:.40} is not in the"
                f" vocabulary of {encoder.spec}: give the model that made the vectors"
            )
        ids.append(vector.id)
        columns.append(np.array([known.setdefault(token, len(known)) for token in vector.weights], np.int32))
        weights.append(np.array([*vector.weights.values()], np.float32))
        ends.append(ends[-1] + len(vector.weights))
    collector.report()
    if not ids:
        raise UserError("there are no documents to index: give vectors with weights")
    parts = np.concatenate(weights), np.concatenate(columns), np.array(ends)
    matrix = sparse.csr_matrix(parts, shape=(len(ids), len(known)))
    if encoder is not None:
        return SparseIndex.build(matrix, ids, storage=storage, **_facts(encoder))
    return SparseIndex.build(matrix, ids, tokens=list(known), storage=storage)


def _facts(encoder: SparseEncoder) -> Mapping[str, Any]:
    """Returns what index.json says about the model."""
    facts: dict[str, Any] = {"similarity": encoder.similarity_fn_name}
    facts |= {"fingerprint": encoder.fingerprint, "model": encoder.spec, "tower": "passage"}
    return facts | {"max_length": encoder.text_settings("passage")[1]}
