"""The README.md of an exported SavedModel."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from jaxir.interop.exports import exported
from jaxir.interop.exports.exported import ExportedModel, GraphSearch, Signature

_EXAMPLES = {
    "ids": [[101, 2073, 2003, 102]],
    "token_types": [[0, 0, 0, 0]],
    "texts": ["where is the treaty kept?"],
    "queries": ["where is the treaty kept?"],
    "passages": ["The treaty is kept in the archive."],
}
_IMPORTS = {
    "tensorflow": "tensorflow as tf",
    "tensorflow-text": "tensorflow_text  # only for its operations",
    "scann": "scann  # only for its operations",
}


def write(
    directory: Path,
    source: ExportedModel,
    *,
    signatures: Mapping[str, Signature],
    default: str,
    versions: dict[str, str],
    index: GraphSearch | None,
) -> None:
    """Writes README.md; `versions` are the versions of the packages that wrote the model."""
    needed = {p: v for p, v in versions.items() if p != "jax"}
    inputs = {name: _EXAMPLES[name] for name in signatures[default].inputs}
    arguments = ", ".join(f"{name}=tf.constant({value!r})" for name, value in inputs.items())
    rows = [f"| `{name}` | {_listed(s.inputs)} | {_listed(s.outputs)} |" for name, s in signatures.items()]
    has_text = "tensorflow-text" in versions
    lines = [
        *exported.describe(source, "a TensorFlow SavedModel"),
        f"{'In the signatures that take texts' if has_text else 'Before texts become ids'},"
        f" {exported.form_of(source).limits_note}.",
        *([index.about] if index is not None else []),
        "",
        "## Signatures",
        "",
        "| signature | input | output |",
        "|---|---|---|",
        *rows,
        "",
        f"`serving_default` is `{default}`. B (rows) and L (columns) can be any numbers.",
        "Ids are those of the model's tokenizer, special tokens included, with its padding,"
        f" {source.tokenizer.pad_swap or 0}, on the right: all after a row's last id that is not padding.",
        *(["A request with a text that is not valid UTF-8 fails."] if has_text else []),
        "",
        "## In Python",
        "",
        "```python",
        *[f"import {_IMPORTS[p]}" for p in needed],
        "",
        'model = tf.saved_model.load("path/of/this/directory")',
        f'outputs = model.signatures["{default}"]({arguments})',
        "```",
        "",
        "## TensorFlow Serving",
        "",
        "Put this directory under a version number (MODEL/1/) and send, to `/v1/models/MODEL:predict`:",
        "",
        "```json",
        json.dumps({"signature_name": default, "inputs": inputs}),
        "```",
        "",
        "A program is compiled for each shape when it is first seen, which takes seconds. Inputs are padded",
        "to few shapes (a power of two of rows, and lengths 16, 32, 48, 64, 96, 128...): before traffic,",
        "send a request of each shape that matters.",
        "",
        "## Versions",
        "",
        "Written with, and loads with:",
        "",
        *[f"- {name} {version}" for name, version in needed.items()],
        "",
        f"(JAX {versions['jax']} lowered the programs for cpu, cuda and tpu; it is not needed to load them.)",
        "Operation libraries are built for one TensorFlow: use these versions together."
        if len(needed) > 1
        else "A later TensorFlow loads it too; an earlier one may not know the operations.",
    ]
    exported.write(directory, source, lines, signatures=list(signatures), default=default, versions=versions)


def _listed(arrays: Mapping[str, str]) -> str:
    return ", ".join(f"`{name}`: {what}" for name, what in arrays.items())
