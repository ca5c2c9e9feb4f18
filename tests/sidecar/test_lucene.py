"""Lucene's results through the sidecar; skipped without the sidecar's environment."""

import collections
import json
import math
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxir.core.errors import UserError
from jaxir.sidecar import environment
from jaxir.sidecar.client import Sidecar
from jaxir.sidecar.lucene_settings import Bm25, LuceneDocument, Rm3, Rocchio

# None of these is a stop word, and each is its own stem.
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


def test_the_sidecar_survives_odd_queries(sidecar, index):
    pid = sidecar.pid
    odd = ["", "   ", "🎉 naïve 漢字 cat", "cat\x00\n\t\r\u2028 dog", "\ud800 cat", "a" * 100_000]
    odd += ['+cat -dog "milk" (corn OR [salt TO sand]) AND NOT /rain/ ~2 ^3 snow* gold? iron\\ : { } && ||']
    odd += [" ".join(f"q{i}" for i in range(10_000)) + " cat"]
    *found, plain = sidecar.search(index, [*odd, "cat"], 10)
    assert len(plain) == 10 and sidecar.pid == pid
    assert [bool(hits) for hits in found] == ["cat" in query for query in odd]


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
        assert sidecar.search(directory, ["zebra", ""], 5, feedback=nothing) == [[], []]
    assert sidecar.search(directory, ["cat"], 100)[0] == plain


@pytest.mark.slow
def test_impacts_equal_pyserinis(sidecar, tmp_path, anserini, anserini_index):
    """The reference is the Java programs that `pyserini.index.lucene` and Pyserini's searches run."""
    rng = random.Random(2)
    vectors = {f"d{i}": {t: rng.randint(1, 255) for t in rng.sample(WORDS, 6)} for i in range(300)}
    queries = [{t: rng.randint(1, 90) for t in rng.sample(WORDS, 3)} for _ in range(20)]
    records = [{"id": i, "contents": "", "vector": v} for i, v in vectors.items()]
    theirs = anserini_index("JsonVectorCollection", records, "-impact", "-pretokenized")
    # A query's text repeats each token as often as its weight says.
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


def test_many_parameters_from_many_threads(sidecar, index):
    def hits(settings: Bm25) -> list:
        return sidecar.search(index, ["cat dog"], 20, bm25=settings)

    settings = [Bm25(k1=0.1 * (1 + i)) for i in range(24)]
    alone = [hits(some) for some in settings]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(hits, settings)) == alone
    assert len({json.dumps(a) for a in alone}) == 24


@pytest.mark.slow
def test_requests_are_repeated_once_after_a_crash(sidecar, index, texts, tmp_path, capfd, monkeypatch):
    """Environment variables name a broken Java, which the sidecar must not use."""
    expected = sidecar.search(index, ["cat dog"], 20)
    for name in ("JAVA_HOME", "JVM_PATH", "CLASSPATH", "PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    with Sidecar(environment.require) as mortal:
        assert mortal.versions()["java"].startswith("21.")
        assert mortal.versions()["anserini"] == "1.7.1"
        assert mortal.search(index, ["cat dog"], 20) == expected
        os.kill(mortal.pid, signal.SIGSEGV)  # imitates a crash of Java
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
