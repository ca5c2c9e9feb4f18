"""Documents encoded with generated queries, by each of the three expansions (typical, corpus, document)."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
from flax import nnx

from jaxir import DualEncoder, cli
from jaxir.core.errors import BadInputError, UserError
from jaxir.data.text.tokenizer import pad_batch
from jaxir.models.dual_encoder import DualEncoderModel
from jaxir.retrieval.encoding.embeddings import encode_corpus
from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
from jaxir.retrieval.encoding.text_encoder import EMBED
from jaxir.retrieval.encoding.views import Expansion
from jaxir.retrieval.indexes.base_index import build_index, load_index
from jaxir.retrieval.indexes.updating import update_index
from jaxir.retrieval.ranking.runs import read_run

COUNT, SEP = 30, 3


@pytest.fixture(scope="module")
def collection(tmp_path_factory, toy):
    """A corpus, up to seven generated queries of each document, and queries."""
    folder = tmp_path_factory.mktemp("views")
    texts, generated = toy.random_texts(COUNT), toy.random_texts(220, seed=1, max_words=6)
    texts[3] = "w7 " * 100
    outputs = [generated[7 * i : 7 * i + i % 8] for i in range(COUNT)]
    outputs[9] = ["w1", "w2", "w1"]  # duplicates count once
    toy.write_corpus(folder / "corpus.jsonl", texts)
    records = [{"_id": f"d{i}", "outputs": queries} for i, queries in enumerate(outputs)]
    toy.write_jsonl(folder / "queries.jsonl", records)
    toy.write_jsonl(folder / "shuffled.jsonl", records[::-1])
    toy.write_queries(folder / "questions.jsonl", toy.random_texts(9, seed=2))
    return folder, texts, [list(dict.fromkeys(queries)) for queries in outputs]


def read_alone(encoder, document: str, *queries: str) -> np.ndarray:
    """The vector of one view, from tokens joined by hand: [CLS] document [SEP] query [SEP] ..."""
    words = encoder.tokens([document], "passage")[0].tolist()
    appended = [encoder.tokenizer.encode_batch([q], max_length=16)[0][1:].tolist() for q in queries]
    if appended:
        room = encoder.settings.passage_max_length - len(appended[0])
        if len(words) > room:
            words = [*words[: room - 1], SEP]
    for more in appended:
        if len(words) + len(more) <= encoder.settings.passage_max_length:
            words += more
    # One row for each of the four devices.
    ids = pad_batch([np.array(words)] * 4, encoder.settings.passage_max_length)
    return encoder.runner.call(EMBED["passage"], ids)[0]


def encoded(encoder, folder, output, **expansion):
    how = Expansion(path=str(folder / expansion.pop("name", "queries.jsonl")), **expansion)
    encode_corpus(encoder, folder / "corpus.jsonl", output, expansion=how, shard_size=8)
    stored = open_embeddings(output)
    return stored, np.concatenate(stored.shards)


def test_typical_vector_is_the_mean_of_the_views(collection, encoder, tmp_path):
    folder, texts, outputs = collection
    stored, vectors = encoded(encoder, folder, tmp_path / "typical", views=5)
    assert stored.ids == [f"d{i}" for i in range(COUNT)]
    assert (stored.info.expansion, stored.info.views, stored.info.count) == ("typical", 5, COUNT)
    for text, queries, vector in zip(texts, outputs, vectors, strict=True):
        views = [read_alone(encoder, text, q) for q in queries[:5]] or [read_alone(encoder, text)]
        mean = np.mean(views, axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=2e-5)
    # Guard: the queries change the vectors, also of the long document.
    plain = encoder.encode_passages(texts)
    moved = np.abs(vectors - plain).max(axis=1)
    assert moved[0] < 1e-5 and moved[3] > 1e-3 and np.sum(moved > 1e-3) == COUNT - 4
    _, again = encoded(encoder, folder, tmp_path / "shuffled", views=5, name="shuffled.jsonl")
    assert np.array_equal(vectors, again)


def test_update_refuses_documents_read_with_other_queries(collection, encoder, tmp_path):
    folder, _, _ = collection
    stored, _ = encoded(encoder, folder, tmp_path / "typical", views=5)
    build_index(stored, backend="exact").save(tmp_path / "index")
    encode_corpus(encoder, folder / "corpus.jsonl", tmp_path / "alone")
    other, _ = encoded(encoder, folder, tmp_path / "other", views=3)
    for new, sentence in (
        (open_embeddings(tmp_path / "alone"), "without generated queries, but the index's documents with"),
        (other, "--views=3.*--views=5"),
    ):
        with pytest.raises(UserError, match=sentence):
            update_index(tmp_path / "index", embeddings=new, delete=stored.ids[:2])
    assert update_index(tmp_path / "index", delete=stored.ids[:2]).count == COUNT - 2
    assert load_index(tmp_path / "index").info.read_with == "--expansion=typical --views=5"


def test_document_expansion_appends_what_fits(collection, encoder, tmp_path):
    folder, texts, outputs = collection
    stored, vectors = encoded(encoder, folder, tmp_path / "document", kind="document", views=5)
    assert stored.ids == [f"d{i}" for i in range(COUNT)]
    expected = [read_alone(encoder, text, *q[:5]) for text, q in zip(texts, outputs, strict=True)]
    np.testing.assert_allclose(vectors, expected, atol=2e-5)


def test_mean_is_not_normalised_for_dot_products(collection, encoder, tmp_path):
    config = dataclasses.replace(encoder.model.config, similarity="dot")
    dot = DualEncoderModel(config, rngs=nnx.Rngs(0))
    nnx.update(dot, nnx.state(encoder.model))
    other = DualEncoder(dot, encoder.tokenizer, encoder.settings, batch_tokens=64)
    folder, texts, outputs = collection
    _, vectors = encoded(other, folder, tmp_path / "dot", views=3)
    views = [read_alone(other, texts[5], q) for q in outputs[5][:3]]
    np.testing.assert_allclose(vectors[5], np.mean(views, axis=0), atol=1e-4)
    assert abs(np.linalg.norm(vectors[5]) - 1) > 0.1


@pytest.fixture(scope="module")
def index(collection, toy, small_model, tmp_path_factory):
    """An index of corpus expansion by the commands, with at most four entries of a document."""
    folder, root = collection[0], tmp_path_factory.mktemp("entries")
    flags = [f"--expansions={folder}/queries.jsonl", "--expansion=corpus", "--views=4", "--shard_size=8"]
    toy.encode(small_model, folder / "corpus.jsonl", root / "emb", *flags)
    flags = [f"--embeddings={root}/emb", f"--corpus={folder}/corpus.jsonl", f"--output={root}/index"]
    assert cli.main("jaxir.index:index", [*flags, "--backend=exact"]) == 0
    return root


def test_corpus_expansion_finds_the_best_entry(collection, encoder, index, capsys):
    folder, texts, outputs = collection
    stored = open_embeddings(index / "emb")
    entries = [(f"d{i}", queries[:4]) for i, queries in enumerate(outputs)]
    assert stored.ids == [name for name, queries in entries for _ in range(max(1, len(queries)))]
    flags = [f"--index={index}/index", f"--queries={folder}/questions.jsonl", f"--output={index}/run"]
    assert cli.main("jaxir.search:search", [*flags, "--k=7"]) == 0
    run = read_run(index / "run")
    questions = [json.loads(line)["text"] for line in (folder / "questions.jsonl").read_text().splitlines()]
    found = encoder.encode_queries(questions)
    views = {
        name: [read_alone(encoder, text, q) for q in queries] or [read_alone(encoder, text)]
        for (name, queries), text in zip(entries, texts, strict=True)
    }
    later = 0
    for question, answers in zip(found, run.values(), strict=True):
        products = {name: [float(view @ question) for view in of_one] for name, of_one in views.items()}
        scores = {name: max(values) for name, values in products.items()}
        later += sum(values.index(max(values)) > 0 for values in products.values())
        expected = sorted(scores, key=scores.get, reverse=True)[:7]
        assert list(answers) == expected
        np.testing.assert_allclose(list(answers.values()), [scores[d] for d in expected], atol=2e-5)
    assert later > 20  # guard: a document's best view is not always its first
    assert cli.main("jaxir.search:search", [f"--index={index}/index", "--query=w1 w2", "--k=2"]) == 0
    shown = capsys.readouterr().out
    assert "  1  " in shown and re.search(r" d\d+\n", shown)


def test_index_of_entries_refuses_updates_and_milvus(index, collection, capsys, tmp_path):
    loaded = load_index(index / "index")
    assert (loaded.info.engine, loaded.info.count, loaded.info.settings["most"]) == ("entries", COUNT, 4)
    assert loaded.documents["d3"].text.startswith("w7")
    (tmp_path / "gone").write_text("d1\n")
    flags = [f"--update={index}/index", f"--delete={tmp_path}/gone"]
    assert cli.main("jaxir.index:index", flags) == 1
    assert "an index of engine entries cannot be changed in place" in capsys.readouterr().err
    assert len(load_index(index / "index").ids) == COUNT
    flags = [f"--embeddings={index}/emb", "--backend=milvus", f"--output={tmp_path}/milvus"]
    assert cli.main("jaxir.index:index", flags) == 1
    assert "milvus engine takes one vector per document" in capsys.readouterr().err
    assert not (tmp_path / "milvus").exists()


def test_resume_refuses_another_expansion(collection, encoder, tmp_path, monkeypatch):
    folder = collection[0]
    stored, vectors = encoded(encoder, folder, tmp_path / "whole", kind="corpus", views=3)
    assert stored.info.count == len(vectors) > 60
    calls, usual = [], DualEncoder.tokens

    def tokens(self, texts, *args):
        calls.append(len(texts))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return usual(self, texts, *args)

    monkeypatch.setattr(DualEncoder, "tokens", tokens)
    with pytest.raises(KeyboardInterrupt):
        encoded(encoder, folder, tmp_path / "broken", kind="corpus", views=3)
    monkeypatch.undo()
    assert 1 <= len(list((tmp_path / "broken").glob("*.npy"))) < 4
    for other in ({"kind": "corpus", "views": 2}, {"kind": "typical", "views": 3}):
        with pytest.raises(UserError, match="started with another"):
            encoded(encoder, folder, tmp_path / "broken", **other)
    # The same number of queries, with other texts.
    changed = (folder / "queries.jsonl").read_text().replace('w1"', 'w2"')
    (folder / "changed.jsonl").write_text(changed)
    with pytest.raises(UserError, match="started with another --expansions"):
        encoded(encoder, folder, tmp_path / "broken", name="changed.jsonl", kind="corpus", views=3)
    again, resumed = encoded(encoder, folder, tmp_path / "broken", kind="corpus", views=3)
    assert again.ids == stored.ids and np.array_equal(vectors, resumed)


def test_unsuitable_queries_are_refused_before_any_work(collection, encoder, tmp_path, toy):
    folder = collection[0]
    lines = (folder / "queries.jsonl").read_text().splitlines()
    (tmp_path / "short.jsonl").write_text("\n".join(lines[:-1]))
    (tmp_path / "short.txt").write_text("w1\n" * (COUNT - 1))
    toy.write_jsonl(tmp_path / "none.jsonl", [{"_id": f"d{i}", "outputs": []} for i in range(COUNT)])
    for name, message in {
        "short.jsonl": "no outputs for 1 of 30 texts",
        "short.txt": "has 29 lines",
        "none.jsonl": "has no query for any document",
    }.items():
        with pytest.raises((BadInputError, UserError), match=message):
            how = Expansion(path=str(tmp_path / name))
            encode_corpus(encoder, folder / "corpus.jsonl", tmp_path / "out", expansion=how)
        assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="--expansions only applies to documents"):
        how = Expansion(path=str(folder / "queries.jsonl"))
        encode_corpus(encoder, folder / "questions.jsonl", tmp_path / "out", tower="query", expansion=how)


def test_model_without_room_for_queries_is_refused_before_any_work(
    collection, encoder, toy, small_model, tmp_path, capsys
):
    folder, lengths = collection[0], encoder.settings
    shutil.copytree(small_model, narrow := tmp_path / "narrow")
    described = json.loads((narrow / "jaxir.json").read_text())
    described["settings"]["query_max_length"] = lengths.passage_max_length
    del described["sha256"]
    (narrow / "jaxir.json").write_text(json.dumps(described))
    corpus, queries = folder / "corpus.jsonl", f"--expansions={folder}/queries.jsonl"
    flags = [f"--model={narrow}", f"--input={corpus}", queries, f"--output={tmp_path}/out"]
    assert cli.main("jaxir.encode:encode", flags) == 1
    assert "leave no room for a query of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    wider = f"--max_length={3 * lengths.passage_max_length // 2}"
    toy.encode(narrow, corpus, tmp_path / "out", queries, wider)
