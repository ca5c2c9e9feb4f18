"""What a generator writes for the texts of a file: a JSON line for each, taken up again where a run stopped.

Until all are there they lie beside the output, in the directory `.NAME.unfinished`:

    made.json             what is made: the input, the model, the settings
    outputs-00000.jsonl   the lines of a window of texts

Texts are batched within their window, so that outputs do not depend on where a run was interrupted, nor on
how many processes share the windows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxir.data.lines import OnBadInput, Policy
from jaxir.data.sources import read_corpus
from jaxir.distributed import wait_for_all
from jaxir.errors import UserError
from jaxir.files import atomic_file, local_path, remove_tree
from jaxir.json_files import read_json
from jaxir.models.decoding import Decoding
from jaxir.outputs import alone
from jaxir.progress import progress
from jaxir.reading import open_to_read
from jaxir.retrieval.encoding.generator import Generator

WINDOW = 1024  # texts, at most which a process loses by an interruption
MADE = "made.json"


@dataclasses.dataclass
class OutputsReport:
    """What is in the file: counts.

    Attributes:
      texts: texts of the input.
      outputs: what was written for them.
      without: texts for which nothing was.
    """

    texts: int = 0
    outputs: int = 0
    without: int = 0

    def __str__(self) -> str:
        said = f"{self.texts:,} texts, {self.outputs:,} outputs"
        return said + (f"; nothing was written for {self.without:,} texts" if self.without else "")


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

    Run again after an interruption it continues; the result is the same. Several processes of one run, which
    see the same files, each generate for their part of the windows; the first one puts them together.

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
    part, parts = jax.process_index(), jax.process_count()
    count = sum(1 for _ in read_corpus(input, on_bad_input))
    made = {
        "input": _sha256(input),
        "model": generator.fingerprint,
        "dtype": generator.model.config.backbone.dtype,
        "max_length": generator.settings.passage_max_length,
        "prompt": generator.settings.passage_prompt,
        "window": window,
        **dataclasses.asdict(how),
    }
    unfinished = output.with_name(f".{output.name}.unfinished")
    windows = [unfinished / f"outputs-{number:05d}.jsonl" for number in range(-(-count // window))]
    with alone(output) if part == 0 else contextlib.nullcontext():
        if part == 0:
            _begin(unfinished, made, output)
        wait_for_all("outputs are begun")
        own = set(windows[part::parts])
        texts = {place: min(window, count - n * window) for n, place in enumerate(windows)}
        with progress(
            total=sum(texts[place] for place in own),
            initial=sum(texts[place] for place in own if place.exists()),
            what=f"generating for {input.name}" + (f", part {part + 1} of {parts}" if parts > 1 else ""),
            unit="texts",
        ) as bar:
            documents = iter(read_corpus(input, OnBadInput(on_bad_input)))  # faults have been told
            for place in windows:
                batch = list(itertools.islice(documents, window))
                if place not in own or place.exists():
                    continue
                found = generator.generate(
                    [document.contents for document in batch],
                    how,
                    num_windows=len(windows),
                    on_batch=bar.update,
                )
                with atomic_file(place) as file:
                    for document, outputs in zip(batch, found, strict=True):
                        file.write(_line({"_id": document.id, "outputs": outputs}))
        wait_for_all("outputs are made")
        return _finish(windows, output) if part == 0 else None


def _begin(unfinished: Path, made: dict[str, Any], output: Path) -> None:
    """Makes the directory, or checks that what was begun in it is the same."""
    if (unfinished / MADE).exists():
        before = read_json(unfinished / MADE, dict[str, Any])
        for name, value in made.items():
            if before.get(name) != value:
                raise UserError(
                    f"{output} was begun with another {name} ({before.get(name)!r:.40}, now"
                    f" {value!r:.40}): give the same to finish it, or remove {unfinished}"
                )
        return
    with atomic_file(unfinished / MADE) as file:
        file.write(_line(made))


def _finish(windows: list[Path], output: Path) -> OutputsReport:
    report = OutputsReport()
    with atomic_file(output, "wb") as file:
        for window in windows:
            if not window.exists():
                raise UserError(f"{window} was removed meanwhile; run the same command again to make it anew")
            with open_to_read(window) as lines:
                for line in lines:
                    number = len(_record(line, window)["outputs"])
                    report.texts += 1
                    report.outputs += number
                    report.without += not number
                    file.write(line)
    remove_tree(windows[0].parent)
    return report


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _record(line: bytes, window: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("outputs"), list):
            return record
    raise UserError(f"{window} is damaged: remove it, and the same command makes it anew")


def _sha256(path: Path) -> str:
    def blocks() -> Iterator[bytes]:
        with open_to_read(path) as file:
            while block := file.read(1 << 20):
                yield block

    digest = hashlib.sha256()
    for block in blocks():
        digest.update(block)
    return digest.hexdigest()
