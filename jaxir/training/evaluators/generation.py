"""The evaluator `Generation`: how similar a generator's outputs are to their targets."""

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
    """Mean ROUGE-L and exact match between the text generated for each source and its target.

    ROUGE-L is the F-measure of the longest common subsequence of words, from the rouge-score package, without
    stemming. Exact match compares texts as `evaluation.exact_match` compares answers. Targets are decoded
    from their token ids, so they are truncated as in training.

    Attributes:
      data: a `data.batches.text_data.TextData` with the fields that the objective reads.
      max_new_tokens: maximum number of tokens per output.
      num_beams: number of beams in beam search; 1 is greedy decoding.
    """

    metrics = {"rougeL": "greater", "exact_match": "greater"}  # noqa: RUF012

    data: Object | None
    max_new_tokens: Count = 64
    num_beams: Count = 1

    def prepare(self, bench: Bench) -> Prepared:
        if not isinstance(bench.objective, Seq2Seq):
            kind = type(bench.objective).__name__
            raise UserError(f"Generation only evaluates models trained by Seq2Seq, not {kind}: remove it")
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
