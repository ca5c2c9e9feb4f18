"""Changes that a user may make to a model while it is loaded."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.installation import require
from jaxir.core.values import Count, Positive, Rate, checked
from jaxir.interop.model import identity, kinds, lora, stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import ModelConfig, StoredModel
from jaxir.models import layers
from jaxir.models.dual_encoder import Pooling, Projection, Sharing
from jaxir.models.quantized import Scheme

# Maximum number of tokens per text; training on ModernBERT's maximum of 8,192 fits no device.
PLAIN_LENGTH = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CommonOverrides:
    """Changes to a model of any kind; None changes nothing.

    Attributes:
      dtype: number type of matrix products.
      weights: keep the encoders' kernels and tables of tokens in 8 or 4 bits ("int8" or "nf4", see
        `jaxir.models.quantized`). Such a model cannot be trained.
      remat: what the backward pass recomputes in blocks: nothing (False or "none"), all except matrix
        products ("products"), all except products and gathered weights ("weights"), all except what the
        kernels of TPUs read again ("kernels") or all (True or "all"). "auto" is the fastest of these with
        which a step fits into memory.
      scan_layers: whether to compute the blocks in a scan, which compiles one block, instead of one by one.
      dropout_rate: rate of every dropout.
      query_max_length: maximum number of tokens per query. None: the model's own maximum, but at most
        `PLAIN_LENGTH` for an `hf:` folder, which states what a model can read and not how it was trained.
      passage_max_length: maximum number of tokens per passage, with the same default.
      lora_rank: rank of adapters (LoRA) to add to the blocks. Training then changes only these, a new
        projection and a head, and the run stores nothing else.
      lora_alpha: the adapters' factor is lora_alpha / lora_rank; None: 1.
      lora_targets: dense layers that get an adapter, such as "query,value" or transformers' names of them
        ("q_proj,v_proj"); None: all.
    """

    dtype: Literal["float32", "bfloat16"] | None = None
    weights: Scheme | None = None
    remat: layers.Remat | Literal["none", "all"] | None = None
    scan_layers: bool | None = None
    dropout_rate: Rate | None = None
    query_max_length: Count | None = None
    passage_max_length: Count | None = None
    lora_rank: Count | None = None
    lora_alpha: Positive | None = None
    lora_targets: str | list[str] | None = None

    def cut(self, settings: EncoderSettings) -> EncoderSettings:
        """Returns `settings` with the changed maximum lengths."""
        given = _given(query_max_length=self.query_max_length, passage_max_length=self.passage_max_length)
        if getattr(self, "source", "").startswith("hf:"):
            lengths = ("query_max_length", "passage_max_length")
            given = {name: min(getattr(settings, name), PLAIN_LENGTH) for name in lengths} | given
        return dataclasses.replace(settings, **given)

    def executed(self, config: ModelConfig) -> ModelConfig:
        """Returns `config` with the changed dtype, remat, scan_layers and dropout rate."""
        fields = (field.name for field in dataclasses.fields(config.backbone))
        changes = {name: self.dropout_rate for name in fields if name.endswith(identity.DROPOUT)}
        remat = {"none": False, "all": True}.get(self.remat, self.remat)
        given = _given(dtype=self.dtype, remat=remat, scan_layers=self.scan_layers, **changes)
        return stored.replace_backbone(config, **given)

    def change_outputs(self) -> bool:
        """Whether one of the changes alters the model's outputs, and so its fingerprint."""
        return False

    def apply(self, model: StoredModel, *, seed: int, where: str) -> StoredModel:
        """Returns `model` with the changes. `seed` is for new random weights; errors begin with `where`."""
        if self.lora_rank is not None:
            targets = self.lora_targets
            targets = targets.split(",") if isinstance(targets, str) else targets
            how = {"alpha": self.lora_alpha, "targets": targets, "seed": seed, "where": where}
            model = lora.added(model, rank=self.lora_rank, **how)
        elif self.lora_alpha is not None or self.lora_targets is not None:
            raise UserError("lora_alpha and lora_targets describe new adapters: give lora_rank, too")
        config, settings = self.executed(model.config), self.cut(model.settings)
        stored.check_lengths(settings, config, where)
        if self.weights is not None:
            require("quantized", "qwix")
            if kinds.name_of(config) == "seq2seq":
                raise UserError(f"{where} is a generator, whose weights are not quantised: leave out weights")
        return dataclasses.replace(model, config=config, settings=settings, weights=self.weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Overrides(CommonOverrides):
    """Changes to a dual encoder, including those of `CommonOverrides`; None changes nothing.

    Attributes:
      sharing: how the towers share weights. Only an SDE can be changed; its tower is copied into both towers.
      pooling: how token vectors become one vector.
      projection: output dimension of a linear projection to add.
      similarity: how vectors are compared.
      query_prompt: text put before each query, such as an instruction.
      passage_prompt: text put before each passage.
      tokenizer: a directory with a tokenizer, or a SentencePiece model; only applies to a `t5x:`
        checkpoint, which has no tokenizer.
    """

    sharing: Sharing | None = None
    pooling: Pooling | None = None
    projection: Count | None = None
    similarity: Literal["cosine", "dot"] | None = None
    query_prompt: str | None = None
    passage_prompt: str | None = None
    tokenizer: str | None = None

    def change_outputs(self) -> bool:
        return any(v is not None for v in (self.sharing, self.pooling, self.projection, self.similarity))

    def apply(self, model: StoredModel, *, seed: int, where: str) -> StoredModel:
        if self.projection is not None:
            model = _add_projection(model, self.projection, seed=seed, where=where)
        if self.sharing is not None and self.sharing != model.config.sharing:
            model = _share(model, self.sharing, where=where)
        given = _given(pooling=self.pooling, similarity=self.similarity)
        prompts = _given(query_prompt=self.query_prompt, passage_prompt=self.passage_prompt)
        if prompts:
            model = dataclasses.replace(model, settings=dataclasses.replace(model.settings, **prompts))
            if not model.settings.pools_prompts and model.tokenizer is not None:
                given |= {f"{name}_tokens": model.tokenizer.prompt_length(p) for name, p in prompts.items()}
        try:
            config = dataclasses.replace(model.config, **given)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        return super().apply(dataclasses.replace(model, config=config), seed=seed, where=where)


def _given(**changes: Any) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def _add_projection(model: StoredModel, dimension: int, *, seed: int, where: str) -> StoredModel:
    present = model.config.projection
    if present is not None:
        if present.dimension == dimension:
            return model
        raise UserError(
            f"{where}: the model already has a projection to {present.dimension} dimensions, so it cannot get"
            f" one to {dimension}: leave projection out"
        )
    width = model.config.pooled_dimension
    kernel = np.asarray(layers.normal(width**-0.5)(jax.random.key(seed), (width, dimension)))
    names = ("query_projection", "passage_projection") if model.config.sharing == "ade" else ("projection",)
    return dataclasses.replace(
        model,
        config=dataclasses.replace(model.config, projection=Projection(dimension=dimension)),
        params={**model.params, **{f"{name}.kernel": kernel for name in names}},
    )


def _share(model: StoredModel, sharing: Sharing, *, where: str) -> StoredModel:
    before = model.config.sharing
    if sharing == "ade_spl" and model.config.projection is None:
        raise UserError(f"{where}: sharing='ade_spl' needs a projection: set `projection`")
    if before != "sde":
        raise UserError(
            f"{where}: sharing is {before!r} and cannot become {sharing!r}; only 'sde' can change:"
            " leave sharing out"
        )
    params: dict[str, np.ndarray] = {}
    for name, value in model.params.items():
        both = name.startswith("encoder.") or sharing == "ade"
        params |= {f"query_{name}": value, f"passage_{name}": value} if both else {name: value}
    return dataclasses.replace(
        model, config=dataclasses.replace(model.config, sharing=sharing), params=params
    )
