"""The evaluator `SentEval`: the accuracy of classifiers on frozen vectors in transfer tasks."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import numpy as np

from jaxir.core.installation import require
from jaxir.core.values import Within, checked
from jaxir.evaluation.senteval_files import read_senteval
from jaxir.evaluation.transfer_tasks import FOLDS, check_folds, scores_of, texts_of
from jaxir.training.evaluators.evaluation_context import Bench, State, check_dense, described
from jaxir.training.evaluators.evaluator import Evaluator, Prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SentEval(Evaluator):
    """`transfer`, the mean accuracy in % on the dev sets of the transfer tasks (Chuang 2024, appendix A.1).

    The accuracy is the one by which SentEval chooses a classifier; test rows are not used. As in the papers,
    vectors are not normalised, even if the model uses cosine similarity; they are from the query tower.
    Each task's accuracy is logged as `transfer/TASK`. Each evaluation fits hundreds of classifiers on CPU.

    Attributes:
      directory: SentEval's data/downstream, or some of its folders: see
        `evaluation.senteval_files.read_senteval`.
      folds: number of folds in the cross-validation of tasks without a dev set: 10 is SentEval's protocol, 5
        takes half its time.
    """

    metrics = {"transfer": "greater"}  # noqa: RUF012

    directory: str
    folds: Annotated[int, Within(2)] = FOLDS

    def prepare(self, bench: Bench) -> Prepared:
        require("analyze", "sklearn")
        tasks = read_senteval(self.directory)
        check_folds(tasks, self.folds)

        def encode(model: Any, _: Any, batch: Any) -> Any:
            check_dense(model)
            return model.unnormalized().encode(batch["ids"], tower="query")

        program = bench.program(encode, {"ids": bench.tokens(texts_of(tasks), "query")})

        def measure(state: State) -> dict[str, float]:
            scores = scores_of(tasks, program.of_rows(state), folds=self.folds)
            each = {f"transfer/{name}": task.dev for name, task in scores.items()}
            return {"transfer": float(np.mean(list(each.values())))} | each

        rows = (str(row) for task in tasks.values() for row in task.items())
        return Prepared(measure, described(f"{', '.join(tasks)}, {self.folds} folds", *rows))
