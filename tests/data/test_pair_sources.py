import pyarrow
import pyarrow.parquet as pq
import pytest

from jaxir.core.errors import BadInputError
from jaxir.core.features import TextFormat
from jaxir.data.formats.sources import text_id
from jaxir.data.sets.pair_sources import BeirPairs, JsonlPairs, ParquetPairs, TevatronPairs, TsvPairs
from jaxir.objectives.pair_batch import pair_features
from tests.dataset_rows import assert_equal

PAIRS = pair_features(TextFormat(12, 20))
WITH_NEGATIVE = pair_features(TextFormat(12, 20, num_negatives=1))


def test_every_source_gives_the_same_pairs(minilm, tmp_path, write_jsonl):
    rows = [("what is a", "a is b", "c is d"), ("what is e", "e is f", "g is h")]
    jsonl = [{"query": q, "passage": p, "negatives": [n]} for q, p, n in rows]
    tevatron = [
        {
            "query_id": text_id(q),
            "query": q,
            "positive_passages": [{"docid": text_id(p), "title": p[:1], "text": p[2:]}],
            "negative_passages": [{"docid": text_id(n), "text": n}],
        }
        for q, p, n in rows
    ]
    (tmp_path / "pairs.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    pq.write_table(pyarrow.Table.from_pylist(jsonl), tmp_path / "pairs.parquet")
    sources = [
        JsonlPairs(path=str(write_jsonl("pairs.jsonl", jsonl))),
        ParquetPairs(path=str(tmp_path / "pairs.parquet")),
        TsvPairs(path=str(tmp_path / "pairs.tsv")),
        TevatronPairs(path=str(write_jsonl("tevatron.jsonl", tevatron))),
    ]
    first, *others = [s.build(minilm, WITH_NEGATIVE).once() for s in sources]
    for other in others:
        assert_equal(first, other)

    write_jsonl("c/corpus.jsonl", [{"_id": text_id(p), "title": p[:1], "text": p[2:]} for _, p, _ in rows])
    write_jsonl("c/queries.jsonl", [{"_id": text_id(q), "text": q} for q, _, _ in rows])
    qrels = "".join(f"{text_id(q)}\t{text_id(p)}\t1\n" for q, p, _ in rows)
    (tmp_path / "c/qrels").mkdir()
    (tmp_path / "c/qrels/train.tsv").write_text(qrels)
    beir = BeirPairs(directory=str(tmp_path / "c")).build(minilm, PAIRS).once()
    assert_equal(beir, {k: first[k] for k in beir})


def test_malformed_rows_of_parquet_are_refused_or_skipped(minilm, tmp_path, capsys):
    path = tmp_path / "pairs.parquet"
    source = ParquetPairs(path=str(path))
    rows = [{"query": "q", "passage": "p", "query_id": None}, {"query": "r", "passage": None}]
    for columns, message in (
        (rows, r"pairs\.parquet:2: field 'passage' is not a string but null"),
        ([{"query": b"q", "passage": "p"}], r"pairs\.parquet:1: field 'query' is not a string but bytes"),
        ([{"question": "q", "passage": "p"}], r"parquet:1: no field 'query' \(it has 'passage'\)"),
    ):
        pq.write_table(pyarrow.Table.from_pylist(columns), path)
        with pytest.raises(BadInputError, match=message):
            source.build(minilm, PAIRS)
    pq.write_table(pyarrow.Table.from_pylist(rows), path)
    assert source.build(minilm, PAIRS, on_bad_input="skip").num_examples == 1
    assert "skipped 1 record: field 'passage' is not a string" in capsys.readouterr().err
