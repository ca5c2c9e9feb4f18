"""The Lucene engines behind the index interface, and their commands."""

import collections
import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxir import cli, load_index
from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.evaluation.retrieval_metrics import evaluate_run
from jaxir.retrieval.indexes.lucene_index import build_impact_index, build_lucene_index
from jaxir.retrieval.ranking.runs import read_run
from jaxir.retrieval.searcher import Searcher
from jaxir.sidecar import environment
from jaxir.sidecar.client import Sidecar
from jaxir.sidecar.lucene_settings import Bm25, Rm3

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "beir"
DOCUMENTS = [
    ("cat", "Cats", "A cat drinks milk."),
    ("dog", "Dogs", "A dog eats."),
    ("title-only", "Milk", ""),
    ("empty", "", ""),
    ("blank", " ", "\n\x01"),
]
# nDCG@10, AP, P@1, RR@10 and R@100 of Pyserini 1.6.0, from the README of the data.
REFERENCE = {
    ("cacm", "test"): [0.4754, 0.3270, 0.5385, 0.6900, 0.6424],
    ("med", "test"): [0.6651, 0.5118, 0.8333, 0.8872, 0.7729],
    ("debpkgs", "test"): [0.6904, 0.6592, 0.5705, 0.6546, 0.8980],
    ("debpkgs", "dev"): [0.7156, 0.6778, 0.5810, 0.6742, 0.9170],
}


def command(name: str, *flags: str) -> int:
    return cli.main(f"jaxir.{name}:{name}", flags)


@pytest.fixture
def index(sidecar, tmp_path, write_corpus) -> str:
    build_lucene_index(write_corpus(*DOCUMENTS), tmp_path / "index")
    return str(tmp_path / "index")


def test_a_corpus_may_be_a_text_on_each_line(sidecar, tmp_path):
    (tmp_path / "lines.txt").write_text("cats drink milk\n\ndogs bark\n")
    build_lucene_index(tmp_path / "lines.txt", tmp_path / "index")
    index = load_index(tmp_path / "index")
    assert index.search(["a dog", "milk"], 2)[1] == [["3"], ["1"]]
    assert index.documents["3"].text == "dogs bark"


def test_a_saved_copy_of_an_index_describes_itself(index):
    load_index(index).save(Path(index).with_name("copy"))
    loaded = load_index(Path(index).with_name("copy"))
    assert loaded.query_kind == "texts"
    assert loaded.ids == ["cat", "dog", "title-only"]
    described = json.loads(Path(index).with_name("copy").joinpath("index.json").read_text())
    expected = {"engine": "lucene", "similarity": "bm25", "count": 3, "settings": {"fields": "flat"}}
    assert described.items() >= (expected | {"model": None}).items()
    assert loaded.search(["dog"], 1)[1] == [["dog"]]
    assert load_index(index).documents["cat"].title == "Cats"


def test_lucene_index_is_searched_by_texts(index):
    scores, ids = load_index(index).search(["milk", "dog cat", "zebra", ""], 10)
    assert scores.dtype == np.float32 and scores.shape == (4, 3)
    assert ids[0] == ["title-only", "cat"] and sorted(ids[1]) == ["cat", "dog"] and ids[2:] == [[], []]
    assert np.isneginf(scores).tolist() == [[False, False, True]] * 2 + [[True] * 3] * 2
    with pytest.raises(UserError, match="k must be at least 1, not 0"):
        load_index(index).search(["milk"], 0)


def test_two_fields(sidecar, tmp_path, write_corpus):
    built = build_lucene_index(write_corpus(*DOCUMENTS), tmp_path / "index", fields="multifield")
    assert built.ids == ["cat", "dog", "title-only"]
    _, ids = load_index(tmp_path / "index").search(["milk", "cat"], 3)
    assert sorted(ids[0]) == ["cat", "title-only"]
    assert ids[1] == ["cat"]
    with pytest.raises(UserError, match="feedback needs a flat index"):
        built.ranked_by(feedback=Rm3())


def test_a_flipped_bit_is_reported(index):
    assert load_index(index).search(["dog"], 1)[1] == [["dog"]]
    load_index(index)  # the checksums still match: a search does not change the files
    file = max((Path(index) / "lucene").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"is damaged: lucene/{file.name} has changed since it was written"):
        load_index(index)


def test_open_lucene_index_outlives_updates_and_removal(index, tmp_path, write_corpus):
    """An open index keeps its own documents, and never shows those of the index that replaced it."""
    opened = load_index(index)
    before = opened.search(["dog"], 3)[1]
    (tmp_path / "gone").write_text("dog\n")
    corpus = write_corpus(("wolf", "", "A dog of the woods."))
    assert command("index", f"--update={index}", f"--corpus={corpus}", f"--delete={tmp_path}/gone") == 0
    for _ in range(2):
        assert opened.search(["dog"], 3)[1] == before == [["dog"]]
        assert opened.documents["dog"].title == "Dogs"
        with pytest.raises(UserError, match="lucene was replaced while it was in use; open it again"):
            opened.ranked_by(Bm25(k1=2.0)).search(["dog"], 3)  # the index was not opened with this k1 before
        if Path(index).exists():
            assert load_index(index).search(["dog"], 3)[1] == [["wolf"]]
            shutil.rmtree(index)


def test_missing_lucene_files_are_reported(index):
    (Path(index) / "SHA256SUMS").unlink()  # indexes of earlier versions have no checksums
    for file in (Path(index) / "lucene").glob("segments_*"):
        file.unlink()
    with pytest.raises(UserError, match="is damaged: it has no Lucene files"):
        load_index(index)


def test_bad_input_leaves_nothing(sidecar, tmp_path, write_corpus, capsys):
    corpus = write_corpus(("a", "", "cat"), ("b", "", "dog"))
    with Path(corpus).open("a") as file:
        file.write('{"_id": "c"}\n')
    flags = ["--backend=lucene", f"--corpus={corpus}", f"--output={tmp_path}/index"]
    assert command("index", *flags) == 1
    error = capsys.readouterr().err
    assert f"{corpus}:3: " in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]
    assert command("index", *flags, "--on_bad_input=skip") == 0
    assert load_index(tmp_path / "index").ids == ["a", "b"]
    with pytest.raises(UserError, match="there are no documents to index"):
        build_lucene_index(write_corpus(("a", "", "")), tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_bad_input_leaves_nothing_if_java_starts_late(sidecar, tmp_path, write_corpus):
    """The documents end with an error while the sidecar is still starting Java."""
    good, bad = write_corpus(("a", "", "cat")), tmp_path / "bad.jsonl"
    bad.write_text("nonsense\n")
    with Sidecar(environment.require) as late:
        with pytest.raises(UserError, match="not valid JSON"):
            build_lucene_index(bad, tmp_path / "index", sidecar=late)
        build_lucene_index(good, tmp_path / "other", sidecar=late)  # after the first request has ended
        assert {p.name for p in tmp_path.iterdir()} == {"corpus.jsonl", "bad.jsonl", "other"}


def test_impacts(sidecar, tmp_path):
    vectors = {"a": {"cat": 3}, "b": {"cat": 1, "dog": 4}, "nothing": {}, "Ωid": {"##ing": 3, "C++": 255}}
    build_impact_index(vectors, tmp_path / "index")
    loaded = load_index(tmp_path / "index")
    assert (loaded.query_kind, loaded.ids) == ("weights", ["a", "b", "Ωid"])
    scores, ids = loaded.search([{"cat": 2, "dog": 1}, {"C++": 2, "##ing": 5, "unknown": 9}], 5)
    assert ids == [["a", "b"], ["Ωid"]]
    np.testing.assert_allclose([scores[0, :2], scores[1, :2]], [[6, 6], [525, -np.inf]], atol=1e-5)
    with pytest.raises(UserError, match="token weights of a learned sparse model, not texts"):
        Searcher.open(tmp_path / "index")
    scores, ids = loaded.search([{"cat": 0}, {}, {"dog": 1}], 1)  # weights of 0 are dropped
    assert ids == [[], [], ["b"]] and scores[:2].tolist() == [[-np.inf]] * 2
    for wrong in ({"cat": -1}, {"cat": 1.5}, {"cat": 10**9}, {"a cat": 1}, {"": 1}):
        with pytest.raises(UserError, match="query 0: "):
            loaded.search([wrong], 5)
        with pytest.raises(UserError, match="document 'x': "):
            build_impact_index({"x": wrong}, tmp_path / "wrong")


# In the format of Anserini's JsonVectorCollection and Pyserini's quantised encoders.
IMPACTS = (
    '{"id": "cat", "contents": "A cat", "vector": {"cat": 210, "milk": 35, "##s": 0}}\n'
    '{"id": 7, "vector": {"dog": 120.0, "cat": 40}}\n{"id": "void", "vector": {}}\n'
)


def test_from_learned_sparse_vectors_to_a_run_by_commands(sidecar, tmp_path, write_corpus, capsys):
    vectors, index, run = tmp_path / "vectors.jsonl.gz", tmp_path / "index", tmp_path / "run"
    vectors.write_bytes(gzip.compress(IMPACTS.encode()))
    corpus = write_corpus(("cat", "Cats", "A cat drinks milk."), ("7", "Dogs", "A dog eats."), ("x", "", "x"))
    flags = ["--backend=lucene_impact", f"--vectors={vectors}", f"--output={index}", f"--corpus={corpus}"]
    assert command("index", *flags) == 0
    assert "lucene_impact index of 2 passages" in capsys.readouterr().out
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"qid": 1, "vector": {"cat": 2, "dog": 1}}\n{"_id": "q2", "weights": {"zebra": 3}}\n')
    assert command("search", f"--index={index}", f"--queries={queries}", f"--output={run}") == 0
    assert "2 queries, 2 answers" in capsys.readouterr().out
    assert read_run(run) == {"1": {"cat": 420.0, "7": 200.0}}
    assert command("search", f"--index={index}", '--query={"milk": 2}') == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert shown == [["1", "70.0000", "Cats", "[cat]"], ["A", "cat", "drinks", "milk."]]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ('search --query={"milk":1} --model=m', "token weights: leave out --model"),
        ("search --query=milk", 'queries of token weights, written as {"token": 12, ...}: not valid JSON'),
        ('search --query={"milk":0.3}', "a weight is not a whole number above 0"),
        ("search --queries=DIR/texts.jsonl --output=DIR/run", "texts.jsonl:1: no field 'vector' of {token:"),
        ("search --queries=DIR/twice.jsonl --output=DIR/run", "twice.jsonl:2: duplicate id 'a'"),
        ("serve", "needs queries with the token weights of a learned sparse model, not texts"),
        ("index --update=DIR/index --delete=DIR/ids", "lucene_impact cannot be changed in place"),
        ("index --output=DIR/o --backend=lucene_impact", "--backend=lucene_impact needs --vectors"),
        ("index --output=DIR/o --vectors=DIR/texts.jsonl", "only applies to --backend=lucene_impact and"),
        (
            "index --output=DIR/o --backend=lucene_impact --vectors=DIR/floats.jsonl",
            "floats.jsonl:1: a weight is not a whole number above 0 (SPLADE's are",
        ),
    ],
)
def test_impact_index_refuses_unsuitable_vectors_queries_and_flags(sidecar, impact, asked, message, capsys):
    before = sorted(path.name for path in impact.iterdir())
    name, *flags = asked.replace("DIR", str(impact)).split()
    assert command(name, *flags, *([] if name == "index" else [f"--index={impact}/index"])) == 1
    error = capsys.readouterr().err.removeprefix(f"loading {impact}/index\n")
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert sorted(path.name for path in impact.iterdir()) == before


@pytest.fixture(scope="module")
def impact(sidecar, tmp_path_factory):
    folder = tmp_path_factory.mktemp("impact")
    for name, content in {
        "texts.jsonl": '{"_id": "q1", "text": "milk"}\n',
        "floats.jsonl": '{"id": "d1", "vector": {"milk": 1.53}}\n',
        "twice.jsonl": "".join(f'{{"id": "a", "vector": {{"x": {n}}}}}\n' for n in (1, 2)),
        "ids": "a\n",
    }.items():
        (folder / name).write_text(content)
    build_impact_index({"a": {"milk": 3}}, folder / "index")
    return folder


def test_from_a_corpus_to_a_run_by_commands(sidecar, tmp_path, write_corpus, capsys):
    corpus = Path(write_corpus(*DOCUMENTS))
    zipped = tmp_path / "corpus.jsonl.gz"
    zipped.write_bytes(gzip.compress(corpus.read_bytes()))
    index, run = tmp_path / "index", tmp_path / "run"
    assert command("index", "--backend=lucene", f"--corpus={zipped}", f"--output={index}") == 0
    assert "lucene index of 3 passages" in capsys.readouterr().out
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"_id": "q1", "text": "milk?"}\n{"_id": "q2", "text": "(zebra)"}\n')
    asked = [f"--index={index}", f"--queries={queries}", f"--output={run}", "--k=1000"]
    assert command("search", *asked) == 0
    assert "2 queries, 2 answers" in capsys.readouterr().out
    plain = read_run(run)
    assert list(plain["q1"]) == ["title-only", "cat"]
    assert command("search", *asked, "--k1=2", "--b=1", "--feedback=rm3") == 0
    assert read_run(run)["q1"] != plain["q1"]
    assert command("search", *asked, "--model=m") == 1
    assert "is searched by bm25, without a model: leave out --model" in capsys.readouterr().err
    # Interactive questions, in a process that starts and ends its own sidecar.
    done = subprocess.run(
        [sys.executable, "-m", "jaxir.search", f"--index={index}"],
        input="milk\nzebra\n", capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "Milk  [title-only]" in done.stdout and "nothing found" in done.stdout


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        pytest.param("cacm", ["test"], marks=pytest.mark.slow),
        ("med", ["test"]),
        pytest.param("debpkgs", ["test", "dev"], marks=pytest.mark.slow),
    ],
)
def test_reference_metrics_on_real_collections(sidecar, tmp_path, name, splits):
    if not DATA.is_dir():
        pytest.skip(f"no data in {DATA}")
    folder = BeirFolder(DATA / name)
    texts = {query.id: query.text for query in folder.queries()}
    index = build_lucene_index(next((DATA / name).glob("corpus.jsonl*")), tmp_path / "index")
    for split in splits:
        qrels = collections.defaultdict(dict)
        for judged in folder.qrels(split):
            qrels[judged.query_id][judged.document_id] = judged.score
        scores, ids = index.search([texts[q] for q in qrels], 1000)
        # Pyserini's run files have six decimals, so some scores that it separated by 1e-6 are ties.
        rounded = [[round(score, 6) for score in row.tolist()] for row in scores]
        run = {q: dict(zip(ids[i], rounded[i], strict=False)) for i, q in enumerate(qrels)}
        result = evaluate_run(run, qrels, ["nDCG@10", "AP", "P@1", "RR@10", "R@100"])
        assert list(result.values.values()) == pytest.approx(REFERENCE[name, split], abs=1e-4)
