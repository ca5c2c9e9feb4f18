"""Writes small data sets in the layouts of the Hugging Face hub: NanoBEIR, BEIR, MTEB, BRIGHT."""

import json
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

DOCUMENTS = {"d1": "cats drink milk", "d2": "dogs bark", "d3": "birds sing songs"}
QUERIES = {"q1": "who drinks milk?", "q2": "who sings?"}
QRELS = [("q1", "d1", 1), ("q2", "d3", 2)]


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".tsv":
        lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def documents(identifier: str = "_id", *, title: bool = False, mark: str = "") -> list[dict[str, Any]]:
    titles = {"title": "T"} if title else {}
    return [{identifier: i, **titles, "text": text + mark} for i, text in DOCUMENTS.items()]


def queries(identifier: str = "_id") -> list[dict[str, Any]]:
    return [{identifier: i, "text": text} for i, text in QUERIES.items()]


def qrels(*, scores: bool = True) -> list[dict[str, Any]]:
    rows = [{"query-id": q, "corpus-id": d, "score": s} for q, d, s in QRELS]
    return rows if scores else [{k: v for k, v in row.items() if k != "score"} for row in rows]


def nanobeir(folder: Path) -> str:
    """Writes data like zeta-alpha-ai/NanoSciFact: a folder for each table, only a split train, no scores."""
    for name, rows in {"corpus": documents(), "queries": queries(), "qrels": qrels(scores=False)}.items():
        write_table(folder / name / "train-00000-of-00001.parquet", rows)
    return f"hf:{folder}"


def nanobeir_of_parts(folder: Path, *names: str) -> str:
    """Writes data like sentence-transformers/NanoBEIR-en: a split is a collection, the README names files."""
    names = names or ("NanoSciFact", "NanoNQ")
    lines = ["---", "configs:"]
    for table in ("corpus", "queries", "qrels"):
        lines += [f"- config_name: {table}", "  data_files:"]
        for name in names:
            rows = {"corpus": documents(mark=f" {name}"), "queries": queries(), "qrels": qrels(scores=False)}
            write_table(folder / table / f"{name}-00000-of-00001.parquet", rows[table])
            lines += [f"  - split: {name}", f"    path: {table}/{name}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", "# NanoBEIR", ""]))
    return f"hf:{folder}/{names[0]}"


def beir(folder: Path) -> str:
    """Writes data like BeIR/scifact: two tables in two parts, and judgements in BeIR/scifact-qrels."""
    rows = documents(title=True)
    for number, part in enumerate((rows[:2], rows[2:])):
        write_table(folder / "corpus" / f"corpus-{number:05}-of-00002.parquet", part)
    write_table(folder / "queries" / "queries-00000-of-00001.parquet", queries())
    for split in ("train", "test"):
        write_table(folder.with_name(f"{folder.name}-qrels") / f"{split}.tsv", qrels())
    return f"hf:{folder}"


def mteb(folder: Path) -> str:
    """Writes data like mteb/scifact: judgements are in the configuration default, in another folder."""
    write_table(folder / "corpus.jsonl", documents(title=True))
    write_table(folder / "queries.jsonl", queries())
    write_table(folder / "qrels" / "test.jsonl", qrels())
    metadata = ["---", "configs:", "- config_name: default", "  data_files:", "  - split: test"]
    metadata += ["    path: qrels/test.jsonl", "- config_name: corpus", "  data_files:", "  - split: corpus"]
    metadata += ["    path: corpus.jsonl", "- config_name: queries", "  data_files:", "  - split: queries"]
    (folder / "README.md").write_text("\n".join([*metadata, "    path: queries.jsonl", "---", ""]))
    return f"hf:{folder}"


def mteb_of_languages(folder: Path) -> str:
    """Writes tables of MTEB whose names begin with a language."""
    for language in ("de", "sw"):
        write_table(folder / f"{language}-corpus" / "dev-00000-of-00001.parquet", documents("id"))
        write_table(folder / f"{language}-queries" / "dev-00000-of-00001.parquet", queries("id"))
        write_table(folder / f"{language}-qrels" / "dev-00000-of-00001.parquet", qrels())
    return f"hf:{folder}/de"


def bright(folder: Path, *, long: bool = False) -> str:
    """Writes data like xlangai/BRIGHT: a split for each domain; queries hold judgements and excluded ids."""
    for name, mark in (("documents", ""), ("long_documents", " long")):
        rows = [{"id": f"{i}{mark.strip()}", "content": text + mark} for i, text in DOCUMENTS.items()]
        write_table(folder / name / "biology-00000-of-00001.parquet", rows)
    examples = [
        {"query": text, "reasoning": "", "id": i, "excluded_ids": excluded, "gold_ids_long": [f"{gold}long"]}
        | {"gold_ids": [gold], "gold_answer": ""}
        for (i, text), excluded, gold in zip(
            QUERIES.items(), (["d2", "d3"], ["N/A"]), ("d1", "d3"), strict=True
        )
    ]
    write_table(folder / "examples" / "biology-00000-of-00001.parquet", examples)
    return f"hf:{folder}/biology" + ("-long" if long else "")
