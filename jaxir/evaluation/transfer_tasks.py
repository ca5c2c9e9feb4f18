"""SentEval's transfer tasks (Conneau and Kiela 2018): logistic regression on a model's frozen vectors.

The protocol equals that of SentEval's own code with usepytorch=False, kfold=10 and nhid=0, in everything
that changes a result: the order of the examples, the folds, the grids of the regularisation C, rounding
before the best C is chosen, scikit-learn's default solver with 100 iterations, no standardised vectors.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.evaluation.collection import TextEncoder
from jaxir.evaluation.senteval_files import TASKS, Row, Task

SEED = 1111  # the default seed of SentEval
FOLDS = 10
GRID = tuple(2.0**t for t in range(-2, 4))  # values of C for tasks without a test set or with a dev set
TEST_GRID = tuple(2.0**t for t in range(-1, 6))  # values of C for tasks with a test set but no dev set
Data = tuple[np.ndarray, np.ndarray]  # vectors [N, D], labels [N]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The scores of a transfer task."""

    accuracy: float  # in %, on the test set, or the mean over ten folds if there is no test set
    dev: float  # in %, the accuracy by which the regularisation C was chosen
    f1: float | None  # in %, on MRPC's test set; None for the other tasks
    train: int  # number of training examples
    test: int  # number of examples on which `accuracy` is measured


def texts_of(tasks: dict[str, Task]) -> list[str]:
    """Returns the distinct texts of all tasks, sorted."""
    parts = (rows for task in tasks.values() for rows in task.values())
    return sorted({text for rows in parts for row in rows for text in row.texts})


def evaluate_senteval(encoder: TextEncoder, tasks: dict[str, Task]) -> dict[str, TaskScores]:
    """Evaluates a model on tasks from `read_senteval`; the query tower encodes the texts."""
    return scores_of(tasks, encoder.encode_queries(texts_of(tasks)))


def scores_of(tasks: dict[str, Task], vectors: np.ndarray, *, folds: int = FOLDS) -> dict[str, TaskScores]:
    """Scores float32 vectors [N, D] of the N texts `texts_of(tasks)`; cross-validation has `folds` folds."""
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    place = {text: number for number, text in enumerate(texts_of(tasks))}
    scores = {}
    # Use one BLAS thread: for matrices this small, several threads make a fit tens of times slower.
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # SentEval stops at 100 iterations
        for name, task in tasks.items():
            parts = {part: _data(rows, vectors, place) for part, rows in task.items()}
            scores[name] = PROTOCOLS[frozenset(task)](name, parts, folds)
    return scores


def check_folds(tasks: dict[str, Task], folds: int) -> None:
    """Raises a UserError if a task has too few examples of a label for nested cross-validation."""
    needed = -(-folds * folds // (folds - 1))  # with fewer, an inner fold could be empty
    for name, task in tasks.items():
        for rows in (task[part] for part in ("all", "train") if part in task and "dev" not in task):
            fewest = min(Counter(row.label for row in rows).values())
            if fewest < needed:
                raise UserError(
                    f"{name} has a label with only {fewest} examples, but nested cross-validation with"
                    f" {folds} folds needs {needed}: complete the task's files, or remove all of them"
                )


def _data(rows: Sequence[Row], vectors: np.ndarray, place: dict[str, int]) -> Data:
    """Returns the features and labels of examples, sorted by number of words and by label, as in SentEval.

    The order determines the folds. The features of two texts u and v are [|u - v|, u * v].
    """
    ordered = sorted(rows, key=lambda row: (*(len(text.split()) for text in row.texts), row.label))
    each = [vectors[[place[row.texts[side]] for row in ordered]] for side in range(len(ordered[0].texts))]
    features = each[0] if len(each) == 1 else np.hstack([np.abs(each[0] - each[1]), each[0] * each[1]])
    return features, np.array([row.label for row in ordered])


def _fit(data: Data, c: float) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=c, random_state=SEED).fit(*data)


def _best(score: Callable[[float], float], grid: Sequence[float]) -> tuple[float, float]:
    """Returns the smallest C of `grid` with the best score, and this score in %."""
    scores = [round(100 * float(score(c)), 2) for c in grid]
    return grid[int(np.argmax(scores))], max(scores)


def _cross_validated(data: Data, count: int) -> Callable[[float], float]:
    """Returns a function that maps C to the mean accuracy over `count` folds of `data`."""
    folds = list(_folds(data, count))
    return lambda c: np.mean([_fit(train, c).score(*held_out) for train, held_out in folds])


def _folds(data: Data, count: int) -> list[tuple[Data, Data]]:
    from sklearn.model_selection import StratifiedKFold

    x, y = data
    split = StratifiedKFold(count, shuffle=True, random_state=SEED).split(x, y)
    return [((x[train], y[train]), (x[test], y[test])) for train, test in split]


def _nested(name: str, parts: dict[str, Data], folds: int) -> TaskScores:
    """Scores MR, CR, SUBJ and MPQA by nested cross-validation: inner folds choose C, outer folds test."""
    found = []
    for train, test in progress(_folds(parts["all"], folds), what=f"classify {name}", unit="folds"):
        c, dev = _best(_cross_validated(train, folds), GRID)
        found.append((round(100 * _fit(train, c).score(*test), 2), dev))
    accuracy, dev = np.mean(found, axis=0)
    count = len(parts["all"][1])
    return TaskScores(accuracy=float(accuracy), dev=float(dev), f1=None, train=count, test=count)


def _folds_of_train(name: str, parts: dict[str, Data], folds: int) -> TaskScores:
    """Scores TREC and MRPC: chooses C by cross-validation on the training set."""
    c, dev = _best(_cross_validated(parts["train"], folds), TEST_GRID)
    return _tested(name, parts, c, dev)


def _dev_set(name: str, parts: dict[str, Data], folds: int) -> TaskScores:
    """Scores SST2: chooses C by the accuracy on the dev set."""
    c, dev = _best(lambda c: _fit(parts["train"], c).score(*parts["dev"]), GRID)
    return _tested(name, parts, c, dev)


def _tested(name: str, parts: dict[str, Data], c: float, dev: float) -> TaskScores:
    from sklearn.metrics import f1_score

    classifier, (x, y) = _fit(parts["train"], c), parts["test"]
    f1 = 100 * float(f1_score(y, classifier.predict(x))) if TASKS[name].pairs else None
    accuracy = 100 * float(classifier.score(x, y))
    return TaskScores(accuracy=accuracy, dev=dev, f1=f1, train=len(parts["train"][1]), test=len(y))


PROTOCOLS: dict[frozenset[str], Callable[[str, dict[str, Data], int], TaskScores]] = {
    frozenset({"all"}): _nested,
    frozenset({"train", "test"}): _folds_of_train,
    frozenset({"train", "dev", "test"}): _dev_set,
}
