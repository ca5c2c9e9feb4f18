import json
from pathlib import Path

import pytest

from jaxir import DualEncoder
from jaxir.core.errors import UserError
from jaxir.evaluate import evaluate
from jaxir.evaluation.question_sets import FORUMS, read_cqadupstack, read_quora
from tests.evaluation.published_files import IR, RELEASE, posts, write

MODEL = f"hf:{Path(__file__).parents[1] / 'golden' / 'bert'}"


# Keys that `evaluate --output` writes for CQADupStack (without the model's settings) and for one forum.
REPORT = {"model", "fingerprint", "dataset", "split", "missing", "depth", "metrics", "forums"}
FORUM = {"documents", "queries", "identical_ids", "identical_ids_found", "metrics", "per_query"}


def beir(documents, queries, qrels, split="test"):
    """Returns the files of a BEIR folder, made of {id: text} and [(query, document)]."""
    lines = {
        f"{name}.jsonl": "".join(json.dumps({"_id": i, "text": text}) + "\n" for i, text in texts.items())
        for name, texts in (("corpus", documents), ("queries", queries))
    }
    judged = "".join(f"{query}\t{document}\t1\n" for query, document in qrels)
    return lines | {f"qrels/{split}.tsv": "query-id\tcorpus-id\tscore\n" + judged}


@pytest.mark.parametrize("below", ["", "information-retrieval/"])
def test_the_source_of_beirs_quora(tmp_path, below):
    write(tmp_path, {below + name: content for name, content in IR.items()})
    found = read_quora(tmp_path)
    assert dict(zip(found.document_ids, found.documents, strict=True))["2"] == "How to boil eggs?"
    assert found.qrels == {"4": {"1": 1, "2": 1}, "6": {"3": 1}}, "a query is no document"
    assert found.queries == ["Best way to boil an egg?", "sky, why blue"]
    assert read_quora(tmp_path, "dev").qrels == {"9": {"3": 1}}
    with pytest.raises(UserError, match=r"has no train-queries\.tsv: expected a BEIR folder"):
        read_quora(tmp_path, "train")


def test_quoras_own_release(tmp_path):
    found = read_quora(write(tmp_path, {"quora_duplicate_questions.tsv": RELEASE}))
    assert found.document_ids == ["1", "2", "3", "4", "5"] and found.documents[1] == "How to boil eggs?"
    assert found.qrels == {"1": {"2": 1}, "2": {"1": 1, "5": 1}, "5": {"2": 1}}
    assert found.queries == ["How do I boil an egg?", "How to boil eggs?", "egg boiling"]
    with pytest.raises(UserError, match="no split 'dev': Quora's own release has no splits"):
        read_quora(tmp_path, "dev")


def test_beirs_quora_by_the_command(tmp_path, capsys):
    texts = ("da de di", "ma me mi")
    files = beir({"a": texts[0], "b": texts[1]}, {"q": texts[0], "r": texts[1]}, [("q", "a"), ("r", "b")])
    values = evaluate(model=MODEL, dataset=f"quora:{write(tmp_path, files)}")
    assert values["dataset"] == f"quora:{tmp_path}"
    assert values["metrics"] == {"nDCG@10": 1.0, "R@10": 1.0, "P@10": 0.1, "R@100": 1.0}
    assert "2 judged queries" in capsys.readouterr().out


def test_titles_are_scored_by_capped_recall(tmp_path):
    """Ten answers find at most ten of twelve matches, so capped recall differs from recall."""
    documents = {f"d{i}": f"da de {'di ' * i}" for i in range(12)}
    files = beir(documents, {"q": "da de"}, [("q", document) for document in documents], split="dev")
    values = evaluate(model=MODEL, dataset=f"eproduct:{write(tmp_path, files)}", split="dev")
    assert values["metrics"] == {"CappedR@10": 1.0, "P@10": 1.0}


def test_the_authors_forums_are_split_as_by_the_authors(tmp_path):
    """The test set gets 15 % of the 13 posts with duplicates, 2: the newest posts, until it has 2 of them."""
    duplicates = {i: [str(i - 5)] for i in range(8, 21) if i != 19}
    duplicates |= {20: ["17", "3"], 6: {"1": {"votedates": []}}}
    write(tmp_path, {"tex/tex_questions.json": json.dumps(posts(duplicates, 20))})
    # From the newest post: 20 is in test (judged), 19 and 18 are in dev (18 judged). 17 would be in test
    # (judged), but stays in the corpus, because 20 duplicates it.
    found = read_cqadupstack(tmp_path)["tex"]
    assert found.qrels == {"20": {"17": 1, "3": 1}} and found.queries == ["title 20"]
    assert found.document_ids == [str(i) for i in range(1, 18)]
    assert found.documents[0] == "title 1 body & soul 1"
    assert read_cqadupstack(tmp_path, "dev")["tex"].qrels == {"18": {"13": 1}}
    with pytest.raises(UserError, match=r"no split 'train' \(has: test, dev\)"):
        read_cqadupstack(tmp_path, "train")
    # From the newest post: 20 is in test (judged), 19 in dev (judged), 18 in test without duplicates. So 17
    # is in test, too; it is judged.
    duplicates = {i: [str(i - 5)] for i in range(7, 21) if i != 18}
    write(tmp_path, {"tex/tex_questions.json": json.dumps(posts(duplicates, 20))})
    found = read_cqadupstack(tmp_path)["tex"]
    assert found.qrels == {"20": {"15": 1}, "17": {"12": 1}}
    assert found.document_ids == [str(i) for i in range(1, 17)]


def test_twelve_forums_are_averaged(tmp_path, capsys):
    """Half of the forums have a wrong first answer; one has more queries but the same weight."""
    texts = {"a": "da de di", "b": "ma me mi"}
    for number, forum in enumerate(FORUMS):
        queries = {"q": "da de di", "r": "ma me mi"} if number == 0 else {"q": "da de di"}
        judged = [(query, "a" if query == "q" else "b") for query in queries]
        if number % 2:
            judged = [("q", "b")]
        write(tmp_path / forum, beir(texts, queries, judged))
    file = tmp_path / "report.json"
    how = {"dataset": f"cqadupstack:{tmp_path}", "metrics": "P@1 R@100"}
    values = evaluate(model=MODEL, output=str(file), **how)
    assert json.loads(file.read_text()) == values
    assert values.keys() - DualEncoder.load(MODEL).settings.describe().keys() == REPORT
    assert all(found.keys() == FORUM for found in values["forums"].values())
    assert values["forums"].keys() == set(FORUMS)
    assert values["forums"]["android"]["per_query"] == {
        "P@1": {"q": 1.0, "r": 1.0},
        "R@100": {"q": 1.0, "r": 1.0},
    }
    assert values["metrics"] == {"P@1": 0.5, "R@100": 1.0} and values["missing"] == []
    assert [found["metrics"]["P@1"] for found in values["forums"].values()] == [1.0, 0.0] * 6
    assert values["forums"]["android"]["queries"] == 2
    assert "| mean of 12  |           |         | 0.5000 | 1.0000 |" in capsys.readouterr().out
    (tmp_path / "wordpress" / "corpus.jsonl").unlink()
    values = evaluate(model=MODEL, dataset=f"cqadupstack:{tmp_path}", metrics="P@1")
    printed = capsys.readouterr().out
    assert values["missing"] == ["wordpress"] and values["metrics"]["P@1"] == pytest.approx(6 / 11)
    assert "mean of 11" in printed and "missing: wordpress (expected a folder for each forum" in printed
