"""Command: draws and measures the embedding spaces of models side by side, as papers do."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxir import cli
from jaxir.core.values import Count, Seed, check_idle
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

    Figure 1 lays the embeddings of both towers out by t-SNE, and scores tell how well they can be told apart.
    Figure 5 is how similar queries are to their nearest passages, Figure 6 how similar they are to other
    queries over how similar they are to the passages of these. Of rated pairs of sentences it is figure 2-2
    of Chuang 2024 (DiffCSE) instead: cosine similarities by people's rating. Of texts it is table 4 of Ma et
    al. 2022: how probable each word is by a run's CPDAE decoder. Writes figure1.png, figure5.png and
    figure6.png, or figure2-2.png, or table4.png, and analysis.json; needs the extra `analyze`.

    Args:
      models: models to compare: jaxir model or run directories, or st: or hf: and a directory or hub name;
        each may be written NAME=MODEL, with the name for the figures.
      dataset: beir:DIR (corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv); or sts:DIR (rated pairs, all together;
        a file for one set) or texts:FILE (a text on each line; models must be runs of CPDAE), which have no
        use for the flags below output.
      output: directory to write; it must not exist.
      split: which of the dataset's queries.
      queries: most queries to look at; each with one relevant document, which no other of them has.
      documents: most documents to look for the nearest in: the relevant ones, the others drawn at random.
      seed: of all drawing.

    Returns:
      What analysis.json holds.

    Raises:
      UserError: a model or dataset that is not there, too few queries, or a library that is not installed.
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
        return _rated(named, path, facts, output)
    if kind == "texts":
        return _of_words(named, path, facts, output)
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
    told = f"{dataset}, split {split}: {len(sample.queries)} queries, {len(sample.documents)} documents"
    return _write(facts, output, f"{told}\n\n{analysis.tables(found)}", lambda at: analysis.draw(found, at))


def _rated(named: dict[str, str], path: Path, facts: dict[str, Any], output: str) -> dict[str, Any]:
    """Draws and measures the similarity of rated pairs."""
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
    told = f"{facts['dataset']}: {len(pairs)} pairs\n\n{rated_pairs.table(found)}"
    return _write(
        facts | {"pairs": len(pairs), "models": described},
        output,
        told,
        lambda at: plots.ratings(found, at / "figure2-2.png"),
    )


def _of_words(named: dict[str, str], path: Path, facts: dict[str, Any], output: str) -> dict[str, Any]:
    """Draws how probable each word of texts is by what decodes their vectors."""
    from jaxir.data.formats.lines import OnBadInput
    from jaxir.data.sets.texts import Texts
    from jaxir.evaluation import plots, word_heat

    texts = [record["text"][1] for record in Texts(path=str(path)).records(OnBadInput("stop"))]
    found = {name: word_heat.word_probabilities(run, texts) for name, run in named.items()}
    described = {name: {"model": run, "words": found[name]} for name, run in named.items()}
    return _write(
        facts | {"models": described},
        output,
        f"{facts['dataset']}: {len(texts)} texts\n\n{word_heat.table(found)}",
        lambda at: plots.word_heat(found, at / "table4.png"),
    )


def _write(values: dict[str, Any], output: str, text: str, draw: Callable[[Path], None]) -> dict[str, Any]:
    """Writes figures and analysis.json, prints `text`, and returns the values."""
    from jaxir.storage.files import atomic_directory

    with atomic_directory(output) as aside:
        draw(aside)
        (aside / "analysis.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    print(f"{text}\n\nThe figures are in {output}.")
    return values


def name_models(models: list[str]) -> dict[str, str]:
    """Returns the name and the specification of each model; without NAME= it is named by its specification.

    A directory may have = in its name.

    Raises:
      UserError: no model, a name or model that is empty, or two of one name.
    """
    from jaxir.core.errors import UserError

    named: dict[str, str] = {}
    for text in models:
        name, equals, spec = text.partition("=")
        if Path(text.removeprefix("st:").removeprefix("hf:")).is_dir():
            name, equals = text, ""
        if name in named:
            raise UserError(f"models has {name!r} twice; write NAME=MODEL")
        if equals and not (name and spec):
            raise UserError(f"{text!r} lacks a {'model' if name else 'name'}; write NAME=MODEL")
        named[name] = spec if equals else text
    if not named:
        raise UserError("models must have at least one model")
    return named


if __name__ == "__main__":
    cli.end(
        cli.main(
            "jaxir.analyze:analyze",
            example="python -m jaxir.analyze --models=Standard=RUN_A,SamToNe=RUN_B --dataset=beir:DIR"
            " --output=FIGURES",
        )
    )
