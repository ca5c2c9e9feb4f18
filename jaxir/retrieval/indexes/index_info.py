"""What an index directory says of itself, in index.json."""

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
    """What index.json says.

    Attributes:
      engine: a key of `ENGINES`.
      similarity: "cosine" or "dot" of vectors; "bm25" or "impact" of terms.
      dimension: D; 0 where there are no vectors.
      count: N.
      fingerprint: of the model that made the vectors; None where they came from elsewhere.
      model: the model as it was named to `encode`; None likewise.
      read_with: how documents were read with generated queries, in words; None: alone.
      tower: which tower of the model read the documents; None: not known, or entries, which are of passages.
      step: of a model that is a training run, the step of its checkpoint; None: unknown.
      max_length: tokens beyond which a document was cut; None: unknown.
      cut: number of documents that were cut; None: unknown.
      settings: the engine's own.
    """

    engine: str
    similarity: Literal["cosine", "dot", "bm25", "impact"]
    dimension: Natural
    count: Count
    fingerprint: str | None = None
    model: str | None = None
    read_with: str | None = None
    tower: Literal["query", "passage"] | None = None
    max_length: Count | None = None
    cut: Natural | None = None
    step: Natural | None = None

    @property
    def made_by(self) -> MadeBy:
        """The model as messages name it."""
        return MadeBy(self.model, self.step)

    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def describe(directory: Path, info: IndexInfo, ids: Sequence[str]) -> None:
    """Writes what `load_index` reads beside the engine's own files."""
    (directory / "ids.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    content = {"format": FORMAT, **dataclasses.asdict(info)}
    (directory / "index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
