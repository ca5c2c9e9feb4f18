"""Changes that a user may make to a model while it is loaded."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.values import Count, Rate, checked
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import ModelConfig, StoredModel
from jaxir.models import layers
from jaxir.models.dual_encoder import Pooling, Projection, Sharing

PLAIN_LENGTH = 512  # tokens per text; a training step on the 8,192 that ModernBERT can read fits on no device


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CommonOverrides:
    """Changes to a model of any kind; None changes nothing.

    Attributes:
      dtype: number type of matrix products.
      remat: what the backward pass recomputes in blocks: nothing (False or "none"), all except matrix
        products ("products"), all except products and gathered weights ("weights") or all (True or "all").
        "auto" is the fastest of these with which a step fits into memory.
      scan_layers: whether to compute the blocks in a scan, which compiles one block, instead of one by one.
      dropout_rate: rate of every dropout.
      query_max_length: maximum number of tokens per query. None: the model's own maximum, but at most
        `PLAIN_LENGTH` for an `hf:` folder, which states what a model can read and not how it was trained.
      passage_max_length: maximum number of tokens per passage, with the same default.
    """

    dtype: Literal["float32", "bfloat16"] | None = None
    remat: layers.Remat | Literal["none", "all"] | None = None
    scan_layers: bool | None = None
    dropout_rate: Rate | None = None
    query_max_length: Count | None = None
    passage_max_length: Count | None = None

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
        changes = {name: self.dropout_rate for name in fields if name.endswith(stored.DROPOUT)}
        remat = {"none": False, "all": True}.get(self.remat, self.remat)
        given = _given(dtype=self.dtype, remat=remat, scan_layers=self.scan_layers, **changes)
        return stored.replace_backbone(config, **given)

    def change_outputs(self) -> bool:
        """Whether a change alters the model's outputs, and so its fingerprint."""
        return False

    def apply(self, model: StoredModel, *, seed: int, where: str) -> StoredModel:
        """Returns `model` with the changes. `seed` is for new random weights; errors begin with `where`."""
        config, settings = self.executed(model.config), self.cut(model.settings)
        stored.check_lengths(settings, config, where)
        return dataclasses.replace(model, config=config, settings=settings)


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Overrides(CommonOverrides):
    """Changes to a dual encoder, including those of `CommonOverrides`; None changes nothing.

    Attributes:
      sharing: how the towers share weights. Only an SDE can be changed; its tower is copied into both towers.
      pooling: how token vectors become one vector.
      projection: output dimension of a linear projection to add.
      similarity: how vectors are compared.
      tokenizer: a directory with a tokenizer, or a SentencePiece model; only applies to a `t5x:`
        checkpoint, which has no tokenizer.
    """

    sharing: Sharing | None = None
    pooling: Pooling | None = None
    projection: Count | None = None
    similarity: Literal["cosine", "dot"] | None = None
    tokenizer: str | None = None

    def change_outputs(self) -> bool:
        return any(v is not None for v in (self.sharing, self.pooling, self.projection, self.similarity))

    def apply(self, model: StoredModel, *, seed: int, where: str) -> StoredModel:
        if self.projection is not None:
            model = _add_projection(model, self.projection, seed=seed, where=where)
        if self.sharing is not None and self.sharing != model.config.sharing:
            model = _share(model, self.sharing, where=where)
        given = _given(pooling=self.pooling, similarity=self.similarity)
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
        raise UserError(f"{where}: it already projects to {present.dimension} dimensions, not {dimension}")
    width = model.config.backbone.embed_dim
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
            f"{where}: sharing is {before!r} and cannot become {sharing!r}; only 'sde' can change"
        )
    params: dict[str, np.ndarray] = {}
    for name, value in model.params.items():
        both = name.startswith("encoder.") or sharing == "ade"
        params |= {f"query_{name}": value, f"passage_{name}": value} if both else {name: value}
    return dataclasses.replace(
        model, config=dataclasses.replace(model.config, sharing=sharing), params=params
    )
