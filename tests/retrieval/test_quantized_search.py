"""Vectors of quantised weights: an index records them, and queries are encoded by the same weights."""

import numpy as np
import pytest

from jaxir import DualEncoder, cli
from jaxir.core.errors import UserError
from jaxir.retrieval.encoding.stored_embeddings import open_embeddings
from jaxir.retrieval.ranking.runs import read_run
from jaxir.retrieval.searcher import Searcher
from jaxir.serving.service import Service


@pytest.mark.slow
def test_commands_encode_index_and_search_with_the_same_weights(toy, small_model, tmp_path, capsys):
    texts = toy.random_texts(30)
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", texts)
    queries = toy.write_queries(tmp_path / "queries.jsonl", texts[:5])
    embeddings = toy.encode(small_model, corpus, tmp_path / "emb", "--weights=int8")
    stored = open_embeddings(embeddings)
    wanted = DualEncoder.load(small_model, weights="int8").encode_passages(texts)
    np.testing.assert_allclose(stored.shards[0], wanted, atol=1e-6)
    assert np.abs(wanted - DualEncoder.load(small_model).encode_passages(texts)).max() > 1e-4
    assert stored.info.weights == "int8"
    in_nf4 = DualEncoder.load(small_model, weights="nf4").encode_passages(texts)
    assert 1e-5 < np.abs(in_nf4 - wanted).max() < 0.1

    index, run = tmp_path / "index", tmp_path / "run.trec"
    flags = [f"--embeddings={embeddings}", f"--model={small_model}", "--backend=exact", f"--output={index}"]
    assert cli.main("jaxir.index:index", flags) == 0
    assert Searcher.open(index).encoder.weights == "int8"
    flags = [f"--index={index}", f"--queries={queries}"]
    assert cli.main("jaxir.search:search", [*flags, f"--output={run}"]) == 0
    assert len(read_run(run)) == 5
    capsys.readouterr()
    assert cli.main("jaxir.search:search", [*flags, "--weights=nf4", f"--output={tmp_path}/other"]) == 1
    says = f"it was made with int8 weights of {small_model}, not with nf4 weights; give the same weights, or"
    assert says in capsys.readouterr().err

    again = [f"--model={small_model}", f"--input={corpus}", f"--output={embeddings}"]
    assert cli.main("jaxir.encode:encode", again) == 1
    assert "was started with another --weights ('int8', now None)" in capsys.readouterr().err


@pytest.mark.slow
def test_service_opens_indexes_of_both_weights(toy, small_model, tmp_path):
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(8))
    for name, flags in (("whole", ()), ("small", ("--weights=int8",))):
        toy.encode(small_model, corpus, tmp_path / name, *flags)
        flags = [f"--embeddings={tmp_path}/{name}", "--backend=exact", f"--output={tmp_path}/{name}-index"]
        assert cli.main("jaxir.index:index", flags) == 0
    specs = [f"{name}={tmp_path}/{name}-index" for name in ("whole", "small")]
    whole, small = (opened.searcher.encoder for opened in Service.open(specs).opened)
    assert (whole.weights, small.weights) == (None, "int8")
    with pytest.raises(UserError, match="made with unquantised weights"):
        Service.open(specs, weights="int8")
