"""Refusals of retrieval, each reported in one sentence."""

import importlib.util
import json
import re
import sys

import numpy as np
import pytest

from jaxir import cli
from jaxir.core.errors import DamagedError, UserError
from jaxir.core.installation import how_to_install
from jaxir.retrieval.encoding.embeddings import encode_corpus
from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
from jaxir.retrieval.indexes import milvus_collection
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.milvus_index import MilvusIndex
from jaxir.retrieval.indexes.scann_index import ScannIndex


@pytest.fixture
def index(tmp_path, toy):
    """The directory of an index with documents and without checksums, as older jaxir versions wrote it."""
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", ["one", "two", "three"])
    built = ExactIndex.build(np.eye(3, 4, dtype=np.float32), ["d0", "d1", "d2"])
    built.save(tmp_path / "index", corpus=corpus)
    (tmp_path / "index" / "SHA256SUMS").unlink()
    return tmp_path / "index"


def spoil(path, content):
    """Replaces a file, changes entries of a JSON file, or removes a file (None)."""
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        path.write_text(content)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "index.json",
            {"similarity": "zz"},
            "must be 'cosine' or 'dot' or 'bm25' or 'impact' or 'maxsim' or 'meanmaxsim', not 'zz'",
        ),
        ("index.json", {"count": "5"}, "count must be a whole number of at least 1, not '5'"),
        ("index.json", {"dimension": 32.5}, "dimension must be a whole number of at least 0, not 32.5"),
        ("index.json", {"engine": "exakt"}, "version of jaxir; this version reads format 1 and the engines"),
        ("index.json", {"coutn": 5}, "'coutn' is unknown; did you mean 'count'?"),
        ("index.json", {"dimension": 5}, "embeddings.npy is float32 (3, 4), not float32 (3, 5)"),
        ("index.json", "{", "is damaged: "),
        ("ids.json", "[1, 2, 3]", "must be a list, each text, not [1, 2, 3]"),
        ("ids.json", '["d0"]', "has 1 of 3 ids"),
        ("embeddings.npy", "", "embeddings.npy cannot be read"),
        ("documents-offsets.npy", "", "documents-offsets.npy cannot be read"),
    ],
)
def test_index_with_a_malformed_or_damaged_file_is_refused(index, name, content, sentence):
    spoil(index / name, content)
    with pytest.raises(UserError) as raised:
        load_index(index)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("line", ["", "null", '["title"]', "["])
def test_damaged_document_is_refused_and_others_are_read(index, line):
    path = index / "documents.jsonl"
    lines = path.read_text().splitlines()
    # The new line is as long as the old one, so that offsets of the other lines stay valid.
    path.write_text("\n".join([*lines[:2], line]) + "\n")
    documents = load_index(index).documents
    assert documents["d0"].text == "one"
    with pytest.raises(DamagedError, match="the document 'd2' cannot be read"):
        documents["d2"]


def test_place_that_is_no_index_or_embeddings_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not an index directory: it has no index\.json"):
        load_index(tmp_path)
    with pytest.raises(UserError, match=r"is not an output of jaxir.encode"):
        open_embeddings(tmp_path)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"storage": "int4"}, "float32, bfloat16, int8, not 'int4'"),
        ({"target_recall": 2.0}, "between 0 and 1"),
    ],
)
def test_exact_index_refuses_unknown_options(option, sentence):
    with pytest.raises(UserError, match=sentence):
        ExactIndex.build(np.eye(3, 4, dtype=np.float32), list("abc"), **option)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("embeddings-00001.npy", "", r"embeddings-00001\.npy cannot be read"),
        ("embeddings-00001.npy", None, r"embeddings-00001\.npy: no such file"),
        ("ids-00000.json", "[1]", r"ids-00000\.json .* must be a list, each text"),
        ("embeddings.json", '{"complete": true}', r"embeddings\.json: the key 'count' is missing"),
        ("embeddings.json", {"complete": False}, "is incomplete: run the same jaxir.encode command again"),
        ("embeddings.json", {"format": 2}, "has format 2, this jaxir reads 1"),
    ],
)
def test_damaged_embeddings_are_refused(tmp_path, toy, encoder, name, content, sentence, capsys):
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(4))
    encode_corpus(encoder, corpus, tmp_path / "out", shard_size=2)
    (tmp_path / "out" / "SHA256SUMS").unlink()  # older jaxir versions wrote no checksums
    spoil(tmp_path / "out" / name, content)
    flags = [f"--embeddings={tmp_path}/out", f"--output={tmp_path}/index"]
    assert cli.main("jaxir.index:index", flags) == 1
    assert re.search(sentence, error := capsys.readouterr().err) and error.count("\n") == 1
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(("index", "package"), [(MilvusIndex, "pymilvus"), (ScannIndex, "scann")])
def test_missing_engine_is_reported_with_the_install_command(index, package, tmp_path, monkeypatch):
    for name in {package, *(m for m in sys.modules if m.startswith(f"{package}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    milvus_collection._pymilvus.cache_clear()
    with pytest.raises(UserError) as raised:
        index.build(np.eye(3, dtype=np.float32), list("abc")).save(tmp_path / "index")
    assert how_to_install(package.removeprefix("py")) in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_without_scann_an_index_is_exact(tmp_path, toy, encoder, capsys, monkeypatch):
    encode_corpus(encoder, toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(4)), tmp_path / "emb")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "scann" else find(name))
    capsys.readouterr()
    flags = [f"--embeddings={tmp_path}/emb", f"--output={tmp_path}/index"]
    assert cli.main("jaxir.index:index", flags) == 0
    printed = capsys.readouterr()
    assert "exact index of 4 passages" in printed.out and printed.err.count("ScaNN is not installed") == 1
    assert how_to_install("scann") in printed.err


RUNS = "--runs=a.trec,b.trec --output=x.trec --method="
MINING = "--run=r.trec --dataset=beir:absent --output=out "
REFUSED = [
    ("index", "--embeddings=e", "give --output to build an index"),
    ("index", "--output=x --embeddings=e --delete=ids.txt", "--delete only applies to --update, not to"),
    ("index", "--output=x --embeddings=e --uri=http://h:1", "--uri only applies to --backend=milvus and"),
    ("index", "--output=x --backend=milvus", "--backend=milvus needs --embeddings"),
    ("index", "--output=x --backend=lucene --model=m", "--model only applies to --backend=scann and"),
    ("index", "--output=x --embeddings=e --queries=q", "--queries only applies with --target_recall"),
    ("index", "--output=x --embeddings=e --target_recall=90", "--target_recall must be a number"),
    ("index", "--update=x --output=y --embeddings=e", "--output and --backend only apply to a new index"),
    ("index", "--update=x", "--update needs --embeddings, --corpus or --delete"),
    ("search", "--index=i --queries=q.jsonl", "give --queries and --output together"),
    ("search", "--index=i --queries=q.jsonl --output=run --query=x", "give --query or --queries, not both"),
    ("search", "--index=i --query=\u200b", "--query is empty"),
    ("search", "--index=i --query=x --k=0", "--k must be a whole number of at least 1, not 0"),
    ("encode", "--model=m --input=i --output=out --views=3", "--views only apply with --expansions"),
    ("fuse", f"{RUNS}rrf --alpha=1", "only applies to --method=interpolate and --method=rescore, not to"),
    ("fuse", f"{RUNS}rrf --constant=-1", "--constant must be a whole number of at least 0, not -1"),
    ("fuse", f"{RUNS}interpolate --weights=1,x", "--weights must be numbers separated by commas, not 1,x"),
    ("fuse", f"{RUNS}interpolate --weights=0,0", "--weights are all 0 (0,0)"),
    ("fuse", f"{RUNS}interpolate --alpha=.5 --weights=1,2", "give one of --alpha, --sweep and --weights"),
    ("fuse", f"{RUNS}interpolate --sweep=0,1", "give --sweep and --qrels together"),
    ("fuse", f"{RUNS}rescore", "rescore needs --alpha, or --sweep and --qrels"),
    ("fuse", f"{RUNS}rescore --alpha=1 --metric=RR", "--metric only applies to --sweep"),
    ("fuse", f"{RUNS}rescore --alpha=1 --model=m", "--model only applies to --embeddings"),
    ("fuse", f"{RUNS}rescore --alpha=1 --embeddings=E --queries=Q", "there are 2 runs"),
    ("mine", f"{MINING}--negatives=0", "negatives must be a whole number of at least 1, not 0"),
    ("mine", f"{MINING}--dataset=bier:x", "--dataset must be beir:DIR"),
    ("mine", f"{MINING}--max_relevance=0.1", "only apply with --cross_encoder"),
    ("mine", f"{MINING}--cross_encoder=hf:x", "needs --max_relevance, --relevance_margin or both"),
    ("mine", f"{MINING}--cross_encoder=hf:./x --max_relevance=0.1", "./x: no such directory"),
    ("mine", f"{MINING}--cross_encoder=hf:x --max_relevance=7", "must be a number of at least 0 and below 1"),
]


@pytest.mark.parametrize(("command", "flags", "sentence"), REFUSED)
def test_inconsistent_flags_are_refused(command, flags, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = cli.main(f"jaxir.{command}:{command}", flags.split(" "))
    assert status == (2 if "must be a " in sentence else 1)
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())
