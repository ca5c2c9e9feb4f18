"""index.json, the description of an index."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jaxir.core.values import Count, Natural, checked
from jaxir.retrieval.encoding.made_by import MadeBy

Similarity = Literal["cosine", "dot"]
FORMAT = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class IndexInfo:
    """The content of index.json.

    Attributes:
      dimension: D, the number of components of a vector; 0 without vectors.
      fingerprint: fingerprint of the model that made the vectors; None if unknown.
      model: the model's name, as given to jaxir.encode; None if unknown.
      read_with: the flags that added generated queries to documents; None: no queries were added.
      tower: which tower of the model encoded the documents; None: unknown, or an index of entries.
      step: the checkpoint's step, if the model is a training run; None: unknown.
      weights: how the model's weights were quantised; None: not at all.
      max_length: maximum number of tokens per document; None: unknown.
      cut: number of truncated documents; None: unknown.
      fde: the settings of a multi-vector encoder's `FixedDimension`; None: the vectors are the model's own.
      settings: the settings of the engine.
    """

    engine: str
    similarity: Literal["cosine", "dot", "bm25", "impact", "maxsim", "meanmaxsim"]
    dimension: Natural
    count: Count
    fingerprint: str | None = None
    model: str | None = None
    read_with: str | None = None
    tower: Literal["query", "passage"] | None = None
    max_length: Count | None = None
    cut: Natural | None = None
    step: Natural | None = None
    weights: Literal["int8", "nf4"] | None = None
    fde: dict[str, int] | None = None
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def made_by(self) -> MadeBy:
        return MadeBy(self.model, self.step, self.weights)


def describe(directory: Path, info: IndexInfo, ids: Sequence[str]) -> None:
    (directory / "ids.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    content = {"format": FORMAT, **dataclasses.asdict(info)}
    (directory / "index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
