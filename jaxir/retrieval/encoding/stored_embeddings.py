"""Reads EMB_DIR, the directory of a corpus's vectors that `embeddings` writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Natural, checked
from jaxir.data.text.truncation import Truncation
from jaxir.models.quantized import Scheme
from jaxir.retrieval.encoding.made_by import MadeBy
from jaxir.retrieval.encoding.shards import lengths_file, shard_files
from jaxir.retrieval.encoding.text_encoder import DualEncoder, Tower
from jaxir.retrieval.encoding.views import Kind
from jaxir.storage import checksums
from jaxir.storage.files import local_path
from jaxir.storage.json_files import made, read_json
from jaxir.storage.npy import read_npy

FORMAT = 1
MANIFEST = "embeddings.json"
MAXSIM = ("maxsim", "meanmaxsim")  # similarities of multi-vector encoders


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class EmbeddingsInfo:
    """The content of embeddings.json.

    Attributes:
      complete: whether all `count` vectors are written.
      model: the name by which the model was loaded.
      dtype: type of the model's matrix products; vectors are float32.
      step: the checkpoint's step, if the model is a training run; None: unknown.
      weights: how the model's weights were quantised; None: not at all.
      fde: the settings of a multi-vector encoder's `FixedDimension`; None: the vectors are the model's own.
      max_length: maximum number of tokens per text.
      cut: number of truncated texts; None: unknown.
      text: how a record of the input becomes a text.
      expansion: how documents were read with generated queries (`views.Expansion.kind`); None: without. With
        "corpus" the texts are entries; entries of one document are consecutive and have its id.
      views: maximum number of generated queries per document.
      expansions_hash: hash of the generated queries.
    """

    format: int = FORMAT
    complete: bool
    count: Natural
    shard_size: Count
    tower: Tower
    fingerprint: str
    model: str | None
    dimension: Count
    similarity: Literal["cosine", "dot", "maxsim", "meanmaxsim"]
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
    weights: Scheme | None = None
    fde: dict[str, int] | None = None

    @property
    def made_by(self) -> MadeBy:
        return MadeBy(self.model, self.step, self.weights)

    @property
    def truncation(self) -> Truncation | None:
        """The numbers of texts and of truncated texts; None: unknown."""
        return None if self.cut is None else Truncation(self.max_length, self.count, self.cut)

    @property
    def shards(self) -> int:
        return -(-self.count // self.shard_size)

    @property
    def read_with(self) -> str | None:
        """The flags that added generated queries to documents; None if no queries were added."""
        return None if self.expansion is None else f"--expansion={self.expansion} --views={self.views}"


@dataclasses.dataclass(frozen=True)
class StoredEmbeddings:
    """A complete EMB_DIR: ids in the order of the input, and their memory-mapped float32 shards [n, D].

    From a multi-vector encoder, a shard has the float16 vectors [t, D] of all tokens of its n texts, one text
    after the other, and `lengths` has the numbers of tokens [n] of each shard.
    """

    info: EmbeddingsInfo
    ids: list[str]
    shards: list[np.ndarray]
    lengths: list[np.ndarray] = dataclasses.field(default_factory=list)

    def require_model(self, encoder: DualEncoder) -> None:
        if encoder.fingerprint != self.info.fingerprint:
            why = self.info.made_by.difference_from(encoder.made_by)
            raise UserError(f"the embeddings do not fit the model: {why}; encode the corpus again")


def open_embeddings(directory: str | Path, *, tokens: bool = False) -> StoredEmbeddings:
    """Opens a complete EMB_DIR; vectors are memory-mapped.

    Args:
      directory: the output of jaxir.encode.
      tokens: whether vectors of tokens are wanted, instead of one vector for each text.

    Raises:
      UserError: the directory is not complete, damaged, or has the other kind of vectors.
    """
    directory = local_path(directory)
    info = read_info(directory)
    if (info.similarity in MAXSIM) != tokens:
        found, backend = (
            ("one vector for each text", "scann") if tokens else ("a vector for each token", "maxsim")
        )
        raise UserError(f"{directory} has {found}: only jaxir.index --backend={backend} takes it")
    if not info.complete:
        raise UserError(f"{directory} is incomplete: run the same jaxir.encode command again to finish it")
    checksums.check(directory)
    ids: list[str] = []
    shards: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    for number in range(info.shards):
        ids_name, vectors_name = shard_files(number)
        shard_ids = read_json(directory / ids_name, list[str])
        count, dtype = len(shard_ids), np.float32
        if tokens:
            lengths.append(read_npy(directory / lengths_file(number), np.int32, (count,)))
            count, dtype = int(lengths[-1].sum()), np.float16
        shards.append(read_npy(directory / vectors_name, dtype, (count, info.dimension)))
        ids += shard_ids
    return StoredEmbeddings(info, ids, shards, lengths)


def has_tokens(directory: str | Path) -> bool:
    """Returns whether a directory has vectors of tokens; False, too, if it has no vectors."""
    directory = local_path(directory)
    return (directory / MANIFEST).is_file() and read_info(directory).similarity in MAXSIM


def read_info(directory: Path) -> EmbeddingsInfo:
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"{directory} is not an output of jaxir.encode: it has no {MANIFEST}")
    info = made(EmbeddingsInfo, read_json(path, dict[str, Any]), path)
    if info.format != FORMAT:
        raise UserError(f"{path} has format {info.format!r}, this jaxir reads {FORMAT}: encode again")
    return info
