"""Writes EMB_DIR, the vectors of a corpus on disk, shard by shard; an interrupted run resumes.

    embeddings-00000.npy   float32 [n, D], memory-mappable; of a multi-vector encoder float16 [t, D] of tokens
    lengths-00000.npy      int32 [n], numbers of tokens; only of a multi-vector encoder
    ids-00000.json         the n ids of the same shard
    .cut-00000.json        how many texts of the shard were truncated
    embeddings.json        `EmbeddingsInfo`: model, input, number of texts, and whether all are encoded
    SHA256SUMS             the hashes of all files that are not hidden, written last

A shard is complete when both its ids and its vectors exist; the ids are written first. Texts are batched
within their shard, so vectors do not depend on interruptions or on the number of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.data.formats.lines import OnBadInput, Policy
from jaxir.data.formats.sources import has_lines, read_corpus, read_lines, read_queries
from jaxir.retrieval.encoding.batching import EncodingReport
from jaxir.retrieval.encoding.cluster import Cluster
from jaxir.retrieval.encoding.fixed_dimension_encoder import FixedDimensionEncoder
from jaxir.retrieval.encoding.multi_vector_encoder import MultiVectorEncoder
from jaxir.retrieval.encoding.shards import (
    Shard,
    cut_file,
    encode_by_cluster,
    encode_shards,
    is_written,
    lengths_file,
    shard_files,
    write_shard,
)
from jaxir.retrieval.encoding.stored_embeddings import MANIFEST, MAXSIM, EmbeddingsInfo, read_info
from jaxir.retrieval.encoding.text_encoder import DualEncoder, Tower
from jaxir.retrieval.encoding.views import Expansion, joiner_of
from jaxir.runtime.distributed import wait_for_all
from jaxir.storage import checksums, fingerprints
from jaxir.storage.files import atomic_file, local_path
from jaxir.storage.json_files import read_json
from jaxir.storage.locks import Lock, locked
from jaxir.storage.open_files import sha256_of
from jaxir.storage.outputs import check_work_directory

SHARD_SIZE = 16_384  # number of texts per file
# Fields of `EmbeddingsInfo` that must be equal when a run resumes, and their names in error messages.
_SAME = {
    "input_sha256": "input",
    "weights": "--weights",
    "fde": "--fde",
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


def encode_corpus(
    encoder: DualEncoder | MultiVectorEncoder | FixedDimensionEncoder,
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

    After an interruption the same call encodes the missing shards. On machines of one kind, the result equals
    that of an uninterrupted run, bit for bit. A complete directory is not changed. The processes of one run
    share the shards and need a common file system; machines of a Ray cluster need no common files.

    Args:
      encoder: the model.
      input: corpus.jsonl[.gz] or queries.jsonl[.gz], or a .txt[.gz] with a text on each line; the line number
        is the id.
      output: the directory to write (EMB_DIR).
      tower: which tower encodes the texts.
      shard_size: number of texts per shard. An interruption loses at most one shard per process, or four per
        machine of a cluster.
      expansion: how generated queries are added to documents; None: without generated queries.
      on_bad_input: "stop" at the first malformed line, before anything is encoded, or "skip" malformed lines.
      cluster: machines that encode instead of this process; None: this process encodes.

    Returns:
      Counts of what this call encoded, here or on the cluster.

    Raises:
      BadInputError: a line of `input` or of the generated queries is malformed.
      UserError: the directory belongs to another run, another process is writing it, generated queries leave
        no room for documents, or a machine of the cluster has a different model under the same name.
    """
    if shard_size < 1:
        raise UserError(f"shard_size must be at least 1, not {shard_size}")
    if expansion is not None and tower != "passage":
        raise UserError("--expansions only applies to documents: give --tower=passage or leave it out")
    if expansion is not None:
        joiner_of(encoder)  # raises, before anything is written, if documents leave no room for queries
    input, output = local_path(input), local_path(output, "written to")
    check_work_directory(output, "embeddings directory")
    source = _Texts(input, tower, expansion)
    info = _describe(encoder, source, shard_size, on_bad_input)
    report, first = EncodingReport(), jax.process_index() == 0
    with _writing(output, info) if first else contextlib.nullcontext() as lock:
        wait_for_all("embeddings are begun")
        if read_info(output).complete:
            return report
        own = range(jax.process_index(), info.shards, jax.process_count())
        missing = [number for number in own if not is_written(output, number)]
        with _progress(info, own, missing) as bar:
            how = {"tower": tower, "num_windows": info.shards, "expanded": expansion is not None}
            how |= {"report": report, "on_batch": bar.update}
            shards = functools.partial(source.shards, missing, shard_size, on_bad_input)
            if cluster is None:
                encoded = encode_shards(encoder, shards(), **how)
            else:
                encoded = encode_by_cluster(cluster, encoder, shards, **how)
            for shard in encoded:
                if lock is not None:
                    lock.check()
                write_shard(output, shard)
        wait_for_all("embeddings are made")
        if lock is not None:
            lock.check()
            _finish(output, info)
        wait_for_all("embeddings are complete")
    return report


class _Texts(NamedTuple):
    input: Path
    tower: Tower
    expansion: Expansion | None

    def records(self, on_bad_input: OnBadInput | Policy) -> Iterator[tuple[str, Any]]:
        """Yields (id, text), or (id, views) for expanded documents."""
        texts = self._texts(on_bad_input)
        if self.expansion is None:
            return texts
        # Skip malformed lines silently: `texts` reports them.
        ids = [identifier for identifier, _ in self._texts(OnBadInput("skip"))]
        return self.expansion.records(texts, ids, on_bad_input)

    def _texts(self, on_bad_input: OnBadInput | Policy) -> Iterator[tuple[str, str]]:
        if has_lines(self.input):
            return map(tuple, read_lines(self.input, on_bad_input))
        if self.tower == "query":
            return ((query.id, query.text) for query in read_queries(self.input, on_bad_input))
        return ((document.id, document.contents) for document in read_corpus(self.input, on_bad_input))

    def shards(self, numbers: Sequence[int], size: int, on_bad_input: Policy) -> Iterator[Shard]:
        records = self.records(OnBadInput(on_bad_input))  # malformed lines were reported by `_describe`
        for number in range(max(numbers, default=-1) + 1):
            shard = list(itertools.islice(records, size))
            if number in numbers:
                yield Shard(number, [doc_id for doc_id, _ in shard], [text for _, text in shard])


def _progress(info: EmbeddingsInfo, own: Sequence[int], missing: Sequence[int]) -> Any:
    """Returns the progress bar of a process; `missing` are its `own` shards that are not encoded."""
    each = info.views if info.expansion == "typical" else 1
    all_, left = (
        sum(each * min(info.shard_size, info.count - number * info.shard_size) for number in numbers)
        for numbers in (own, missing)
    )
    part, parts = jax.process_index(), jax.process_count()
    what = f"encoding {info.input_name}" + (f", part {part + 1} of {parts}" if parts > 1 else "")
    return progress(total=all_, initial=all_ - left, what=what, unit="texts")


def _describe(
    encoder: DualEncoder | MultiVectorEncoder | FixedDimensionEncoder,
    source: _Texts,
    shard_size: int,
    on_bad_input: Policy,
) -> EmbeddingsInfo:
    """Describes the run. Reads all of the input, so that malformed lines are reported before any work."""
    input, tower, expansion = source
    queries_hash = fingerprints.ValuesHash()
    count = queries = 0
    for _, item in source.records(on_bad_input):
        count += 1
        if expansion is not None:
            found = [view.queries for view in item]
            queries += sum(map(len, found))
            queries_hash.add(found)
    if expansion is not None and not queries:
        raise UserError(f"{expansion.path} has no query for any document; generate queries for this corpus")
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
        similarity=encoder.similarity_fn_name,
        dtype=encoder.model.config.backbone.dtype,
        weights=encoder.weights,
        max_length=max_length,
        prompt=prompt,
        text="(title + ' ' + text).strip()" if tower == "passage" and not has_lines(input) else "text",
        input_name=input.name,
        input_bytes=input.stat().st_size,
        input_sha256=sha256_of(input),
        expansion=expansion and expansion.kind,
        views=expansion.views if expansion else 0,
        expansions_hash=queries_hash.hex() if expansion else "",
        fde=dataclasses.asdict(encoder.how) if isinstance(encoder, FixedDimensionEncoder) else None,
    )


@contextlib.contextmanager
def _writing(output: Path, info: EmbeddingsInfo) -> Iterator[Lock]:
    """Locks `output` and writes a missing manifest. Raises a UserError if it belongs to another run."""
    with locked(output, f"another process is writing {output}") as lock:
        stored = read_info(output) if (output / MANIFEST).exists() else info
        changed = next((n for n in _SAME if getattr(stored, n) != getattr(info, n)), None)
        if changed is not None and any(output.glob(shard_files("*")[1])):
            how = _change(changed, stored, info)
            raise UserError(
                f"{output} was started with another {_SAME[changed]} ({how}):"
                " give the same value, or another output"
            )
        if not (stored.complete and all(is_written(output, n) for n in range(info.shards))):
            # Another run may have left ids and counts, but no vectors: remove them.
            others = () if changed is None else (shard_files("*")[0], cut_file("*"), lengths_file("*"))
            for leftover in itertools.chain.from_iterable(map(output.glob, (".*.part", *others))):
                leftover.unlink()
            _write_manifest(output, info)
        yield lock


def _change(name: str, before: EmbeddingsInfo, now: EmbeddingsInfo) -> str:
    """Returns how a field differs between two runs, in words instead of hashes."""
    if name == "fingerprint":
        return before.made_by.difference_from(now.made_by).removeprefix("they were ")
    if name == "input_sha256" and before.input_name == now.input_name:
        return f"{now.input_name} has changed since then"
    if name == "input_sha256":
        return f"{before.input_name}, now {now.input_name}"
    if name == "expansions_hash":
        return "other generated queries"
    return f"{getattr(before, name)!r}, now {getattr(now, name)!r}"


def _finish(output: Path, info: EmbeddingsInfo) -> None:
    """Writes SHA256SUMS and the manifest of a complete directory."""
    names = [name for number in range(info.shards) for name in shard_files(number)]
    if info.similarity in MAXSIM:
        names += [lengths_file(number) for number in range(info.shards)]
    if gone := next((name for name in names if not (output / name).exists()), None):
        raise UserError(f"{output / gone} was removed while texts were encoded; run the same command again")
    sums = checksums.digests(output, names)
    info = dataclasses.replace(info, complete=True, cut=_number_cut(output, info.shards))
    sums[MANIFEST] = hashlib.sha256(_described(info).encode()).hexdigest()
    checksums.write(output, sums)
    _write_manifest(output, info)


def _number_cut(output: Path, shards: int) -> int | None:
    """Returns how many texts were truncated; None if an earlier jaxir wrote a shard without its count."""
    paths = [output / cut_file(number) for number in range(shards)]
    try:
        return sum(read_json(path, int) for path in paths)
    except (UserError, FileNotFoundError):
        return None


def _write_manifest(directory: Path, info: EmbeddingsInfo) -> None:
    with atomic_file(directory / MANIFEST) as file:
        file.write(_described(info))


def _described(info: EmbeddingsInfo) -> str:
    return json.dumps(dataclasses.asdict(info), indent=2, ensure_ascii=False) + "\n"
