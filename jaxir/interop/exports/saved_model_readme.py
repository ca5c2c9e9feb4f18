"""The README.md of an exported SavedModel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jaxir.interop.exports import exported
from jaxir.interop.exports.exported import Source

if TYPE_CHECKING:
    from jaxir.interop.exports.saved_model import GraphSearch

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
    dimension = source.model.config.dimension
    needed = {p: v for p, v in versions.items() if p != "jax"}
    example = "texts" if default in ("query", "search") else "ids"
    value = ["where is the treaty kept?"] if example == "texts" else [[101, 2073, 2003, 102]]
    rows = [_row(name, dimension, index) for name in signatures]
    has_text = "query" in signatures
    lines = [
        *exported.describe(source, "a TensorFlow SavedModel"),
        *([f"In the signatures that take texts, {exported.how_texts_are_cut(source)}."] if has_text else []),
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
    exported.write(directory, source, lines, signatures=signatures, default=default, versions=versions)


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
