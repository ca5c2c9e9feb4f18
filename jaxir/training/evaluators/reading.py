"""The evaluator `Reading`: how often the answer that a reader generates is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxir.core.errors import UserError
from jaxir.core.values import Count, checked
from jaxir.data.batches.batch_plan import in_one_order
from jaxir.evaluation.exact_match import score_answers
from jaxir.models.decoding import Decoding
from jaxir.objectives.reader import FusionInDecoder
from jaxir.retrieval.answering.answered import AnsweredDataset, AnsweredQuestions
from jaxir.training.evaluators.evaluation_context import Bench, State, written
from jaxir.training.evaluators.evaluator import Evaluator, Prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Reading(Evaluator):
    """Exact match and F1 of the answers generated for questions (see `evaluation.exact_match`).

    Attributes:
      data: the questions, passages and answers.
      max_new_tokens: maximum number of tokens per answer.
      num_beams: number of beams in beam search; 1 is greedy decoding.
    """

    metrics = {"EM": "greater", "F1": "greater"}  # noqa: RUF012

    data: AnsweredQuestions | None
    max_new_tokens: Count = 50
    num_beams: Count = 1

    def prepare(self, bench: Bench) -> Prepared:
        if not isinstance(bench.objective, FusionInDecoder):
            kind = type(bench.objective).__name__
            raise UserError(
                f"Reading only evaluates readers, trained by FusionInDecoder, not {kind}: remove it"
            )
        if self.data is None:
            raise UserError("the evaluator has no data: set DEV_RUN, or the setting that names its data")
        features = bench.objective.features(bench.form)
        examples = bench.examples(self.data, features)
        data: AnsweredDataset = examples.dataset
        answers = dict(zip(data.questions.ids, data.answers, strict=True))
        ids = [data.questions.ids[number] for number in in_one_order(data.num_examples)]
        how = Decoding(max_new_tokens=self.max_new_tokens, num_beams=self.num_beams)

        write = bench.texts(examples.arrays["source_ids"], how)

        def measure(state: State) -> Mapping[str, float]:
            return score_answers(dict(zip(ids, write(state), strict=True)), answers).values

        return Prepared(measure, written(examples.fingerprint, how))
