"""Duplicate questions and titles: small folders in each published layout, by hand and by the command."""

import json
from pathlib import Path

import pytest

from jaxir.core.errors import UserError
from jaxir.evaluate import evaluate
from jaxir.evaluation.collection import evaluate_collection
from jaxir.evaluation.question_sets import FORUMS, read_cqadupstack, read_quora

MODEL = f"hf:{Path(__file__).parents[1] / 'golden' / 'bert'}"
IR = {
    "corpus.tsv": "qid\tquestion\n1\tHow do I boil an egg?\n2\tHow to boil eggs?\n3\tWhy is the sky blue?\n",
    "test-queries.tsv": "qid\tquestion\tduplicate_qids\n4\tBest way to boil an egg?\t1,2,5\n"
    "6\tsky, why blue\t3\n5\tegg boiling\t4\n",
    "dev-queries.tsv": "qid\tquestion\tduplicate_qids\n9\tblue sky why\t3\n",
}
RELEASE = (
    "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    '0\t1\t2\tHow do I boil an egg?\t"How to boil ""large""\neggs?"\t1\n'
    "1\t3\t4\tWhy is the sky blue?\tWhy is the sea blue?\t0\n"
    "2\t2\t5\tHow to boil eggs?\tegg boiling\t1\n"
    "3\t7\t8\tWhat?\t\t0\n"
)


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def beir(documents, queries, qrels, split="test"):
    """The files of a BEIR folder of {id: text} and [(query, document)]."""
    lines = {
        f"{name}.jsonl": "".join(json.dumps({"_id": i, "text": text}) + "\n" for i, text in texts.items())
        for name, texts in (("corpus", documents), ("queries", queries))
    }
    judged = "".join(f"{query}\t{document}\t1\n" for query, document in qrels)
    return lines | {f"qrels/{split}.tsv": "query-id\tcorpus-id\tscore\n" + judged}


@pytest.mark.parametrize("below", ["", "information-retrieval/"])
def test_the_questions_that_beirs_quora_is_made_of(tmp_path, below):
    write(tmp_path, {below + name: content for name, content in IR.items()})
    found = read_quora(tmp_path)
    assert dict(zip(found.document_ids, found.documents, strict=True))["2"] == "How to boil eggs?"
    assert found.qrels == {"4": {"1": 1, "2": 1}, "6": {"3": 1}}, "a query is no document"
    assert found.queries == ["Best way to boil an egg?", "sky, why blue"]
    assert read_quora(tmp_path, "dev").qrels == {"9": {"3": 1}}
    with pytest.raises(UserError, match=r"has no train-queries\.tsv: expected are a BEIR folder"):
        read_quora(tmp_path, "train")


def test_quoras_own_release(tmp_path):
    found = read_quora(write(tmp_path, {"quora_duplicate_questions.tsv": RELEASE}))
    assert found.document_ids == ["1", "2", "3", "4", "5"] and found.documents[1] == "How to boil eggs?"
    assert found.qrels == {"1": {"2": 1}, "2": {"1": 1, "5": 1}, "5": {"2": 1}}
    assert found.queries == ["How do I boil an egg?", "How to boil eggs?", "egg boiling"]
    with pytest.raises(UserError, match="no split 'dev': Quora's own release has none"):
        read_quora(tmp_path, "dev")


def test_beirs_quora_by_the_command(tmp_path, capsys):
    files = beir(
        {"a": "da de di", "b": "ma me mi"}, {"q": "da de di", "r": "ma me mi"}, [("q", "a"), ("r", "b")]
    )
    values = evaluate(model=MODEL, dataset=f"quora:{write(tmp_path, files)}")
    assert values["dataset"] == f"quora:{tmp_path}"
    assert values["metrics"] == {"nDCG@10": 1.0, "R@10": 1.0, "P@10": 0.1, "R@100": 1.0}
    assert "2 judged queries" in capsys.readouterr().out


def test_titles_go_by_capped_recall(tmp_path):
    """Twelve matches, of which ten answers find what there is room for: capped recall is not recall."""
    documents = {f"d{i}": f"da de {'di ' * i}" for i in range(12)}
    files = beir(documents, {"q": "da de"}, [("q", document) for document in documents], split="dev")
    values = evaluate(model=MODEL, dataset=f"eproduct:{write(tmp_path, files)}", split="dev")
    assert values["metrics"] == {"CappedR@10": 1.0, "P@10": 1.0}
    with pytest.raises(
        UserError, match=r"absent has no eProduct: expected is a BEIR folder, corpus\.jsonl with the"
    ):
        evaluate(model=MODEL, dataset=f"eproduct:{tmp_path / 'absent'}")


def posts(duplicates, count):
    """Posts 1 to `count`, a day each, of which some are duplicates of older ones."""
    return {
        str(i): {
            "title": f"title {i}",
            "body": f"<p>body &amp; <b>soul</b>\n{i}</p>",
            "creationdate": f"2014-05-{i:02}T10:00:00.000",
            "dups": duplicates.get(i, []),
        }
        for i in range(1, count + 1)
    }


def test_a_forum_of_the_authors_is_split_as_they_do(tmp_path):
    """Of 13 posts with duplicates 15 % are 2: the newest are held out until the test set has as many."""
    duplicates = {i: [str(i - 5)] for i in range(8, 21) if i != 19}
    duplicates |= {20: ["17", "3"], 6: {"1": {"votedates": []}}}
    write(tmp_path, {"tex/tex_questions.json": json.dumps(posts(duplicates, 20))})
    # 20 test (judged), 19 dev, 18 dev (judged), 17 test (judged) but searched, for 20 duplicates it.
    found = read_cqadupstack(tmp_path)["tex"]
    assert found.qrels == {"20": {"17": 1, "3": 1}} and found.queries == ["title 20"]
    assert found.document_ids == [str(i) for i in range(1, 18)]
    assert found.documents[0] == "title 1 body & soul 1"
    assert read_cqadupstack(tmp_path, "dev")["tex"].qrels == {"18": {"13": 1}}
    with pytest.raises(UserError, match=r"no split 'train' \(has: test, dev\)"):
        read_cqadupstack(tmp_path, "train")
    # 20 test (judged), 19 dev (judged), 18 test without duplicates, so 17 too, which is judged.
    duplicates = {i: [str(i - 5)] for i in range(7, 21) if i != 18}
    write(tmp_path, {"tex/tex_questions.json": json.dumps(posts(duplicates, 20))})
    found = read_cqadupstack(tmp_path)["tex"]
    assert found.qrels == {"20": {"15": 1}, "17": {"12": 1}}
    assert found.document_ids == [str(i) for i in range(1, 17)]


def test_twelve_forums_are_averaged(tmp_path, capsys):
    """Half of the forums answer a query wrongly; one has more queries, but counts as much."""
    texts = {"a": "da de di", "b": "ma me mi"}
    for number, forum in enumerate(FORUMS):
        queries = {"q": "da de di", "r": "ma me mi"} if number == 0 else {"q": "da de di"}
        judged = [(query, "a" if query == "q" else "b") for query in queries]
        if number % 2:
            judged = [("q", "b")]
        write(tmp_path / forum, beir(texts, queries, judged))
    values = evaluate(model=MODEL, dataset=f"cqadupstack:{tmp_path}", metrics="P@1 R@100")
    assert values["metrics"] == {"P@1": 0.5, "R@100": 1.0} and values["missing"] == []
    assert [found["metrics"]["P@1"] for found in values["forums"].values()] == [1.0, 0.0] * 6
    assert values["forums"]["android"]["queries"] == 2
    assert "| mean of 12  |           |         | 0.5000 | 1.0000 |" in capsys.readouterr().out
    (tmp_path / "wordpress" / "corpus.jsonl").unlink()
    values = evaluate(model=MODEL, dataset=f"cqadupstack:{tmp_path}", metrics="P@1")
    printed = capsys.readouterr().out
    assert values["missing"] == ["wordpress"] and values["metrics"]["P@1"] == pytest.approx(6 / 11)
    assert "mean of 11" in printed and "not there: wordpress (expected is a folder for each forum" in printed
    with pytest.raises(
        UserError, match="--baseline compares runs over one collection; cqadupstack: has none"
    ):
        evaluate(model=MODEL, dataset=f"cqadupstack:{tmp_path}", baseline="bm25.trec")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "corpus.tsv",
            "qid\tquestion\n1\ta\tb\n",
            "corpus.tsv:2: expected 2 columns separated by tabs, found 3",
        ),
        ("corpus.tsv", "qid\tquestion\n1\ta\n1\tb\n", "corpus.tsv:3: duplicate id '1'"),
        (
            "test-queries.tsv",
            "qid\tquestion\tduplicate_qids\n4\ta\t1,99\n",
            "queries.tsv:2: '99' is neither in corpus",
        ),
        ("test-queries.tsv", "4\tx\t1\n6\ty\t2\n", "queries.tsv:1: the first line is a question, '4': a h"),
        (
            "corpus.tsv",
            "1\ta\n2\tb\n",
            "corpus.tsv:1: the first line is a question, '1': a header is missing",
        ),
        (
            "test-queries.tsv",
            "qid\tquestion\tduplicate_qids\n4\ta\t\n",
            "queries.tsv: no question in it has a duplicate to be found",
        ),
        (
            "quora_duplicate_questions.tsv",
            RELEASE.replace("\t1\n", "\t0\n"),
            "questions.tsv: no question in it has a duplicate to be found",
        ),
        (
            "quora_duplicate_questions.tsv",
            RELEASE + "4\t1\t2\ta\tb\tyes\n",
            "questions.tsv:7: expected id, qid1",
        ),
        ("quora_duplicate_questions.tsv", RELEASE.partition("\n")[2], "questions.tsv:1: expected id, qid1"),
        (
            "quora_duplicate_questions.tsv",
            RELEASE + '4\t1\t2\ta\t"b\n',
            "questions.tsv:7: unexpected end of data",
        ),
    ],
)
def test_damaged_questions_say_where_and_why(tmp_path, name, content, sentence):
    write(tmp_path, ({} if name.startswith("quora") else IR) | {name: content})
    with pytest.raises(UserError, match=sentence):
        read_quora(tmp_path, strict=True)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "gis_questions.json: not valid JSON"),
        ('{"1": {"title": "a"}}', "post '1' needs the texts title, body and creationdate"),
        (json.dumps(posts({3: ["99"]}, 3)), "post '3' duplicates '99', which is not there"),
        (json.dumps(posts({}, 3)), "gis_questions.json: no question in it has a duplicate to be found"),
    ],
)
def test_damaged_forums_say_where_and_why(tmp_path, content, sentence):
    write(tmp_path, {"gis/gis_questions.json": content})
    with pytest.raises(UserError, match=sentence):
        read_cqadupstack(tmp_path, strict=True)


def test_missing_question_sets_say_where_to_get_them(tmp_path):
    with pytest.raises(
        UserError, match=r"no questions of Quora: .*quora_duplicate_questions\.tsv \(Quora's own"
    ):
        read_quora(tmp_path, strict=True)
    with pytest.raises(UserError, match=r"none of the forums android, .*: .*nlp\.cis\.unimelb\.edu\.au"):
        read_cqadupstack(tmp_path, strict=True)


def test_the_readers_feed_the_metrics(tmp_path):
    """Search among Quora's own release finds a question itself first, which identical_ids drops."""

    class SameWords:
        similarity = "dot"

        def encode_passages(self, texts):
            import numpy as np

            return np.array([["egg" in text, "boil" in text, "sky" in text] for text in texts], np.float32)

        encode_queries = encode_passages

    collection = read_quora(write(tmp_path, {"quora_duplicate_questions.tsv": RELEASE}))
    scores = evaluate_collection(SameWords(), collection, "R@2", identical_ids="drop")
    assert scores.identical == 3 and scores.values["R@2"] == 1.0
