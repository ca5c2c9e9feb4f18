"""The README.md of an exported SavedModel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxir.interop.saved_model import GraphSearch, Source

_IMPORTS = {"tensorflow": "tensorflow as tf", "tensorflow-text": "tensorflow_text", "scann": "scann"}


def write(
    directory: Path,
    source: Source,
    *,
    signatures: list[str],
    default: str,
    versions: dict[str, str],
    index: GraphSearch | None,
) -> None:
    """Writes README.md into `directory`.

    Args:
      directory: the SavedModel's.
      source: what was exported.
      signatures: their names.
      default: the one that `serving_default` is.
      versions: of the packages that wrote the model, by name; all but jax are needed to load it.
      index: what `search` searches, or None.
    """
    config, settings = source.model.config, source.settings
    needed = {p: v for p, v in versions.items() if p != "jax"}
    example = "texts" if default in ("query", "search") else "ids"
    value = ["where is the treaty kept?"] if example == "texts" else [[101, 2073, 2003, 102]]
    rows = [_row(name, config.dimension, index) for name in signatures]
    cut = (
        f"queries are cut at {settings.query_max_length} tokens"
        + (f" and begin with the prompt {settings.query_prompt!r}" if settings.query_prompt else "")
        + f", passages at {settings.passage_max_length}"
        + (f" and begin with {settings.passage_prompt!r}" if settings.passage_prompt else "")
    )
    has_text = "query" in signatures
    lines = [
        f"# {source.name}",
        "",
        f"A dual encoder, written by jaxir as a TensorFlow SavedModel. Fingerprint: `{source.fingerprint}`.",
        f"Vectors have {config.dimension} dimensions and are compared by {config.similarity};"
        f" matrix products are {config.backbone.dtype}.",
        *([f"In the signatures that take texts, {cut}."] if has_text else []),
        *([index.about] if index is not None else []),
        "",
        "## Signatures",
        "",
        "| signature | input | output |",
        "|---|---|---|",
        *rows,
        "",
        f"`serving_default` is `{default}`. B, the number of rows, is free; so is L, the number of columns.",
        "Ids are those of the model's tokenizer, special tokens included, with 0 as padding on the right.",
        *(["A text must be valid UTF-8; another one fails the request."] if has_text else []),
        "",
        "## In Python",
        "",
        "```python",
        *[f"import {_IMPORTS[p]}{_why(p)}" for p in needed],
        "",
        'model = tf.saved_model.load("path/of/this/directory")',
        f'outputs = model.signatures["{default}"]({example}=tf.constant({value!r}))',
        "```",
        "",
        "## TensorFlow Serving",
        "",
        "Put this directory under a version number (MODEL/1/) and send, to `/v1/models/MODEL:predict`:",
        "",
        "```json",
        json.dumps({"signature_name": default, "inputs": {example: value}}),
        "```",
        "",
        "A program is compiled for each shape when it is first seen, which takes seconds. Inputs are padded",
        "to few shapes (a power of two of rows, and lengths 16, 32, 48, 64, 96, 128...): send a request of",
        "each that matters before traffic.",
        "",
        "## Versions",
        "",
        "Written with, and loads with:",
        "",
        *[f"- {name} {version}" for name, version in needed.items()],
        "",
        f"(JAX {versions['jax']} lowered the programs for cpu, cuda and tpu; it is not needed to load them.)",
        "Operation libraries are built for one TensorFlow: take these versions together."
        if len(needed) > 1
        else "A later TensorFlow loads it too; an earlier one may not know the operations.",
    ]
    (directory / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    content = {
        "model": source.name,
        "fingerprint": source.fingerprint,
        "signatures": signatures,
        "default": default,
        "versions": versions,
        "dtype": config.backbone.dtype,
        "similarity": config.similarity,
    }
    (directory / "jaxir_export.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _row(name: str, dimension: int, index: GraphSearch | None) -> str:
    vectors = f"`vectors`: float32 [B, {dimension}]"
    if name.endswith("_ids"):
        return f"| `{name}` | `ids`: int32 [B, L] | {vectors} |"
    if name == "search":
        output = f"`ids`: string [B, {index.k}], `scores`: float32 [B, {index.k}], best first"
        return f"| `search` | `texts`: string [B] | {output} |"
    return f"| `{name}` | `texts`: string [B] | {vectors} |"


def _why(package: str) -> str:
    return {"tensorflow": ""}.get(package, "  # only for its operations")
