from pathlib import Path

import pytest

from jaxir import cli
from jaxir.evaluation.sts_files import has_splits

FUSE = "fuse --runs=a.trec,b.trec --output=out"
MINE = "mine --dataset=beir:. --output=out"
SERVE = "serve --port=0"
PLAN = "plan --gin_file=gin/samtone_base.gin --topology=gpu:8xh100"
GRID = "grid --recipe=r --datasets=d --steps=3 --models=m --output_dir=out"
# Each command line, run in a folder with a.trec, b.trec and a small BEIR folder, and words of its error.
REFUSED = [
    # empty or malformed values
    ("fuse --runs= --method=rrf --output=out", "--runs is empty"),
    (f"{FUSE} --method=rrf --gin.fuse.queries=''", "fuse.queries is empty"),
    (f"{FUSE} --method=interpolate --sweep=0.1 --qrels=q --metric=RR|P@1", "--metric must be one metric"),
    ("evaluate --run= --qrels=q", "--run is empty"),
    ("evaluate --gin.evaluate.run=[] --qrels=q", "give --run and --qrels"),
    ("evaluate --run=a.trec+ --qrels=q", "'a.trec+' lacks a run file"),
    ("rerank --model=hf: --run=run.trec --dataset=beir:. --output=out", "write hf:DIR or hf:NAME"),
    ("encode --model=w2v: --input=a.trec --output=out", "write w2v:FILE"),
    (f"{MINE} --run=a.trec --gin.mine.margin=True", "mine.margin must be a number"),
    (f"{MINE} --run=a\nb", r"a\nb: no such run file"),
    ("analyze --models=A=,B=m --dataset=beir:. --output=out", "'A=' lacks a model"),
    ("analyze --models==m --dataset=beir:. --output=out", "'=m' lacks a name"),
    (f"{SERVE} --index=i --host=..", "cannot serve on --host=.. --port=0"),
    (f"{SERVE} --index=i --access_log=a.trec", "--access_log=a.trec is not an access log"),
    (f"{SERVE} --index=i --access_log=~", "~: shells do not expand ~"),
    (f"{SERVE} --index=i --access_log=gs://b/log", "gs://b/log: this can be written to local"),
    (f"{SERVE} --index=a=", "'a=' lacks a directory"),
    # objects of a wrong kind in gin files
    (f"{PLAN} --gin.train.mesh=[]", "train.mesh must be"),
    (f"{PLAN} --gin.train.objective=3", "object, @NAME()"),
    (f"{SERVE} --index=i --gin.serve.limits=3", "serve.limits must be an object, Limits or None"),
    (f"{GRID} --gin.grid.variants=['x']", "variants must be a list of @Variant(), not ['x']"),
    # flags that have no effect together with the others
    ("evaluate --run=a.trec --qrels=q --split=dev", "--split only applies to a --dataset"),
    ("evaluate --model=m --dataset=sts:. --metrics=RR", "--metrics only applies to retrieval"),
    ("evaluate --model=absent --dataset=sts:a.trec --split=dev", "--split only applies to a folder"),
    ("analyze --models=absent --dataset=sts:a.trec --output=out --split=dev", "only applies to beir: "),
    ("search --index=absent --query=why --on_bad_input=skip", "--on_bad_input only applies to --queries"),
    (f"{MINE} --run=absent --sampling=top --seed=1", "--seed only applies to --sampling=random"),
    ("expand:generate --model=m --input=i --output=out --num_beams=2 --seed=1", "applies to sampling"),
    ("prepare --dataset=pairs:absent --output=out --data_dir=absent", "only applies to published data"),
    ("prepare --dataset=nq:absent --output=out --seed=1", "--seed only applies to --dataset=pairs:FILE"),
    (f"{SERVE} --index=absent --rerank_depth=3", "--rerank_depth only applies to --reranker"),
    ("index --embeddings=absent --output=out --on_bad_input=skip", "only applies to --backend=bm25s"),
    ("index --update=absent --delete=absent --on_bad_input=skip", "only applies to the --corpus of a"),
    # inputs in a bucket, for commands that only read local files
    ("search --index=gs://b/x --query=why", "gs://b/x: this can be "),
    (f"{SERVE} --index=name=gs://b/x", "gs://b/x: this can be "),
    ("index --embeddings=gs://b/x --output=out", "gs://b/x: this can be "),
    ("index --backend=lucene --corpus=gs://b/x --output=out", "gs://b/x: this can be "),
    ("index --update=gs://b/x --delete=ids", "gs://b/x: this can be "),
    ("evaluate --run=gs://b/x --qrels=gs://b/x", "gs://b/x: this can be "),
    ("evaluate --model=absent --dataset=beir:gs://b/x", "gs://b/x: this can be "),
    ("fuse --runs=gs://b/x --method=rrf --output=out", "gs://b/x: this can be "),
    ("mine --run=absent --dataset=gs://b/x --output=out", "gs://b/x: this can be "),
    ("prepare --dataset=pairs:gs://b/x --output=out", "gs://b/x: this can be "),
    ("convert --source=hf:gs://b/x --output=out", "gs://b/x: this can be "),
]


@pytest.mark.parametrize(("line", "message"), REFUSED)
def test_refused_command_line_changes_no_file(line, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.trec", "b.trec"):
        Path(name).write_text("q0 Q0 d0 1 0.5 t\n")
    Path("run.trec").write_text("0 Q0 0 1 0.5 t\n")
    Path("qrels").mkdir()
    for name in ("corpus", "queries"):
        Path(f"{name}.jsonl").write_text('{"_id": "0", "text": "a"}\n')
    Path("qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\n0\t0\t1\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    command, *flags = (word.replace("|", " ") for word in line.split(" "))
    name = command if ":" in command else f"{command}:{command}"
    assert cli.main(f"jaxir.{name}", flags) in (1, 2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (2 if said[0].startswith("loading") else 1), said
    assert said[-1].startswith("error: ") and message in said[-1]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_only_a_folder_of_several_tasks_has_splits(tmp_path):
    """--split is refused for the folder of a single task, because it would not change what is evaluated."""
    (tmp_path / "STSBenchmark").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / f"STSBenchmark/sts-{split}.csv").touch()
    assert has_splits(tmp_path) and not has_splits(tmp_path / "STSBenchmark")
    (tmp_path / "STSBenchmark" / "other.tsv").touch()
    assert not has_splits(tmp_path)
