"""Transfer tasks: how well a classifier does that has nothing but the frozen vectors."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import numpy as np

from jaxir.core.installation import require
from jaxir.core.values import Within, checked
from jaxir.evaluation.senteval_files import read_senteval
from jaxir.evaluation.transfer_tasks import FOLDS, check_folds, scores_of, texts_of
from jaxir.training.evaluators.evaluation_context import Bench, State, described
from jaxir.training.evaluators.evaluator import Evaluator, Prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SentEval(Evaluator):
    """`transfer`, the mean accuracy in % on the dev sets of the transfer tasks (Chuang 2024, appendix A.1).

    The accuracy is the one by which SentEval chooses a classifier, so no test row has a part in it. Vectors
    of the query tower keep their own length, whatever they are compared by, as in the papers. Each task's is
    logged besides as `transfer/TASK`. Hundreds of classifiers are fitted each time, on the host.

    Attributes:
      directory: SentEval's data/downstream, or some of its folders: see
        `evaluation.senteval_files.read_senteval`.
      folds: of the cross-validations of tasks without a dev set: 10 is SentEval's protocol, 5 half its time.
    """

    metrics = {"transfer": "greater"}  # noqa: RUF012

    directory: str
    folds: Annotated[int, Within(2)] = FOLDS

    def prepare(self, bench: Bench) -> Prepared:
        """Reads the tasks; see `Evaluator`.

        Raises:
          UserError: there are none, one has too few rows for the folds, or scikit-learn is not installed.
        """
        require("analyze", "sklearn")
        tasks = read_senteval(self.directory)
        check_folds(tasks, self.folds)

        def encode(model: Any, _: Any, batch: Any) -> Any:
            return model.unnormalized().encode(batch["ids"], tower="query")

        program = bench.program(encode, {"ids": bench.tokens(texts_of(tasks), "query")})

        def measure(state: State) -> dict[str, float]:
            scores = scores_of(tasks, program.of_rows(state), folds=self.folds)
            each = {f"transfer/{name}": task.dev for name, task in scores.items()}
            return {"transfer": float(np.mean(list(each.values())))} | each

        rows = (str(row) for task in tasks.values() for row in task.items())
        return Prepared(measure, described(f"{', '.join(tasks)}, {self.folds} folds", *rows))
