"""The inverted index of token weights: rankings of the dense product, from a model and from vectors."""

import asyncio
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from jaxir import SparseEncoder, encode_weights
from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.sparse_index import SparseIndex
from jaxir.retrieval.ranking.runs import read_run
from jaxir.retrieval.searcher import Searcher
from jaxir.serving.service import Service

MODEL = f"hf:{Path(__file__).resolve().parent.parent}/golden/mlm_bert"
TEXTS = {
    "d1": "the cat sat on the mat",
    "d2": "dogs chase cats",
    "d10": "mice eat cheese on the table",
    "empty": "",
    "d3": "last night a dog and a cat",
}
QUERIES = {"q1": "a cat", "q2": "cheese for mice"}


def weights_of(count, vocabulary, density, seed=0):
    found = sparse.random(count, vocabulary, density, "csr", np.float32, random_state=seed)
    found.data = np.ceil(found.data * 8) / 4  # multiples of 1/4: sums are exact, and many scores tie
    return found


def expected_ranking(scores, ids, k):
    rows = sorted((i for i in range(len(ids)) if scores[i]), key=lambda i: ids[i], reverse=True)
    return sorted(rows, key=lambda i: -scores[i])[:k]


@pytest.mark.parametrize("k", [1, 10, 500])
def test_rankings_equal_those_of_the_dense_product(k, tmp_path):
    documents, queries = weights_of(300, 50, 0.05), weights_of(20, 50, 0.1, seed=1)
    ids = [f"d{number}" for number in range(300)]
    SparseIndex.build(documents, ids).save(tmp_path / "index")
    scores, found = load_index(tmp_path / "index").search(queries, k)
    products = queries.toarray() @ documents.toarray().T
    assert scores.shape == (20, min(k, 300))
    for row, product in enumerate(products):
        best = expected_ranking(product, ids, k)
        assert found[row] == [ids[i] for i in best]
        np.testing.assert_array_equal(scores[row, : len(best)], product[best])
        assert (scores[row, len(best) :] == -np.inf).all()


def test_weights_of_one_byte_change_scores_by_less_than_their_rounding():
    documents, queries = weights_of(200, 40, 0.2), weights_of(9, 40, 0.2, seed=1)
    documents.data = np.random.default_rng(0).uniform(0, 3, len(documents.data)).astype(np.float32)
    ids = [f"d{number}" for number in range(200)]
    index = SparseIndex.build(documents, ids, storage="int8")
    scores, found = index.search(queries, 200)
    products = queries @ documents.T
    for row, names in enumerate(found):
        exact = products[row].toarray()[0, [int(name[1:]) for name in names]]
        off = queries[row].sum() * documents.data.max() / 255 / 2
        np.testing.assert_allclose(scores[row, : len(names)], exact, atol=off * 1.0001)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("sparse")
    for name, texts in (("corpus", TEXTS), ("queries", QUERIES)):
        lines = [json.dumps({"_id": i, "title": "", "text": text}) for i, text in texts.items()]
        (place / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return place


def run(command, *flags):
    function = importlib.import_module(f"jaxir.{command}").__dict__[command]
    function(**dict(flag.removeprefix("--").split("=", 1) for flag in flags))


@pytest.fixture(scope="module")
def index(folder):
    run(
        "index",
        "--backend=sparse",
        f"--model={MODEL}",
        f"--corpus={folder}/corpus.jsonl",
        f"--output={folder}/index",
    )
    return folder / "index"


def test_a_corpus_is_indexed_and_searched_with_the_model_that_the_index_names(index, folder, capsys):
    encoder = SparseEncoder.load(MODEL)
    products = (
        encoder.encode_queries(list(QUERIES.values())) @ encoder.encode_passages(list(TEXTS.values())).T
    )
    run("search", f"--index={index}", f"--queries={folder}/queries.jsonl", f"--output={folder}/run.trec")
    found = read_run(folder / "run.trec")
    for row, query in enumerate(QUERIES):
        scores = dict(zip(TEXTS, products[row].toarray()[0], strict=True))
        del scores["empty"]  # a document without text is left out
        assert list(found[query]) == sorted(scores, key=lambda i: -scores[i])
        np.testing.assert_allclose([*found[query].values()], sorted(scores.values(), reverse=True), rtol=1e-5)
    run("search", f"--index={index}", "--query=a cat")
    assert next(iter(found["q1"])) in capsys.readouterr().out


def test_vectors_of_a_file_are_searched_with_token_weights_or_with_their_model(index, folder, capsys):
    encoder = SparseEncoder.load(MODEL)
    encode_weights(encoder, folder / "corpus.jsonl", folder / "vectors.jsonl")
    encode_weights(encoder, folder / "queries.jsonl", folder / "query_vectors.jsonl", tower="query")
    flags = ["--backend=sparse", f"--vectors={folder}/vectors.jsonl"]
    run("index", *flags, f"--output={folder}/plain")
    run("index", *flags, f"--output={folder}/named", f"--model={MODEL}", f"--corpus={folder}/corpus.jsonl")
    runs = []
    for place, queries in (("plain", "query_vectors"), ("named", "queries"), ("index", "queries")):
        output = folder / f"{place}.trec"
        run(
            "search", f"--index={folder}/{place}", f"--queries={folder}/{queries}.jsonl", f"--output={output}"
        )
        runs.append(read_run(output))
    for query in QUERIES:
        assert [i for i in runs[1][query] if i != "empty"] == list(runs[2][query])
        for found, unit in ((runs[0], 1e4), (runs[1], 1e2)):  # weights in files are times 100
            ours = [found[query][i] / unit for i in runs[2][query]]
            np.testing.assert_allclose(ours, [*runs[2][query].values()], rtol=0.02)


def test_a_served_index_encodes_queries(index):
    async def search():
        async with Service.open([f"splade={index}"]) as service:
            return await service.search(["a cat"], 2, ["splade"])

    [found] = asyncio.run(search())
    _, [expected] = Searcher.open(index).search(["a cat"], 2)
    assert found["splade"].ids == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--corpus=DIR/corpus.jsonl", "--backend=sparse needs --model and --corpus, or --vectors"),
        (
            "--vectors=DIR/strange.jsonl --model=MODEL",
            "the token 'katze' of document 'd1' is not in the vocab",
        ),
        (
            "--vectors=DIR/strange.jsonl --storage=bfloat16",
            "holds weights in float32 or int8, not in bfloat16",
        ),
    ],
)
def test_what_cannot_be_indexed_is_refused(flags, message, folder):
    (folder / "strange.jsonl").write_text('{"_id": "d1", "vector": {"katze": 3}}\n')
    flags = flags.replace("DIR", str(folder)).replace("MODEL", MODEL).split()
    with pytest.raises(UserError, match=message):
        run("index", "--backend=sparse", f"--output={folder}/refused", *flags)


def test_another_model_is_refused(index):
    other = MODEL.replace("mlm_bert", "mlm_distilbert")
    with pytest.raises(UserError, match="the index cannot be searched with this model"):
        Searcher.open(index, model=other)
    with pytest.raises(UserError, match=r"the queries have weights of 7 tokens and the index of 100"):
        load_index(index).search(sparse.csr_matrix((1, 7), dtype=np.float32), 3)
