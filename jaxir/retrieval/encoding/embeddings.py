"""EMB_DIR: the vectors of a corpus on disk, written shard by shard and taken up again where they stopped.

    embeddings-00000.npy   float32 [n, D], memory-mappable
    ids-00000.json         its n ids
    embeddings.json        `EmbeddingsInfo`: model, input, number of texts, and whether all are there
    SHA256SUMS             the hashes of all of them

A shard is there if both are: the ids and the hashes of both are written first, and either appears only when
whole. Texts are batched within their shard, so its vectors do not depend on where a run was interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxir import checksums
from jaxir.data import fingerprints
from jaxir.data.lines import OnBadInput, Policy
from jaxir.data.sources import read_corpus, read_lines, read_queries
from jaxir.errors import UserError
from jaxir.files import atomic_file, local_path
from jaxir.json_files import made, read_json
from jaxir.locks import Lock, locked
from jaxir.outputs import check_work_directory
from jaxir.progress import progress
from jaxir.reading import open_to_read
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.dual_encoder import DualEncoder, Tower
from jaxir.retrieval.encoding.views import Expansion, Kind, encode_views
from jaxir.retrieval.npy import read_npy, write_npy
from jaxir.simple_types import Count, Natural, checked

FORMAT = 1
SHARD_SIZE = 16_384
MANIFEST = "embeddings.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EmbeddingsInfo:
    """What embeddings.json says.

    Attributes:
      format: version of the format.
      complete: whether all `count` vectors are there.
      count: number of texts of the input.
      shard_size: texts in a shard; the last one may have fewer.
      tower: "query" or "passage".
      fingerprint: of the model.
      model: the model as it was named.
      dimension: D.
      similarity: "cosine" or "dot".
      dtype: of the matrix products; vectors are float32.
      max_length: tokens beyond which a text is cut.
      prompt: what stood before each text.
      text: how a record becomes a text.
      input_name: name of the input file.
      input_bytes: its size.
      input_sha256: its hash.
      expansion: how documents were read with generated queries (`views.Expansion.kind`); None: without. By
        "corpus" texts are entries, of which those of a document follow each other under its one id.
      views: S, at most so many queries of a document.
      expansions_hash: of these queries.
    """

    format: int = FORMAT
    complete: bool
    count: Natural
    shard_size: Count
    tower: Tower
    fingerprint: str
    model: str | None
    dimension: Count
    similarity: Literal["cosine", "dot"]
    dtype: Literal["float32", "bfloat16"]
    max_length: Count
    prompt: str
    text: str
    input_name: str
    input_bytes: Natural
    input_sha256: str
    expansion: Kind | None = None
    views: Natural = 0
    expansions_hash: str = ""

    @property
    def read_with(self) -> str | None:
        """How documents were read with generated queries, in words; None: alone."""
        return None if self.expansion is None else f"--expansion={self.expansion} --views={self.views}"


# What must be the same for a run to be continued, and how it is called.
_SAME = {
    "input_sha256": "input",
    "fingerprint": "model",
    "tower": "--tower",
    "shard_size": "--shard_size",
    "dtype": "--dtype",
    "max_length": "maximum length",
    "prompt": "prompt",
    "expansion": "--expansion",
    "views": "--views",
    "expansions_hash": "--expansions",
}


@dataclasses.dataclass(frozen=True)
class StoredEmbeddings:
    """A complete EMB_DIR.

    Attributes:
      info: what embeddings.json says.
      ids: all ids, in the order of the input.
      shards: the memory-mapped vectors, float32 [n, D] each, in the order of the ids.
    """

    info: EmbeddingsInfo
    ids: list[str]
    shards: list[np.ndarray]


def encode_corpus(
    encoder: DualEncoder,
    input: str | Path,
    output: str | Path,
    *,
    tower: Tower = "passage",
    shard_size: int = SHARD_SIZE,
    expansion: Expansion | None = None,
    on_bad_input: Policy = "stop",
) -> EncodingReport:
    """Encodes a corpus (tower "passage") or queries (tower "query") into an EMB_DIR.

    Run again after an interruption it continues at the first missing shard; the result is the same, bit for
    bit on one machine, as that of an uninterrupted run. A complete directory is left as it is.

    Args:
      encoder: the model.
      input: corpus.jsonl[.gz] or queries.jsonl[.gz], or a .txt[.gz] with a text on each line, whose number is
        the id.
      output: EMB_DIR.
      tower: which tower reads the texts.
      shard_size: texts in a shard. At most one shard of work is lost by an interruption.
      expansion: reads documents with generated queries; None: without.
      on_bad_input: "stop" at the first malformed line, before anything is encoded, or "skip" them.

    Returns:
      What was done by this call.

    Raises:
      BadInputError: a malformed line, also of the queries.
      UserError: the directory is another run's, or another process is writing it, or queries are to expand
        queries.
    """
    if shard_size < 1:
        raise UserError(f"shard_size must be at least 1, not {shard_size}")
    if expansion is not None and tower != "passage":
        raise UserError("generated queries expand documents: with --tower=passage only")
    input, output = local_path(input), local_path(output, "written to")
    check_work_directory(output, "embeddings directory")
    report = EncodingReport()
    info = _describe(encoder, input, tower, shard_size, expansion, on_bad_input)
    with _writing(output, info) as (done, lock):
        if done is None:
            return report
        records = _records(input, tower, expansion, OnBadInput(on_bad_input))
        records = itertools.islice(records, done * shard_size, None)
        ids_of_shards: list[list[str]] = []

        def windows() -> Iterator[list[Any]]:
            while shard := list(itertools.islice(records, shard_size)):
                ids_of_shards.append([doc_id for doc_id, _ in shard])
                yield [text for _, text in shard]

        sums = checksums.take_up(output, [name for number in range(done) for name in _files(number)])
        written = {}
        each = info.views if info.expansion == "typical" else 1
        initial, total = (each * count for count in (min(info.count, done * shard_size), info.count))
        with progress(total=total, initial=initial, what=f"encoding {input.name}", unit="texts") as bar:
            how = {
                "num_windows": -(-info.count // shard_size),
                "report": report,
                "on_batch": bar.update,
            }
            if expansion is None:
                parts = encoder.encode_windows(windows(), tower=tower, **how)
            else:
                parts = encode_views(encoder, windows(), **how)
            for number, vectors in enumerate(parts, start=done):
                lock.check()
                ids_name, vectors_name = _files(number)
                ids = json.dumps(ids_of_shards.pop(0), ensure_ascii=False).encode()
                sums[ids_name] = hashlib.sha256(ids).hexdigest()
                with atomic_file(output / ids_name, "wb") as file:
                    file.write(ids)
                with atomic_file(output / vectors_name, "wb") as file:
                    hashed = checksums.Hashed(file)
                    write_npy(hashed, [vectors])
                    sums[vectors_name] = hashed.hexdigest()
                    checksums.append(output, {name: sums[name] for name in (ids_name, vectors_name)})
                written |= {name: checksums.key(output / name) for name in (ids_name, vectors_name)}
        lock.check()
        if gone := next((name for name in sums if not (output / name).exists()), None):
            raise UserError(
                f"{output / gone} was removed meanwhile; run the same command again to make it anew"
            )
        info = dataclasses.replace(info, complete=True)
        sums[MANIFEST] = hashlib.sha256(_described(info).encode()).hexdigest()
        checksums.write(output, sums)
        _write_manifest(output, info)
        written[MANIFEST] = checksums.key(output / MANIFEST)
        if written.keys() == sums.keys():  # what others have written is read when it is opened
            checksums.stamp(output, written)
    return report


def open_embeddings(directory: str | Path) -> StoredEmbeddings:
    """Opens a complete EMB_DIR; vectors are memory-mapped.

    Raises:
      UserError: it is none, it is unfinished, or it is damaged.
    """
    directory = local_path(directory)
    info = _read_manifest(directory)
    if not info.complete:
        raise UserError(f"{directory} is unfinished: run the same encode command again to continue it")
    checksums.check(directory)
    ids: list[str] = []
    shards: list[np.ndarray] = []
    for number in range(-(-info.count // info.shard_size)):
        try:
            ids_name, vectors_name = _files(number)
            shard_ids = read_json(directory / ids_name, list[str])
            shard = read_npy(directory / vectors_name, np.float32, (len(shard_ids), info.dimension))
        except UserError as error:
            raise UserError(f"{directory} is damaged: {error}") from None
        ids += shard_ids
        shards.append(shard)
    if len(ids) != info.count:
        raise UserError(f"{directory} is damaged: it holds {len(ids)} texts of {info.count}")
    return StoredEmbeddings(info, ids, shards)


def _describe(
    encoder: DualEncoder,
    input: Path,
    tower: Tower,
    shard_size: int,
    expansion: Expansion | None,
    on_bad_input: Policy,
) -> EmbeddingsInfo:
    """Reads the whole input once, so that a fault in it is told before any work, and describes the run."""
    digest, of_queries = hashlib.sha256(), fingerprints.ValuesHash()
    count = queries = 0
    for _, item in _records(input, tower, expansion, on_bad_input):
        count += 1
        if expansion is not None:
            found = [view.queries for view in item]
            queries += sum(map(len, found))
            of_queries.add(found)
    if expansion is not None and not queries:
        raise UserError(f"{expansion.path}: there is no query for any document")
    with open_to_read(input) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    prompt, max_length = encoder.text_settings(tower)
    return EmbeddingsInfo(
        complete=False,
        count=count,
        shard_size=shard_size,
        tower=tower,
        fingerprint=encoder.fingerprint,
        model=encoder.spec,
        dimension=encoder.dimension,
        similarity=encoder.similarity,
        dtype=encoder.model.config.backbone.dtype,
        max_length=max_length,
        prompt=prompt,
        text="(title + ' ' + text).strip()" if tower == "passage" and not _has_lines(input) else "text",
        input_name=input.name,
        input_bytes=input.stat().st_size,
        input_sha256=digest.hexdigest(),
        expansion=expansion and expansion.kind,
        views=expansion.views if expansion else 0,
        expansions_hash=of_queries.hex() if expansion else "",
    )


def _has_lines(input: Path) -> bool:
    """Whether it has a text on each line."""
    return input.name.removesuffix(".gz").endswith(".txt")


def _records(
    input: Path, tower: Tower, expansion: Expansion | None, on_bad_input: OnBadInput | Policy
) -> Iterator[tuple[str, Any]]:
    """Yields (id, text), or of documents that are expanded (id, views)."""
    texts = _read(input, tower, on_bad_input)
    if expansion is None:
        return texts
    # What is malformed is told when the texts are read.
    ids = [identifier for identifier, _ in _read(input, tower, OnBadInput("skip"))]
    return expansion.records(texts, ids, on_bad_input)


def _read(input: Path, tower: Tower, on_bad_input: OnBadInput | Policy) -> Iterator[tuple[str, str]]:
    if _has_lines(input):
        return map(tuple, read_lines(input, on_bad_input))
    if tower == "query":
        return ((query.id, query.text) for query in read_queries(input, on_bad_input))
    return ((document.id, document.contents) for document in read_corpus(input, on_bad_input))


@contextlib.contextmanager
def _writing(output: Path, info: EmbeddingsInfo) -> Iterator[tuple[int | None, Lock]]:
    """Locks `output` for this process; yields how many shards are there (None: all), and the lock."""
    check_work_directory(output, "embeddings directory")
    with locked(output, f"another process is writing {output}") as lock:
        if (output / MANIFEST).exists():
            stored = _read_manifest(output)
            for name, called in _SAME.items():
                if getattr(stored, name) != getattr(info, name):
                    raise UserError(
                        f"{output} was begun with another {called} ({getattr(stored, name)!r}, now "
                        f"{getattr(info, name)!r}): give the same, or another output"
                    )
            shards = range(-(-info.count // info.shard_size))
            if stored.complete and all((output / name).exists() for n in shards for name in _files(n)):
                yield None, lock
                return
            if stored.complete:  # some have been removed since
                _write_manifest(output, info)
        else:
            _write_manifest(output, info)
        for leftover in output.glob(".*.part"):
            leftover.unlink()
        done = 0
        while all((output / name).exists() for name in _files(done)):
            done += 1
        yield done, lock


def _write_manifest(directory: Path, info: EmbeddingsInfo) -> None:
    with atomic_file(directory / MANIFEST) as file:
        file.write(_described(info))


def _described(info: EmbeddingsInfo) -> str:
    return json.dumps(dataclasses.asdict(info), indent=2, ensure_ascii=False) + "\n"


def _files(number: int) -> tuple[str, str]:
    """Returns the names of a shard's files: the ids, and the vectors."""
    return f"ids-{number:05d}.json", f"embeddings-{number:05d}.npy"


def _read_manifest(directory: Path) -> EmbeddingsInfo:
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"{directory} holds no embeddings: it has no {MANIFEST}")
    try:
        info = made(EmbeddingsInfo, read_json(path, dict[str, Any]), path)
    except UserError as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise UserError(f"{path} is damaged: {reason}") from None
    if info.format != FORMAT:
        raise UserError(f"{path} has format {info.format!r}, this jaxir reads {FORMAT}")
    return info
