import asyncio
import contextlib
import functools
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from jaxir import DualEncoder, ExactIndex
from jaxir.core.errors import UserError
from jaxir.data.formats.sources import Document
from jaxir.models import packed
from jaxir.retrieval.encoding.batch_runner import Runner
from jaxir.retrieval.encoding.tower_functions import EMBED, PACKED
from jaxir.retrieval.indexes.milvus_index import MilvusIndex
from jaxir.retrieval.ranking.fusion import reciprocal_rank_fusion
from jaxir.runtime import cpu
from jaxir.runtime.partitioning import MeshConfig
from jaxir.serving.access_log import AccessLog
from jaxir.serving.engines import DenseEngine
from jaxir.serving.examples import phrase_of
from jaxir.serving.few_shapes import ROWS, lay_out, lengths_up_to
from jaxir.serving.limits import Limits
from jaxir.serving.packed_shapes import BATCH_TOKENS, chosen, fill_rows, plan
from jaxir.serving.service import Service
from tests.retrieval.conftest import random_texts, write_jsonl
from tests.serving.conftest import answered, result_of

QUERIES = ["w1 w2 w3", "w5", "joined arrays", "w7 w8 w9 " * 9]


@pytest.fixture(scope="module")
def service(world) -> Service:
    indexes = [f"{world.root}/dense", f"second={world.root}/second", f"again={world.root}/dense"]
    return Service.open(indexes, limits=Limits(k=20))


def test_layout_has_every_text_once_in_few_shapes():
    rng = np.random.default_rng(0)
    lengths = lengths_up_to(200)
    assert lengths == [16, 32, 64, 128, 200] and lengths_up_to(10) == [10] and lengths_up_to(17) == [16, 17]
    assert lengths_up_to(200, is_fine=True) == [16, 32, 48, 64, 80, 96, 112, 128, 192, 200]
    known = [(rows, length) for rows in ROWS for length in lengths if rows == 1 or rows * length <= 512]
    for call_tokens in (0, 16, 10**6):
        shapes = set()
        for _ in range(100):
            counts = rng.integers(1, 201, rng.integers(1, 70)).tolist()
            plan = lay_out(counts, known, call_tokens=call_tokens)
            assert sorted(text for _, _, texts in plan for text in texts) == list(range(len(counts)))
            for rows, length, texts in plan:
                assert (rows, length) in known and 1 <= len(texts) <= rows
                assert max(counts[text] for text in texts) <= length
            shapes |= {(rows, length) for rows, length, _ in plan}
        assert len(shapes) <= len(known)


def test_batches_are_padded_if_calls_are_expensive():
    shapes = [(rows, 16) for rows in ROWS]
    assert [p[0] for p in lay_out([5] * 7, shapes, call_tokens=0)] == [4, 2, 1]
    assert [p[0] for p in lay_out([5] * 7, shapes, call_tokens=16)] == [8]


def test_texts_are_padded_to_the_shapes_that_are_ready():
    plan = lay_out([5, 200, 7, 70], [(1, 64), (1, 256)], call_tokens=0)
    assert sorted(plan) == [(1, 64, [0]), (1, 64, [2]), (1, 256, [1]), (1, 256, [3])]
    assert lay_out([5], [(4, 64)], call_tokens=0) == [(4, 64, [0])]


def test_rows_begin_with_the_oldest_text_and_take_what_fits():
    rows = fill_rows([100, 30, 60, 20, 68, 8], [128])
    assert [(row.texts, row.tokens) for row in rows] == [([0, 3, 5], 128), ([1, 4], 98), ([2], 60)]
    assert [row.texts for row in fill_rows([2] * 20, [128])] == [list(range(16)), [16, 17, 18, 19]]
    assert [row.length for row in fill_rows([10, 200, 100], [128, 256])] == [128, 256]


def test_batch_takes_the_oldest_texts_up_to_its_tokens_and_shares_few_texts():
    sizes = np.random.default_rng(0).integers(10, 121, 60).tolist()
    waiting = list(range(60))
    while waiting:
        texts = chosen([sizes[n] for n in waiting], idle=1, max_length=256)
        assert texts[0] == 0 and len(set(texts)) == len(texts)
        assert sum(sizes[waiting[n]] for n in texts) <= BATCH_TOKENS
        waiting = [text for n, text in enumerate(waiting) if n not in texts]
    assert chosen([60] * 4, idle=2, max_length=256) == [0, 1]  # the other thread gets the other two
    assert chosen([512, 10], idle=1, max_length=512) == [0]


def test_plan_fits_the_programs_that_are_ready():
    assert plan([5, 200, 7], [(1, 64), (1, 256)]) == [(256, [[0, 1, 2]])]
    shapes = [(1, 16), (1, 64), (1, 128), (2, 128), (4, 128)]
    assert plan([5], shapes) == [(16, [[0]])]
    batches = plan([100] * 7, shapes)
    assert [(length, len(rows)) for length, rows in batches] == [(128, 4), (128, 2), (128, 1)]
    assert sorted(text for _, rows in batches for row in rows for text in row) == list(range(7))


@pytest.mark.parametrize("packs", [True, False])
def test_vectors_equal_the_models_and_nothing_compiles_after_start(world, monkeypatch, packs):
    monkeypatch.setattr(packed, "packs", lambda model, tower: packs)
    engine = DenseEngine(world.encoder, {}, k=1)
    engine.warm_up(1)
    texts = ["", *random_texts(37, seed=9)]
    for tower in ("query", "passage"):
        shapes = engine._variant(0)
        programs = shapes._runner.program((PACKED if packs else EMBED)[tower]).executables
        assert set(programs) == set(shapes.shapes(world.encoder.text_settings(tower)[1]))
        assert len(programs) == engine.compiled_shapes(tower) > 3
        before = dict(programs)
        expected = world.encoder.encode(texts, tower=tower)
        for count in (1, 2, 3, 13, len(texts)):
            np.testing.assert_allclose(engine.encode(texts[:count], tower)[0], expected[:count], atol=2e-6)
        assert programs == before


def test_concurrent_requests_for_a_program_share_it(world):
    """Regression: two programs were made, so that the first client waited for a second compilation."""
    runner = Runner(world.encoder.model, MeshConfig().build(jax.local_devices()[:1]))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(100):
                function = functools.partial(EMBED["query"])
                programs = [pool.submit(runner.program, function) for _ in range(4)]
                assert len({id(program.result()) for program in programs}) == 1
    finally:
        sys.setswitchinterval(interval)


def test_bfloat16_products_are_those_of_other_commands(world, monkeypatch):
    monkeypatch.setattr(cpu, "has_quick_bfloat16", lambda: True)  # the program is valid on every CPU
    encoder = DualEncoder.load(world.model, dtype="bfloat16")
    # Under the partitioner parameters have sharding constraints, and products return float32.
    engine = DenseEngine(encoder, {}, k=1)
    runner, ids = engine._variant(0)._runner, jax.ShapeDtypeStruct((2, 16), np.int32)
    lowered = runner.program(PACKED["query"]).jitted.lower(runner.parameters, (ids, ids)).as_text()
    found = re.findall(r"dot_general.*: \(tensor<\S*xbf16>, tensor<\S*xbf16>\) -> tensor<\S*x(\w+)>", lowered)
    assert found.count("f32") >= 6 * encoder.model.config.backbone.num_layers
    assert "sdy.sharding_constraint" in lowered
    alone = DualEncoder.load(world.model, dtype="bfloat16")
    np.testing.assert_allclose(engine.encode(QUERIES, "query")[0], alone.encode_queries(QUERIES), atol=1e-2)


def test_rankings_equal_those_of_indexes_and_fusion(service):
    assert service.systems == ["dense", "second", "again", "hybrid"]
    assert service.engines["dense"] is service.engines["again"]  # one model, so one engine
    rankings = result_of(service, lambda running: running.search(QUERIES, 7, service.systems))
    assert len(rankings) == len(QUERIES)
    for system in ("dense", "again", "hybrid"):
        assert [ranking[system].cut_at for ranking in rankings] == [None, None, None, 41]
    runs = []
    for opened in service.opened:
        scores, ids = opened.searcher.search(QUERIES, 20)
        for row, ranking in enumerate(rankings):
            assert ranking[opened.name].ids == ids[row][:7]
            expected = scores[row][: len(ids[row])]
            np.testing.assert_allclose(ranking[opened.name].scores, expected[:7], atol=2e-6)
        runs.append({str(q): dict(zip(i, scores[q].tolist(), strict=False)) for q, i in enumerate(ids)})
    fused = reciprocal_rank_fusion(runs, depth=7)
    assert [r["hybrid"].ids for r in rankings] == [list(fused[str(q)]) for q in range(len(QUERIES))]
    assert any(r["hybrid"].ids != r["dense"].ids for r in rankings)


def test_concurrent_queries_share_batches(service):
    async def many(running):
        engine, sizes = running.engines["dense"], []
        answer = engine.answer
        batcher = running.batchers[engine.name, "query"]
        batcher._work = lambda questions: sizes.append(len(questions)) or answer(questions)
        alone = [(await running.search([query], 5, ["dense"]))[0] for query in QUERIES]
        sizes.clear()
        together = await asyncio.gather(*(running.search([q], 5, ["dense"]) for q in QUERIES * 20))
        return alone, together, sizes

    alone, together, sizes = result_of(service, many)
    assert sum(sizes) == 80 and len(sizes) < 10
    for number, (answer,) in enumerate(together):
        assert answer["dense"].ids == alone[number % 4]["dense"].ids


def test_encode_uses_towers_and_reports_cuts(world, service):
    async def both(running):
        opened, _, queries = await running.encode(QUERIES, "query", None)
        with pytest.raises(KeyError, match="no index 'other' here has a model"):
            await running.encode(QUERIES, "query", "other")
        with pytest.raises(KeyError, match="no index '' here has a model"):
            await running.encode(QUERIES, "query", "")
        return opened, queries, (await running.encode(QUERIES, "passage", "dense"))[2]

    opened, *answers = result_of(service, both)
    cuts, passage_cuts = ([answer.cut_at for answer in some] for some in answers)
    queries, passages = (np.stack([answer.vector for answer in some]) for some in answers)
    assert opened.name == "dense"
    # Queries have 16 tokens, two of them special; passages have more.
    assert cuts == [None, None, None, len("w7 w8 w9 " * 4 + "w7 w8")] and passage_cuts == [None] * 4
    np.testing.assert_allclose(queries, world.encoder.encode_queries(QUERIES), atol=2e-6)
    np.testing.assert_allclose(passages, world.encoder.encode_passages(QUERIES), atol=2e-6)
    assert np.abs(passages - queries).max() > 0.1  # the towers differ


def test_examples_resemble_typed_queries(service):
    found = service.examples(4)
    assert len(set(found)) == 4
    assert set(found) <= {"Joining arrays", *(f"Title {i}" for i in range(10))}
    assert {tuple(service.examples(4)) for _ in range(5)} != {tuple(found)}
    phrases = [
        ("", "Short. A library to read and write files. It is quick.", "A library to read and write files"),
        ("numpy.linalg.solve", "solve(a, b)\nSolve a linear equation.", "Solve a linear equation"),
        ("A title of  words", "Never the text of it.", "A title of words"),
        ("", "x = 1; y = 2; 0x55 0x66", None),
        ("", "word " * 500, None),
        ("日本語の題名です", "", "日本語の題名です"),
    ]
    for title, text, expected in phrases:
        assert phrase_of(Document("1", title, text)) == expected


def test_internal_errors_hide_their_details(service, monkeypatch):
    def fails(count):
        raise RuntimeError("a secret")

    monkeypatch.setattr(service, "examples", fails)
    status, answer = answered(service, "GET", "/examples")
    assert (status, answer) == (500, {"detail": "internal error of the service (RuntimeError)"})


def test_metadata_counts_towards_the_limit_of_whole_documents(world, tmp_path):
    records = [{"_id": i, "text": "w1", "metadata": {"raw": 1000 * i}} for i in "abcde"]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", records)
    facts = {"fingerprint": world.encoder.fingerprint, "model": world.model}
    vectors = world.encoder.encode_passages([r["text"] for r in records])
    ExactIndex.build(vectors, list("abcde"), **facts).save(tmp_path / "index", corpus=corpus)
    whole = 5 * (len("w1") + len(json.dumps(records[0]["metadata"])))
    for characters, status in ((whole, 200), (whole - 1, 422)):
        service = Service.open([f"{tmp_path}/index"], limits=Limits(k=5, whole_characters=characters))
        got, answer = answered(service, "POST", "/search", {"queries": ["w1"], "k": 5, "full": True})
        assert got == status
    assert "full: these documents have more than 5,064 characters" in answer["detail"]


def test_failed_engine_hides_the_machine_from_clients(world, tmp_path, capsys):
    vectors, ids = world.encoder.encode_passages(["w1", "w2"]), ["a", "b"]
    facts = {"similarity": "cosine", "fingerprint": world.encoder.fingerprint, "model": world.model}
    MilvusIndex.build(vectors, ids, **facts).save(tmp_path / "index")
    service = Service.open([f"{tmp_path}/index"], limits=Limits(k=2))
    with contextlib.closing(service.opened[0].index) as index:
        index._collection._client.drop_collection("passages")  # as another user of Milvus could do
        status, answer = answered(service, "POST", "/search", {"queries": ["w1"], "k": 2})
    assert status == 503
    assert answer == {"detail": "the service cannot answer now; its standard error has the reason"}
    err = capsys.readouterr().err
    assert "error: " in err and str(tmp_path) in err


def test_access_log_reports_write_errors_once_and_is_rotated(tmp_path, capsys):
    with pytest.raises(UserError, match=r"cannot write --access_log=.*nowhere/log: no such file"):
        AccessLog(str(tmp_path / "nowhere" / "log"))
    full = AccessLog("/dev/full")
    for _ in range(3):
        full.write("127.0.0.1", "GET", "/", 200, 0.1)
    said = capsys.readouterr().err
    assert said.count("cannot write the access log, lines are lost: [Errno 28] No space left") == 1
    log = AccessLog(str(tmp_path / "log"))
    log.write("127.0.0.1", "GET", "/one", 200, 0.1)
    (tmp_path / "log").rename(tmp_path / "log.1")  # what logrotate does
    log.write("127.0.0.1", "GET", "/two", 200, 0.1)
    log.close()
    full.close()
    assert "/one" in (tmp_path / "log.1").read_text() and "/two" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], "there is nothing to serve: give --index=DIR, --model=MODEL or --reranker=MODEL"),
        (["{root}/dense", "{root}/dense"], "the name 'dense' is taken: give .*/dense another name"),
        (["hybrid={root}/dense"], "the name 'hybrid' is taken"),
        (["={root}/dense"], "'=.*/dense' lacks a name; write --index=NAME=DIR"),
        (["dense="], "'dense=' lacks a directory; write --index=NAME=DIR"),
        (["{root}/dense", "{root}/foreign"], "dense and foreign have no document in common"),
    ],
)
def test_service_refuses_indexes(world, names, sentence):
    foreign = world.root / "foreign"
    if not foreign.exists():
        vectors = world.encoder.encode_passages(["w1", "w2"])
        facts = {"fingerprint": world.encoder.fingerprint, "model": world.model}
        ExactIndex.build(vectors, ["1", "2"], **facts).save(foreign)
    with pytest.raises(UserError, match=sentence):
        Service.open([name.format(root=world.root) for name in names])


def test_unsatisfiable_limits_are_refused():
    with pytest.raises(UserError, match="k must be a whole number of at least 1, not 0"):
        Limits(k=0)
    with pytest.raises(UserError, match="waiting is 32, but one request may have 64 queries"):
        Limits(waiting=32)
    assert Limits(waiting=32, queries=32).waiting == 32
