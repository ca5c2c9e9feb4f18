"""Adds documents to an index directory, and deletes documents from it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import Policy
from jaxir.retrieval.encoding.stored_embeddings import EmbeddingsInfo, StoredEmbeddings
from jaxir.retrieval.indexes.base_index import Index, VectorIndex, checked, load_index, not_changed
from jaxir.retrieval.indexes.documents import Documents, check_corpus
from jaxir.retrieval.indexes.ids import check_known, check_new
from jaxir.retrieval.indexes.index_info import IndexInfo
from jaxir.retrieval.indexes.keyword_index import KeywordIndex, update_keyword_index
from jaxir.retrieval.indexes.scann_files import stored_vectors
from jaxir.retrieval.indexes.scann_index import ScannIndex
from jaxir.storage.checksums import directory_with_checksums
from jaxir.storage.files import local_path
from jaxir.storage.locks import locked
from jaxir.storage.open_files import read_text

if TYPE_CHECKING:
    from jaxir.retrieval.indexes.tuning import Recall


class Change(NamedTuple):
    """The result of an update: the engine, the new number of documents, and what changed."""

    engine: str
    count: int
    added: int
    deleted: int
    recall: Recall | None

    def __str__(self) -> str:
        recall = f"; {self.recall} of the stored vectors" if self.recall is not None else ""
        counts = f"{self.added:,} added, {self.deleted:,} deleted"
        return f"{self.engine} index of {self.count:,} passages ({counts}){recall}"


def update_index(
    directory: str | Path,
    *,
    embeddings: StoredEmbeddings | None = None,
    delete: Sequence[str] = (),
    corpus: str | Path | None = None,
    on_bad_input: Policy = "stop",
) -> Change:
    """Deletes and adds documents; the new index replaces the old index when it is complete.

    Documents are deleted first, so a document that is both deleted and added is replaced. A database outside
    the directory is changed in place; after an interruption the same call completes the update.

    Args:
      directory: the index directory.
      embeddings: the vectors to add, from `open_embeddings`; for BM25 only give `corpus`.
      delete: ids of the documents to delete.
      corpus: titles and texts of the new documents; needed if the index stores documents.
      on_bad_input: for BM25, stop at the first malformed line of the corpus, or skip and count such lines.

    Returns:
      The result, with the new recall of a ScaNN index that was tuned.

    Raises:
      UserError: the directory is not an index, belongs to another model or is being updated; ids to add exist
        or ids to delete do not; the corpus is missing or not needed; or no document would be left.
    """
    directory = local_path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory} is not an index directory: it has no index.json; give another")
    busy = f"{directory} is being changed by another process"
    with locked(directory, busy), contextlib.closing(load_index(directory)) as index:
        before, deleted = index.info.count, len(set(delete))
        if isinstance(index, VectorIndex):
            after = _update_vectors(directory, index, embeddings, delete, corpus)
        else:
            after = _update_words(directory, index, embeddings, delete, corpus, on_bad_input)
        return Change(index.engine, after, after - before + deleted, deleted, _recall(directory, index))


def read_ids(path: str | Path) -> list[str]:
    """Returns the ids of a text file with one id on each line. A byte order mark is dropped."""
    try:
        lines = read_text(local_path(path)).removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: give a file with one id on each line") from None
    return [line.removesuffix("\r") for line in lines if line.strip()]


def _update_vectors(
    directory: Path,
    index: VectorIndex,
    embeddings: StoredEmbeddings | None,
    delete: Sequence[str],
    corpus: str | Path | None,
) -> int:
    new = _checked(directory, index, embeddings, delete, corpus)
    kept, gone, before = index.documents, set(delete), index.info
    with directory_with_checksums(directory, overwrite=True, without=index.changing) as temporary:
        if gone:
            index.delete(list(delete))
        if embeddings is not None:
            index.add(embeddings.shards, new)
            if not gone:
                index.info = dataclasses.replace(index.info, cut=_number_cut(before, embeddings.info))
        index.write_into(temporary)
        if kept is not None:
            Documents.write(temporary, corpus, index.ids, kept=kept, new=new)
    return index.info.count


def _number_cut(before: IndexInfo, added: EmbeddingsInfo) -> int | None:
    if before.cut is None or added.cut is None or before.max_length != added.max_length:
        return None
    return before.cut + added.cut


def _checked(
    directory: Path,
    index: VectorIndex,
    embeddings: StoredEmbeddings | None,
    delete: Sequence[str],
    corpus: str | Path | None,
) -> list[str]:
    """Returns the ids to add. Raises a UserError if the update is not possible."""
    check_known(delete, index.ids)
    if embeddings is None:
        if corpus is not None:
            raise UserError("--corpus needs --embeddings of the documents to add")
        return []
    info = embeddings.info
    if info.fde != index.info.fde:
        raise UserError(
            f"the index's vectors have the --fde settings {index.info.fde}, the new ones {info.fde}: encode"
            " the new documents with the same --fde flags"
        )
    if info.fingerprint != index.info.fingerprint or info.similarity != index.info.similarity:
        why = index.info.made_by.difference_from(info.made_by).replace("they were", "the index was")
        raise UserError(
            f"the embeddings cannot be added to {directory}: {why}; encode both with the same model"
        )
    if index.info.tower is not None and info.tower != index.info.tower:
        raise UserError(
            f"the embeddings are from the {info.tower} tower, but the index is from the {index.info.tower}"
            f" tower: encode the new documents with --tower={index.info.tower}"
        )
    if info.read_with != index.info.read_with:
        raise UserError(
            f"the new documents were encoded {_reading(info.read_with)}, but the index's documents"
            f" {_reading(index.info.read_with)}: encode the new documents in the same way"
        )
    checked(embeddings.shards, embeddings.ids, info.similarity)
    check_new(embeddings.ids, set(index.ids).difference(delete))
    if (corpus is None) != (index.documents is None):
        raise UserError(
            f"{directory} stores titles and texts: give the new documents' titles and texts with --corpus"
            if corpus is None
            else f"{directory} stores no titles and texts: leave out --corpus"
        )
    if corpus is not None:
        check_corpus(corpus, embeddings)
    return embeddings.ids


def _reading(read_with: str | None) -> str:
    return "without generated queries" if read_with is None else f"with generated queries ({read_with})"


def _recall(directory: Path, index: Index) -> Recall | None:
    """Returns the recall of a tuned index after an update, which does not change its searched leaves."""
    if not isinstance(index, ScannIndex) or not index.tuned:
        return None
    from jaxir.retrieval.indexes.tuning import Trial  # imported here, because it imports JAX

    storage = index.info.settings["storage"]
    with stored_vectors(directory, storage, index.outliers, index.residuals) as vectors:
        return Trial(vectors, index.ids, similarity=index.info.similarity).measure(index)


def _update_words(
    directory: Path,
    index: Index,
    embeddings: StoredEmbeddings | None,
    delete: Sequence[str],
    corpus: str | Path | None,
    on_bad_input: Policy,
) -> int:
    if not isinstance(index, KeywordIndex):
        raise not_changed(index)
    if embeddings is not None:
        raise UserError(f"{directory} is a BM25 index: give --corpus, not --embeddings")
    check_known(delete, index.ids)
    return update_keyword_index(index, directory, delete=delete, corpus=corpus, on_bad_input=on_bad_input)
