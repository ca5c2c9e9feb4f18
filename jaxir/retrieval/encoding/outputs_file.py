"""What a generator writes for the texts of a file (windowed_file.py)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxir.data.lines import OnBadInput, Policy
from jaxir.data.sources import Document, read_corpus
from jaxir.files import local_path
from jaxir.models.decoding import Decoding
from jaxir.retrieval.encoding.generator import Generator
from jaxir.retrieval.encoding.windowed_file import WINDOW, OutputsReport, sha256_of, write_windows


def write_outputs(
    generator: Generator,
    input: str | Path,
    output: str | Path,
    how: Decoding,
    *,
    window: int = WINDOW,
    on_bad_input: Policy = "stop",
) -> OutputsReport | None:
    """Writes {"_id", "outputs"} for each text of a file, in its order; the file appears only when whole.

    Run again after an interruption it continues; several processes of one run share the work.

    Args:
      generator: the model, on devices of this process.
      input: .jsonl[.gz] of `_id`, `text` and maybe `title`.
      output: the file.
      how: how outputs are made.
      window: texts that are batched together.
      on_bad_input: "stop" at the first malformed line, before anything is generated, or "skip" them.

    Returns:
      What is in the file, in the first process; None in the others.

    Raises:
      BadInputError: a malformed line.
      UserError: what was begun there is something else or damaged, or another run is writing it.
    """
    input, output = local_path(input), local_path(output, "written to")
    count = sum(1 for _ in read_corpus(input, on_bad_input))

    def make(batch: Sequence[Document], done: Callable[[int], None]) -> Iterator[dict[str, Any]]:
        texts = [document.contents for document in batch]
        found = generator.generate(texts, how, num_windows=-(-count // window), on_batch=done)
        return ({"outputs": outputs} for outputs in found)

    return write_windows(
        output,
        {"input": sha256_of(input), "window": window, **made_by(generator, how)},
        read_corpus(input, OnBadInput(on_bad_input)),  # faults have been told
        make,
        count=count,
        what=f"generating for {input.name}",
        window=window,
    )


def made_by(generator: Generator, how: Decoding) -> dict[str, Any]:
    """Returns all of a generator, and of how it writes, that its outputs depend on."""
    return {
        "model": generator.fingerprint,
        "dtype": generator.model.config.backbone.dtype,
        "batch_tokens": generator.runner.batch_tokens,
        "max_length": generator.settings.passage_max_length,
        "prompt": generator.settings.passage_prompt,
        **dataclasses.asdict(how),
    }
