"""PostgreSQL with pgvector: a real server of the tests' own."""

import json
import time
from collections.abc import Iterator

import numpy as np
import psycopg
import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.pgvector_index import PgvectorIndex, PgvectorTable, parameters_of
from jaxir.retrieval.ranking.runs import read_run
from tests.retrieval.postgres_cluster import cluster, free_port

COUNT, DIMENSION = 2000, 16


def command(name: str, *flags: str) -> int:
    return cli.main(f"jaxir.{name}:{name}", flags)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with cluster() as uri:
        yield uri


@pytest.fixture
def uri(server, monkeypatch) -> Iterator[str]:
    monkeypatch.setenv("PGPASSWORD", "secret")
    monkeypatch.setenv("PGVECTOR_URI", server)
    yield server
    with psycopg.connect(server, autocommit=True, password="secret") as connection:
        for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'"):
            connection.execute(f'DROP TABLE "{name}"')


def tables(uri: str) -> set[str]:
    with psycopg.connect(uri) as connection:
        return {n for (n,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname='public'")}


@pytest.fixture(scope="module")
def vectors() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(COUNT, DIMENSION)).astype(np.float32)


@pytest.fixture(scope="module")
def ids() -> list[str]:
    return [f"d{i} 'x\" é\n{{}}" for i in range(COUNT)]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_results_equal_exact_search(tmp_path, toy, uri, vectors, ids, similarity):
    expected, found = toy.nearest(vectors, ids, vectors[:100], 20, similarity=similarity)
    PgvectorIndex.build([vectors[:700], vectors[700:]], ids, uri=uri, similarity=similarity).save(
        tmp_path / "index"
    )
    index = load_index(tmp_path / "index")
    scores, answers = index.search(vectors[:100], 20)
    assert answers == found
    np.testing.assert_allclose(scores, expected, rtol=1e-5, atol=1e-5)
    assert [len(row) for row in index.search(vectors[:1], COUNT + 5)[1]] == [COUNT]
    index.close()


def test_hnsw_is_used_and_returns_all_results(tmp_path, toy, uri, vectors, ids):
    _, expected = toy.nearest(vectors, ids, vectors[:50], 10)
    PgvectorIndex.build(vectors, ids, uri=uri, index_type="HNSW").save(tmp_path / "index")
    index = load_index(tmp_path / "index")
    index._opened()._ask("SET enable_seqscan = off")  # sequential scans are quicker for so few vectors
    found = index.search(vectors[:50], 10)[1]
    assert np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, expected, strict=True)]) > 0.9
    assert len(index.search(vectors[:1], 1500)[1][0]) == 1500, "more than pgvector's largest ef_search"
    index.close()
    with psycopg.connect(uri) as connection:
        used = "SELECT idx_scan FROM pg_stat_user_indexes WHERE indexrelname LIKE '%vector_idx'"
        assert connection.execute(used).fetchone()[0] > 0
    wide = np.ones([2, 2001], np.float32)
    with pytest.raises(UserError, match="at most 2000 dimensions, not 2001: give --index_type=FLAT"):
        PgvectorIndex.build(wide, ["a", "b"], uri=uri, collection="wide", index_type="HNSW").save(
            tmp_path / "wide"
        )
    assert tables(uri) == {"passages"} and not (tmp_path / "wide").exists()


def test_failed_save_leaves_no_table(tmp_path, uri, vectors, ids):
    index = PgvectorIndex.build(vectors[:9], ids[:9], uri=uri)
    with pytest.raises(UserError, match=r"does not exist|no such file|cannot be read"):
        index.save(tmp_path / "index", corpus=tmp_path / "absent.jsonl")
    assert tables(uri) == set() and not (tmp_path / "index").exists()
    index.save(tmp_path / "index")
    with pytest.raises(UserError, match=r"already has a table passages: give another --collection"):
        PgvectorIndex.build(vectors[:9], ids[:9], uri=uri)


def test_table_of_another_index_is_refused(tmp_path, uri, vectors, ids):
    PgvectorIndex.build(vectors[:9], ids[:9], uri=uri).save(tmp_path / "old")
    table = PgvectorTable(uri, "passages")
    table.drop()
    table.close()
    with pytest.raises(UserError, match="has no table passages: build the index again"):
        load_index(tmp_path / "old")
    PgvectorIndex.build(vectors[9:18], ids[:9], uri=uri).save(tmp_path / "new")
    with pytest.raises(UserError, match=r"table passages in .* was made by another index"):
        load_index(tmp_path / "old")
    with psycopg.connect(uri) as connection:
        connection.execute("ALTER TABLE passages ALTER COLUMN vector TYPE vector(3) USING '[1,2,3]'")
    with pytest.raises(UserError, match=r"has the columns .*vector\(3\).*, not .*vector\(16\)"):
        load_index(tmp_path / "new")


def test_search_continues_after_the_server_closed_the_connection(tmp_path, uri, vectors, ids):
    PgvectorIndex.build(vectors[:99], ids[:99], uri=uri).save(tmp_path / "index")
    index = load_index(tmp_path / "index")
    with psycopg.connect(uri, autocommit=True) as connection:
        others = "FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
        connection.execute(f"SELECT pg_terminate_backend(pid) {others}")
    with pytest.raises(UserError, match=r"failed: .*terminat"):
        index.search(vectors[:3], 1)
    assert index.search(vectors[:3], 1)[1] == [[i] for i in ids[:3]]
    index.close()


def test_unreachable_or_misnamed_database_is_refused_in_a_sentence(tmp_path, uri, vectors, ids, monkeypatch):
    PgvectorIndex.build(vectors[:9], ids[:9], uri=uri).save(tmp_path / "index")
    monkeypatch.setenv("PGPASSWORD", "Very5ecret")
    with pytest.raises(UserError, match=r"cannot be reached: .*password authentication failed"):
        load_index(tmp_path / "index")
    monkeypatch.delenv("PGVECTOR_URI")
    with pytest.raises(UserError, match=f"jaxir only opens if you name it: set PGVECTOR_URI={uri}"):
        load_index(tmp_path / "index")
    absent = f"postgresql://me@127.0.0.1:{free_port()}/postgres"
    for place, message in (
        (absent, "cannot be reached: .*refused"),
        (uri.replace("me@", "me:secret@"), "must not contain a password: set PGPASSWORD"),
        ("127.0.0.1:5432", "must be postgresql://USER@HOST/DATABASE, not 127"),
        (f"{uri}?colour=red", "is not a URI of PostgreSQL: .*colour"),
        (None, "--backend=pgvector needs --uri=postgresql://USER@HOST/DATABASE"),
        # 0.0.0.0 leads to this machine, but is not a loopback address, so no plain password is sent.
        (uri.replace("127.0.0.1", "0.0.0.0"), 'cannot be reached: .*"!password" failed'),
    ):
        started = time.monotonic()
        with pytest.raises(UserError, match=message) as raised:
            PgvectorIndex.build(vectors, ids, uri=place)
        assert time.monotonic() - started < 10
        assert "\n" not in str(raised.value) and "ecret" not in str(raised.value)
    assert parameters_of(f"{uri}?sslmode=require")["sslmode"] == "require"
    monkeypatch.setenv("PGVECTOR_URI", absent)
    with pytest.raises(UserError, match="where PGPASSWORD is sent, but --uri is"):
        PgvectorIndex.build(vectors, ids, uri=uri)


@pytest.mark.slow
def test_commands_use_postgres(tmp_path, toy, small_model, encoder, uri, capsys):
    texts, more_texts, queries = (toy.random_texts(count, seed=count) for count in (60, 5, 7))
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", texts)
    more = [{"_id": f"n{i}", "text": t} for i, t in enumerate(more_texts)]
    more = toy.write_jsonl(tmp_path / "more.jsonl", more)
    for name, source in (("emb", corpus), ("more", more)):
        toy.encode(small_model, source, tmp_path / name)
    flags = [f"--embeddings={tmp_path}/emb", "--backend=pgvector", f"--corpus={corpus}", f"--uri={uri}"]
    assert command("index", *flags, "--collection=docs", f"--output={tmp_path}/index") == 0
    assert tables(uri) == {"docs"}
    described = json.loads((tmp_path / "index" / "index.json").read_text())["settings"]
    assert (described["uri"], described["index_type"], described["next_row"]) == (uri, "FLAT", 60)

    search = [f"--index={tmp_path}/index", f"--queries={toy.write_queries(tmp_path / 'q.jsonl', queries)}"]
    assert command("search", *search, f"--output={tmp_path}/run", "--k=9") == 0
    passages, asking = encoder.encode_passages(texts), encoder.encode_queries(queries)
    _, found = toy.nearest(passages, [f"d{i}" for i in range(60)], asking, 9)
    assert [list(answers) for answers in read_run(tmp_path / "run").values()] == found

    # A killed update left some new rows: search reports it, and the update can be run again.
    other = PgvectorTable(uri, "docs")
    other.insert([np.ones([3, 32], np.float32)], 60, cosine=True)
    other.close()
    interrupted = load_index(tmp_path / "index")
    with pytest.raises(UserError, match="has 63 vectors and the index 60: run an interrupted update again"):
        interrupted.search(asking, 3)
    interrupted.close()
    capsys.readouterr()
    (tmp_path / "gone.txt").write_text("d1\n")
    update = [f"--update={tmp_path}/index", f"--embeddings={tmp_path}/more", f"--corpus={more}"]
    assert command("index", *update, f"--delete={tmp_path}/gone.txt") == 0
    assert "pgvector index of 64 passages (5 added, 1 deleted)" in capsys.readouterr().out
    kept = [i for i in range(60) if i != 1]
    left = [f"d{i}" for i in kept] + [f"n{i}" for i in range(5)]
    vectors = np.concatenate([passages[kept], encoder.encode_passages(more_texts)])
    _, found = toy.nearest(vectors, left, asking, 64)
    updated = load_index(tmp_path / "index")
    assert updated.search(asking, 64)[1] == found
    updated.close()
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and b"secret" in p.read_bytes()]
