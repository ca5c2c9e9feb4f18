"""A collection in BEIR's format: a folder, or one made from another data set (`collection_names`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from jaxir.core.errors import UserError, suggest
from jaxir.core.progress import progress
from jaxir.data.formats.collection_names import folder_of
from jaxir.data.formats.lines import OnBadInput, Policy
from jaxir.data.formats.qrels import Qrel, read_qrels
from jaxir.data.formats.sources import (
    Document,
    PairExample,
    Query,
    find_file,
    read_corpus,
    read_excluded,
    read_judged_pairs,
    read_queries,
    splits_in,
)


class BeirFolder:
    """A collection in BEIR's format: corpus.jsonl[.gz], queries.jsonl[.gz], qrels/SPLIT.tsv.

    Args:
      directory: DIR or beir:DIR, or the name of another kind, such as hf:NAME (see `folder_of`).
      on_bad_input: what to do with malformed records.
    """

    def __init__(self, directory: str | Path, on_bad_input: OnBadInput | Policy = "stop"):
        self.directory = folder_of(directory)
        self.on_bad_input = on_bad_input
        if not self.directory.is_dir():
            how = f"; jaxir.prepare --dataset=pairs:{directory} --output=DIR makes one"
            how = how if self.directory.is_file() else ""
            raise UserError(f"{directory} is not a directory: a BEIR folder is needed{how}")
        self.corpus_path = self._find("corpus.jsonl")
        self.queries_path = self._find("queries.jsonl")

    @property
    def splits(self) -> list[str]:
        return splits_in(self.directory / "qrels", "")

    def qrels_path(self, split: str) -> Path:
        if split not in self.splits:
            known = ", ".join(self.splits) or "none"
            raise UserError(
                f"{self.directory} has no split {split!r} (has: {known}){suggest(split, self.splits)}"
            )
        return self._find(f"qrels/{split}.tsv")

    def corpus(self) -> Iterator[Document]:
        return read_corpus(self.corpus_path, self.on_bad_input)

    def documents_again(self, what: str) -> Iterator[Document]:
        """Yields the documents again, with a progress bar named `what`, without checking for repeated ids."""
        documents = read_corpus(self.corpus_path, OnBadInput("stop"), unique=False)
        return iter(progress(documents, what=what, unit="documents"))

    def queries(self) -> Iterator[Query]:
        return read_queries(self.queries_path, self.on_bad_input)

    def excluded(self) -> dict[str, tuple[str, ...]]:
        """Returns ids of documents that results must not have, by the id of the query."""
        return read_excluded(self.queries_path)

    def qrels(self, split: str, **known_ids: Collection[str] | None) -> Iterator[Qrel]:
        """Yields the judgements of `split`, checked against `query_ids` and `document_ids`, if given."""
        return read_qrels(self.qrels_path(split), self.on_bad_input, **known_ids)

    def pairs(self, split: str) -> Iterator[PairExample]:
        return read_judged_pairs(self.qrels_path(split), self.queries, self.corpus, self.on_bad_input)

    def _find(self, name: str) -> Path:
        return find_file(self.directory, name, "a BEIR folder")
