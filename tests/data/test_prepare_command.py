import json
import re

import pytest

from jaxir import cli
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import PairExample
from jaxir.data.sets.msmarco import MsMarcoPairs
from jaxir.data.sets.multireqa import MultiReqaPairs
from jaxir.data.sets.pair_sources import BeirPairs
from jaxir.evaluation.collection import read_collection
from tests.data import published


def prepare(*flags):
    return cli.main("jaxir.prepare:prepare", flags)


def examples(source):
    return list(source.examples(OnBadInput()))


def test_msmarco_with_two_splits(tmp_path, capsys):
    folder, output = published.write_msmarco(tmp_path / "msmarco"), tmp_path / "out"
    assert prepare(f"--dataset=msmarco:{folder}", "--splits=train,dev.small", f"--output={output}") == 0
    counted, cut, advice = capsys.readouterr().out.splitlines()
    assert counted == f"{output}: 6 passages, 4 queries, 3 judgements (train), 1 judgements (dev.small)"
    assert cut.startswith(
        "truncated: 0 of 4 queries (0 %) at 256 tokens, 0 of 6 passages (0 %) at 256 tokens"
    )
    assert advice.endswith(f"python -m jaxir.evaluate --model=MODEL --dataset=beir:{output} --split=train")
    for split in ("train", "dev.small"):
        pairs = examples(MsMarcoPairs(directory=str(folder), split=split))
        assert examples(BeirPairs(directory=str(output), split=split)) == pairs != []
    collection = read_collection(output, "dev.small")
    assert collection.qrels == {"1048585": {"3": 1}} and len(collection.documents) == 6


def test_msmarco_splits_that_share_queries(tmp_path, capsys):
    """MS MARCO's dev.small is a part of its dev split."""
    folder, output = published.write_msmarco(tmp_path / "msmarco"), tmp_path / "out"
    published.write_lines(folder / "queries.dev.tsv", ["55\twhat is a mill", "1048585\twhere do rivers end"])
    published.write_lines(folder / "qrels.dev.tsv", ["55\t0\t2\t1", "1048585\t0\t3\t1"])
    flags = [f"--dataset=msmarco:{folder}", f"--output={output}"]
    assert prepare(*flags, "--splits=dev,dev.small,dev") == 0
    assert "6 passages, 2 queries, 2 judgements (dev), 1 judgements (dev.small)" in capsys.readouterr().out
    found = [read_collection(output, split).query_ids for split in ("dev", "dev.small")]
    assert found == [["55", "1048585"], ["1048585"]]
    other = published.write_lines(folder / "queries.dev.small.tsv", ["1048585\twhere do they begin"])
    assert prepare(*flags[:1], f"--output={tmp_path}/other", "--splits=dev,dev.small") == 1
    error = f"error: {other}: query '1048585' has another text than in an earlier split\n"
    assert capsys.readouterr().err == error and not (tmp_path / "other").exists()


@pytest.mark.parametrize("cut", ["collection", "queries.train"])
def test_truncated_msmarco_files_are_refused(tmp_path, capsys, cut):
    folder, output = published.write_msmarco(tmp_path / "msmarco"), tmp_path / "out"
    place = folder / f"{cut}.tsv"
    lines = place.read_text().splitlines(keepends=True)
    place.write_text("".join(lines[:1] if cut == "queries.train" else lines[:5]))
    flags = [f"--dataset=msmarco:{folder}", "--splits=train", f"--output={output}"]
    assert prepare(*flags) == 1
    line, unknown = {"collection": (3, "document '5'"), "queries.train": (2, "query '634306'")}[cut]
    judged = folder / "qrels.train.tsv"
    assert capsys.readouterr().err == f"error: {judged}:{line}: judgement for an unknown {unknown}\n"
    assert not output.exists()
    assert prepare(*flags, "--on_bad_input=skip") == 0
    assert f"for an unknown {unknown.split()[0]} (first: {judged}:{line})" in capsys.readouterr().err
    assert set(read_collection(output, "train").qrels) <= {"121352", "634306"}


def test_multireqa(tmp_path):
    mrqa, candidates = published.write_multireqa(tmp_path)
    output = tmp_path / "out"
    dataset = f"--dataset=multireqa:{mrqa},{candidates}"
    assert prepare(dataset, f"--output={output}", "--with_context=false") == 0
    source = MultiReqaPairs(mrqa=str(mrqa), candidates=str(candidates), with_context=False)
    assert examples(BeirPairs(directory=str(output), split="test")) == examples(source)
    collection = read_collection(output)
    assert collection.query_ids == ["a1", "a2", "a3", "a4", "c1"]
    assert collection.document_ids == [*(f"SQuAD_a1/a2/a3/a4/_{i}" for i in range(3)), "SQuAD_b1/_1"]


def test_beir_from_tfds(tmp_path):
    pytest.importorskip("tensorflow_datasets")
    row = published.beir_row
    splits = {"test": [row("q1", "question", "d1", "text", 2.0, "Title")], "query": [row("q1", "question")]}
    splits["passage"] = [row(passage_id="d1", passage="text", title="Title")]
    published.store_tfds(tmp_path, "beir/scidocs", splits)
    flags = ["--dataset=tfds:beir/scidocs", f"--data_dir={tmp_path}", f"--output={tmp_path / 'out'}"]
    assert prepare(*flags) == 0
    (pair,) = examples(BeirPairs(directory=str(tmp_path / "out"), split="test"))
    assert pair == PairExample("q1", "question", "d1", "Title text")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("msmraco:DIR", "--dataset must be one of pairs:FILE, msmarco:DIR, .*; did you mean 'msmarco'"),
        ("msmarco:{}/none", "is not an MS MARCO folder"),
        ("msmarco:x --query=a", "--query only applies to --dataset=pairs:FILE: leave it out"),
        ("multireqa:{}/a.jsonl.gz", "takes two files, MRQA_FILE,CANDIDATES_FILE"),
        ("nq:{}/none.jsonl", "no such file or directory"),
        ("nq:{}/bad.jsonl", "bad.jsonl:2: not valid JSON"),
        ("nq:{}/twice.jsonl", "twice.jsonl:2: duplicate id '1'"),
        ("nq:{}/good.jsonl --splits=../dev", r"--splits has '\.\./dev', which cannot be SPLIT in the"),
    ],
)
def test_unusable_input_is_refused_and_nothing_is_written(tmp_path, capsys, dataset, message):
    good = json.dumps(published.nq_record(1, "what", published.PARAGRAPH))
    for name, lines in {"bad": [good, "{"], "twice": [good, good], "good": [good]}.items():
        published.write_lines(tmp_path / f"{name}.jsonl", lines)
    before = sorted(tmp_path.iterdir())
    flags = f"--dataset={dataset.format(tmp_path)}".split()
    assert prepare(*flags, f"--output={tmp_path / 'out'}") == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert re.search(message, err)
    assert sorted(tmp_path.iterdir()) == before
