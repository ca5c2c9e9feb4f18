"""Encodes a corpus in shards, each independent of the others, in this process or on a cluster."""

from __future__ import annotations

import collections
import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.text.truncation import Truncation
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.cluster import Cluster, start_worker
from jaxir.retrieval.encoding.fixed_dimension_encoder import FixedDimensionEncoder
from jaxir.retrieval.encoding.lengths import UnusableVectorError
from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
from jaxir.retrieval.encoding.text_encoder import DualEncoder, Tower
from jaxir.retrieval.encoding.views import encode_views
from jaxir.storage.files import atomic_file
from jaxir.storage.npy import write_npy


class Shard(NamedTuple):
    """The n ids and texts of a shard. For documents with generated queries, `texts` has lists of views."""

    number: int
    ids: list[str]
    texts: list[Any]


class Encoded(NamedTuple):
    """An encoded shard: float32 vectors [n, D], and how many texts were truncated.

    A multi-vector encoder gives n arrays [tokens, D] instead of `vectors`.
    """

    number: int
    ids: list[str]
    vectors: np.ndarray | list[np.ndarray]
    cut: int


def encode_shards(
    encoder: DualEncoder | MultiVectorEncoder | FixedDimensionEncoder,
    shards: Iterable[Shard],
    *,
    tower: Tower,
    num_windows: int,
    expanded: bool,
    report: EncodingReport | None = None,
    on_batch: Callable[[int], Any] | None = None,
) -> Iterator[Encoded]:
    """Encodes shards one by one. Batch shapes depend on `num_windows`, the corpus's number of shards."""
    drawn: collections.deque[tuple[Shard, Truncation]] = collections.deque()
    _, max_length = encoder.text_settings(tower)

    def texts() -> Iterator[tuple[list[Any], Truncation]]:
        for shard in shards:
            drawn.append((shard, Truncation(max_length)))
            yield shard.texts, drawn[-1][1]

    how = {"num_windows": num_windows, "report": report, "on_batch": on_batch}
    if expanded:
        parts = encode_views(encoder, texts(), **how)
    else:
        tokens = (encoder.tokens(some, tower, truncation) for some, truncation in texts())
        parts = encoder.encode_tokens(tokens, tower=tower, **how)
    try:
        for vectors in parts:
            shard, truncation = drawn.popleft()
            yield Encoded(shard.number, shard.ids, vectors, truncation.cut)
    except UnusableVectorError as error:
        raise UserError(f"{error}: the text of {drawn[0][0].ids[error.row]!r}") from None


def encode_by_cluster(
    cluster: Cluster,
    encoder: DualEncoder,
    shards: Callable[[], Iterable[Shard]],
    *,
    report: EncodingReport,
    on_batch: Callable[[int], Any],
    **how: Any,
) -> Iterator[Encoded]:
    """Like `encode_shards`, on a cluster. Yields shards as they finish; may call `shards` several times."""
    if encoder.spec is None:
        raise UserError(
            "a cluster cannot load a model that was never saved: save it, then load the saved one"
        )
    start = functools.partial(
        start_worker,
        load=DualEncoder.load,
        spec=encoder.spec,
        fingerprint=encoder.fingerprint,
        options={
            "dtype": encoder.model.config.backbone.dtype,
            "weights": encoder.weights,
            "batch_tokens": cluster.batch_tokens,
            "query_max_length": encoder.settings.query_max_length,
            "passage_max_length": encoder.settings.passage_max_length,
        },
        work=encode_shard,
        how=how,
    )
    started = time.perf_counter()
    for encoded, done in cluster.map(start, shards):
        report.texts += done.texts
        report.real_tokens += done.real_tokens
        report.padded_tokens += done.padded_tokens
        report.shapes |= done.shapes
        report.seconds = time.perf_counter() - started
        on_batch(done.texts)
        yield encoded


def encode_shard(encoder: DualEncoder, shard: Shard, **how: Any) -> tuple[Encoded, EncodingReport]:
    report = EncodingReport()
    (encoded,) = encode_shards(encoder, [shard], **how, report=report)
    return encoded, report


def shard_files(number: int | Literal["*"]) -> tuple[str, str]:
    """Returns the names of a shard's files, ids and vectors; for "*" glob patterns of all names."""
    digits = number if number == "*" else f"{number:05d}"
    return f"ids-{digits}.json", f"embeddings-{digits}.npy"


def cut_file(number: int | Literal["*"]) -> str:
    """Returns the name of the hidden file that counts a shard's truncated texts."""
    return f".cut-{number if number == '*' else f'{number:05d}'}.json"


def lengths_file(number: int | Literal["*"]) -> str:
    """Returns the name of the file with the numbers of tokens of a multi-vector encoder's texts."""
    return f"lengths-{number if number == '*' else f'{number:05d}'}.npy"


def is_written(directory: Path, number: int) -> bool:
    return all((directory / name).exists() for name in shard_files(number))


def write_shard(directory: Path, encoded: Encoded) -> None:
    """Writes a shard's files; each appears only when complete, the vectors last."""
    ids_name, vectors_name = shard_files(encoded.number)
    with atomic_file(directory / cut_file(encoded.number)) as file:
        file.write(f"{encoded.cut}\n")
    with atomic_file(directory / ids_name, "wb") as file:
        file.write(json.dumps(encoded.ids, ensure_ascii=False).encode())
    vectors = encoded.vectors
    if isinstance(vectors, list):
        with atomic_file(directory / lengths_file(encoded.number), "wb") as file:
            write_npy(file, [np.array([len(some) for some in vectors], np.int32)])
        vectors = np.concatenate(vectors).astype(np.float16)
    with atomic_file(directory / vectors_name, "wb") as file:
        write_npy(file, [vectors])
