"""Shards of a corpus, each encoded by itself: in this process, or by one of many on machines of a cluster."""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.data.text.truncation import Truncation
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.cluster import Cluster, check_same
from jaxir.retrieval.encoding.lengths import UnusableVectorError
from jaxir.retrieval.encoding.text_encoder import DualEncoder, Tower
from jaxir.retrieval.encoding.views import encode_views
from jaxir.storage.files import atomic_file
from jaxir.storage.npy import write_npy


class Shard(NamedTuple):
    """Texts that are batched together.

    Attributes:
      number: which shard of the corpus it is.
      ids: of its n texts.
      texts: these, or for documents that are read with generated queries the views of each.
    """

    number: int
    ids: list[str]
    texts: list[Any]


class Encoded(NamedTuple):
    """What became of a shard.

    Attributes:
      number: which shard of the corpus it is.
      ids: of its n texts.
      vectors: float32 [n, D].
      cut: how many texts had more tokens than the model keeps.
    """

    number: int
    ids: list[str]
    vectors: np.ndarray
    cut: int


def encode_shards(
    encoder: DualEncoder,
    shards: Iterable[Shard],
    *,
    tower: Tower,
    num_windows: int,
    expanded: bool,
    report: EncodingReport | None = None,
    on_batch: Callable[[int], Any] | None = None,
) -> Iterator[Encoded]:
    """Encodes shards one after another; the next one is read and tokenised meanwhile.

    Args:
      encoder: the model.
      shards: the shards.
      tower: "query" or "passage".
      num_windows: how many the corpus has, wherever they are encoded: batches hang on it.
      expanded: whether texts are views.
      report: adds what was done to this.
      on_batch: called with the number of texts of each batch when it is done.
    """
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
    """As `encode_shards`, on other machines, in whatever order they are done.

    Args:
      cluster: the machines.
      encoder: the model, which they load under its name.
      shards: reads them.
      report: as there.
      on_batch: called with the number of texts of each shard.
      **how: the rest, as there.

    Raises:
      UserError: the model has no name, or another one has it there.
    """
    if encoder.spec is None:
        raise UserError("a model that was never saved cannot be loaded by the machines of a cluster: save it")
    worker = ShardWorker(
        spec=encoder.spec,
        fingerprint=encoder.fingerprint,
        dtype=encoder.model.config.backbone.dtype,
        batch_tokens=cluster.batch_tokens,
        lengths=(encoder.settings.query_max_length, encoder.settings.passage_max_length),
        how=how,
    )
    started = time.perf_counter()
    for encoded, done in cluster.map(worker, shards):
        report.texts += done.texts
        report.real_tokens += done.real_tokens
        report.padded_tokens += done.padded_tokens
        report.shapes |= done.shapes
        report.seconds = time.perf_counter() - started
        on_batch(done.texts)
        yield encoded


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardWorker:
    """What a process on another machine needs to encode shards as `encode_shards` does: a few words.

    Attributes:
      spec: the model, as that machine finds it.
      fingerprint: of it.
      dtype: of the matrix products.
      batch_tokens: tokens of a batch on one device; None suits that machine's.
      lengths: tokens that are kept of a query, and of a passage.
      how: what `encode_shards` is given.
    """

    spec: str
    fingerprint: str
    dtype: Literal["float32", "bfloat16"]
    batch_tokens: int | None
    lengths: tuple[int, int]
    how: dict[str, Any]

    def start(self) -> Callable[[Shard], tuple[Encoded, EncodingReport]]:
        """Loads the model; returns what encodes one shard, in any number of threads.

        Raises:
          UserError: the model is not there, or is another one.
        """
        query, passage = self.lengths
        encoder = DualEncoder.load(
            self.spec,
            dtype=self.dtype,
            batch_tokens=self.batch_tokens,
            query_max_length=query,
            passage_max_length=passage,
        )
        check_same(encoder, self.fingerprint)

        def encode(shard: Shard) -> tuple[Encoded, EncodingReport]:
            report = EncodingReport()
            (encoded,) = encode_shards(encoder, [shard], **self.how, report=report)
            return encoded, report

        return encode


def files_of(number: int | Literal["*"]) -> tuple[str, str]:
    """Returns the names of a shard's files, the ids and the vectors; of "*" patterns of all names."""
    digits = number if number == "*" else f"{number:05d}"
    return f"ids-{digits}.json", f"embeddings-{digits}.npy"


def count_of(number: int | Literal["*"]) -> str:
    """Returns the name of the hidden file that says how many texts of a shard were cut."""
    return f".cut-{number if number == '*' else f'{number:05d}'}.json"


def write_shard(directory: Path, encoded: Encoded) -> None:
    """Writes a shard's files, each of which appears only when whole."""
    ids_name, vectors_name = files_of(encoded.number)
    ids = json.dumps(encoded.ids, ensure_ascii=False).encode()
    with atomic_file(directory / count_of(encoded.number)) as file:
        file.write(f"{encoded.cut}\n")
    with atomic_file(directory / ids_name, "wb") as file:
        file.write(ids)
    with atomic_file(directory / vectors_name, "wb") as file:
        write_npy(file, [encoded.vectors])
