"""Cosine similarities of rated sentence pairs by group of ratings (Chuang 2024, figure 2-2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxir.evaluation.collection import TextEncoder
from jaxir.evaluation.embedding_space import spread
from jaxir.evaluation.sts_files import SentencePair
from jaxir.evaluation.sts_scores import sentences_of
from jaxir.evaluation.text_tables import format_table
from jaxir.retrieval.indexes.base_index import normalize

GROUPS = ("0-1", "1-2", "2-3", "3-4", "4-5")  # a group includes its lower bound; the last also includes 5


def cosines_by_rating(encoder: TextEncoder, pairs: Sequence[SentencePair]) -> dict[str, np.ndarray]:
    """Returns {group of ratings: cosines [N] of its pairs by the query tower}, for groups with pairs."""
    texts = sentences_of({"all": pairs})
    vectors = normalize(encoder.encode_queries(texts))
    row = {text: number for number, text in enumerate(texts)}
    first, second = (vectors[[row[pair[side]] for pair in pairs]] for side in (1, 2))
    cosines = np.einsum("nd,nd->n", first, second).astype(np.float64)
    groups = np.clip(np.floor([pair.score for pair in pairs]), 0, len(GROUPS) - 1).astype(int)
    found = {name: cosines[groups == number] for number, name in enumerate(GROUPS)}
    return {name: values for name, values in found.items() if len(values)}


def table(models: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Returns a table of the cosines' mean, median and spread, a row for each model and group of ratings."""
    described = {(name, group): spread(x) for name, groups in models.items() for group, x in groups.items()}
    rows = [
        [name, group, s.count, s.mean, s.median, s.interquartile_range]
        for (name, group), s in described.items()
    ]
    header = ["model", "rating", "pairs", "mean", "median", "interquartile range"]
    title = "Figure 2-2: cosine similarity of pairs by people's rating"
    return f"{title}\n\n{format_table(header, rows, digits=3)}"
