"""Encodes each document as S views, with generated queries (He et al. 2022, section 3.3 and figure 5)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from jaxir.core.values import Count, checked
from jaxir.data.expanded.joining import Joiner
from jaxir.data.formats.expansions import read_expansions
from jaxir.data.formats.lines import OnBadInput, Policy
from jaxir.data.text.truncation import Truncation
from jaxir.retrieval.encoding.lengths import UnusableVectorError
from jaxir.retrieval.encoding.text_encoder import DualEncoder

Kind = Literal["typical", "corpus", "document"]


class View(NamedTuple):
    """One input of the passage tower: a document, and the queries appended to it."""

    document: str
    queries: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Expansion:
    """How the first S different queries of each document are used.

    - typical: a view for each query; the vector is the mean over the views, E(d) = 1/S sum_j E(d + q_j),
      scaled to length 1 for cosine;
    - corpus: an entry of the index for each view; a document has the score of its best entry;
    - document: a single view with all queries. (After training with one query at a time, this is the
      asymmetric expansion of figure 5.)

    A document with fewer queries has fewer views; a document without queries is encoded without them.

    Attributes:
      path: the file or folder of queries, in a format that `data.expansions.read_expansions` reads.
      kind: typical, corpus or document.
      views: S, the maximum number of queries per document.
    """

    path: str
    kind: Kind = "typical"
    views: Count = 10

    def records(
        self, texts: Iterable[tuple[str, str]], ids: Sequence[str], on_bad_input: OnBadInput | Policy
    ) -> Iterator[tuple[str, list[View]]]:
        """Yields (id, views) of each document, or of each entry for "corpus"; `texts` has (id, text)."""
        for (identifier, text), queries in zip(texts, self._in_order(ids, on_bad_input), strict=True):
            views = [View(text, (query,)) for query in queries] or [View(text)]
            if self.kind == "corpus":
                yield from ((identifier, [view]) for view in views)
            elif self.kind == "document":
                yield identifier, [View(text, tuple(queries))]
            else:
                yield identifier, views

    def _in_order(self, ids: Sequence[str], on_bad_input: OnBadInput | Policy) -> Iterator[list[str]]:
        """Yields each document's queries in the order of `ids`, although the file may have another order."""
        read = read_expansions(self.path, ids, on_bad_input=on_bad_input)
        early: dict[str, list[str]] = {}
        for wanted in ids:
            while wanted not in early and (found := next(read, None)):
                early[found[0]] = list(dict.fromkeys(found[1]))[: self.views]
            yield early.pop(wanted, [])
        for _ in read:  # read on to the end, where the reader checks the number of lines
            pass


def joiner_of(encoder: DualEncoder) -> Joiner:
    settings = encoder.settings
    return Joiner(encoder.tokenizer, settings.passage_max_length, settings.query_max_length)


def encode_views(
    encoder: DualEncoder, windows: Iterable[tuple[Sequence[Sequence[View]], Truncation]], **how: object
) -> Iterator[np.ndarray]:
    """Yields vectors for each window of n documents: float32 [n, D], the means over each document's views."""
    joiner, sizes = joiner_of(encoder), []

    def tokens() -> Iterator[list[np.ndarray]]:
        for window, truncation in windows:
            sizes.append([len(views) for views in window])
            yield _tokens(encoder, joiner, [view for views in window for view in views], truncation)

    for vectors in _by_document(encoder.encode_tokens(tokens(), tower="passage", **how), sizes):
        counts = np.array(sizes.pop(0))
        if (counts == 1).all():
            yield vectors
            continue
        means = np.add.reduceat(vectors, np.cumsum(counts) - counts) / counts[:, None].astype(np.float32)
        if encoder.similarity_fn_name == "cosine":
            means /= np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        yield means


def _by_document(encoded: Iterator[np.ndarray], sizes: Sequence[list[int]]) -> Iterator[np.ndarray]:
    """Yields `encoded`; if an error names a row of views, raises it with the row of the document instead."""
    try:
        yield from encoded
    except UnusableVectorError as error:
        row = int(np.searchsorted(np.cumsum(sizes[0]), error.row, side="right"))
        raise UnusableVectorError(error.subject, row, error.reason) from None


def _tokens(
    encoder: DualEncoder, joiner: Joiner, views: Sequence[View], truncation: Truncation
) -> list[np.ndarray]:
    """Returns the token ids of views; each document and each query is tokenised once."""
    documents = list(dict.fromkeys(view.document for view in views))
    queries = list(dict.fromkeys(query for view in views for query in view.queries))
    of_document = dict(zip(documents, encoder.tokens(documents, "passage", truncation), strict=True))
    of_query = dict(zip(queries, joiner.queries(queries), strict=True))
    return [joiner.join(of_document[v.document], [of_query[q] for q in v.queries]) for v in views]
