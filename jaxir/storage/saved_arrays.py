"""Examples as arrays on a disk, and their description."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, Numbers, Tokens, fields_of, pair_format

FORMAT = 2
META = "dataset.json"


def in_words(features: Features, num_examples: int) -> str:
    """Returns e.g. 64 pairs of 16 + 24 tokens, negatives 2."""
    fields = fields_of(features)
    lengths = [str(f.length) for f in fields.values() if isinstance(f, Tokens) and f.count is None]
    lists = "".join(f", {name} {f.count}" for name, f in fields.items() if f.count is not None)
    noun = "pairs" if len(lengths) == 2 else "examples"
    return f"{num_examples} {noun} of {' + '.join(lengths)} tokens{lists}"


def as_pairs_were_named(features: Features, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Returns arrays of pairs under the names by which earlier jaxir hashed them, so that its runs go on."""
    if pair_format(features) is None:
        return arrays
    found = dict(arrays)
    found["pairs"] = np.stack([found.pop("query"), found.pop("passage")], axis=1)
    found["negative_offsets"] = found.pop("offsets")
    return {"negatives": np.zeros(0, np.int32)} | found


def read(
    directory: Path,
) -> tuple[dict[str, Any], dict[str, Tokens | Numbers], dict[str, np.ndarray]]:
    """Returns the description, the fields and the arrays of what was saved."""
    meta = json.loads((directory / META).read_text())
    if meta["format"] != FORMAT:
        raise UserError(f"{directory} is of another format; make it again")
    saved = {
        name: Tokens(**field) if "length" in field else Numbers(**field)
        for name, field in meta["fields"].items()
    }
    return meta, saved, {p.stem: np.asarray(np.load(p, mmap_mode="r")) for p in directory.glob("*.npy")}


def check_same(directory: Path, name: str, saved: Tokens | Numbers, wanted: Tokens | Numbers) -> None:
    """Raises a UserError where a field was saved in another form than is wanted; the count may differ."""
    if (saved.count is None) != (wanted.count is None) or type(saved) is not type(wanted):
        raise UserError(f"{directory} has another kind of value in the field {name!r}; make it again")
    was, now = (dataclasses.asdict(field) for field in (saved, wanted))
    for part in was:
        if part != "count" and was[part] != now[part]:
            raise UserError(f"{directory} was made with {name} {part} {was[part]!r}, not {now[part]!r}")
