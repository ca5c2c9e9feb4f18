"""What an exported model says of itself, whatever the format: README.md and jaxir_export.json."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxir.data.tokenizer import Tokenizer
from jaxir.interop.stored import EncoderSettings
from jaxir.models.dual_encoder import DualEncoderModel

TOWERS = ("query", "passage")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """What is exported.

    Attributes:
      name: the model as it was named.
      model: the dual encoder.
      tokenizer: its tokenizer.
      settings: lengths and prompts.
      fingerprint: of the model.
    """

    name: str
    model: DualEncoderModel
    tokenizer: Tokenizer
    settings: EncoderSettings
    fingerprint: str

    def of_tower(self, tower: str) -> tuple[int, str]:
        """Returns the maximum length, in tokens, and the prompt of a tower's texts."""
        settings = self.settings
        if tower == "query":
            return settings.query_max_length, settings.query_prompt
        return settings.passage_max_length, settings.passage_prompt


def describe(source: Source, kind: str) -> list[str]:
    """Returns the first lines of a README: what was exported, as a `kind` of model."""
    config = source.model.config
    return [
        f"# {source.name}",
        "",
        f"A dual encoder, written by jaxir as {kind}. Fingerprint: `{source.fingerprint}`.",
        f"Vectors have {config.dimension} dimensions and are compared by {config.similarity};"
        f" matrix products are {config.backbone.dtype}.",
    ]


def how_texts_are_cut(source: Source) -> str:
    """Returns the part of a sentence that says how long texts may be and which prompts they get."""
    (query, query_prompt), (passage, passage_prompt) = map(source.of_tower, TOWERS)
    return (
        f"queries are cut at {query} tokens"
        + (f" and begin with the prompt {query_prompt!r}" if query_prompt else "")
        + f", passages at {passage}"
        + (f" and begin with {passage_prompt!r}" if passage_prompt else "")
    )


def write(directory: Path, source: Source, readme: Sequence[str], **facts: Any) -> None:
    """Writes README.md, and jaxir_export.json with `facts` and those of every export."""
    (directory / "README.md").write_text("\n".join(readme) + "\n", encoding="utf-8")
    config = source.model.config
    content = {
        "model": source.name,
        "fingerprint": source.fingerprint,
        **facts,
        "dtype": config.backbone.dtype,
        "similarity": config.similarity,
    }
    (directory / "jaxir_export.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
