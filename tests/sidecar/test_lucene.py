"""Lucene's results through the sidecar; skipped without the sidecar's environment."""

import collections
import json
import math
import os
import random
import signal
import threading
import time

import pytest

from jaxir.core.errors import UserError
from jaxir.sidecar import environment
from jaxir.sidecar.client import Sidecar
from jaxir.sidecar.lucene_settings import Bm25, LuceneDocument, Rm3, Rocchio

# No stop words, and each is its own stem.
WORDS = ["cat", "dog", "bird", "fish", "horn", "milk", "corn", "salt", "sand", "wind", "rain", "snow"]
WORDS += ["gold", "iron", "wood", "clay"]


def corpus(count: int, seed: int = 0) -> dict[str, str]:
    rng = random.Random(seed)
    return {f"d{i:03}": " ".join(rng.choices(WORDS, k=rng.randint(3, 30))) for i in range(count)}


def build(sidecar: Sidecar, directory, texts: dict[str, str]):
    counted = []
    count = sidecar.index(
        directory, lambda: (LuceneDocument(i, t) for i, t in texts.items()), on_progress=counted.append
    )
    assert counted[-1] == count == len(texts)
    return directory


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return corpus(700)


@pytest.fixture(scope="module")
def index(sidecar, tmp_path_factory, texts):
    return build(sidecar, tmp_path_factory.mktemp("lucene") / "index", texts)


def bm25(texts: dict[str, str], query: str, k1: float, b: float) -> dict[str, float]:
    """Returns BM25 as Lucene defines it; lengths of up to 40 words are exact in its index."""
    bags = {i: t.split() for i, t in texts.items()}
    average = sum(map(len, bags.values())) / len(bags)
    scores: dict[str, float] = {}
    for word in query.split():
        frequency = sum(word in bag for bag in bags.values())
        idf = math.log(1 + (len(bags) - frequency + 0.5) / (frequency + 0.5))
        for i, bag in bags.items():
            if tf := bag.count(word):
                weight = tf / (tf + k1 * (1 - b + b * len(bag) / average))
                scores[i] = scores.get(i, 0) + idf * weight
    return scores


@pytest.mark.parametrize("parameters", [Bm25(), Bm25(k1=1.2, b=0.75)])
def test_bm25_scores_follow_the_definition(sidecar, index, texts, parameters):
    queries = ["cat", "cat dog dog milk", "zebra", "snow zebra"]
    found = sidecar.search(index, queries, 1000, bm25=parameters)
    assert found[2] == []
    for query, hits in zip(queries, found, strict=True):
        expected = bm25(texts, query, parameters.k1, parameters.b)
        assert {i for i, _ in hits} == set(expected)
        for i, score in hits:
            # Pyserini subtracts 1e-6 for each earlier document with an equal score.
            assert score == pytest.approx(expected[i], abs=1e-3)
        assert [s for _, s in hits] == sorted((s for _, s in hits), reverse=True)
    assert len(found[0]) > 100


def test_k_and_batches(sidecar, index, texts, monkeypatch):
    monkeypatch.setattr("jaxir.sidecar.client.BATCH_QUERIES", 3)
    counted = []
    together = sidecar.search(index, WORDS, 7, on_progress=counted.append)
    assert counted == [3, 6, 9, 12, 15, 16]
    assert all(len(hits) == 7 for hits in together)
    assert together[5] == sidecar.search(index, [WORDS[5]], 100)[0][:7]


def test_stemming_stop_words_and_emoji(sidecar, tmp_path):
    texts = {"a": "running dogs", "b": "the the the", "c": "he runs", "é😀": "party 🎉 café"}
    directory = build(sidecar, tmp_path / "index", texts)
    run, the, emoji = sidecar.search(directory, ["run DOG", "the", "🎉"], 10)
    assert [i for i, _ in run] == ["a", "c"]
    assert the == [] and [i for i, _ in emoji] == ["é😀"]


def test_ties_are_ordered_as_by_pyserini(sidecar, tmp_path):
    texts = dict.fromkeys(["b", "a", "c"], "cat dog") | {"x": "cat", "y": "bird bird"}
    directory = build(sidecar, tmp_path / "index", texts)
    hits = sidecar.search(directory, ["dog"], 10)[0]
    assert [i for i, _ in hits] == ["a", "b", "c"]
    first = hits[0][1]
    assert [first - s for _, s in hits] == pytest.approx([0, 1e-6, 2e-6], abs=2e-7)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "   ",
        '+cat -dog "milk" (corn OR [salt TO sand]) AND NOT /rain/ ~2 ^3 snow* gold? iron\\ : { } && ||',
        "🎉 naïve 漢字 cat",
        "cat\x00\n\t\r\u2028 dog",
        "\ud800 cat",
        "a" * 100_000,
        " ".join(f"q{i}" for i in range(10_000)) + " cat",
    ],
    ids=["empty", "blank", "reserved", "emoji", "control", "surrogate", "one long word", "many words"],
)
def test_the_sidecar_survives_odd_queries(sidecar, index, query):
    pid = sidecar.pid
    hits, plain = sidecar.search(index, [query, "cat"], 10)
    assert len(plain) == 10
    if "cat" in query:
        assert hits
    assert sidecar.pid == pid


def test_fields(sidecar, tmp_path):
    documents = [
        LuceneDocument("a", "cat", {"title": "dog"}),
        LuceneDocument("b", "dog", {"title": "cat"}),
        LuceneDocument("c", "bird", {"title": "bird"}),
    ]
    directory = tmp_path / "index"
    assert sidecar.index(directory, lambda: documents, fields=["title"]) == 3
    assert [i for i, _ in sidecar.search(directory, ["cat"], 5)[0]] == ["a"]
    title = sidecar.search(directory, ["cat"], 5, fields={"title": 2.0})[0]
    both = dict(sidecar.search(directory, ["cat"], 5, fields={"contents": 1.0, "title": 2.0})[0])
    assert [i for i, _ in title] == ["b"]
    assert both["b"] == pytest.approx(2 * both["a"], abs=2e-4)


def test_feedback_expands_queries(sidecar, tmp_path):
    # Documents with cats have milk too; one document has milk without a cat.
    texts = {f"c{i}": "cat milk" for i in range(5)} | {"m": "milk"}
    texts |= {f"z{i}": "bird fish horn" for i in range(100)}
    directory = build(sidecar, tmp_path / "index", texts)
    plain = sidecar.search(directory, ["cat"], 100)[0]
    assert "m" not in dict(plain)
    for feedback in (Rm3(), Rocchio()):
        assert "m" in dict(sidecar.search(directory, ["cat"], 100, feedback=feedback)[0])
    for nothing in (Rm3(original_weight=1.0), Rocchio(beta=0.0)):
        weights = sidecar.search(directory, ["cat"], 100, feedback=nothing)[0]
        assert [i for i, s in weights if s > 1e-3] == [i for i, _ in plain]
    assert sidecar.search(directory, ["zebra", ""], 5, feedback=Rm3()) == [[], []]
    assert sidecar.search(directory, ["zebra", ""], 5, feedback=Rocchio()) == [[], []]
    assert sidecar.search(directory, ["cat"], 100)[0] == plain


def test_impacts_are_inner_products(sidecar, tmp_path):
    rng = random.Random(1)
    vectors = {f"d{i}": {t: rng.randint(1, 200) for t in rng.sample(WORDS, 5)} for i in range(60)}
    vectors["Ωid"] = {"##ing": 3, "C++": 255}
    directory = tmp_path / "index"
    assert sidecar.index_impact(directory, lambda: vectors.items()) == 61
    queries = [{"cat": 3, "dog": 7}, {"C++": 2, "##ing": 5, "unknown": 9}, {}]
    found = sidecar.search_impact(directory, queries, 100)
    assert found[1] == [("Ωid", 2 * 255 + 5 * 3)]
    assert found[2] == []
    products = {
        i: sum(w * v.get(t, 0) for t, w in queries[0].items())
        for i, v in vectors.items()
        if v.keys() & queries[0]
    }
    assert len(products) > 10
    assert {i: round(s) for i, s in found[0]} == products


def test_impacts_equal_pyserinis(sidecar, tmp_path, anserini):
    """Compared with the Java programs behind `pyserini.index.lucene` and its searches."""
    rng = random.Random(2)
    vectors = {f"d{i}": {t: rng.randint(1, 255) for t in rng.sample(WORDS, 6)} for i in range(300)}
    queries = [{t: rng.randint(1, 90) for t in rng.sample(WORDS, 3)} for _ in range(20)]
    (tmp_path / "vectors").mkdir()
    lines = [json.dumps({"id": i, "contents": "", "vector": v}) for i, v in vectors.items()]
    (tmp_path / "vectors" / "0.jsonl").write_text("\n".join(lines) + "\n")
    theirs = tmp_path / "theirs"
    flags = [
        "-collection",
        "JsonVectorCollection",
        "-input",
        str(tmp_path / "vectors"),
        "-index",
        str(theirs),
    ]
    flags += ["-generator", "DefaultLuceneDocumentGenerator", "-threads", "1", "-impact", "-pretokenized"]
    anserini("io.anserini.index.IndexCollection", *flags)
    # A query text repeats each token weight times.
    texts = [" ".join(" ".join([t] * w) for t, w in query.items()) for query in queries]
    topics, run = tmp_path / "topics.tsv", tmp_path / "run.trec"
    topics.write_text("".join(f"{n}\t{text}\n" for n, text in enumerate(texts)))
    flags = ["-index", str(theirs), "-topics", str(topics), "-topicReader", "TsvInt", "-output", str(run)]
    anserini("io.anserini.search.SearchCollection", *flags, "-impact", "-pretokenized", "-hits", "50")

    expected = collections.defaultdict(list)
    for line in run.read_text().splitlines():
        number, _, doc_id, _, score, _ = line.split()
        expected[int(number)].append((doc_id, float(score)))
    assert all(len(expected[n]) > 10 for n in range(len(queries)))
    sidecar.index_impact(tmp_path / "ours", lambda: vectors.items())
    for directory in (tmp_path / "ours", theirs):
        for n, hits in enumerate(sidecar.search_impact(directory, queries, 50)):
            assert [s for _, s in hits] == pytest.approx([s for _, s in expected[n]], abs=1e-3)
            least = hits[-1][1]  # any document that ties for the last place may be found
            assert {i for i, s in hits if s > least} == {i for i, s in expected[n] if s > least + 0.5}


def test_missing_lucene_index_is_refused(sidecar, tmp_path):
    with pytest.raises(UserError, match="nowhere is not a Lucene index"):
        sidecar.search(tmp_path / "nowhere", ["cat"], 5)


def test_many_parameters_from_many_threads(sidecar, index, texts):
    settings = [Bm25(k1=0.1 * (1 + i)) for i in range(24)]
    alone = [sidecar.search(index, ["cat dog"], 20, bm25=s) for s in settings]
    found: dict[int, object] = {}

    def ask(i: int) -> None:
        found[i] = sidecar.search(index, ["cat dog"], 20, bm25=settings[i])

    threads = [threading.Thread(target=ask, args=[i]) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(24)] == alone
    assert len({json.dumps(a) for a in alone}) == 24


@pytest.mark.slow
def test_requests_are_repeated_once_after_a_crash(sidecar, index, texts, tmp_path, capfd, monkeypatch):
    """A sidecar dies during several requests, in one test because each start of Java takes seconds.

    Its environment variables name a Java that does not work, which must not be used.
    """
    expected = sidecar.search(index, ["cat dog"], 20)
    for name in ("JAVA_HOME", "JVM_PATH", "CLASSPATH", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    with Sidecar(environment.require) as mortal:
        assert mortal.versions()["java"].startswith("21.")
        assert mortal.versions()["anserini"] == "1.7.1"
        assert mortal.search(index, ["cat dog"], 20) == expected
        os.kill(mortal.pid, signal.SIGSEGV)  # like a crash of Java
        time.sleep(0.5)
        assert mortal.search(index, ["cat dog"], 20) == expected
        assert "starting it again" in capfd.readouterr().err

        deaths = []

        def documents(times: int):
            for n, (i, t) in enumerate(texts.items()):
                if n == 600 and len(deaths) < times:  # after the first batch
                    deaths.append(mortal.pid)
                    os.kill(mortal.pid, signal.SIGKILL)
                yield LuceneDocument(i, t)

        assert mortal.index(tmp_path / "once", lambda: documents(1)) == len(texts)
        assert len(deaths) == 1
        assert mortal.search(tmp_path / "once", ["cat dog"], 20) == expected
        deaths.clear()
        with pytest.raises(UserError, match=r"ended twice during a request \(status -9\).*JAVA_TOOL_OPTIONS"):
            mortal.index(tmp_path / "twice", lambda: documents(9))
        assert len(set(deaths)) == 2


def test_java_that_does_not_start_is_reported(sidecar, monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Xmx1k")
    with Sidecar(environment.require) as broken, pytest.raises(UserError) as error:
        broken.versions()
    assert "initialization of VM Too small maximum heap" in str(error.value)
    assert "(it is set to '-Xmx1k')" in str(error.value)
