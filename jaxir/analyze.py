"""Command: draws and measures the embedding spaces of models side by side."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxir import cli
from jaxir.core.choices import check_idle
from jaxir.core.errors import UserError
from jaxir.core.values import Count, Seed
from jaxir.storage.outputs import writes


@writes(output="directory")
def analyze(
    *,
    models: list[str],
    dataset: str,
    output: str,
    split: str = "test",
    queries: Count = 2000,
    documents: Count = 10_000,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Draws and measures the embedding spaces of models side by side, as the SamToNe paper does.

    For a BEIR folder it draws that paper's figures 1 (both towers' embeddings by t-SNE, with scores of how
    separable they are), 5 (similarities of queries to their nearest passages) and 6 (the same beside their
    similarities to other queries). For rated pairs of sentences it draws figure 2-2 of Chuang 2024 (DiffCSE):
    cosine similarities by human rating. For texts it draws table 4 of Ma et al. 2022: each word's probability
    by a run's CPDAE decoder. Writes figures (.png) and analysis.json. Needs the extra `analyze`.

    Args:
      models: models to compare: jaxir model or run directories, or st: or hf: and a directory or hub name;
        each may be written NAME=MODEL, with the name for the figures.
      dataset: beir:DIR (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv), sts:DIR (rated pairs, or a file of one
        set), or texts:FILE (a text on each line; models must be runs of CPDAE). The flags below --output
        only apply to beir:.
      output: directory to write; it must not exist.
      split: the split of the dataset's queries.
      queries: maximum number of queries; each has one relevant document, which no other query has.
      documents: maximum number of documents to search: the relevant ones, and others drawn at random.
      seed: seed for all random draws.

    Returns:
      The content of analysis.json.
    """
    from jaxir.core.installation import require
    from jaxir.evaluation.datasets import parse_dataset

    require("analyze", "matplotlib", "sklearn")
    named = name_models(models)
    kind, path = parse_dataset(dataset, "beir", "sts", "texts")
    facts: dict[str, Any] = {"dataset": dataset}
    if kind != "beir":
        check_idle(analyze, "beir: datasets", split=split, queries=queries, documents=documents, seed=seed)
    if kind == "sts":
        return _analyze_ratings(named, path, facts, output)
    if kind == "texts":
        return _analyze_words(named, path, facts, output)
    from jaxir.evaluation import analysis
    from jaxir.retrieval.encoding.text_encoder import DualEncoder

    sample = analysis.draw_sample(path, split, queries=queries, documents=documents, seed=seed)
    found, described = {}, {}
    for name, spec in named.items():
        encoder = DualEncoder.load(spec)
        found[name] = analysis.analyze_model(encoder, sample, seed=seed)
        described[name] = {"model": spec, "fingerprint": encoder.fingerprint, **found[name].numbers()}
    facts |= {
        "split": split,
        "queries": len(sample.queries),
        "documents": len(sample.documents),
        "seed": seed,
        "models": described,
    }
    text = f"{dataset}, split {split}: {len(sample.queries)} queries, {len(sample.documents)} documents"
    return _write(facts, output, f"{text}\n\n{analysis.tables(found)}", lambda at: analysis.draw(found, at))


def _analyze_ratings(named: dict[str, str], path: Path, facts: dict[str, Any], output: str) -> dict[str, Any]:
    from jaxir.evaluation import plots, rated_pairs
    from jaxir.evaluation.embedding_space import spread
    from jaxir.evaluation.sts_files import read_sts
    from jaxir.retrieval.encoding.text_encoder import DualEncoder

    pairs = [pair for of_set in read_sts(path).values() for pair in of_set]
    found, described = {}, {}
    for name, spec in named.items():
        encoder = DualEncoder.load(spec)
        found[name] = rated_pairs.cosines_by_rating(encoder, pairs)
        ratings = {group: dataclasses.asdict(spread(x)) for group, x in found[name].items()}
        described[name] = {"model": spec, "fingerprint": encoder.fingerprint, "ratings": ratings}
    facts |= {"pairs": len(pairs), "models": described}
    text = f"{facts['dataset']}: {len(pairs)} pairs\n\n{rated_pairs.table(found)}"
    return _write(facts, output, text, lambda at: plots.ratings(found, at / "figure2-2.png"))


def _analyze_words(named: dict[str, str], path: Path, facts: dict[str, Any], output: str) -> dict[str, Any]:
    from jaxir.data.formats.lines import OnBadInput
    from jaxir.data.sets.texts import Texts
    from jaxir.evaluation import plots, word_heat

    texts = [record["text"][1] for record in Texts(path=str(path)).records(OnBadInput("stop"))]
    found = {name: word_heat.word_probabilities(run, texts) for name, run in named.items()}
    facts |= {"models": {name: {"model": run, "words": found[name]} for name, run in named.items()}}
    text = f"{facts['dataset']}: {len(texts)} texts\n\n{word_heat.table(found)}"
    return _write(facts, output, text, lambda at: plots.word_heat(found, at / "table4.png"))


def _write(values: dict[str, Any], output: str, text: str, draw: Callable[[Path], None]) -> dict[str, Any]:
    from jaxir.storage.files import atomic_directory

    with atomic_directory(output) as aside:
        draw(aside)
        (aside / "analysis.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(f"{text}\n\nThe figures are in {output}.")
    return values


def name_models(models: list[str]) -> dict[str, str]:
    """Returns {name: specification} of models written NAME=MODEL, or MODEL, which is then also the name."""
    named: dict[str, str] = {}
    for text in models:
        name, equals, spec = text.partition("=")
        # If `text` is a directory, "=" belongs to its name.
        if Path(text.removeprefix("st:").removeprefix("hf:")).is_dir():
            name, equals = text, ""
        if name in named:
            raise UserError(f"--models has {name!r} twice; give each model its own name: NAME=MODEL")
        if equals and not (name and spec):
            raise UserError(f"--models: {text!r} lacks a {'model' if name else 'name'}; write NAME=MODEL")
        named[name] = spec if equals else text
    if not named:
        raise UserError("--models must have at least one model")
    return named


if __name__ == "__main__":
    cli.start("jaxir.analyze:analyze", "--models=A=RUN_A,B=RUN_B --dataset=beir:DIR --output=FIGURES")
