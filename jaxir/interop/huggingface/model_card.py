"""README.md of an exported model: the model card that the Hugging Face hub shows.

The card has what is known of the model: its shape, prompts and lengths; of a training run also its data, its
settings, its recipe and the last figures of its evaluators before the exported checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxir.core.errors import UserError
from jaxir.interop.hub import hub
from jaxir.interop.model import kinds
from jaxir.interop.model.stored import StoredModel
from jaxir.storage.json_files import read_json
from jaxir.storage.open_files import read_text

NAME = "README.md"
_LIBRARIES = {"st": "sentence-transformers", "hf": "transformers", "peft": "peft"}
_PIPELINES = {
    "dual_encoder": "sentence-similarity",
    "cross_encoder": "text-ranking",
    "sparse_encoder": "feature-extraction",
    "multi_vector_encoder": "feature-extraction",
}
_RECIPES = {"config.gin": "gin", "recipe.py": "python"}
# Settings of run.json that the card shows, in this order; the other settings are hashes.
_SETTINGS = ("data", "dev", "objective", "optimizer", "steps", "batch_size", "seed")
# Finds the directories before a file's name in a recipe.
_ABSOLUTE = re.compile(r"""(?<=["'])(?:/|~/)[^"']*/(?=[^"'/]+["'])""")
_SOURCE = re.compile(r"""^(?:MODEL|[\w./]*\.source)\s*=\s*["']((?:st|hf):[^"']+)""", re.M)
# Finds names of data sets of the hub in a recipe.
_DATA = re.compile(r"""(?:^DATA|\bdirectory)\s*=\s*["']hf:([\w.-]+/[\w.-]+)""", re.M)
_INHERITED = (
    "license",
    "license_name",
    "license_link",
    "language",
)  # entries of the base model's README.md that the card repeats

ST_USE = """\
```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
queries = model.encode_query(["where is the treaty kept?"])
passages = model.encode_document(["The treaty is kept in the archive.", "Cats sleep for most of the day."])
print(model.similarity(queries, passages))
```"""
JAXIR_USE = """\
```python
from jaxir import DualEncoder

model = DualEncoder.load("{spec}")
queries = model.encode_queries(["where is the treaty kept?"])
passages = model.encode_passages(["The treaty is kept in the archive.", "Cats sleep for most of the day."])
print(model.similarity(queries, passages))
```"""
HYBRID_USE = JAXIR_USE.replace("DualEncoder", "HybridEncoder").replace("passages))", 'passages)["sum"])')
SPARSE_ENCODER_USE = ST_USE.replace("SentenceTransformer", "SparseEncoder")
MULTI_VECTOR_USE = ST_USE.replace("SentenceTransformer", "MultiVectorEncoder")
CROSS_ENCODER_USE = """\
```python
from sentence_transformers import CrossEncoder

model = CrossEncoder("{name}")
print(model.predict([("where is the treaty kept?", "The treaty is kept in the archive.")]))
```"""


class _Run(NamedTuple):
    """What a training run's directory records; all fields are empty for a model that is not a run."""

    settings: Mapping[str, Any] = {}
    metrics: Mapping[str, float] = {}
    step: int | None = None
    recipe: str = ""
    language: str = ""
    base: str = ""  # the st: or hf: name of the model from which the run started
    datasets: Sequence[str] = ()  # names of the run's data sets on the hub


def write(
    directory: Path,
    model: StoredModel,
    to: Literal["st", "hf", "peft"],
    source: str,
    folder: str,
    repo: str | None,
) -> None:
    """Writes README.md into an exported folder.

    Args:
      directory: the folder.
      model: the exported model.
      to: the folder's format.
      source: the name by which the model was read, perhaps a run.
      folder: the name that the folder will have.
      repo: the name that the folder will have on the hub, OWNER/NAME; None: the examples name the folder.
    """
    from huggingface_hub import ModelCardData

    run = _read_run(source, model)
    spec = model.base.spec if model.base is not None else source
    spec = spec if spec.startswith(("st:", "hf:")) else run.base
    kind = kinds.name_of(model.config)
    name = repo or folder
    tags = ["jaxir", *([_LIBRARIES[to], "feature-extraction"] if kind == "dual_encoder" else [])]
    data = ModelCardData(
        model_name=name,
        library_name=_LIBRARIES[to],
        pipeline_tag=_PIPELINES.get(kind),
        tags=sorted({*tags, *filter(None, [_PIPELINES.get(kind)])}),
        base_model=_base(spec),
        datasets=list(run.datasets) or None,
        eval_results=_results(run) or None,
        **_inherited(spec),
    )
    parts = [f"---\n{data.to_yaml()}\n---", f"# {name}", *_described(model, kind)]
    parts += ["## Use", *_use(kind, to, name, repo)]
    parts += _training(run)
    (directory / NAME).write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _read_run(source: str, model: StoredModel) -> _Run:
    directory = Path(source)
    if model.checkpoint is None or not (directory / "run.json").is_file():
        return _Run()
    step, metrics = int(model.checkpoint.name), {}
    for line in (
        read_text(directory / "log.jsonl").splitlines() if (directory / "log.jsonl").is_file() else ()
    ):
        row = json.loads(line) if line.endswith("}") else {}
        if row.get("step") == step:
            values = {k.removeprefix("dev/"): v for k, v in row.items() if k.startswith("dev/")}
            metrics |= {k: float(v) for k, v in values.items() if isinstance(v, int | float)}
    recipe = next((name for name in _RECIPES if (directory / name).is_file()), None)
    text = read_text(directory / recipe).strip() if recipe else ""
    base = _SOURCE.search(text)
    return _Run(
        settings=read_json(directory / "run.json", dict[str, Any]).get("settings", {}),
        metrics=metrics,
        step=step,
        # Directories of this machine mean nothing to others.
        recipe=_ABSOLUTE.sub("", text),
        language=_RECIPES.get(recipe, ""),
        base=base[1] if base else "",
        datasets=[name for name in dict.fromkeys(_DATA.findall(text)) if not Path(name).exists()],
    )


def _base(spec: str) -> str | None:
    """Returns the name on the hub of the model `spec`; None if it is a folder."""
    name = spec.partition(":")[2].partition("@")[0]
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or Path(name).exists():
        return None
    return name if "/" in name else f"{hub.ST_OWNER}/{name}"


def _inherited(spec: str) -> dict[str, Any]:
    """Returns the licence and the languages in the README.md of the model `spec`, if this machine has it."""
    import yaml
    from huggingface_hub import repocard

    form, _, name = spec.partition(":")
    # Without the model or readable metadata in its README.md, its licence and languages are unknown.
    with contextlib.suppress(UserError, OSError, ValueError, yaml.YAMLError):
        place = hub.local_copy(name, default_owner=hub.ST_OWNER if form == "st" else None)
        found = repocard.metadata_load(place / NAME) if place is not None else None
        return {key: found[key] for key in _INHERITED if found and found.get(key)}
    return {}


def _results(run: _Run) -> list[Any]:
    """Returns the run's figures in the form of the hub's model-index."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="information-retrieval",
            dataset_type="unknown",
            dataset_name="dev",
            metric_type=re.sub(r"\W+", "_", name.replace("@", "_at_")).strip("_").lower(),
            metric_name=name,
            metric_value=round(value, 6),
        )
        for name, value in run.metrics.items()
        if "@" in name
    ]


def _described(model: StoredModel, kind: str) -> list[str]:
    settings = model.settings
    lines = [f"{kinds.KINDS[kind].what[:1].upper()}{kinds.KINDS[kind].what[1:]}: {model.config.summary}."]
    if kind in ("dual_encoder", "sparse_encoder", "multi_vector_encoder", "hybrid_encoder"):
        of_queries = settings if model.queries is None else model.queries.settings
        if model.queries is not None:
            lines.append(f"Queries have another model: {model.queries.config.summary}.")
        lines.append(
            f"Queries have at most {of_queries.query_max_length} tokens, passages at most"
            f" {settings.passage_max_length}; longer texts are truncated."
        )
        for texts, prompt in (("queries", settings.query_prompt), ("passages", settings.passage_prompt)):
            if prompt:
                lines.append(f"The prompt {json.dumps(prompt, ensure_ascii=False)} goes before {texts}.")
    return ["\n".join(lines)]


def _use(kind: str, to: str, name: str, repo: str | None) -> list[str]:
    if kind == "seq2seq":
        return ["The model opens with `transformers.AutoModelForSeq2SeqLM`, or `jaxir.Generator`."]
    if kind == "cross_encoder":
        return [CROSS_ENCODER_USE.format(name=name)]
    if kind == "sparse_encoder":
        return [SPARSE_ENCODER_USE.format(name=name)]
    if kind == "multi_vector_encoder":
        return [MULTI_VECTOR_USE.format(name=name)]
    if to == "hf":
        return [
            "The folder holds only the encoder, without pooling; its token vectors open with `transformers`."
        ]
    spec = repo or f"st:{name}"
    return [
        "With [sentence-transformers](https://sbert.net):",
        ST_USE.format(name=name),
        "With jaxir:",
        (HYBRID_USE if kind == "hybrid_encoder" else JAXIR_USE).format(spec=spec),
    ]


def _training(run: _Run) -> list[str]:
    if run.step is None:
        return []
    parts = ["## Training", f"Trained by jaxir; this is step {run.step}."]
    rows = [(name, run.settings[name]) for name in _SETTINGS if name in run.settings]
    cells = [f"| {name} | `{str(value).replace('|', '/').replace('`', '')}` |" for name, value in rows]
    parts.append("\n".join(["| setting | value |", "|---|---|", *cells]))
    if run.metrics:
        figures = [f"| {name} | {value:.4f} |" for name, value in run.metrics.items()]
        parts += ["## Figures", "Measured on the development data while training:"]
        parts.append("\n".join(["| metric | value |", "|---|---:|", *figures]))
    if run.recipe:
        fold = (
            f"<details><summary>All settings</summary>\n\n```{run.language}\n{run.recipe}\n```\n\n</details>"
        )
        parts += ["## Recipe", fold]
    return parts
