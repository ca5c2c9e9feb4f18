"""EMB_DIR: interrupted runs resume bit for bit, and incomplete or damaged directories are refused."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxir import DualEncoder, cli
from jaxir.core.errors import BadInputError, UserError
from jaxir.data.text.truncation import Truncation
from jaxir.retrieval.encoding.embeddings import encode_corpus
from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
from jaxir.retrieval.encoding.views import Expansion
from jaxir.retrieval.indexes.base_index import build_index

SHARD = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, toy) -> str:
    texts = toy.random_texts(2001)
    texts[7], texts[11] = "", "w3 " * 100_000
    return toy.write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", texts, title="w5")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, corpus, small_model):
    directory = tmp_path_factory.mktemp("whole") / "embeddings"
    with encode_process(small_model, corpus, directory) as process:
        out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and "2001 texts" in out, error
    return directory


def contents(directory) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


def encode_process(model, corpus, output) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxir.encode", f"--model={model}", f"--input={corpus}"]
    command += [f"--output={output}", f"--shard_size={SHARD}"]
    env = os.environ | {"XLA_FLAGS": ""}  # as users run it
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path, corpus, small_model, uninterrupted):
    output = tmp_path / "embeddings"
    for shards in (3, 60):
        with encode_process(small_model, corpus, output) as process:
            deadline = time.monotonic() + 90
            while len(list(output.glob("*.npy"))) < shards:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
            process.wait()
        for path in output.glob("*.npy"):  # complete shards only
            assert np.load(path).shape == (SHARD, 32)
            assert len(json.loads(path.with_name(f"ids-{path.stem[-5:]}.json").read_text())) == SHARD
        with pytest.raises(UserError, match=r"incomplete: run the same jaxir.encode command again"):
            open_embeddings(output)
    (output / ".embeddings-00099.npy.abc.part").write_bytes(b"half a shard")
    before = len(list(output.glob("*.npy")))
    assert 60 <= before < 251  # guard: some shards are missing
    with encode_process(small_model, corpus, output) as process:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
    assert f"{2001 - SHARD * before} texts" in out
    assert contents(output) == contents(uninterrupted)


@pytest.mark.slow
def test_embeddings_directory_holds_vectors_ids_and_description(uninterrupted, corpus, small_model, toy):
    stored = open_embeddings(uninterrupted)
    assert stored.ids == [f"d{i}" for i in range(2001)]
    assert [len(s) for s in stored.shards] == [SHARD] * 250 + [1]
    assert all(isinstance(s, np.memmap) and s.dtype == np.float32 for s in stored.shards)
    encoder = DualEncoder.load(small_model)
    lines = Path(corpus).read_text().splitlines()
    texts = [f"w5 {json.loads(line)['text']}".strip() for line in lines]
    np.testing.assert_allclose(np.concatenate(stored.shards), encoder.encode_passages(texts), atol=1e-5)
    info = stored.info
    assert (info.fingerprint, info.model, info.count) == (encoder.fingerprint, small_model, 2001)
    assert (info.tower, info.dimension, info.similarity) == ("passage", 32, "cosine")
    assert (info.max_length, info.input_name) == (toy.max_length, "corpus.jsonl")
    assert len(info.input_sha256) == 64


def test_resume_refuses_changed_model_settings_and_input(tmp_path, toy, encoder, other_model):
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(20))
    encode_corpus(encoder, corpus, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="started with another model"):
        encode_corpus(DualEncoder.load(other_model), corpus, tmp_path / "out")
    with pytest.raises(UserError, match=r"started with another --shard_size \(16384, now 5\)"):
        encode_corpus(encoder, corpus, tmp_path / "out", shard_size=5)
    with pytest.raises(UserError, match=r"started with another --dtype \('float32', now 'bfloat16'\)"):
        encode_corpus(DualEncoder.load(encoder.spec, dtype="bfloat16"), corpus, tmp_path / "out")
    toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(20, seed=9))
    with pytest.raises(UserError, match="started with another input"):
        encode_corpus(encoder, corpus, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_compressed_queries_are_encoded_by_the_query_tower(tmp_path, toy, encoder):
    records = [{"_id": f"q{i}", "text": t} for i, t in enumerate(toy.random_texts(9))]
    with gzip.open(tmp_path / "queries.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(r) + "\n" for r in records)
    encode_corpus(encoder, tmp_path / "queries.jsonl.gz", tmp_path / "out", tower="query")
    stored = open_embeddings(tmp_path / "out")
    assert stored.ids == [r["_id"] for r in records]
    expected = encoder.encode_queries([r["text"] for r in records])
    np.testing.assert_allclose(stored.shards[0], expected, atol=1e-5)
    assert stored.info.max_length == 16


def test_output_without_vectors_may_be_used_by_another_model(tmp_path, toy, encoder):
    class Failing:
        def encode_batch(self, texts, **how):
            raise UserError("the model is bad")

    def named(tokenizer, step, fingerprint):
        return DualEncoder(encoder.model, tokenizer, encoder.settings, fingerprint, spec="RUN", step=step)

    corpus, output = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(12)), tmp_path / "out"
    with pytest.raises(UserError, match="the model is bad"):
        encode_corpus(named(Failing(), None, "e" * 64), corpus, output, shard_size=5)
    earlier, later = (named(encoder.tokenizer, step, str(step) * 32) for step in (10, 21))
    encode_corpus(earlier, corpus, output, shard_size=5)
    with pytest.raises(
        UserError, match=r"another model \(RUN was trained further since then \(step 10 to 21\)\): give"
    ):
        encode_corpus(later, corpus, output, shard_size=5)
    index = build_index(open_embeddings(output), backend="exact")
    with pytest.raises(
        UserError, match=r": RUN was trained further since then \(step 10 to 21\); encode and index"
    ):
        index.require_model(later.fingerprint, *later.made_by)
    with pytest.raises(UserError, match="made with RUN, not with a model without a name; encode"):
        open_embeddings(output).require_model(
            DualEncoder(encoder.model, encoder.tokenizer, encoder.settings, "0" * 64)
        )


def test_the_number_of_texts_that_were_cut_survives_an_interruption(tmp_path, toy, encoder):
    long = " ".join(["w1"] * 2 * toy.max_length)
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", [long, *toy.random_texts(12), long])
    lengths = [len(row) for row in encoder.tokenizer.encode_batch(toy.random_texts(12), max_length=1000)]
    encode_corpus(encoder, corpus, tmp_path / "out", shard_size=5)
    expected = 2 + sum(length > toy.max_length for length in lengths)
    assert open_embeddings(tmp_path / "out").info.truncation == Truncation(toy.max_length, 14, expected)
    whole = contents(tmp_path / "out")
    (tmp_path / "out" / "embeddings-00001.npy").unlink()
    encode_corpus(encoder, corpus, tmp_path / "out", shard_size=5)
    assert contents(tmp_path / "out") == whole
    index = build_index(open_embeddings(tmp_path / "out"), backend="exact")
    assert (index.info.max_length, index.info.cut) == (toy.max_length, expected)


GOOD = b'{"_id": "a", "text": "w1"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "corpus.jsonl: the file is empty"),
        (GOOD + b'{"_id": "b", "text": \n', r"corpus.jsonl:2: not valid JSON"),
    ],
)
def test_malformed_input_is_reported_before_any_work(tmp_path, encoder, content, message):
    (tmp_path / "corpus.jsonl").write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        encode_corpus(encoder, tmp_path / "corpus.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if content:
        encode_corpus(encoder, tmp_path / "corpus.jsonl", tmp_path / "out", on_bad_input="skip")
        assert open_embeddings(tmp_path / "out").ids == ["a"]


def test_error_of_an_unusable_vector_names_its_text(tmp_path, encoder, monkeypatch):
    corpus, queries = tmp_path / "corpus.jsonl", tmp_path / "queries.jsonl"
    corpus.write_bytes(GOOD + GOOD.replace(b'"a"', b'"b"') + GOOD.replace(b'"a"', b'"c"'))
    queries.write_text("".join(f'{{"_id": "{i}", "outputs": ["x", "y"]}}\n' for i in "abc"))

    def run(function, tokens, **_):
        vectors = np.ones((len(tokens), encoder.dimension), np.float32)
        vectors[-2] = 3e38
        return vectors

    monkeypatch.setattr(encoder.runner, "run", run)
    expansion = Expansion(path=str(queries), kind="typical", views=2)
    for output, name, how in (("out", "b", {}), ("expanded", "c", {"expansion": expansion})):
        with pytest.raises(UserError, match=rf"gives a vector that has the norm .*: the text of '{name}'$"):
            encode_corpus(encoder, corpus, tmp_path / output, **how)
        assert not list((tmp_path / output).glob("embeddings-*"))


@pytest.mark.parametrize("tower", ["query", "passage"])
def test_a_text_on_each_line(tmp_path, encoder, tower):
    (tmp_path / "texts.txt").write_text("where is the treaty?\n\nthe cat sat\n")
    encode_corpus(encoder, tmp_path / "texts.txt", tmp_path / "out", tower=tower)
    found = open_embeddings(tmp_path / "out")
    assert found.ids == ["1", "3"] and found.info.text == "text"
    encode = encoder.encode_queries if tower == "query" else encoder.encode_passages
    expected = encode(["where is the treaty?", "the cat sat"], show_progress=False)
    np.testing.assert_allclose(np.concatenate(found.shards), expected, atol=1e-6)


def test_skipped_lines_are_reported_once(tmp_path, encoder, capsys):
    (tmp_path / "corpus.jsonl").write_bytes(GOOD + b"nonsense\n")
    encode_corpus(encoder, tmp_path / "corpus.jsonl", tmp_path / "out", on_bad_input="skip")
    assert capsys.readouterr().err.count("skipped 1 record") == 1


def test_flipped_bit_is_reported(tmp_path, toy, encoder):
    corpus, out = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(20)), tmp_path / "out"
    encode_corpus(encoder, corpus, out, shard_size=10)
    listed = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, capture_output=True, text=True).stdout
    assert sorted(listed.splitlines()) == [
        *(f"embeddings-0000{n}.npy: OK" for n in range(2)),
        "embeddings.json: OK",
        *(f"ids-0000{n}.json: OK" for n in range(2)),
    ]
    for name in ("embeddings-00001.npy", "ids-00000.json", "embeddings.json"):
        content = bytearray((out / name).read_bytes())
        content[-6] ^= 1
        (out / name).write_bytes(content)
        with pytest.raises(UserError, match=f"damaged: {name} has changed since it was|not valid JSON"):
            open_embeddings(out)
        content[-6] ^= 1
        (out / name).write_bytes(content)
    open_embeddings(out)


def test_resumed_embeddings_get_checksums(tmp_path, toy, encoder):
    """The number of cut texts is unknown if an older jaxir wrote the first shards without it."""
    corpus, out = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(30)), tmp_path / "out"
    encode_corpus(encoder, corpus, out, shard_size=10)
    whole = contents(out)
    for name in ("embeddings-00001.npy", "embeddings-00002.npy", "ids-00002.json"):
        (out / name).unlink()
    manifest = json.loads(whole["embeddings.json"]) | {"complete": False}
    (out / "embeddings.json").write_text(json.dumps(manifest))
    for note in out.glob(".cut-*"):
        note.unlink()
    assert encode_corpus(encoder, corpus, out, shard_size=10).texts == 20
    changed = {name for name, content in contents(out).items() if content != whole[name]}
    assert changed == {"embeddings.json", "SHA256SUMS"}
    assert open_embeddings(out).info.cut is None


def test_foreign_directory_is_refused_before_the_model_is_read(tmp_path, capsys):
    (tmp_path / "mine").touch()
    flags = ["--model=absent", "--input=absent", f"--output={tmp_path}"]
    assert cli.main("jaxir.encode:encode", flags) == 1
    assert "and is not what this command writes (embeddings directory)" in capsys.readouterr().err
