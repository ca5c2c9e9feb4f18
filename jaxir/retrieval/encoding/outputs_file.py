"""Writes a generator's outputs for the texts of a file, resumably (see `windowed_file`)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxir.data.formats.lines import OnBadInput, Policy
from jaxir.data.formats.sources import Document, read_corpus
from jaxir.interop import model_dir
from jaxir.models.decoding import Decoding
from jaxir.retrieval.encoding.cluster import Cluster, start_worker
from jaxir.retrieval.encoding.generator import Generator
from jaxir.retrieval.encoding.windowed_file import WINDOW, OutputsReport, lines_of, write_windows
from jaxir.storage.files import local_path
from jaxir.storage.open_files import sha256_of


def write_outputs(
    generator: Generator,
    input: str | Path,
    output: str | Path,
    how: Decoding,
    *,
    window: int = WINDOW,
    on_bad_input: Policy = "stop",
    cluster: Cluster | None = None,
) -> OutputsReport | None:
    """Writes a line {"_id", "outputs"} for each text of a .jsonl[.gz], in order (see `write_windows`)."""
    input, output = local_path(input), local_path(output, "written to")
    count = sum(1 for _ in read_corpus(input, on_bad_input))
    num_windows = -(-count // window)
    made = {"input": sha256_of(input), "window": window, **made_by(generator, how)}
    remote = None
    if cluster is not None:
        made["batch_tokens"] = cluster.batch_tokens
        start = functools.partial(
            start_worker,
            load=Generator.load,
            spec=model_dir.absolute(generator.spec),
            fingerprint=generator.fingerprint,
            options={"dtype": made["dtype"], "batch_tokens": cluster.batch_tokens},
            work=write_window,
            how={"how": how, "num_windows": num_windows},
        )
        remote = functools.partial(cluster.map, start)
    return write_windows(
        output,
        made,
        _Corpus(input, on_bad_input),
        lambda batch, done: write(generator, batch, how, num_windows=num_windows, on_batch=done),
        count=count,
        what=f"generating for {input.name}",
        window=window,
        remote=remote,
    )


def write_window(
    generator: Generator, window: tuple[int, list[Document]], *, how: Decoding, num_windows: int
) -> tuple[int, list[dict[str, Any]]]:
    number, batch = window
    return number, list(lines_of(batch, write(generator, batch, how, num_windows=num_windows)))


def write(
    generator: Generator, batch: Sequence[Document], how: Decoding, **more: Any
) -> Iterator[dict[str, list[str]]]:
    """Yields the outputs of each document; `more` is passed to `Generator.generate`."""
    texts = [document.contents for document in batch]
    return ({"outputs": outputs} for outputs in generator.generate(texts, how, **more))


@dataclasses.dataclass(frozen=True)
class _Corpus:
    """A picklable iterable of documents. Malformed lines are skipped silently: they were reported before."""

    path: Path
    on_bad_input: Policy

    def __iter__(self) -> Iterator[Document]:
        return read_corpus(self.path, OnBadInput(self.on_bad_input))


def made_by(generator: Generator, how: Decoding) -> dict[str, Any]:
    """Returns all settings of a generator and of decoding that outputs depend on."""
    return {
        "model": generator.fingerprint,
        "dtype": generator.model.config.backbone.dtype,
        "batch_tokens": generator.runner.batch_tokens,
        "max_length": generator.settings.passage_max_length,
        "prompt": generator.settings.passage_prompt,
        **dataclasses.asdict(how),
    }
