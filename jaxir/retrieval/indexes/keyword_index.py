"""The base class of indexes of words (BM25), which are built from a corpus and searched with texts."""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from jaxir.core.errors import UserError
from jaxir.data.formats.lines import OnBadInput, Policy
from jaxir.data.formats.sources import Document, read_documents
from jaxir.retrieval.indexes.base_index import Index
from jaxir.retrieval.indexes.documents import Documents
from jaxir.retrieval.indexes.ids import check_new
from jaxir.retrieval.indexes.index_info import IndexInfo, describe
from jaxir.storage.checksums import directory_with_checksums

Corpus = Callable[[], Iterator[Document]]  # each call reads the documents again
# The characters that Java's String.trim removes. Like Anserini, every index of words skips documents that
# have only such characters.
BLANK = "".join(map(chr, range(33)))


class KeywordIndex(Index):
    """An index of the words of a corpus; it stores the documents, to show them and to build it again."""

    query_kind = "texts"

    @abc.abstractmethod
    def _index_again(self, directory: Path, documents: Corpus) -> tuple[IndexInfo, list[str]]:
        """Writes the engine's files for changed documents; returns the index's description and ids."""


def build_of_corpus(
    corpus: str | Path,
    output: str | Path,
    write: Callable[[Path, Corpus], tuple[IndexInfo, list[str]]],
    on_bad_input: Policy,
) -> tuple[IndexInfo, list[str], Documents | None]:
    """Makes the directory of an index. `write` writes the engine's files, given the documents with text."""
    collector = OnBadInput(on_bad_input)
    with directory_with_checksums(output) as temporary:
        info, ids = write(temporary, lambda: _with_text(read_documents(corpus, collector)))
        collector.report(noted="left out")
        Documents.write(temporary, corpus, ids)
        describe(temporary, info, ids)
    return info, ids, Documents.open(Path(output), ids)


def update_keyword_index(
    index: KeywordIndex,
    directory: Path,
    *,
    delete: Collection[str] = (),
    corpus: str | Path | None = None,
    on_bad_input: Policy = "stop",
) -> int:
    """Deletes and adds documents. Builds the index again for correct word counts; returns its size."""
    stored, collector = index.documents, OnBadInput(on_bad_input)
    if stored is None:
        raise UserError(f"{directory} is damaged: it has no documents; build it again with jaxir.index")
    gone = set(delete)
    kept = [doc_id for doc_id in index.ids if doc_id not in gone]
    new = [] if corpus is None else [d.id for d in read_documents(corpus, collector)]
    collector.report(noted="left out")
    check_new(new, kept)

    def documents() -> Iterator[Document]:
        for doc_id, _ in stored.lines(kept):
            yield stored[doc_id]
        if corpus is not None:
            yield from _with_text(read_documents(corpus, OnBadInput("skip")))

    with directory_with_checksums(directory, overwrite=True) as temporary:
        info, ids = index._index_again(temporary, documents)
        Documents.write(temporary, corpus, ids, kept=stored, new=set(new).intersection(ids))
        describe(temporary, info, ids)
    return info.count


def bm25_info(engine: str, ids: list[str], settings: dict[str, str | float]) -> IndexInfo:
    if not ids:
        raise UserError("there are no documents to index: give a corpus with texts")
    return IndexInfo(engine=engine, similarity="bm25", dimension=0, count=len(ids), settings=settings)


def _with_text(documents: Iterator[Document]) -> Iterator[Document]:
    return (document for document in documents if document.contents.strip(BLANK))
