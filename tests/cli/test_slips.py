"""Flags that say nothing or contradict each other cost one sentence, and change no file."""

import pytest

from jaxir import cli

RUN = "q0 Q0 d0 1 0.5 t\n"
# Flags that would have been passed over in silence, read as something else, or ended in a traceback.
SLIPS = [
    ("fuse", ["--runs=", "--method=rrf"], "--runs is empty"),
    ("fuse", ["--runs=a.trec,b.trec", "--method=rrf", "--metric=RR"], "--metric is for --method=interpolate"),
    (
        "fuse",
        ["--runs=a.trec,b.trec", "--method=interpolate", "--constant=3"],
        "--constant is for --method=rrf",
    ),
    (
        "fuse",
        ["--runs=a.trec,b.trec", "--method=rrf", "--normalization=none"],
        "--normalization is for --method=interpolate",
    ),
    (
        "fuse",
        ["--runs=a.trec,b.trec", "--method=interpolate", "--weights=0,-0.0"],
        "--weights are all 0 (0,-0.0)",
    ),
    (
        "fuse",
        ["--runs=a.trec,b.trec", "--method=interpolate", "--sweep=0.1", "--qrels=q", "--metric=RR P@1"],
        "--metric must be one, not 'RR P@1'",
    ),
    ("fuse", ["--runs=a.trec,b.trec", "--method=rrf", "--gin.fuse.queries=''"], "fuse.queries is empty"),
    ("evaluate", ["--run=", "--qrels=q"], "--run is empty"),
    ("evaluate", ["--gin.evaluate.run=[]", "--qrels=q"], "give --run and --qrels"),
    ("evaluate", ["--run=a=", "--qrels=q"], "'a=' lacks a run file"),
    ("evaluate", ["--run=a.trec+", "--qrels=q"], "'a.trec+' lacks a run file"),
    ("evaluate", ["--run=a.trec", "--qrels=q", "--split=dev"], "--split is for a --dataset"),
    ("evaluate", ["--model=m", "--dataset=sts:.", "--metrics=RR"], "--metrics is for retrieval"),
    (
        "rerank",
        ["--model=hf:", "--run=run.trec", "--dataset=beir:."],
        "hf: names no model: write hf:DIR or hf:NAME",
    ),
    ("encode", ["--model=w2v:", "--input=a.trec"], "w2v: names no model: write w2v:FILE"),
    ("mine", ["--run=a.trec", "--dataset=beir:.", "--gin.mine.margin=True"], "mine.margin must be a number"),
    ("mine", ["--run= ", "--dataset=beir:."], "--run is empty"),
    ("mine", ["--run=a\nb", "--dataset=beir:."], r"a\nb: no such run file"),
    ("rerank", ["--model=", "--run=a.trec", "--dataset=beir:."], "--model is empty"),
    ("analyze", ["--models=A=,B=m", "--dataset=beir:."], "'A=' lacks a model"),
    ("analyze", ["--models==m", "--dataset=beir:."], "'=m' lacks a name"),
    ("sample", ["--dataset=beir:.", "--train=3", "--output=~/here"], "~/here: shells do not expand ~"),
    ("serve", ["--index=i", "--host=..", "--port=0"], "cannot serve on .., port 0"),
    (
        "serve",
        ["--index=i", "--port=0", "--access_log=a.trec"],
        "a.trec is there already and is no access log",
    ),
    ("serve", ["--index=i", "--port=0", "--access_log=~"], "~: shells do not expand ~"),
    ("serve", ["--index=i", "--port=0", "--access_log=gs://b/log"], "gs://b/log: this is"),
    ("serve", ["--index=a=", "--port=0"], "'a=' lacks a directory"),
    (
        "plan",
        ["--topology=gpu:8xh100", "--gin.train.mesh=[]"],
        "train.mesh must be an object, @NAME() in gin files or None, not []",
    ),
    (
        "plan",
        ["--topology=gpu:8xh100", "--gin.train.objective=3"],
        "train.objective must be an object, @NAME() in gin files, not 3",
    ),
    (
        "serve",
        ["--index=i", "--port=0", "--gin.serve.limits=3"],
        "serve.limits must be an object, Limits or None",
    ),
    (
        "grid",
        ["--recipe=r", "--datasets=d", "--steps=3", "--models=m", "--gin.grid.variants=['x']"],
        "variants must be a list, each @Variant(), not ['x']",
    ),
]


@pytest.mark.parametrize(("command", "flags", "message"), SLIPS)
def test_a_slip_costs_one_sentence_and_nothing_else(command, flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.trec", "b.trec"):
        (tmp_path / name).write_text(RUN)
    (tmp_path / "run.trec").write_text("0 Q0 0 1 0.5 t\n")
    (tmp_path / "qrels").mkdir()
    for name in ("corpus", "queries"):
        (tmp_path / f"{name}.jsonl").write_text('{"_id": "0", "text": "a"}\n')
    (tmp_path / "qrels" / "train.tsv").write_text("query-id\tcorpus-id\tscore\n0\t0\t1\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    output = "output_dir" if command == "grid" else "output"
    writes = command not in ("serve", "plan") and not any(f.startswith("--output=") for f in flags)
    typed = [*flags, *([f"--{output}=out"] if writes else [])]
    if command == "plan":
        typed.append("--gin_file=gin/samtone_base.gin")
    assert cli.main(f"jaxir.{command}:{command}", typed) in (1, 2)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == (2 if said[0].startswith("loading") else 1), said
    assert said[-1].startswith("error: ") and message in said[-1]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
