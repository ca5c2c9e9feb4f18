"""Bad input of the retrieval room, and the one sentence that each costs."""

import json

import numpy as np
import pytest

from jaxir.core.errors import DamagedError, UserError
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.exact import ExactIndex


@pytest.fixture
def index(tmp_path, toy):
    """The directory of an index with documents and without checksums, as jaxir once wrote them."""
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", ["one", "two", "three"])
    ExactIndex.build(np.eye(3, 4, dtype=np.float32), ["d0", "d1", "d2"]).save(
        tmp_path / "index", corpus=corpus
    )
    (tmp_path / "index" / "SHA256SUMS").unlink()
    return tmp_path / "index"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"similarity": "zz"}, "similarity must be 'cosine' or 'dot' or 'bm25' or 'impact', not 'zz'"),
        ({"count": "5"}, "count must be a whole number of at least 1, not '5'"),
        ({"dimension": 32.5}, "dimension must be a whole number of at least 0, not 32.5"),
        ({"engine": "exakt"}, "another version than this jaxir, which knows format 1 and the engines exact,"),
        ({"coutn": 5}, "'coutn' is unknown; did you mean 'count'?"),
        ({"dimension": 5}, r"embeddings.npy is float32 (3, 4), not float32 (3, 5)"),
    ],
)
def test_index_with_a_malformed_description_is_refused(index, changes, sentence):
    path = index / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError) as raised:
        load_index(index)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("index.json", "{", "is a damaged index"),
        ("ids.json", "[1, 2, 3]", r"must be a list, each text, not \[1, 2, 3\]"),
        ("ids.json", '["d0"]', "has 1 ids of 3"),
        ("embeddings.npy", "", "embeddings.npy cannot be read"),
        ("documents-offsets.npy", "", "documents-offsets.npy cannot be read"),
    ],
)
def test_index_with_a_damaged_file_is_refused(index, name, content, sentence):
    (index / name).write_text(content)
    with pytest.raises(UserError, match=sentence):
        load_index(index)


@pytest.mark.parametrize("line", ["", "null", '["title"]', "["])
def test_damaged_document_is_refused_and_others_are_read(index, line):
    path = index / "documents.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], line]) + "\n")  # the others stay where they are
    documents = load_index(index).documents
    assert documents["d0"].text == "one"
    with pytest.raises(DamagedError, match="the document 'd2' is not there as it was stored; index again"):
        documents["d2"]
