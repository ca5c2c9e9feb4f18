"""Starting points of a training run: pretrained and random models. gin binds these classes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Reads
from jaxir.core.values import Count, Object, checked
from jaxir.data.text.pair_tokenizer import PairTokenizer
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.interop.hub import hub
from jaxir.interop.huggingface import (
    hf,
    hf_cross_encoder,
    hf_hybrid_encoder,
    hf_masked_lm,
    hf_sparse_encoder,
)
from jaxir.interop.model import identity, kinds, multi_vector_start, stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.overrides import CommonOverrides, Overrides
from jaxir.interop.model.stored import ModelConfig, StoredModel
from jaxir.interop.model_dir import LoadedModel
from jaxir.interop.starting_points import Opened, Reader, Source
from jaxir.models import backbones
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.masked_lm import MaskedLanguageModel, MaskedLMConfig
from jaxir.models.sparse_encoder import SparseEncoderConfig
from jaxir.runtime.partitioning import Partitioner


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained(Overrides, Opened):
    """A dual encoder to load, with changes (see `Overrides`); `build(seed=0, partitioner=None)` loads it.

    Attributes:
      source: the model, in a form that `model_dir.load` accepts.
      from_scratch: whether to keep only the architecture and tokenizer, and draw random parameters.
    """

    _kind: ClassVar[str | None] = "dual_encoder"

    source: str
    from_scratch: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PretrainedCrossEncoder(CommonOverrides, Opened):
    """A cross-encoder to load, or an encoder to load and give a new head; `build(seed=0)` loads it.

    Attributes:
      source: a cross-encoder, or a dual encoder with one encoder, in a form that `model_dir.load` accepts.
      reads: which texts the cross-encoder reads (`features.Reads`); None leaves this unchanged.
    """

    _kind: ClassVar[str | None] = None

    source: str
    reads: Reads | None = None

    def apply(self, model: StoredModel, *, seed: int, where: str) -> StoredModel:
        if kinds.name_of(model.config) != "cross_encoder":
            model = hf_cross_encoder.with_new_head(model, seed=seed, where=where)
        try:  # `model.tokenizer` is None in planning
            separator = model.tokenizer and PairTokenizer(model.tokenizer).separator
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        config = dataclasses.replace(model.config, separator=separator)
        if self.reads is not None:
            model = dataclasses.replace(model, settings=dataclasses.replace(model.settings, reads=self.reads))
        return super().apply(dataclasses.replace(model, config=config), seed=seed, where=where)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PretrainedSeq2Seq(CommonOverrides, Opened):
    """A generator to load, with changes; `build(seed=0, partitioner=None)` loads it.

    `passage_max_length` limits the tokens of a source text, `query_max_length` the tokens of a target text.

    Attributes:
      source: the model, in a form that `model_dir.load` accepts.
    """

    _kind: ClassVar[str | None] = "seq2seq"

    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PretrainedMultiVector(CommonOverrides, Opened):
    """A multi-vector encoder to load, or an encoder to turn into one; `build(seed=0)` loads it.

    Attributes:
      source: a multi-vector encoder, or a dual encoder with one encoder, in a form that `model_dir.load`
        accepts. A dual encoder's queries get at most 32 tokens and its passages 180 unless lengths are given,
        and each query is filled with mask tokens to its maximum length, as in PyLate. Punctuation in passages
        is not scored.
      projection: dimension of a token's vector of a new multi-vector encoder; None: 128. A model that is a
          multi-vector encoder already keeps its own.
    """

    _kind: ClassVar[str | None] = None

    source: str
    projection: Count | None = None

    def apply(self, model: StoredModel, *, seed: int, where: str) -> StoredModel:
        given = {"query": self.query_max_length, "passage": self.passage_max_length}
        if kinds.name_of(model.config) == "multi_vector_encoder":
            model = multi_vector_start.with_lengths(model, given["query"], self.projection, where=where)
        else:
            how = {"lengths": given, "dimension": self.projection, "seed": seed, "where": where}
            model = multi_vector_start.of_dual_encoder(model, **how)
        return super().apply(model, seed=seed, where=where)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PretrainedSparse(CommonOverrides, Opened):
    """A sparse encoder to load, or an encoder to turn into one; `build(seed=0)` loads it.

    Attributes:
      source: a sparse encoder, a masked language model (`hf:`), or a dual encoder with one encoder, in a form
        that `model_dir.load` accepts. A dual encoder gets a new head (`hf_sparse_encoder.with_new_head`).
    """

    source: str

    @property
    def _kind(self) -> str | None:  # type: ignore[override]
        return hf_sparse_encoder.kind_of_start(self.source)

    def apply(self, model: StoredModel, *, seed: int, where: str) -> StoredModel:
        if kinds.name_of(model.config) != "sparse_encoder":
            model = hf_sparse_encoder.with_new_head(model, seed=seed, where=where)
        elif model.config.static_queries or model.queries is not None:
            raise UserError(
                f"{where}: training of stored query weights, or of two models, is not supported; give another"
                " model"
            )
        elif model.config.form != SparseEncoderConfig.form or model.config.factors:
            raise UserError(
                f"{where} is {model.config.summary}, and only a language model with pooling can be trained;"
                " give another model"
            )
        return super().apply(model, seed=seed, where=where)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PretrainedHybrid(CommonOverrides, Opened):
    """A hybrid encoder (BGE-M3) to load, or an encoder to turn into one; `build(seed=0)` loads it.

    Attributes:
      source: a hybrid encoder, or a dual encoder with one encoder, in a form that `model_dir.load` accepts. A
        dual encoder keeps its pooling and gets two new heads (`hf_hybrid_encoder.with_new_heads`).
      projection: dimension of a token's vector of a new hybrid encoder; None: the encoder's width.
    """

    _kind: ClassVar[str | None] = None

    source: str
    projection: Count | None = None

    def apply(self, model: StoredModel, *, seed: int, where: str) -> StoredModel:
        how = {"dimension": self.projection, "seed": seed, "where": where}
        return super().apply(hf_hybrid_encoder.with_new_heads(model, **how), seed=seed, where=where)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PretrainedWith(CommonOverrides, Opened):
    """A model to load; a function turns it into a model of another kind (docs/adding_a_head.md).

    Attributes:
      source: the model, in a form that `model_dir.load` accepts.
      head: maps (the stored model as it was read, seed of new weights) to the stored model to train.
    """

    _kind: ClassVar[str | None] = None

    source: str
    head: Callable[[StoredModel, int], StoredModel]

    def apply(self, model: StoredModel, *, seed: int, where: str) -> StoredModel:
        return super().apply(self.head(model, seed), seed=seed, where=where)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PretrainedMaskedLM:
    """A masked language model for an objective: a frozen generator of words, or the source of a head.

    Attributes:
      source: `hf:` and a local directory or a name on the hub: BERT, DistilBERT or RoBERTa with their
        masked-language-model head.
      dtype: number type of matrix products.
    """

    _what: ClassVar[str] = "a masked language model"

    source: str
    dtype: Literal["float32", "bfloat16"] = "float32"

    def outline(self) -> MaskedLMConfig:
        """Returns the configuration of the model that `build` would return, without reading weights."""
        return self._computed(hf_masked_lm.outline(hub.configuration(_name_of(self.source, self._what))))

    def build(self) -> tuple[MaskedLanguageModel, str]:
        """Returns the model, on the default device, and its `Tokenizer.vocabulary`."""
        found = hf_masked_lm.read(hub.resolve(_name_of(self.source, self._what), check=hf.read_architecture))
        found = dataclasses.replace(found, config=self._computed(found.config))
        return stored.build(found), found.tokenizer.vocabulary

    def _computed(self, config: MaskedLMConfig) -> MaskedLMConfig:
        return dataclasses.replace(config, backbone=dataclasses.replace(config.backbone, dtype=self.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PretrainedGuide:
    """A dual encoder for an objective: a frozen guide that finds false negatives.

    Attributes:
      source: the dual encoder, in a form that `model_dir.load` accepts.
      dtype: number type of matrix products.
    """

    source: str
    dtype: Literal["float32", "bfloat16"] = "float32"

    def outline(self) -> tuple[DualEncoderConfig, EncoderSettings]:
        """Returns the configuration and settings of the model, without its weights."""
        found, _ = model_dir.read(self.source, weights=False)
        return stored.replace_backbone(found.config, dtype=self.dtype), found.settings

    def build(self) -> LoadedModel:
        """Returns the model, on the default device."""
        return model_dir.load(self.source, dtype=self.dtype, halved=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class PretrainedPooler:
    """The pooler of a BERT: the layer over [CLS] from its next-sentence prediction.

    Attributes:
      source: `hf:` and a local directory or a name on the hub.
    """

    source: str

    def read(self) -> dict[str, np.ndarray]:
        """Returns the pooler's `kernel` [D, D] and `bias` [D], float32."""
        name = _name_of(self.source, "a pooler")
        return hf_masked_lm.read_pooler(hub.resolve(name, check=hf.read_architecture))


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class FromScratch:
    """A model with random parameters, in general a dual encoder.

    Attributes:
      config: its configuration, of any kind that `kinds` knows.
      tokenizer: directory of its tokenizer.
      query_max_length: maximum number of tokens per query.
      passage_max_length: maximum number of tokens per passage.
      query_prompt: text put before each query.
      passage_prompt: text put before each passage.
    """

    config: Object
    tokenizer: str
    query_max_length: Count
    passage_max_length: Count
    query_prompt: str = ""
    passage_prompt: str = ""

    def build(self, *, seed: int, partitioner: Partitioner | None = None) -> LoadedModel:
        """Makes the model; each parameter is computed on the devices of `partitioner` that hold it."""
        tokenizer = Tokenizer.load(Path(self.tokenizer))
        backbone = self.config.backbone
        if tokenizer.vocab_size > backbone.vocab_size:
            raise UserError(
                f"{self.tokenizer}: the tokenizer has {tokenizer.vocab_size} ids,"
                f" the model only {backbone.vocab_size}: set vocab_size to at least that"
            )
        _, settings = self.outline()
        model = stored.initialize(self.config, seed=seed, partitioner=partitioner)
        fingerprint = identity.initial_fingerprint(self.config, tokenizer, seed)
        return LoadedModel(model, tokenizer, settings, fingerprint)

    def outline(self, read: Reader | None = None) -> tuple[ModelConfig, EncoderSettings]:
        kinds.name_of(self.config)
        backbones.check_registered(self.config.backbone)
        settings = EncoderSettings(
            query_max_length=self.query_max_length,
            passage_max_length=self.passage_max_length,
            query_prompt=self.query_prompt,
            passage_prompt=self.passage_prompt,
        )
        stored.check_lengths(settings, self.config, "the new model")
        return self.config, settings


def outline_of(
    model: Source, *, weights: bool = True
) -> tuple[ModelConfig, EncoderSettings, Tokenizer | None]:
    """Returns the configuration, settings and tokenizer (None: unknown) that `build` would give."""
    if isinstance(model, FromScratch):
        return *model.outline(), Tokenizer.load(Path(model.tokenizer))
    found = []

    def read(source: str, tokenizer: str | None, kind: str | None = "dual_encoder") -> StoredModel:
        wanted = weights and not getattr(model, "from_scratch", None)
        found.append(model_dir.read(source, tokenizer=tokenizer, kind=kind, weights=wanted)[0])
        return found[0]

    config, settings = model.outline(read)
    return config, settings, found[0].tokenizer if found else None


def pooler_of(source: str | None) -> PretrainedPooler | None:
    """Returns the `PretrainedPooler` of a source; None if `source` is None."""
    return None if source is None else PretrainedPooler(source=source)


def _name_of(source: str, what: str) -> str:
    form, _, name = source.partition(":")
    if form != "hf" or not name:
        raise UserError(f"{source}: {what} must be given as hf:NAME or hf:DIRECTORY")
    return name
