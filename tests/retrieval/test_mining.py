"""Hard negatives from runs over a collection with known positives and duplicates."""

import json
import tracemalloc

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.sets.pair_sources import TevatronPairs
from jaxir.retrieval.mining.known_positives import KnownPositives
from jaxir.retrieval.mining.mining_settings import MiningSettings
from jaxir.retrieval.ranking.runs import write_run

DOCUMENTS = {f"d{i}": f"text number {i}" for i in range(60)} | {"twin": "Text  NUMBER 0", "empty": " \u200b"}
# q0: d0 and, in another split, d1 are right; q1: d2; q2: d3, which the run has not found.
QRELS = {"train": {"q0": {"d0": 1, "d5": 0}, "q1": {"d2": 2}, "q2": {"d3": 1}, "q3": {"d4": 1}}}
QRELS |= {"dev": {"q0": {"d1": 1, "d10": 0}, "q9": {"d8": 1}}}
RUN = {
    "q0": ["twin", "d5", "d0", "d1", "empty", *(f"d{i}" for i in range(10, 40))],
    "q1": ["d20", "d2", "d21", "d22"],
    "q2": ["d30", "d31", "d32"],
    "q9": ["d40"],
}


def scores(doc_ids):
    return {doc_id: 1 - 0.01 * place for place, doc_id in enumerate(doc_ids)}


def write_ranked(folder, run):
    write_run(folder / "run.trec", {query: scores(doc_ids) for query, doc_ids in run.items()})


@pytest.fixture
def folder(tmp_path, toy):
    toy.write_jsonl(tmp_path / "corpus.jsonl", [{"_id": i, "text": t} for i, t in DOCUMENTS.items()])
    queries = [{"_id": f"q{i}", "text": f"question {i}"} for i in range(10)]
    toy.write_jsonl(tmp_path / "queries.jsonl", queries)
    for split, judged in QRELS.items():
        toy.write_qrels(tmp_path, split, judged)
    write_ranked(tmp_path, RUN)
    return tmp_path


def tevatron(folder):
    return TevatronPairs(path=str(folder / "train.jsonl")).examples("stop")


def run_mine(folder, name="out", **flags) -> int:
    given = {"run": folder / "run.trec", "dataset": f"beir:{folder}", "output": folder / name} | flags
    return cli.main("jaxir.mine:mine", [f"--{flag}={value}" for flag, value in given.items()])


def mine(folder, name="out", **flags) -> dict[str, list[str]]:
    assert run_mine(folder, name, **flags) == 0
    return {p.query_id: [d for d, _ in p.negatives] for p in tevatron(folder / name)}


def test_positives_and_their_duplicates_are_not_mined(folder, capsys):
    found = mine(folder, negatives=100)
    assert found["q0"] == ["d5", *RUN["q0"][5:]], "d0, d1 are positives, twin has d0's text, empty none"
    assert found["q1"] == ["d20", "d21", "d22"] and found["q2"] == RUN["q2"]
    assert set(found) == {"q0", "q1", "q2"}
    printed = capsys.readouterr().out
    assert "3 queries, 12.3 negatives each; left out: 1 not in the run" in printed
    assert "1 documents have the text of a positive" in printed
    pair = next(tevatron(folder / "out"))
    assert (pair.query, pair.passage_id, pair.passage) == ("question 0", "d0", "text number 0")
    recorded = json.loads((folder / "out" / "mining.json").read_text())
    assert recorded["settings"]["last"] == 200 and recorded["run"]["name"] == "run.trec"
    assert recorded["negatives"] == 37 and len(recorded["run"]["sha256"]) == 64


def test_queries_of_one_text_share_their_positives(folder, toy):
    """This holds for positives of any split, whether the mined split judges them or not."""
    queries = [{"_id": f"q{i}", "text": "Question  0" if i in (1, 9) else f"question {i}"} for i in range(10)]
    toy.write_jsonl(folder / "queries.jsonl", queries)
    answers = ["d0", "d2", "d8", "d30"]  # positives of q0, q1 and, in another split, q9
    write_ranked(folder, {"q0": answers, "q1": answers})
    assert mine(folder, negatives=100) == {"q0": ["d30"], "q1": ["d30"]}


def test_positives_that_the_collection_lacks_are_left_out_and_counted(folder, capsys):
    with (folder / "qrels/train.tsv").open("a") as file:
        file.write("q0\tgone\t1\nq1\tempty\t1.0\nq4\tgone\t1\nlost\td8\t1\n")
    found = mine(folder, negatives=100)
    assert list(found) == ["q0", "q1", "q2"]
    said = capsys.readouterr()
    assert "; 4 positives left out, because the collection lacks their query or text" in said.out
    assert "note: grades written as decimals, which are read as integers: 1 (first: " in said.err
    assert run_mine(folder, "strict", strict=True) == 1
    assert "the score is not an integer: '1.0'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("judgement", "sentence"),
    [
        ("q0\tgone\t1", "lacks 'gone', which is judged relevant"),
        ("q0\tempty\t1", "'empty' is judged relevant and has no text"),
        ("lost\td8\t1", "lacks query 'lost', which is judged"),
    ],
)
def test_strict_mining_refuses_positives_that_the_collection_lacks(folder, judgement, sentence):
    with (folder / "qrels/train.tsv").open("a") as file:
        file.write(judgement + "\n")
    with pytest.raises(UserError, match=sentence):
        KnownPositives.read(BeirFolder(folder), "train", strict=True)


def test_documents_with_the_query_text_are_not_mined(folder, capsys, toy):
    """When questions are searched for duplicates, the question itself is the best answer."""
    itself = [{"_id": "q1", "text": "Question  1"}, {"_id": "copy", "text": "question 2"}]
    every = [{"_id": i, "text": t} for i, t in DOCUMENTS.items()]
    toy.write_jsonl(folder / "corpus.jsonl", [*every, *itself])
    write_ranked(folder, {"q1": ["q1", "copy", *RUN["q1"]], "q2": ["copy", *RUN["q2"]]})
    found = mine(folder, negatives=100)
    assert found == {"q1": ["copy", "d20", "d21", "d22"], "q2": RUN["q2"]}, "the copy is of another query"
    assert "dropped: 1 known positives, 2 with the query's text" in capsys.readouterr().out
    assert json.loads((folder / "out/mining.json").read_text())["dropped"] == {"positive": 1, "query": 2}


def test_first_and_last_are_ranks_of_the_run(folder):
    found = mine(folder, first=2, last=6, negatives=100)
    assert found["q0"] == ["d5", "d10"] and found["q1"] == ["d21", "d22"] and found["q2"] == ["d31", "d32"]
    assert mine(folder, "top", negatives=2, sampling="top")["q0"] == ["d5", "d10"]


def test_sampling_is_random_and_repeatable(folder):
    orders = [MiningSettings().order(query, 30) for query in ("q0", "q1", "q0")]
    assert orders[0] == orders[2] != orders[1], "each query has its own"
    one, again, other = mine(folder, "a"), mine(folder, "b"), mine(folder, "c", seed=1)
    assert one == again != other
    assert len(one["q0"]) == 7 and set(one["q0"]) < set(RUN["q0"]) and one["q0"] != RUN["q0"][5:12]
    lines = (folder / "run.trec").read_text().splitlines()
    (folder / "run.trec").write_text("\n".join(sorted(lines, reverse=True)) + "\n")
    assert mine(folder, "d") == one, "the order of the queries does not matter"


def test_margin_is_below_the_lowest_positive(folder, capsys):
    found = mine(folder, negatives=100, margin=0.1)
    # q0's positives score .98 and .97, so its negatives score at most .87, from rank 14 on.
    assert found["q0"] == RUN["q0"][13:]
    assert "q1" not in found and "q2" not in found
    assert "1 without a positive in the run, which a margin needs, 1 without" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "first"),
    [
        # Rank r scores 1.01 - 0.01 r, and q0's lowest positive 0.97: the ceilings are 0.9215, 0.8 and 0.77.
        ({"relative_margin": 0.05}, 9),
        ({"max_score": 0.8}, 21),
        ({"margin": 0.2, "relative_margin": 0.05, "max_score": 0.8}, 24),
    ],
)
def test_relative_margin_and_max_score_limit_the_scores_of_negatives(folder, flags, first):
    found = mine(folder, negatives=100, **flags)
    assert found["q0"] == RUN["q0"][first - 1 :]


def test_the_ceiling_falls_for_negative_scores_too():
    """Scores of BM25 are positive, those of inner products need not be."""
    assert MiningSettings(relative_margin=0.1).ceiling([-2.0, 3.0]) == pytest.approx(-2.2)
    assert MiningSettings(margin=0.5, relative_margin=0.5).ceiling([4.0]) == 2.0
    assert MiningSettings(max_score=0.3).ceiling([]) == 0.3 and MiningSettings().ceiling([]) == float("inf")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"first": 5, "last": 4}, "--first=5 must be at most --last=4"),
        ({"split": "trian"}, "did you mean 'train'"),
        ({"margin": 5}, "no query of split 'train' has a negative: 1 not in the run"),
        ({"run": "other.trec"}, "lacks 'other', which the run has found"),
    ],
)
def test_mining_refuses_bad_flags(folder, monkeypatch, capsys, flags, sentence):
    monkeypatch.chdir(folder)
    write_run(folder / "other.trec", {"q0": {"d0": 2, "other": 1}})
    assert run_mine(folder, **flags) == 1
    *notes, error = capsys.readouterr().err.splitlines()
    assert sentence in error and all("kept 1 record" in note for note in notes)
    assert not (folder / "out").exists()


def test_memory_does_not_grow_with_the_corpus(tmp_path, toy, folder):
    def peak(documents: int) -> int:
        filler = [{"_id": f"x{i}", "text": f"filler {i} " * 20} for i in range(documents)]
        corpus = [{"_id": i, "text": t} for i, t in DOCUMENTS.items()]
        toy.write_jsonl(folder / "corpus.jsonl", corpus + filler)
        write_ranked(folder, {q: [record["_id"] for record in filler[:100]] for q in ("q0", "q1")})
        tracemalloc.start()
        assert run_mine(folder, f"out{documents}") == 0
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(100)
    small, large = peak(500), peak(5_000)
    assert large < small + 200_000, "4,500 documents are 0.9 MB of text"
