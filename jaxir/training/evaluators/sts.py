"""The evaluator `STS`, semantic textual similarity: how well cosines of sentences rank pairs as people do."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxir.core.values import checked
from jaxir.evaluation.sts_files import read_sts
from jaxir.evaluation.sts_scores import scores_of, sentences_of
from jaxir.training.evaluators.evaluation_context import Bench, State, described
from jaxir.training.evaluators.evaluator import Evaluator, Prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class STS(Evaluator):
    """Spearman's correlation x 100 of people's ratings and cosines; the query tower encodes all sentences.

    `uniformity` is over all sentences; `alignment` is over pairs rated above 4, and logged if there are any.
    With several files, `spearman/FILE` is logged for each file, and `spearman/SETTING` for each setting.

    Attributes:
      path: a file of rated pairs, or a folder of such files: see `evaluation.sts_files.read_sts`. In a folder
        with train, dev and test, dev is used.
      setting: how several files become one `spearman`: "all" pools their pairs, "mean" averages the files'
        values, "wmean" averages the values weighted by the files' numbers of pairs.
    """

    metrics = {"spearman": "greater", "uniformity": "smaller"}  # noqa: RUF012

    path: str
    setting: Literal["all", "mean", "wmean"] = "all"

    def prepare(self, bench: Bench) -> Prepared:
        sets = read_sts(self.path, "dev")
        texts = sentences_of(sets)
        vectors_of = bench.vectors(bench.tokens(texts, "query"), "query", dense=True)

        def measure(state: State) -> dict[str, float]:
            scores = scores_of(sets, vectors_of(state))
            space = scores.space["all"]
            found = {"spearman": scores.spearman[self.setting], "uniformity": space.uniformity}
            if space.alignment is not None:
                found["alignment"] = space.alignment
            if len(sets) > 1:
                found |= {f"spearman/{name}": value for name, value in scores.spearman.items()}
            return found

        pairs = (tuple(pair) for of_set in sets.values() for pair in of_set)
        data = described(f"{len(texts)} sentences", *pairs)
        return Prepared(measure, data if self.setting == "all" else f"{data}, {self.setting}")
