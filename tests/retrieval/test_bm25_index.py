"""BM25 by bm25s: its scores, its words, its files, and its commands."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxir import cli, load_index
from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.bm25_index import build_bm25_index
from jaxir.retrieval.indexes.english_words import words_of
from jaxir.retrieval.ranking.runs import read_run
from jaxir.sidecar.lucene_settings import Bm25

DOCUMENTS = [
    {"_id": "cat", "title": "Cats", "text": "A cat drinks milk."},
    {"_id": "dog", "title": "Dogs", "text": "A dog eats."},
    {"_id": "title-only", "title": "Milk", "text": ""},
    {"_id": "stop", "text": "it is the"},
    {"_id": "empty", "title": "", "text": ""},
]


def write_corpus(path: Path, records=DOCUMENTS) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def command(name: str, *flags: str) -> int:
    return cli.main(f"jaxir.{name}:{name}", flags)


@pytest.fixture
def index(tmp_path) -> Path:
    build_bm25_index(write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index")
    return tmp_path / "index"


@pytest.mark.parametrize("bm25", [Bm25(), Bm25(k1=1.2, b=0.75), Bm25(k1=0.0, b=0.0)])
def test_scores_follow_lucenes_formula_with_exact_lengths(tmp_path, bm25):
    """The document of stop words counts neither among the documents nor in the mean length, as in Lucene."""
    rng = np.random.default_rng(0)
    vocabulary = [f"{a}{b}" for a in "bcdfg" for b in "kmnpr"]
    texts = {f"d{i:03}": list(rng.choice(vocabulary, rng.integers(1, 60))) for i in range(200)}
    records = [{"_id": i, "text": " ".join(words)} for i, words in texts.items()]
    corpus = write_corpus(tmp_path / "corpus.jsonl", [*records, {"_id": "stop", "text": "of the"}])
    found = build_bm25_index(corpus, tmp_path / "index", bm25=bm25)
    query = [vocabulary[0], vocabulary[7], vocabulary[7], "unknown"]
    mean = sum(map(len, texts.values())) / len(texts)
    expected: dict[str, float] = {}
    for word in query[:3]:
        frequency = sum(word in words for words in texts.values())
        idf = math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
        for i, words in texts.items():
            if count := words.count(word):
                norm = bm25.k1 * (1 - bm25.b + bm25.b * len(words) / mean)
                expected[i] = expected.get(i, 0.0) + idf * count / (count + norm)
    scores, ids = found.search([" ".join(query)], 500)
    assert set(ids[0]) == set(expected) and scores.shape == (1, 201)
    np.testing.assert_allclose(scores[0, : len(ids[0])], [expected[i] for i in ids[0]], rtol=1e-5)
    assert np.isneginf(scores[0, len(ids[0]) :]).all()
    few = found.search([" ".join(query)], 7)
    assert few[1][0] == ids[0][:7]


def test_equal_scores_are_in_descending_order_of_id(tmp_path):
    records = [{"_id": i, "text": "cats"} for i in ("b", "a", "é", "Z", "c")] + [{"_id": "x", "text": "dog"}]
    found = build_bm25_index(write_corpus(tmp_path / "corpus.jsonl", records), tmp_path / "index")
    assert found.search(["cat"], 6)[1] == [["é", "c", "b", "a", "Z"]]
    assert found.search(["cat"], 2)[1] == [["é", "c"]]


def test_words_are_those_of_lucenes_english_analyzer():
    """What Lucene finds was compared with these words in tests/sidecar/test_bm25_agreement.py."""
    text = (
        "The cats' running: John's U.S.A. foo_bar 3.14 a-b 漢字 カタカナ ひら 🎉👍🏽 ___ don't É ภาษาไทย us"
    )
    expected = "cat run john u.s.a foo_bar 3.14 b 漢 字 カタカナ ひ ら 🎉 👍🏽 don't é ภาษาไทย us"
    assert words_of(text) == expected.split()
    assert [len(word) for word in words_of("x" * 600)] == [255, 255, 90]
    stems = "relational conditional hopping falling filing happy sky possibly radiology adjustable controlled"
    expected = "relat condit hop fall file happi sky possibl radiolog adjust control"
    assert words_of(stems) == expected.split()


def test_a_saved_index_is_searched_and_describes_itself(index, tmp_path):
    load_index(index).save(tmp_path / "copy")
    loaded = load_index(tmp_path / "copy")
    assert loaded.query_kind == "texts" and sorted(loaded.ids) == ["cat", "dog", "stop", "title-only"]
    assert isinstance(loaded._words.scores["data"], np.memmap)
    described = json.loads((tmp_path / "copy" / "index.json").read_text())
    expected = {"engine": "bm25s", "similarity": "bm25", "count": 4, "settings": {"k1": 0.9, "b": 0.4}}
    assert described.items() >= expected.items()
    scores, ids = loaded.search(["milk", "dog cat", "zebra", "", "the"], 10)
    assert scores.dtype == np.float32 and scores.shape == (5, 4)
    assert ids[0] == ["title-only", "cat"] and sorted(ids[1]) == ["cat", "dog"] and ids[2:] == [[], [], []]
    assert load_index(index).documents["cat"].title == "Cats"
    with pytest.raises(UserError, match="k must be at least 1, not 0"):
        loaded.search(["milk"], 0)


def test_an_open_index_outlives_an_update_and_its_removal(index, tmp_path, capsys):
    opened = load_index(index)
    (tmp_path / "gone").write_text("dog\n")
    new = write_corpus(tmp_path / "new.jsonl", [{"_id": "wolf", "text": "A dog of the woods."}])
    assert command("index", f"--update={index}", f"--corpus={new}", f"--delete={tmp_path}/gone") == 0
    assert "bm25s index of 4 passages (1 added, 1 deleted)" in capsys.readouterr().out
    changed = load_index(index)
    both = [DOCUMENTS[0], *DOCUMENTS[2:], {"_id": "wolf", "text": "A dog of the woods."}]
    fresh = build_bm25_index(write_corpus(tmp_path / "both.jsonl", both), tmp_path / "fresh")
    for found, expected in zip(changed.search(["dog milk"], 5), fresh.search(["dog milk"], 5), strict=True):
        np.testing.assert_array_equal(found, expected, "the statistics of a fresh index")
    shutil.rmtree(index)
    assert opened.search(["dog"], 3)[1] == [["dog"]] and opened.documents["dog"].title == "Dogs"


def test_a_flipped_bit_is_reported(index):
    file = index / "bm25s" / "data.csc.index.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged: bm25s/data\.csc\.index\.npy has changed"):
        load_index(index)


def test_from_a_corpus_to_a_run_without_naming_the_engine(tmp_path, capsys):
    corpus, index, run = write_corpus(tmp_path / "corpus.jsonl"), tmp_path / "index", tmp_path / "run"
    assert command("index", f"--corpus={corpus}", f"--output={index}", "--k1=1.2", "--b=0.75") == 0
    assert "index: bm25s index of 4 passages" in capsys.readouterr().out
    assert load_index(index).info.settings == {"k1": 1.2, "b": 0.75}
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"_id": "q1", "text": "milk?"}\n{"_id": "q2", "text": "(zebra)"}\n')
    assert command("search", f"--index={index}", f"--queries={queries}", f"--output={run}") == 0
    assert "2 queries, 2 answers" in capsys.readouterr().out
    assert list(read_run(run)["q1"]) == ["title-only", "cat"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("search --query=milk --model=m", "is searched by bm25, without a model: leave out --model"),
        ("search --query=milk --feedback=rm3", "--feedback needs a lucene index: build one with jaxir.index"),
        ("search --query=milk --k1=2", "keeps the k1 (0.9) and b (0.4) that it was built with"),
        ("index --backend=bm25s --fields=flat", "--fields only applies to --backend=lucene, not to"),
        ("index --backend=bm25s --corpus=CORPUS --k1=-1", "--k1 must be a number of at least 0, not -1"),
        ("index --backend=bm25s", "--backend=bm25s needs --corpus"),
        ("index --corpus=STOP", "all texts are stop words or signs, so no word can be indexed"),
        ("index --corpus=EMPTY", "there are no documents to index: give a corpus with texts"),
    ],
)
def test_refusals(index, tmp_path, flags, message, capsys):
    write_corpus(tmp_path / "STOP", [{"_id": "a", "text": "it is"}])
    write_corpus(tmp_path / "EMPTY", [{"_id": "a", "text": " "}])
    name, *rest = flags.split()
    for word in ("CORPUS", "STOP", "EMPTY"):
        rest = [flag.replace(f"={word}", f"={tmp_path / word}") for flag in rest]
    place = f"--index={index}" if name == "search" else f"--output={tmp_path}/new"
    assert command(name, *rest, place) in (1, 2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_searching_words_does_not_start_jax(index):
    """bm25s by itself runs a JAX program on import, which takes an accelerator from other processes."""
    code = (
        "import sys\nfrom jaxir import load_index\n"
        f"print(load_index({str(index)!r}).search(['milk'], 1)[1])\n"
        "from jax._src import xla_bridge\nprint(xla_bridge.backends_are_initialized())\n"
        "import jax.lax\nprint(jax.lax.add)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["[['title-only']]", "False"]
