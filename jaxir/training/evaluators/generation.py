"""Generation: how similar a generator's outputs are to their targets."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.installation import require
from jaxir.core.values import Count, Object, checked
from jaxir.evaluation.exact_match import exact_match
from jaxir.models.decoding import Decoding
from jaxir.objectives.seq2seq import Seq2Seq
from jaxir.retrieval.encoding.generator import text_of
from jaxir.training.evaluators.evaluation_context import Bench, State, written
from jaxir.training.evaluators.evaluator import Evaluator, Prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Generation(Evaluator):
    """ROUGE-L and exact match of the text written for each source, and its target.

    Both are means over the examples. ROUGE-L is the F-measure of the longest common subsequence of words,
    from the rouge-score package, without stemming. Texts match as answers do (`evaluation.exact_match`).
    Targets are decoded from the tokens of training.

    Attributes:
      data: has the fields that the objective reads: a `data.text_data.TextData`.
      max_new_tokens: the most tokens of an output.
      num_beams: beams of an output; 1 is greedy.
    """

    metrics = {"rougeL": "greater", "exact_match": "greater"}  # noqa: RUF012

    data: Object | None
    max_new_tokens: Count = 64
    num_beams: Count = 1

    def prepare(self, bench: Bench) -> Prepared:
        if not isinstance(bench.objective, Seq2Seq):
            kind = type(bench.objective).__name__
            raise UserError(f"Generation measures generators, which Seq2Seq trains, not {kind}")
        require("rouge", "rouge_score")
        from rouge_score.rouge_scorer import RougeScorer

        features = bench.objective.features(bench.form)
        examples = bench.examples(self.data, features)
        targets = [text_of(row["target_ids"], bench.tokenizer) for row in examples.rows]
        how = Decoding(max_new_tokens=self.max_new_tokens, num_beams=self.num_beams)

        write = bench.texts(examples.arrays["source_ids"], how)
        scorer = RougeScorer(["rougeL"])

        def measure(state: State) -> dict[str, float]:
            pairs = list(zip(targets, write(state), strict=True))
            return {
                "rougeL": float(np.mean([scorer.score(*pair)["rougeL"].fmeasure for pair in pairs])),
                "exact_match": float(np.mean([exact_match(text, [target]) for target, text in pairs])),
            }

        return Prepared(measure, written(examples.fingerprint, how))
