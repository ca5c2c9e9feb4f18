"""Memory-mapped files that are cut, or written to, while they are in use: a sentence, no SIGBUS."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxir.core.errors import ChangedError
from jaxir.storage.memory_map import check_unchanged, open_mapped, pieces

ROWS = np.arange(80_000, dtype=np.float32).reshape(10_000, 8)

BEFORE = """
import sys
from pathlib import Path
import numpy as np
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.text_table import TextTable
from jaxir.core.errors import ChangedError
from jaxir.core.features import TextFormat, pair_features
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.storage.npy import gather, read_npy

COUNT = 10_000
FEATURES = pair_features(TextFormat(16, 16))
vectors = np.random.default_rng(0).normal(size=(COUNT, 8)).astype(np.float32)
ids = [str(number) for number in range(COUNT)]
"""
MAKE = """
ExactIndex.build(vectors, ids).save("index")
offsets, keys = np.arange(5_001) * 16, np.arange(10_000, dtype=np.int32).reshape(5_000, 2)
tables = {n: TextTable(np.ones(80_000, np.uint16), offsets, keys) for n in ("queries", "passages")}
columns = {name: np.arange(5_000, dtype=np.int32) for name in ("query", "passage")}
made = {"tables": tables, "columns": columns, "offsets": np.zeros(5_001, np.int64)}
ArrayDataset(features=FEATURES, tokenizer_fingerprint="none", **made).save("examples")
"""
# Opens what is mapped, reads all of it, waits to be told that it was changed, and reads again.
READ = """
index, stored = load_index("index"), read_npy(Path("index/embeddings.npy"), np.float32, (COUNT, 8))
batches = ArrayDataset.load("examples", FEATURES).batches(batch_size=8, seed=0)
readers = [
    lambda: index.search(vectors[:2], 3),
    lambda: ExactIndex.build(stored, ids),
    lambda: gather([stored], np.array([COUNT - 1])),
    lambda: next(batches),
]
for read in readers:
    read()
print("open", flush=True)
input()
for read in readers:
    try:
        read()
        print("nothing")
    except ChangedError as error:
        print(error)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """An index and training examples."""
    place = tmp_path_factory.mktemp("mapped")
    subprocess.run([sys.executable, "-c", BEFORE + MAKE], cwd=place, check=True)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("cut", [True, False])
def test_a_file_that_is_cut_or_written_to_does_not_kill_its_reader(tmp_path, files, cut):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    vectors, tokens = tmp_path / "index/embeddings.npy", tmp_path / "examples/passages_flat.npy"
    process = subprocess.Popen(
        [sys.executable, "-c", BEFORE + READ],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "open\n"
        for path in (vectors, tokens):
            if cut:
                os.truncate(path, 1000)
                continue
            with path.open("r+b") as file:  # it keeps its size
                file.seek(-100, 2)
                file.write(bytes(100))
        said, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0  # and not SIGBUS
    sentence = "{} was changed while it was in use; start again, to read it anew\n"
    assert said == sentence.format(vectors) * 3 + sentence.format(tokens)


def test_what_is_mapped_is_known_whatever_view_of_it_is_left(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, ROWS)
    rows = open_mapped(path)
    views = [rows, rows[5:7], rows.T, rows.view(np.int32), np.asarray(rows)[None], rows[0]]
    check_unchanged(views)
    os.truncate(path, 10_000)
    for view in views:
        with pytest.raises(ChangedError, match=r"rows\.npy was changed while it was in use"):
            check_unchanged([ROWS, view])
    check_unchanged([rows[:0].copy(), ROWS])  # in memory


def test_a_file_that_was_replaced_or_removed_is_still_there(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, ROWS)
    rows = open_mapped(path)
    np.save(tmp_path / "new.npy", ROWS[:1])
    (tmp_path / "new.npy").replace(path)
    check_unchanged([rows])
    path.unlink()
    assert np.array_equal(np.concatenate(list(pieces([rows, ROWS[:3]], 999))), [*ROWS, *ROWS[:3]])


def test_each_piece_is_looked_at_before_it_is_given(tmp_path):
    path = tmp_path / "rows.npy"
    np.save(path, ROWS)
    parts = pieces([open_mapped(path)], 4000)
    assert len(next(parts)) == 4000
    os.truncate(path, 1000)
    with pytest.raises(ChangedError):
        next(parts)
