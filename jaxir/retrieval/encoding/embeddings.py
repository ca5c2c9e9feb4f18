"""EMB_DIR: the vectors of a corpus on disk, written shard by shard and taken up again where they stopped.

    embeddings-00000.npy   float32 [n, D], memory-mappable
    ids-00000.json         its n ids
    .cut-00000.json        how many of its texts had more tokens than the model keeps
    embeddings.json        `EmbeddingsInfo`: model, input, number of texts, and whether all are there
    SHA256SUMS             the hashes of all of them but hidden ones

A shard is there if both files are: the ids are written first, and either appears only when whole. SHA256SUMS
is written when all shards are there. Texts are batched within their shard, so its vectors do not depend on
where a run was interrupted, nor on which of several processes made it.
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

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.core.values import Count, Natural, checked
from jaxir.data.formats.lines import OnBadInput, Policy
from jaxir.data.formats.sources import has_lines, read_corpus, read_lines, read_queries
from jaxir.data.text.truncation import Truncation
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.cluster import Cluster
from jaxir.retrieval.encoding.made_by import MadeBy
from jaxir.retrieval.encoding.shards import (
    Shard,
    count_of,
    encode_by_cluster,
    encode_shards,
    files_of,
    write_shard,
)
from jaxir.retrieval.encoding.text_encoder import DualEncoder, Tower
from jaxir.retrieval.encoding.views import Expansion, Kind, joiner_of
from jaxir.runtime.distributed import wait_for_all
from jaxir.storage import checksums, fingerprints
from jaxir.storage.files import atomic_file, local_path
from jaxir.storage.json_files import made, read_json
from jaxir.storage.locks import Lock, locked
from jaxir.storage.npy import read_npy
from jaxir.storage.open_files import sha256_of
from jaxir.storage.outputs import check_work_directory

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
      step: of a model that is a training run, the step of its checkpoint; None: unknown.
      max_length: tokens beyond which a text is cut.
      cut: number of texts that were cut; None: unknown.
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
    cut: Natural | None = None
    step: Natural | None = None

    @property
    def made_by(self) -> MadeBy:
        """The model as messages name it."""
        return MadeBy(self.model, self.step)

    @property
    def truncation(self) -> Truncation | None:
        """The counts of texts, and of those that were cut; None: unknown."""
        return None if self.cut is None else Truncation(self.max_length, self.count, self.cut)

    @property
    def shards(self) -> int:
        """How many there are."""
        return -(-self.count // self.shard_size)

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
    "max_length": "--max_length",
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

    def require_model(self, encoder: DualEncoder) -> None:
        """Checks that a model's queries may be compared with these vectors.

        Raises:
          UserError: another model made them.
        """
        if encoder.fingerprint != self.info.fingerprint:
            why = self.info.made_by.unlike(encoder.made_by)
            raise UserError(f"the embeddings do not fit the model: {why}; encode the corpus again")


def encode_corpus(
    encoder: DualEncoder,
    input: str | Path,
    output: str | Path,
    *,
    tower: Tower = "passage",
    shard_size: int = SHARD_SIZE,
    expansion: Expansion | None = None,
    on_bad_input: Policy = "stop",
    cluster: Cluster | None = None,
) -> EncodingReport:
    """Encodes a corpus (tower "passage") or queries (tower "query") into an EMB_DIR.

    Run again after an interruption it makes the shards that are missing; the result is the same, bit for bit
    on machines of one kind, as that of an uninterrupted run, in whatever processes it was made. A complete
    directory is left as it is. Several processes of one run, which see the same files, each make their part
    of the shards; the machines of a Ray cluster see none of them.

    Args:
      encoder: the model.
      input: corpus.jsonl[.gz] or queries.jsonl[.gz], or a .txt[.gz] with a text on each line, whose number is
        the id.
      output: EMB_DIR.
      tower: which tower reads the texts.
      shard_size: texts in a shard. At most one shard of work of each process is lost by an interruption, of a
        machine of a cluster four.
      expansion: reads documents with generated queries; None: without.
      on_bad_input: "stop" at the first malformed line, before anything is encoded, or "skip" them.
      cluster: machines that encode in the place of this process, which only reads and writes; None: it does.

    Returns:
      What was done by this call, in this process or by the cluster.

    Raises:
      BadInputError: a malformed line, also of the queries.
      UserError: the directory is another run's, or another run is writing it, or queries are to expand
        queries or leave no room for documents, or a machine of the cluster has another model under the
        encoder's name.
    """
    if shard_size < 1:
        raise UserError(f"shard_size must be at least 1, not {shard_size}")
    if expansion is not None and tower != "passage":
        raise UserError("generated queries expand documents: with --tower=passage only")
    if expansion is not None:
        joiner_of(encoder)  # while nothing is written yet
    input, output = local_path(input), local_path(output, "written to")
    check_work_directory(output, "embeddings directory")
    info = _describe(encoder, input, tower, shard_size, expansion, on_bad_input)
    report, part, parts = EncodingReport(), jax.process_index(), jax.process_count()
    with _writing(output, info) if part == 0 else contextlib.nullcontext() as lock:
        there = {number for number in range(info.shards) if _is_there(output, number)}
        wait_for_all("embeddings are begun")
        if read_info(output).complete:
            return report
        own = [number for number in range(part, info.shards, parts) if number not in there]

        def shards() -> Iterator[Shard]:
            records = _records(input, tower, expansion, OnBadInput(on_bad_input))
            for number in range(own[-1] + 1 if own else 0):
                shard = list(itertools.islice(records, shard_size))
                if number in wanted:
                    yield Shard(number, [doc_id for doc_id, _ in shard], [text for _, text in shard])

        wanted = set(own)
        each = info.views if info.expansion == "typical" else 1
        sizes = [each * min(shard_size, info.count - n * shard_size) for n in range(part, info.shards, parts)]
        left = sum(each * min(shard_size, info.count - number * shard_size) for number in own)
        what = f"encoding {input.name}" + (f", part {part + 1} of {parts}" if parts > 1 else "")
        with progress(total=sum(sizes), initial=sum(sizes) - left, what=what, unit="texts") as bar:
            how = {"tower": tower, "num_windows": info.shards, "expanded": expansion is not None}
            if cluster is None:
                made = encode_shards(encoder, shards(), **how, report=report, on_batch=bar.update)
            else:
                made = encode_by_cluster(cluster, encoder, shards, **how, report=report, on_batch=bar.update)
            for shard in made:
                if lock is not None:
                    lock.check()
                write_shard(output, shard)
        wait_for_all("embeddings are made")
        if lock is not None:
            lock.check()
            _finish(output, info)
        wait_for_all("embeddings are complete")
    return report


def open_embeddings(directory: str | Path) -> StoredEmbeddings:
    """Opens a complete EMB_DIR; vectors are memory-mapped.

    Raises:
      UserError: it is none, it is unfinished, or it is damaged.
    """
    directory = local_path(directory)
    info = read_info(directory)
    if not info.complete:
        raise UserError(f"{directory} is unfinished: run the same encode command again to continue it")
    checksums.check(directory)
    ids: list[str] = []
    shards: list[np.ndarray] = []
    for number in range(info.shards):
        try:
            ids_name, vectors_name = files_of(number)
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
    of_queries = fingerprints.ValuesHash()
    count = queries = 0
    for _, item in _records(input, tower, expansion, on_bad_input):
        count += 1
        if expansion is not None:
            found = [view.queries for view in item]
            queries += sum(map(len, found))
            of_queries.add(found)
    if expansion is not None and not queries:
        raise UserError(f"{expansion.path}: there is no query for any document")
    prompt, max_length = encoder.text_settings(tower)
    return EmbeddingsInfo(
        complete=False,
        count=count,
        shard_size=shard_size,
        tower=tower,
        fingerprint=encoder.fingerprint,
        model=encoder.spec,
        step=encoder.step,
        dimension=encoder.dimension,
        similarity=encoder.similarity,
        dtype=encoder.model.config.backbone.dtype,
        max_length=max_length,
        prompt=prompt,
        text="(title + ' ' + text).strip()" if tower == "passage" and not has_lines(input) else "text",
        input_name=input.name,
        input_bytes=input.stat().st_size,
        input_sha256=sha256_of(input),
        expansion=expansion and expansion.kind,
        views=expansion.views if expansion else 0,
        expansions_hash=of_queries.hex() if expansion else "",
    )


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
    if has_lines(input):
        return map(tuple, read_lines(input, on_bad_input))
    if tower == "query":
        return ((query.id, query.text) for query in read_queries(input, on_bad_input))
    return ((document.id, document.contents) for document in read_corpus(input, on_bad_input))


@contextlib.contextmanager
def _writing(output: Path, info: EmbeddingsInfo) -> Iterator[Lock]:
    """Locks `output` for this process, and sees that its manifest says whether all shards are there."""
    check_work_directory(output, "embeddings directory")
    with locked(output, f"another process is writing {output}") as lock:
        complete = False
        if (output / MANIFEST).exists():
            stored = read_info(output)
            changed = next((n for n in _SAME if getattr(stored, n) != getattr(info, n)), None)
            if changed is not None and any(output.glob(files_of("*")[1])):
                how = _change(changed, stored, info)
                raise UserError(
                    f"{output} was begun with another {_SAME[changed]} ({how}): give the same, or another"
                    " output"
                )
            complete = (
                changed is None and stored.complete and all(_is_there(output, n) for n in range(info.shards))
            )
            if changed is not None:  # there are no vectors that could be lost
                for leftover in (*output.glob(files_of("*")[0]), *output.glob(count_of("*"))):
                    leftover.unlink()
        if not complete:  # or some have been removed since
            _write_manifest(output, info)
            for leftover in output.glob(".*.part"):
                leftover.unlink()
        yield lock


def _change(name: str, before: EmbeddingsInfo, now: EmbeddingsInfo) -> str:
    """Returns in words how a field of two descriptions differs; hashes say nothing to a reader."""
    if name == "fingerprint":
        return before.made_by.unlike(now.made_by).removeprefix("they were ")
    if name == "input_sha256" and before.input_name == now.input_name:
        return f"{now.input_name} has changed since"
    if name == "input_sha256":
        return f"{before.input_name}, now {now.input_name}"
    if name == "expansions_hash":
        return "other generated queries"
    return f"{getattr(before, name)!r}, now {getattr(now, name)!r}"


def _finish(output: Path, info: EmbeddingsInfo) -> None:
    """Writes SHA256SUMS and the manifest, which says that all shards are there."""
    names = [name for number in range(info.shards) for name in files_of(number)]
    if gone := next((name for name in names if not (output / name).exists()), None):
        raise UserError(f"{output / gone} was removed meanwhile; run the same command again to make it anew")
    sums = checksums.take_up(output, names)
    info = dataclasses.replace(info, complete=True, cut=_number_cut(output, info.shards))
    sums[MANIFEST] = hashlib.sha256(_described(info).encode()).hexdigest()
    checksums.write(output, sums)
    _write_manifest(output, info)


def _number_cut(output: Path, shards: int) -> int | None:
    """Returns how many texts of all shards were cut; None if an earlier jaxir made one of them."""
    paths = [output / count_of(number) for number in range(shards)]
    try:
        return sum(read_json(path, int) for path in paths)
    except (UserError, FileNotFoundError):
        return None


def _write_manifest(directory: Path, info: EmbeddingsInfo) -> None:
    with atomic_file(directory / MANIFEST) as file:
        file.write(_described(info))


def _described(info: EmbeddingsInfo) -> str:
    return json.dumps(dataclasses.asdict(info), indent=2, ensure_ascii=False) + "\n"


def _is_there(output: Path, number: int) -> bool:
    return all((output / name).exists() for name in files_of(number))


def read_info(directory: Path) -> EmbeddingsInfo:
    """Returns what embeddings.json says.

    Raises:
      UserError: it is missing, damaged or of another format.
    """
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
