"""Dual encoders: a query tower and a passage tower that map token ids to vectors (Dong et al. 2022).

The towers of a Siamese dual encoder (SDE) share all parameters. Those of an asymmetric one (ADE) share none,
and those of an ADE-SPL share only the projection layer.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Natural, Size, checked
from jaxir.models import layers, outlines
from jaxir.models.adapters import Adapters, attach
from jaxir.models.after_pooling import AfterPooling, l2_normalize, width_after
from jaxir.models.backbones import BackboneConfig, Edit, Encoder, check_editable, make_encoder
from jaxir.runtime.partitioning import constrain

Tower = Literal["query", "passage"]
Sharing = Literal["sde", "ade", "ade_spl"]
Pooling = Literal[
    "mean", "cls", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens", "first_last", "embeddings_last"
]
# Pooling that averages the outputs of an earlier and the last layer -> the number of the earlier layer; 0
# means the input of the first block.
EARLY_LAYERS = {"first_last": 1, "embeddings_last": 0}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Projection:
    """The linear map, in float32, from the pooled vector to the embedding.

    Attributes:
      dimension: D, the length of the embedding.
      use_bias: whether the map adds a bias.
      activation: the activation after the linear map.
    """

    dimension: Size
    use_bias: bool = False
    activation: Literal["identity", "tanh"] = "identity"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class DualEncoderConfig:
    """The components of a dual encoder.

    Attributes:
      backbone: the encoder of each tower.
      sharing: "sde" (one tower), "ade" (two) or "ade_spl" (two encoders, one projection).
      pooling: "mean" over real tokens, "cls", the first token, "lasttoken", the last real token, "max" of
        each dimension, "weightedmean", weighted by position from 1, or "mean_sqrt_len_tokens", the sum
        divided by the root of the number of tokens. The BERT family also has "first_last", the mean of the
        outputs of the first and the last block, and "embeddings_last", the mean of the first block's input
        and the last block's output. The vectors of several poolings are concatenated.
      layers_from: the token vectors are a weighted mean of the outputs of all blocks from this one on; 0 is
        the first block's input. None: the last block's output.
      query_prompt_tokens: number of tokens at the start of queries that pooling leaves out.
      passage_prompt_tokens: number of tokens at the start of passages that pooling leaves out.
      projection: the map after pooling; None: no projection.
      after_pooling: further modules, after the projection.
      similarity: "cosine" (embeddings have length 1) or "dot".
      adapters: LoRA in the encoders; None: none.
    """

    backbone: BackboneConfig
    sharing: Sharing = "sde"
    pooling: Pooling | tuple[Pooling, ...] = "mean"
    layers_from: Natural | None = None
    query_prompt_tokens: Natural = 0
    passage_prompt_tokens: Natural = 0
    projection: Projection | None = None
    after_pooling: tuple[AfterPooling, ...] = ()
    similarity: Literal["cosine", "dot"] = "cosine"
    adapters: Adapters | None = None

    def __post_init__(self):
        if not isinstance(self.pooling, str):  # jaxir.json stores a tuple as a list
            object.__setattr__(self, "pooling", tuple(self.pooling))
        if self.sharing == "ade_spl" and self.projection is None:
            raise ValueError("sharing='ade_spl' shares the projection, so it needs one: set projection")
        if self.layers_from is not None and self.layers_from > self.backbone.num_layers:
            raise ValueError(
                f"layers_from {self.layers_from} exceeds the {self.backbone.num_layers} blocks; reduce it"
            )
        early = [pooling for pooling in self.poolings if pooling in EARLY_LAYERS]
        if early and self.poolings != (early[0],):
            raise ValueError(f"pooling {early[0]!r} cannot be concatenated with another: give it alone")
        if (early or self.layers_from is not None) and not self.backbone.shows_layers:
            raise ValueError(
                f"pooling={self.pooling!r} reads two layers, which {self.backbone.kind} does not return; use"
                " a BERT backbone or another pooling"
            )

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        return (self.pooling,) if isinstance(self.pooling, str) else self.pooling

    @property
    def pooled_dimension(self) -> int:
        return self.backbone.output_dim * len(self.poolings)

    @property
    def dimension(self) -> int:
        width = self.pooled_dimension if self.projection is None else self.projection.dimension
        return width_after(self.after_pooling, width)

    @property
    def summary(self) -> str:
        sharing = {"sde": "", "ade": ", two towers", "ade_spl": ", two towers under one projection"}
        return (
            f"{self.backbone.summary}{sharing[self.sharing]}, {' + '.join(self.poolings)} pooling,"
            f" {self.dimension} dimensions, {self.similarity}"
        )

    def make(self, *, rngs: nnx.Rngs) -> "DualEncoderModel":
        return DualEncoderModel(self, rngs=rngs)


class DualEncoderModel(layers.Summarised):
    """The module of a dual encoder."""

    def __init__(self, config: DualEncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        if config.sharing == "sde":
            self.encoder = make_encoder(config.backbone, rngs=rngs)
        else:
            self.query_encoder = make_encoder(config.backbone, rngs=rngs)
            self.passage_encoder = make_encoder(config.backbone, rngs=rngs)
        if config.projection is not None and config.sharing == "ade":
            self.query_projection = _make_projection(config, rngs=rngs)
            self.passage_projection = _make_projection(config, rngs=rngs)
        elif config.projection is not None:
            self.projection = _make_projection(config, rngs=rngs)
        for prefix in ("query_", "passage_") if config.sharing == "ade" else ("",):
            if config.after_pooling:
                setattr(self, f"{prefix}after_pooling", _make_after_pooling(config, rngs=rngs))
            if config.layers_from is not None:
                ones = outlines.filled(1, (config.backbone.num_layers + 1 - config.layers_from,))
                setattr(self, f"{prefix}layer_weights", layers.param(ones, None))
        attach(self, config.adapters, rngs=rngs)

    @checked_shapes
    def encode(
        self,
        ids: Int[Array, "B L"],
        *,
        tower: Tower,
        key: Key[Array, ""] | None = None,
        edit: Edit | None = None,
        left_out: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B D"]:
        """Embeds token ids: returns float32 [B, D], of length 1 if the similarity is cosine.

        0 is padding, on the right; a text of only padding gives zeros, except with cls pooling. `edit`
        changes the token vectors [B, L, E] that the first block reads. A `key` of None turns dropout off.
        `left_out` is the number of tokens at the start of each text that pooling leaves out; None: the prompt
        tokens of the config.
        """
        return self.encode_together([(ids, tower, key)], [edit], [left_out])[0]

    def unnormalized(self) -> "DualEncoderModel":
        """Returns a model of the same parameters whose vectors keep their length (`similarity="dot"`)."""
        return self.with_config(dataclasses.replace(self.config, similarity="dot"))

    def with_config(self, config: DualEncoderConfig) -> "DualEncoderModel":
        """Returns a model of the same parameters with another configuration, which must need the same."""
        model = nnx.merge(*nnx.split(self))
        model.config = config
        return model

    def compared(self, x: jax.Array) -> jax.Array:
        """Normalises vectors [B, D] of an `unnormalized` model if the similarity is cosine."""
        return l2_normalize(x) if self.config.similarity == "cosine" else x

    def encoder_of(self, tower: Tower) -> Encoder:
        return self.encoder if self.config.sharing == "sde" else getattr(self, f"{tower}_encoder")

    def encode_together(
        self,
        texts: Sequence[tuple[jax.Array, Tower, jax.Array | None]],
        edits: Sequence[Edit | None] | None = None,
        left_out: Sequence[jax.Array | None] | None = None,
    ) -> list[jax.Array]:
        """Embeds several batches, each (token ids [B, L], tower, dropout key); `encode` embeds one batch.

        Batches of the same encoder run together: with FSDP its weights are gathered once for all.
        """
        return [embedding for embedding, _ in self.encode_with_tokens(texts, edits, left_out)]

    def encode_with_tokens(
        self,
        texts: Sequence[tuple[jax.Array, Tower, jax.Array | None]],
        edits: Sequence[Edit | None] | None = None,
        left_out: Sequence[jax.Array | None] | None = None,
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Like `encode_together`, but returns embeddings [B, D] and the last token vectors [B, L, E]."""
        found: dict[int, tuple[jax.Array, jax.Array]] = {}
        encoders = [self.encoder_of(tower) for _, tower, _ in texts]
        for encoder in {id(encoder): encoder for encoder in encoders}.values():
            at = [i for i, other in enumerate(encoders) if other is encoder]
            more = []
            if edits and any(edits[i] for i in at):
                check_editable(encoder)
                more = [[edits[i] for i in at]]
            weights = None
            if self.config.layers_from is not None:
                weights = layers.weight(self._of_tower("layer_weights", texts[at[0]][1]))
            batches = [texts[i][0] for i in at], [texts[i][2] for i in at], *more
            hidden = self._hidden(encoder, *batches, weights=weights)
            found |= dict(zip(at, hidden, strict=True))
        starts = left_out or [None] * len(texts)
        return [
            (self._embedding(found[i][0], encoders[i].is_pooled(ids), tower, starts[i]), found[i][1])
            for i, (ids, tower, _) in enumerate(texts)
        ]

    def _of_tower(self, name: str, tower: Tower) -> Any:
        return getattr(self, f"{tower}_{name}" if self.config.sharing == "ade" else name)

    def _hidden(
        self, encoder: Encoder, *args: Any, weights: jax.Array | None
    ) -> list[tuple[jax.Array, jax.Array]]:
        """Returns the vectors to pool and the last token vectors of each batch, both [B, L, E]."""
        if weights is not None:
            return encoder.mean_and_last(*args, weights=weights / weights.sum())
        if self.config.pooling not in EARLY_LAYERS:
            return [(last, last) for last in encoder.together(*args)]
        pairs = encoder.layer_and_last(*args, layer=EARLY_LAYERS[self.config.pooling])
        return [((early.astype(jnp.float32) + last.astype(jnp.float32)) / 2, last) for early, last in pairs]

    def _embedding(
        self, hidden: jax.Array, mask: jax.Array, tower: Tower, left_out: jax.Array | int | None
    ) -> jax.Array:
        config = self.config
        if left_out is None:
            left_out = config.query_prompt_tokens if tower == "query" else config.passage_prompt_tokens
        pooled = [pool(hidden, mask, how=how, left_out=left_out) for how in config.poolings]
        x = constrain(jnp.concatenate(pooled, -1) if pooled[1:] else pooled[0], ("batch", "activation_embed"))
        if config.projection is not None:
            x = self._of_tower("projection", tower)(x)
            x = jnp.tanh(x) if config.projection.activation == "tanh" else x
        for module in self._of_tower("after_pooling", tower) if config.after_pooling else ():
            x = module(x)
        return constrain(self.compared(x), ("batch", None))


def _make_projection(config: DualEncoderConfig, *, rngs: nnx.Rngs) -> layers.Linear:
    width = config.pooled_dimension
    return layers.Linear(
        width,
        config.projection.dimension,
        axes=("embed", "affinity"),
        use_bias=config.projection.use_bias,
        dtype="float32",
        init=layers.normal(width**-0.5),
        rngs=rngs,
    )


def _make_after_pooling(config: DualEncoderConfig, *, rngs: nnx.Rngs) -> nnx.List:
    width = config.pooled_dimension if config.projection is None else config.projection.dimension
    made = []
    for module in config.after_pooling:
        made.append(module.make(width, rngs=rngs))
        width = width_after((module,), width)
    return nnx.List(made)


@checked_shapes
def pool(
    hidden: Float[Array, "B L E"],
    mask: Bool[Array, "B L"],
    *,
    how: Pooling,
    left_out: int | Int[Array, " B"] = 0,
) -> Float[Array, "B E"]:
    """Pools `hidden` [B, L, E] into float32 [B, E].

    Args:
      hidden: token vectors.
      mask: true at the tokens to pool.
      how: the pooling; a pooling in `EARLY_LAYERS` is a mean.
      left_out: number of tokens at the start of each text, such as a prompt's, that are not pooled; one for
        all texts, or one per text.
    """
    real, positions = mask, jnp.arange(mask.shape[1])[None]
    from_start = isinstance(left_out, int) and left_out == 0
    starts = jnp.reshape(jnp.asarray(left_out, jnp.int32), (-1, 1))
    mask = mask if from_start else mask & (positions >= starts)
    if how == "cls":
        first = hidden[:, 0].astype(jnp.float32)
        if from_start:
            return first
        # Sum over a one-hot mask instead of gathering, so that rows stay on their devices.
        at = real & (positions == starts)
        chosen = jnp.where(at[..., None], hidden.astype(jnp.float32), 0.0).sum(1)
        return jnp.where(at.any(1)[:, None], chosen, first)
    if how == "max":
        largest = jnp.where(mask[..., None], hidden.astype(jnp.float32), -jnp.inf).max(1)
        return jnp.where(mask.any(1)[:, None], largest, 0.0)
    if how == "weightedmean":
        weights = jnp.where(mask, positions + 1, 0).astype(jnp.float32)
        kept = jnp.where(mask[..., None], hidden.astype(jnp.float32), 0.0) * weights[..., None]
        return kept.sum(1) / jnp.maximum(weights.sum(1), 1.0)[:, None]
    if how == "lasttoken":
        mask = mask & (positions == real.sum(1, dtype=jnp.int32)[:, None] - 1)
    kept = jnp.where(mask[..., None], hidden.astype(jnp.float32), 0.0)
    count = jnp.maximum(mask.sum(1, dtype=jnp.float32), 1.0)[:, None]
    return kept.sum(1) / (jnp.sqrt(count) if how == "mean_sqrt_len_tokens" else count)
