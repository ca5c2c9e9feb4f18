"""Computes the numbers and figures of `jaxir.analyze` for models on a test collection."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.evaluation import embedding_space, plots
from jaxir.evaluation.collection import Collection, TextEncoder, read_collection
from jaxir.evaluation.embedding_space import Separability, Spread
from jaxir.evaluation.text_tables import format_table
from jaxir.retrieval.indexes.base_index import normalize
from jaxir.retrieval.indexes.exact import ExactIndex

PROJECTED = 1000  # maximum number of pairs shown in figure1.png; t-SNE is slow for more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """The texts of a test collection that `jaxir.analyze` encodes."""

    queries: list[str]  # N different texts
    passages: list[str]  # a relevant document of each query; all N texts differ
    documents: list[str]  # the corpus that is searched for nearest passages; includes `passages`
    document_ids: list[str]  # the id of each text of `documents`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Analysis:
    """The measures of one model's embedding space; figures are those of Moiseev et al. 2023 (SamToNe).

    `ratio` is query-query similarity divided by query-passage similarity, for random pairs whose divisor is
    positive.
    """

    separability: Separability  # how separable the two towers' vectors are (figure 1)
    nearest: Spread  # similarity of queries to their nearest passages (figure 5)
    own: Spread  # similarity of queries to their own passages
    ratio: Spread | None  # statistics of the ratio (figure 6); None if no divisor is positive
    ratio_of_means: float  # mean query-query over mean query-passage similarity, robust to small divisors
    divisors_not_positive: float  # share of pairs left out of `ratio`
    points: tuple[np.ndarray, np.ndarray]  # t-SNE of queries and of passages, [n, 2] each (figure 1)
    nearest_values: np.ndarray  # [N], the similarities that `nearest` summarises
    ratio_values: np.ndarray  # [S], the ratios that `ratio` summarises

    def numbers(self) -> dict[str, Any]:
        """Returns all fields except the arrays, as JSON-serialisable values."""
        fields = dataclasses.asdict(dataclasses.replace(self, points=(), nearest_values=(), ratio_values=()))
        return {name: value for name, value in fields.items() if value != ()}


def draw_sample(directory: Path, split: str, *, queries: int, documents: int, seed: int) -> Sample:
    """Draws queries with a relevant document each, and documents to search, from a BEIR folder.

    The documents include the relevant ones. If several queries have the same text, or relevant documents with
    the same text, only one of them is drawn. Copies would bias the measures: a classifier trained on one copy
    recognises the others, and copies are always each other's nearest neighbours.
    """
    collection = read_collection(directory, split)
    rng = np.random.default_rng(seed)
    text_of = dict(zip(collection.document_ids, collection.documents, strict=True))
    best = {}
    for query_id in collection.query_ids:
        relevant = {d: grade for d, grade in collection.qrels[query_id].items() if grade > 0 and d in text_of}
        if relevant:
            best[query_id] = max(relevant, key=relevant.__getitem__)
    usable = [place for place, query_id in enumerate(collection.query_ids) if query_id in best]
    drawn = _without_copies(
        (usable[i], collection.queries[usable[i]], text_of[best[collection.query_ids[usable[i]]]])
        for i in rng.permutation(len(usable))
    )
    chosen = sorted(itertools.islice(drawn, queries))
    embedding_space.check_pairs(len(chosen))
    relevant = [best[collection.query_ids[place]] for place in chosen]
    kept = _documents(collection, set(relevant), documents, rng)
    return Sample(
        queries=[collection.queries[place] for place in chosen],
        passages=[text_of[document_id] for document_id in relevant],
        documents=[text_of[document_id] for document_id in kept],
        document_ids=kept,
    )


def _without_copies(pairs: Iterable[tuple[int, str, str]]) -> Iterator[int]:
    """Yields the index of each (index, query, passage) whose query and passage did not occur before."""
    queries, passages = set(), set()
    for place, *texts in pairs:
        query, passage = (" ".join(text.casefold().split()) for text in texts)
        if query not in queries and passage not in passages:
            queries.add(query)
            passages.add(passage)
            yield place


def _documents(collection: Collection, relevant: set[str], count: int, rng: np.random.Generator) -> list[str]:
    others = [document_id for document_id in collection.document_ids if document_id not in relevant]
    drawn = rng.permutation(len(others))[: max(0, count - len(relevant))]
    kept = relevant | {others[place] for place in drawn}
    return [document_id for document_id in collection.document_ids if document_id in kept]


def analyze_model(encoder: TextEncoder, sample: Sample, *, seed: int) -> Analysis:
    """Encodes the sample, normalises the vectors to length 1, and measures the embedding space."""
    vectors = normalize(encoder.encode_passages(sample.documents))
    row_of = {text: row for row, text in enumerate(sample.documents)}
    query = normalize(encoder.encode_queries(sample.queries))
    passage = vectors[[row_of[text] for text in sample.passages]]
    found, _ = ExactIndex.build(vectors, sample.document_ids, similarity="dot").search(query, 1)
    nearest = found[:, 0].astype(np.float64)
    numerators, divisors = embedding_space.similarity_ratios(query, passage, seed=seed)
    ratios = numerators[divisors > 0] / divisors[divisors > 0]
    shown = np.random.default_rng(seed).permutation(len(query))[:PROJECTED]
    plane = embedding_space.project(np.concatenate([query[shown], passage[shown]]), seed=seed)
    return Analysis(
        separability=embedding_space.separability(query, passage, seed=seed),
        nearest=embedding_space.spread(nearest),
        own=embedding_space.spread(np.einsum("nd,nd->n", query, passage).astype(np.float64)),
        ratio=embedding_space.spread(ratios) if len(ratios) else None,
        ratio_of_means=float(numerators.mean() / divisors.mean()),
        divisors_not_positive=float(np.mean(divisors <= 0)),
        points=(plane[: len(shown)], plane[len(shown) :]),
        nearest_values=nearest,
        ratio_values=ratios,
    )


def draw(analyses: Mapping[str, Analysis], directory: Path) -> None:
    """Writes figure1.png, figure5.png and figure6.png, numbered as in Moiseev et al. 2023 (SamToNe)."""
    plots.towers({name: a.points for name, a in analyses.items()}, directory / "figure1.png")
    plots.nearest({name: a.nearest_values for name, a in analyses.items()}, directory / "figure5.png")
    plots.ratios({name: a.ratio_values for name, a in analyses.items()}, directory / "figure6.png")


def tables(analyses: Mapping[str, Analysis]) -> str:
    """Returns the numbers of Figures 1, 5 and 6 as Markdown tables with a row for each model."""
    separability, similarity, ratio = [], [], []
    for name, a in analyses.items():
        separability.append([name, *dataclasses.astuple(a.separability)])
        similarity.append([name, a.nearest.mean, a.nearest.median, a.own.mean])
        spread = (a.ratio.median, a.ratio.interquartile_range) if a.ratio else ("none", "none")
        ratio.append([name, *spread, a.ratio_of_means, 100 * a.divisors_not_positive])
    parts = (
        (
            "Figure 1: separability of the towers (0.5: they overlap)",
            ["model", "AUC, linear", "accuracy, linear", "neighbours of the same tower"],
            separability,
        ),
        (
            "Figure 5: cosine similarity of queries and passages",
            ["model", "nearest, mean", "nearest, median", "own, mean"],
            similarity,
        ),
        (
            "Figure 6: query-query over query-passage similarity",
            ["model", "median", "interquartile range", "ratio of means", "divisors <= 0, %"],
            ratio,
        ),
    )
    return "\n\n".join(f"{title}\n\n{format_table(header, rows, digits=3)}" for title, header, rows in parts)
