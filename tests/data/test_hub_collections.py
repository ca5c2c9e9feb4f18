"""Collections named hf:NAME and ir_datasets:ID, and the commands that take these names."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.formats.collection_names import folder_of
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import Document
from jaxir.data.sets.pair_sources import BeirPairs, dev_pairs
from jaxir.data.sets.texts import Texts
from jaxir.evaluation.collection import read_collection
from tests.data import hub_folders
from tests.data.hub_folders import DOCUMENTS, QRELS, QUERIES, write_table
from tests.interop import hub_server


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxir" / "collections"


@pytest.mark.parametrize(
    ("layout", "splits", "title", "mark"),
    [
        (hub_folders.nanobeir, {"train"}, "", ""),
        (hub_folders.nanobeir_of_parts, {"test"}, "", " NanoSciFact"),
        (hub_folders.beir, {"train", "test"}, "T", ""),
        (hub_folders.mteb, {"test"}, "T", ""),
        (hub_folders.mteb_of_languages, {"dev"}, "", ""),
        (hub_folders.bright, {"test"}, "", ""),
    ],
)
def test_every_layout_is_read_as_the_same_collection(layout, splits, title, mark, tmp_path):
    folder = BeirFolder(layout(tmp_path / "set"))
    assert list(folder.corpus()) == [Document(i, title, text + mark) for i, text in DOCUMENTS.items()]
    assert list(folder.queries()) == list(QUERIES.items())
    assert set(folder.splits) == splits
    scored = layout not in (hub_folders.nanobeir, hub_folders.nanobeir_of_parts, hub_folders.bright)
    expected = QRELS if scored else [(query, document, 1) for query, document, _ in QRELS]
    for split in splits:
        assert [tuple(qrel) for qrel in folder.qrels(split)] == expected


def test_bright_excludes_documents_and_has_long_ones(tmp_path):
    name = hub_folders.bright(tmp_path / "set")
    assert BeirFolder(name).excluded() == {"q1": ("d2", "d3")}
    assert read_collection(name).excluded == {"q1": ("d2", "d3")}
    long = read_collection(f"{name}-long")
    assert long.qrels == {"q1": {"d1long": 1}, "q2": {"d3long": 1}} and long.documents[0].endswith(" long")


def test_names_are_understood_wherever_a_folder_is(tmp_path, capsys):
    name = hub_folders.mteb(tmp_path / "set")
    assert [pair.passage for pair in BeirPairs(directory=name, split="test").examples("stop")] == [
        "T cats drink milk",
        "T birds sing songs",
    ]
    assert dev_pairs(name, "test").split == "test"
    texts = [record["text"][1] for record in Texts(path=name).records(OnBadInput())]
    assert texts == [f"T {text}" for text in DOCUMENTS.values()]
    assert (
        cli.main(
            "jaxir.sample:sample",
            [f"--dataset={name}", "--split=test", "--train=1", f"--output={tmp_path}/s"],
        )
        == 0
    )
    assert (tmp_path / "s" / "corpus.jsonl").is_file()
    assert cli.main("jaxir.prepare:prepare", [f"--dataset={name}", f"--output={tmp_path}/out"]) == 0
    assert "3 passages, 2 queries, 2 judgements (test)" in capsys.readouterr().out
    assert list(BeirFolder(tmp_path / "out").corpus()) == list(BeirFolder(name).corpus())


def test_the_copy_in_the_cache_follows_the_files(tmp_path, cache, capsys):
    name = hub_folders.nanobeir(tmp_path / "set")
    first = folder_of(name)
    assert f"{name}: 3 documents, 2 queries, 2 judgements (train); kept in {first}" in capsys.readouterr().err
    assert folder_of(name) == first and capsys.readouterr().err == ""
    write_table(tmp_path / "set/corpus/train-00000-of-00001.parquet", [{"_id": 7, "text": "new"}])
    second = folder_of(name)
    assert second != first and list(BeirFolder(second).corpus()) == [Document("7", "", "new")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:", "'hf:' names no data set: write hf:NAME"),
        ("hf:nothing", "hf:nothing: no such directory; give hf:DIRECTORY or hf:OWNER/NAME"),
        ("hf:some/name", r"hf:some/name is not in the cache .*HF_HUB_OFFLINE forbids a download"),
        ("hf:DIR/parts", "has several collections: name one, such as hf:.*parts/NanoNQ"),
        ("hf:DIR/parts/NanoSciFacts", "has no part 'NanoSciFacts' .has: NanoNQ, NanoSciFact.; did you mean"),
        ("hf:DIR/languages", "has several collections: name one, such as hf:.*languages/de"),
        ("hf:DIR/bright/biologie", "has no part 'biologie' .has: biology, biology-long."),
        ("hf:DIR/empty", "has no corpus and no queries in a layout of BEIR, MTEB, NanoBEIR or BRIGHT"),
        ("hf:DIR/bare", "bare has no judgements .qrels., and there is no .*bare-qrels"),
        ("hf:DIR/half", "1 of the 2 parts of corpus/corpus-00001-of-00002.parquet are there"),
        ("hf:DIR/columns", r"corpus.jsonl:1: no column text or content \(it has _id, body\)"),
        ("ir_datasets:nothing/here", "ir_datasets has no data set 'nothing/here'"),
        ("ir_datasets:beir/scifact", "has no qrels: give a part with judgements, such as ir_datasets:beir/"),
    ],
)
def test_unusable_names_are_refused(name, message, tmp_path):
    hub_folders.nanobeir_of_parts(tmp_path / "parts")
    hub_folders.mteb_of_languages(tmp_path / "languages")
    hub_folders.bright(tmp_path / "bright")
    hub_folders.beir(tmp_path / "half")
    (tmp_path / "half/corpus/corpus-00000-of-00002.parquet").unlink()
    (tmp_path / "empty").mkdir()
    for folder, text in (("bare", "text"), ("columns", "body")):
        write_table(tmp_path / folder / "corpus.jsonl", [{"_id": "d1", text: "x"}])
        write_table(tmp_path / folder / "queries.jsonl", hub_folders.queries())
    write_table(tmp_path / "columns" / "qrels" / "test.jsonl", hub_folders.qrels())
    with pytest.raises(UserError, match=message):
        folder_of(name.replace("DIR", str(tmp_path)))


def test_ir_datasets_are_read_by_their_ids(tmp_path, cache, capsys):
    import ir_datasets

    for name, rows in {"docs.tsv": DOCUMENTS, "queries.tsv": QUERIES}.items():
        (tmp_path / name).write_text("".join(f"{i}\t{text}\n" for i, text in rows.items()))
    (tmp_path / "qrels").write_text("".join(f"{q} 0 {d} {s}\n" for q, d, s in QRELS))
    local = ir_datasets.create_dataset(
        docs_tsv=str(tmp_path / "docs.tsv"),
        queries_tsv=str(tmp_path / "queries.tsv"),
        qrels_trec=str(tmp_path / "qrels"),
    )
    ir_datasets.registry.register(f"jaxir-{tmp_path.name}/test", local)
    name = f"ir_datasets:jaxir-{tmp_path.name}/test"
    collection = read_collection(name)
    assert dict(zip(collection.document_ids, collection.documents, strict=True)) == DOCUMENTS
    assert collection.qrels == {"q1": {"d1": 1}, "q2": {"d3": 2}}
    assert cli.main("jaxir.prepare:prepare", [f"--dataset={name}", f"--output={tmp_path}/out"]) == 0
    assert [tuple(qrel) for qrel in BeirFolder(tmp_path / "out").qrels("test")] == QRELS


READ = """
import sys
from jaxir.data.formats.beir_folder import BeirFolder
folder = BeirFolder(sys.argv[1])
print(folder.splits, len(list(folder.corpus())))
"""


def test_only_the_needed_files_are_downloaded_and_then_read_without_a_network(tmp_path):
    hub_folders.nanobeir_of_parts(tmp_path / "set")
    hub_folders.beir(tmp_path / "scifact")

    def files(folder: Path) -> dict[str, bytes]:
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def read(name: str, **environment: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-c", READ, name],
            env=hub.environment(tmp_path / "hub", XDG_CACHE_HOME=str(tmp_path / "xdg"), **environment),
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode in (0, 1), done.stderr
        return done.stdout, done.stderr

    with hub_server.serve() as hub:
        hub.add("datasets/sentence-transformers/NanoBEIR-en", files(tmp_path / "set"))
        hub.add("datasets/BeIR/scifact", files(tmp_path / "scifact"))
        hub.add("datasets/BeIR/scifact-qrels", files(tmp_path / "scifact-qrels"))
        nano = "hf:sentence-transformers/NanoBEIR-en/NanoSciFact"
        assert read(nano)[0] == "['test'] 3\n", read(nano)[1]
        assert {path.partition("/")[2] for path, _ in hub.sent if "/" in path} == {
            "NanoSciFact-00000-of-00001.parquet"
        }
        assert read("hf:BeIR/scifact")[0] == "['test', 'train'] 3\n"
        out, error = read("hf:BeIR/nothing")
        assert out == "" and "hf:BeIR/nothing: neither a local directory nor a data set on the hub" in error
        sent = len(hub.sent)
        assert read(nano, HF_HUB_OFFLINE="1")[0] == "['test'] 3\n"
        assert len(hub.sent) == sent


def test_excluded_documents_are_left_out_of_runs_and_scores(tmp_path, capsys):
    """d2 and d3 are excluded for q1; otherwise the first of them would be in the run."""
    folder = folder_of(hub_folders.bright(tmp_path / "set"))
    corpus = tmp_path / "corpus.jsonl"
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    rows = [{**json.loads(line), "text": json.loads(line)["text"] + " milk"} for line in lines]
    write_table(corpus, rows)
    assert cli.main("jaxir.index:index", [f"--corpus={corpus}", f"--output={tmp_path}/index"]) == 0
    asked = [f"--index={tmp_path}/index", f"--queries={folder}/queries.jsonl"]
    asked += [f"--output={tmp_path}/run.trec"]
    assert cli.main("jaxir.search:search", [*asked, "--k=1"]) == 0
    found = [line.split()[:3:2] for line in (tmp_path / "run.trec").read_text().splitlines()]
    assert found[0] == ["q1", "d1"]
    assert cli.main("jaxir.search:search", [*asked, "--k=3"]) == 0
    assert "q1 Q0 d2" not in (tmp_path / "run.trec").read_text()


def test_excluded_documents_are_left_out_of_runs_from_elsewhere(tmp_path, capsys):
    """If d2 and d3 were not left out, they would rank before the relevant d1."""
    folder = shutil.copytree(folder_of(hub_folders.bright(tmp_path / "set")), tmp_path / "folder")
    run = tmp_path / "run.trec"
    run.write_text("".join(f"q1 Q0 {d} {n} {9 - n} theirs\n" for n, d in enumerate(("d2", "d3", "d1"), 1)))
    asked = [f"--run={run}", "--metrics=RR@10"]
    for place, value in ((folder / "qrels", "1.0000"), (tmp_path, "0.3333")):
        qrels = place / "test.tsv"
        qrels.write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")
        assert cli.main("jaxir.evaluate:evaluate", [*asked, f"--qrels={qrels}"]) == 0
        printed = capsys.readouterr().out
        assert value in printed and ("without the excluded_ids of 1 queries" in printed) == (value[0] == "1")
