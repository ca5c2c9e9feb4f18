import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from jaxir import CrossEncoder, ExactIndex, cli
from jaxir.core.errors import UserError
from jaxir.retrieval.encoding.pair_scorer import score_pairs
from jaxir.retrieval.ranking.runs import rank, read_run, write_run
from jaxir.serving.batcher import Busy
from jaxir.serving.limits import Limits
from jaxir.serving.metrics import Metrics
from jaxir.serving.reranker import Reranker
from jaxir.serving.service import Service
from tests.retrieval.conftest import write_jsonl
from tests.serving.conftest import result_of, running
from tests.shallow import first_layers

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
QUERIES = ["w1 w2 w3", "joined arrays", "w5"]
DEPTH = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("one_layer") / "cross_bert"
    first_layers(folder, "cross_bert", ("num_hidden_layers",), r"layer\.1\.")
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def service(world, model) -> Service:
    indexes = [f"{world.root}/dense", f"second={world.root}/second"]
    return Service.open(indexes, limits=Limits(k=20), reranker=model, rerank_depth=DEPTH)


def test_reranked_order_and_scores_equal_jaxir_rerank(service, world, model, tmp_path):
    assert service.systems == ["dense", "second", "hybrid", "reranked"]
    found = result_of(service, lambda running: running.search(QUERIES, 10, ["reranked", "hybrid"]))
    run = {
        f"q{n}": dict(zip(r["hybrid"].ids[:DEPTH], r["hybrid"].scores, strict=False))
        for n, r in enumerate(found)
    }
    write_run(tmp_path / "hybrid.trec", run)
    write_jsonl(tmp_path / "queries.jsonl", [{"_id": f"q{n}", "text": q} for n, q in enumerate(QUERIES)])
    (tmp_path / "corpus.jsonl").write_text((world.root / "corpus.jsonl").read_text())
    flags = [f"--model={model}", f"--run={tmp_path}/hybrid.trec", f"--dataset=beir:{tmp_path}"]
    assert cli.main("jaxir.rerank:rerank", [*flags, f"--output={tmp_path}/new.trec"]) == 0
    expected = read_run(tmp_path / "new.trec")
    moved = 0
    for n, rankings in enumerate(found):
        assert list(rankings) == ["reranked", "hybrid"] and len(rankings["hybrid"].ids) == 10
        reranked = rankings["reranked"]
        assert len(reranked.ids) == DEPTH and {"rerank", "fuse", "total"} <= reranked.ms.keys()
        assert reranked.ms["total"] > rankings["hybrid"].ms["total"]
        wanted = [expected[f"q{n}"][d] for d in reranked.ids]
        np.testing.assert_allclose(reranked.scores, wanted, atol=1e-5)
        assert reranked.scores == sorted(reranked.scores, reverse=True)
        if len({round(score, 4) for score in wanted}) == DEPTH:  # no ties up to rounding
            assert reranked.ids == rank(expected[f"q{n}"])
        moved += reranked.ids != rankings["hybrid"].ids[:DEPTH]
    assert moved


def test_reranked_alone_shortened_and_of_one_index(service, world, model):
    found = result_of(service, lambda running: running.search(QUERIES, 2, ["reranked"]))
    whole = result_of(service, lambda running: running.search(QUERIES, 10, ["reranked"]))
    for few, many in zip(found, whole, strict=True):
        assert list(few) == ["reranked"] and few["reranked"].ids == many["reranked"].ids[:2]
    one = Service.open([f"{world.root}/dense"], limits=Limits(k=20), reranker=model, rerank_depth=DEPTH)
    assert one.systems == ["dense", "reranked"]
    (answer,) = result_of(one, lambda running: running.search(QUERIES[:1], 3, one.systems))
    (dense,) = result_of(one, lambda running: running.search(QUERIES[:1], DEPTH, ["dense"]))
    assert len(answer["dense"].ids) == 3 and set(answer["reranked"].ids) <= set(dense["dense"].ids)


def test_no_reranker_compiles_after_start(service, model):
    reranker = service.reranker
    reranker.compile_rest()
    programs = reranker.shapes._runner.program(score_pairs).executables
    before = dict(programs)
    assert len(before) == len(reranker.shapes.compiled) > 5
    pairs = [("w1 " * n, "w2 w3 " * m) for n in (1, 7, 60) for m in (0, 1, 9, 200)]
    scores = reranker.score(pairs)
    np.testing.assert_allclose(scores, CrossEncoder.load(model).score(pairs), atol=1e-5)
    for count in (1, 2, 5):
        np.testing.assert_allclose(reranker.score(pairs[:count]), scores[:count], atol=1e-5)
    assert programs == before


def test_clients_share_reranker_batches(service):
    async def many(running):
        await asyncio.gather(*(running.search([q], 3, ["reranked"]) for q in QUERIES * 4))
        text, _ = Metrics(running).text("")
        return running.reranker.batcher.sizes, text.decode()

    sizes, text = result_of(service, many)
    assert sum(size * n for size, n in sizes.items()) == DEPTH * 12 and max(sizes) > DEPTH
    assert 'jaxir_queue_length{indexes="reranked",tower="pair"} 0.0' in text
    assert 'jaxir_compiled_shapes{indexes="reranked",tower="pair"}' in text


def test_too_many_pairs_are_refused(world, model):
    limits = Limits(k=20, queries=1, waiting=1)
    service = Service.open([f"{world.root}/dense"], limits=limits, reranker=model, rerank_depth=DEPTH)

    async def two(running):
        with pytest.raises(Busy):
            await running.reranker.rerank(["a", "b"], [world.ids[:DEPTH]] * 2, lambda doc_id: "text")

    result_of(service, two)


@pytest.mark.parametrize(
    ("indexes", "flags", "sentence"),
    [
        (["dense"], {"reranker": "hf:./nowhere"}, "no such directory"),
        (["dense"], {"reranker": "{model}"}, "is a dual encoder, which makes vectors"),
        (["dense"], {"reranker": "{reader}", "rerank_depth": 21}, "--rerank_depth=21 must be at most 20"),
        (["without_texts"], {"reranker": "{reader}"}, "no index stores texts; build one with jaxir.index"),
        (["reranked=dense"], {}, "the name 'reranked' is taken"),
    ],
)
def test_serve_refuses_unsuitable_rerankers_depths_and_names(world, model, indexes, flags, sentence):
    names = [f"{world.root}/{i}" if "=" not in i else i.replace("=", f"={world.root}/") for i in indexes]
    given = {"rerank_depth": DEPTH} | flags
    if "reranker" in flags:
        given["reranker"] = flags["reranker"].format(model=world.model, reader=model)
    with pytest.raises(UserError, match=sentence):
        Service.open(names, limits=Limits(k=20), **given)


def test_documents_without_text_are_refused(world, model, tmp_path):
    """A dense index without texts has documents that the index with texts lacks."""
    vectors = np.eye(len(world.ids) + 1, world.encoder.dimension, dtype=np.float32)
    facts = {"fingerprint": world.encoder.fingerprint, "model": world.model}
    ExactIndex.build(vectors, [*world.ids, "new"], **facts).save(tmp_path / "grown")
    names = [f"{world.root}/second", str(tmp_path / "grown")]
    with pytest.raises(UserError, match=r"text of 1 of the documents of the index grown \(such as 'new'\)"):
        Service.open(names, limits=Limits(k=20), reranker=model, rerank_depth=DEPTH)
    indexes = [names[0], f"{world.root}/without_texts"]
    Service.open(indexes, limits=Limits(k=20), reranker=model, rerank_depth=6)


@pytest.mark.slow
def test_reranker_over_http(world, model, tmp_path):
    flags = [f"--index={world.root}/dense", f"--reranker={model}", f"--rerank_depth={DEPTH}"]
    with running(tmp_path, *flags) as server:
        answer = server.ask("/search", queries=QUERIES[:1], k=4)["results"][0]["systems"]
        assert [system["system"] for system in answer] == ["dense", "reranked"]
        assert len(answer[1]["hits"]) == 4 and answer[1]["ms"]["rerank"] > 0
        health = json.loads(server.request("GET", "/healthz")[2])
        assert health["systems"] == ["dense", "reranked"] and health["reranker"] == "cross_bert"
    assert "judging" not in server.log.read_text()  # no progress bar


def test_reranker_accepts_any_cross_encoder(tmp_path):
    reranker = Reranker(f"hf:{GOLDEN}/cross_roberta", depth=2)
    assert len(reranker.score([("a", "b"), ("c", "")])) == 2
