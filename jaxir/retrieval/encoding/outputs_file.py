"""What a generator writes for the texts of a file: a JSON line for each, taken up again where a run stopped.

Until all are there they lie beside the output, in `.NAME.unfinished`: a line that says what is made, and the
lines of whole windows. Texts are batched within their window, so that outputs do not depend on where a run
was interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxir.data.lines import Policy
from jaxir.data.sources import read_corpus
from jaxir.errors import UserError
from jaxir.files import atomic_file, local_path
from jaxir.models.decoding import Decoding
from jaxir.progress import progress
from jaxir.reading import open_to_read
from jaxir.retrieval.encoding.generator import Generator

WINDOW = 1024  # texts, at most which are lost by an interruption


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
) -> OutputsReport:
    """Writes {"_id", "outputs"} for each text of a file, in its order; the file appears only when whole.

    Run again after an interruption it continues; the result is the same.

    Args:
      generator: the model.
      input: .jsonl[.gz] of `_id`, `text` and maybe `title`.
      output: the file.
      how: how outputs are made.
      window: texts that are batched together.
      on_bad_input: "stop" at the first malformed line, before anything is generated, or "skip" them.

    Raises:
      BadInputError: a malformed line.
      UserError: what was begun there is something else, or damaged.
    """
    input, output = local_path(input), local_path(output, "written to")
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
    done = _take_up(unfinished, made, window, output)
    documents = itertools.islice(read_corpus(input, on_bad_input), done, None)
    with (
        progress(total=count, initial=done, what=f"generating for {input.name}", unit="texts") as bar,
        unfinished.open("ab") as file,
    ):
        while part := list(itertools.islice(documents, window)):
            found = generator.generate(
                [document.contents for document in part],
                how,
                num_windows=-(-count // window),
                on_batch=bar.update,
            )
            records = ({"_id": d.id, "outputs": outputs} for d, outputs in zip(part, found, strict=True))
            file.write("".join(map(_line, records)).encode())
            file.flush()
            os.fsync(file.fileno())
    return _finish(unfinished, output)


def _take_up(unfinished: Path, made: dict[str, Any], window: int, output: Path) -> int:
    """Returns how many texts have their outputs, and makes ready for the next ones."""
    if unfinished.exists():
        with open_to_read(unfinished) as file:
            lines = file.read().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        if whole:
            before = _record(whole[0], unfinished)
            for name, value in made.items():
                if before.get(name) != value:
                    raise UserError(
                        f"{output} was begun with another {name} ({before.get(name)!r:.40}, now"
                        f" {value!r:.40}): give the same to finish it, or remove {unfinished}"
                    )
            done = (len(whole) - 1) // window * window
            os.truncate(unfinished, sum(map(len, whole[: 1 + done])))
            return done
    with atomic_file(unfinished) as file:
        file.write(_line(made))
    return 0


def _finish(unfinished: Path, output: Path) -> OutputsReport:
    report = OutputsReport()
    with open_to_read(unfinished) as lines, atomic_file(output, "wb") as file:
        for line in itertools.islice(lines, 1, None):
            number = len(_record(line, unfinished, "outputs")["outputs"])
            report.texts += 1
            report.outputs += number
            report.without += not number
            file.write(line)
    unfinished.unlink()
    return report


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


def _record(line: bytes, unfinished: Path, *keys: str) -> dict[str, Any]:
    """Returns the record of a line, which has these keys."""
    with contextlib.suppress(ValueError):
        record = json.loads(line)
        if isinstance(record, dict) and set(keys) <= record.keys():
            return record
    raise UserError(f"{unfinished} is damaged: remove it to begin anew")


def _sha256(path: Path) -> str:
    def blocks() -> Iterator[bytes]:
        with open_to_read(path) as file:
            while block := file.read(1 << 20):
                yield block

    digest = hashlib.sha256()
    for block in blocks():
        digest.update(block)
    return digest.hexdigest()
