"""Each file that jaxir has written, damaged in several ways, and its reader: one sentence each time."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxir.core.errors import DamagedError, UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.retrieval.encoding.embeddings import encode_corpus, open_embeddings
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.exact import ExactIndex

# No field of ours may be this.
WRONG = [[1]]


@pytest.fixture(scope="module")
def written(tmp_path_factory, toy, small_model, encoder) -> Path:
    """Embeddings, and an index of them with its documents."""
    root = tmp_path_factory.mktemp("written")
    corpus = toy.write_corpus(root / "corpus.jsonl", toy.random_texts(5))
    encode_corpus(encoder, corpus, root / "embeddings")
    stored = open_embeddings(root / "embeddings")
    ExactIndex.build(stored.shards, stored.ids, model=small_model).save(root / "index", corpus=corpus)
    shutil.copytree(Path(small_model) / "tokenizer", root / "tokenizer")
    (root / "tokenizer/tokenizer_config.json").write_text('{"pad_token": "[PAD]"}')
    (root / "tokenizer/special_tokens_map.json").write_text('{"pad_token": {"content": "[PAD]"}}')
    for sums in root.rglob("SHA256SUMS"):  # the readers themselves are tested, on files of before
        sums.unlink()
    return root


def damaged(path: Path):
    """Yields what was done to a file, and its content then."""
    whole = path.read_bytes()
    yield from {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "null": b"null",
        "a number": b"7",
        "an empty list": b"[]",
        "a list of numbers": b"[1, 2]",
        "an empty object": b"{}",
        "no text": b"\xff\xfe\x00",
        "deep": b"[" * 100_000,
    }.items()
    if path.suffix == ".npy":
        yield "one byte less", whole[:-1]
        yield "a broken header", whole[:6] + b"\x01\x00\x10\x00{'descr': " + whole[20:]
    content = json.loads(whole) if path.suffix == ".json" else None
    for key in content if isinstance(content, dict) else ():
        yield f"{key} wrong", json.dumps(content | {key: WRONG}).encode()


def told_of(directory: Path, name: str, reader, *, fine: str = "") -> list[str]:
    """Damages a file in every way but one that is `fine`, and returns what its reader says of them."""
    path, sentences = directory / name, []
    whole = path.read_bytes()
    for how, content in damaged(path):
        if how == fine:
            continue
        path.write_bytes(content)
        with pytest.raises(UserError) as raised:
            reader(directory)
            pytest.fail(f"{name}: {how} was read")
        assert str(directory) in str(raised.value) and "\n" not in str(raised.value)[:-1], how
        sentences.append(str(raised.value))
    path.write_bytes(whole)
    reader(directory)
    return sentences


@pytest.mark.parametrize("name", ["index.json", "ids.json", "documents-offsets.npy", "embeddings.npy"])
def test_an_index(written, name):
    assert all("is a damaged index" in sentence for sentence in told_of(written / "index", name, load_index))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"similarity": "zz"}, "similarity must be 'cosine' or 'dot' or 'bm25' or 'impact', not 'zz'"),
        ({"similarity": "bm25"}, "similarity must be 'cosine' or 'dot', not 'bm25'"),
        ({"count": "5"}, "count must be a whole number of at least 1, not '5'"),
        ({"dimension": 32.5}, "dimension must be a whole number of at least 0, not 32.5"),
        ({"settings": {"storage": "int7"}}, "the setting storage must be 'float32' or 'bfloat16'"),
        ({"engine": "lucene"}, "the setting fields must be 'flat' or 'multifield', not None"),
        ({"engine": "exakt"}, "another version than this jaxir, which knows format 1 and the engines exact,"),
        ({"coutn": 5}, "'coutn' is unknown; did you mean 'count'?"),
    ],
)
def test_index_with_a_malformed_description_is_refused(written, tmp_path, changes, sentence):
    shutil.copytree(written / "index", tmp_path / "index")
    path = tmp_path / "index/index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError) as raised:
        load_index(tmp_path / "index")
    assert sentence in str(raised.value)


def test_ids_that_are_numbers(written, tmp_path):
    shutil.copytree(written / "index", tmp_path / "index")
    (tmp_path / "index/ids.json").write_text(json.dumps([1, 2, 3, 4, 5]))
    with pytest.raises(UserError, match=r"must be a list, each text, not \[1, 2, 3, 4, 5\]"):
        load_index(tmp_path / "index")


@pytest.mark.parametrize(
    "line",
    [
        "",
        "null",
        "7",
        '"text"',
        "[]",
        '["title"]',
        '["title", 7]',
        '["a", "b", {}, {}]',
        '["a", "b", [1]]',
        "[",
    ],
)
def test_a_document(written, tmp_path, line):
    shutil.copytree(written / "index", tmp_path / "index")
    path = tmp_path / "index/documents.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], line]) + "\n")  # the others stay where they are
    index = load_index(tmp_path / "index")
    assert index.documents["d0"].text == json.loads(lines[0])[1]
    with pytest.raises(DamagedError, match="the document 'd4' is not there as it was stored; index again"):
        index.documents["d4"]


def test_offsets_that_lead_nowhere(written, tmp_path):
    shutil.copytree(written / "index", tmp_path / "index")
    for offset in (-5, 3, 10**9):
        np.save(tmp_path / "index/documents-offsets.npy", np.full(5, offset))
        with pytest.raises(DamagedError):
            load_index(tmp_path / "index").documents["d4"]
        with pytest.raises(DamagedError):
            list(load_index(tmp_path / "index").documents.lines(["d4"]))


@pytest.mark.parametrize("name", ["embeddings.json", "ids-00000.json", "embeddings-00000.npy"])
def test_embeddings(written, name):
    assert all("damaged" in sentence for sentence in told_of(written / "embeddings", name, open_embeddings))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer(written, name):
    told_of(
        written / "tokenizer",
        name,
        Tokenizer.load,
        fine="" if name == "tokenizer.json" else "an empty object",
    )
