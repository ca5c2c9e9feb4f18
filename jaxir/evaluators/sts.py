"""Semantic textual similarity: how well the cosine of two sentences' vectors ranks pairs as people did."""

from __future__ import annotations

import dataclasses

from jaxir.data import fingerprints
from jaxir.data.tokenizer import pad_batch
from jaxir.evaluation.sts import read_sts, scores_of, sentences_of
from jaxir.evaluators.bench import Bench, State
from jaxir.evaluators.evaluator import Evaluator, Prepared
from jaxir.simple_types import checked


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class STS(Evaluator):
    """Spearman's correlation x 100 of people's scores and the cosine; the query tower reads both sentences.

    `spearman` is that of all pairs taken together. Of several files, that of each is measured besides, as
    `spearman/FILE`.

    Attributes:
      path: a .tsv file of `score<TAB>sentence1<TAB>sentence2` under a header, or a folder of such.
    """

    metrics = {"spearman": "greater"}  # noqa: RUF012

    path: str

    def prepare(self, bench: Bench) -> Prepared:
        """Reads the files; see `Evaluator`."""
        sets, form = read_sts(self.path), bench.form
        texts = [form.query_prompt + sentence for sentence in sentences_of(sets)]
        ids = bench.tokenizer.encode_batch(texts, max_length=form.query_length)
        vectors_of = bench.vectors(pad_batch(ids, form.query_length), "query")

        def measure(state: State) -> dict[str, float]:
            found = scores_of(sets, vectors_of(state)).spearman
            each = {f"spearman/{name}": value for name, value in found.items() if name != "all"}
            return {"spearman": found["all"]} | (each if len(sets) > 1 else {})

        told = fingerprints.of_values(*(tuple(pair) for pairs in sets.values() for pair in pairs))
        return Prepared(measure, f"{len(texts)} sentences, hash {told[: fingerprints.DIGITS]}")
