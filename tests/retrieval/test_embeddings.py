"""EMB_DIR: interrupted runs resume bit for bit, and incomplete or damaged directories are refused."""

import gzip
import json
import subprocess

import numpy as np
import pytest

from jaxir import DualEncoder, cli
from jaxir.core.errors import BadInputError, UserError
from jaxir.data.text.truncation import Truncation
from jaxir.retrieval.encoding.embeddings import encode_corpus
from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
from jaxir.retrieval.encoding.views import Expansion
from jaxir.retrieval.indexes.base_index import build_index
from tests.retrieval.encode_processes import COUNT, SHARD, contents, encode, shards, wait_for_shards


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(encoded, small_model):
    output = encoded / "killed"
    for count in (3, 60):
        process = encode(encoded, small_model, output.name)
        wait_for_shards(process, output, count)
        process.kill()
        process.wait()
        for number in (made := shards(output)):  # complete shards only
            assert np.load(output / f"embeddings-{number:05}.npy").shape == (SHARD, 32)
            assert len(json.loads((output / f"ids-{number:05}.json").read_text())) == SHARD
        with pytest.raises(UserError, match=r"incomplete: run the same jaxir.encode command again"):
            open_embeddings(output)
    (output / ".embeddings-00099.npy.abc.part").write_bytes(b"half a shard")
    assert 60 <= len(made) < COUNT // SHARD, "guard: some shards are missing"
    assert encode(encoded, small_model, output.name).wait(200) == 0
    assert f"{COUNT - SHARD * len(made)} texts" in output.with_suffix(".log").read_text()
    assert contents(output) == contents(encoded / "whole")


def test_embeddings_directory_holds_vectors_ids_and_description(tmp_path, encoder, small_model, toy):
    texts = toy.random_texts(17)
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", texts, title="w5")
    encode_corpus(encoder, corpus, tmp_path / "out", shard_size=SHARD)
    stored = open_embeddings(tmp_path / "out")
    assert stored.ids == [f"d{i}" for i in range(17)] and [len(s) for s in stored.shards] == [SHARD, SHARD, 1]
    assert all(isinstance(s, np.memmap) and s.dtype == np.float32 for s in stored.shards)
    expected = encoder.encode_passages([f"w5 {text}" for text in texts])
    np.testing.assert_allclose(np.concatenate(stored.shards), expected, atol=1e-5)
    info = stored.info
    assert (info.fingerprint, info.model, info.count) == (encoder.fingerprint, small_model, 17)
    assert (info.tower, info.dimension, info.similarity) == ("passage", 32, "cosine")
    assert (info.max_length, info.input_name) == (toy.max_length, "corpus.jsonl")
    assert len(info.input_sha256) == 64


def test_resume_refuses_changed_model_settings_and_input(tmp_path, toy, encoder, other_model):
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(20))
    encode_corpus(encoder, corpus, tmp_path / "out")
    before = contents(tmp_path / "out")
    changed = toy.write_corpus(tmp_path / "changed.jsonl", toy.random_texts(20, seed=9))
    half = DualEncoder.load(encoder.spec, dtype="bfloat16")
    for model, source, size, message in (
        (DualEncoder.load(other_model), corpus, 16384, "another model"),
        (encoder, corpus, 5, r"another --shard_size \(16384, now 5\)"),
        (half, corpus, 16384, r"another --dtype \('float32', now 'bfloat16'\)"),
        (encoder, changed, 16384, "another input"),
    ):
        with pytest.raises(UserError, match=f"started with {message}"):
            encode_corpus(model, source, tmp_path / "out", shard_size=size)
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
    with pytest.raises(UserError, match=r"another model \(RUN was trained further .*\(step 10 to 21\)\)"):
        encode_corpus(later, corpus, output, shard_size=5)
    index = build_index(open_embeddings(output), backend="exact")
    with pytest.raises(UserError, match=r"RUN was trained further .*\(step 10 to 21\); encode and index"):
        index.require_model(later.fingerprint, *later.made_by)
    unnamed = DualEncoder(encoder.model, encoder.tokenizer, encoder.settings, "0" * 64)
    with pytest.raises(UserError, match="made with RUN, not with a model without a name; encode"):
        open_embeddings(output).require_model(unnamed)


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
def test_malformed_input_is_reported_before_any_work(tmp_path, encoder, content, message, capsys):
    (tmp_path / "corpus.jsonl").write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        encode_corpus(encoder, tmp_path / "corpus.jsonl", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if content:
        encode_corpus(encoder, tmp_path / "corpus.jsonl", tmp_path / "out", on_bad_input="skip")
        assert open_embeddings(tmp_path / "out").ids == ["a"]
        assert capsys.readouterr().err.count("skipped 1 record") == 1


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
