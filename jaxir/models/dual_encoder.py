"""Dual encoders: a query tower and a passage tower that map token ids to vectors (Dong et al. 2022).

The towers of an SDE share all parameters. An ADE's towers share none, and an ADE-SPL's only the projection.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from beartype import beartype
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, jaxtyped

from jaxir.core.values import Size, checked
from jaxir.models import layers
from jaxir.models.backbones import BackboneConfig, Edit, Encoder, check_editable, make_encoder
from jaxir.runtime.partitioning import constrain

Tower = Literal["query", "passage"]
Sharing = Literal["sde", "ade", "ade_spl"]
Pooling = Literal["mean", "cls", "lasttoken", "first_last", "embeddings_last"]
# Poolings that average the outputs of an earlier and the last layer -> index of the earlier layer; 0 means
# the input of the first block.
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
      pooling: "mean" over real tokens, "cls", the first token, or "lasttoken", the last real token. The BERT
        family also has "first_last", the mean of the outputs of the first and the last block, and
        "embeddings_last", the mean of the first block's input and the last block's output.
      projection: the map after pooling; None: no projection.
      similarity: "cosine" (embeddings have length 1) or "dot".
    """

    backbone: BackboneConfig
    sharing: Sharing = "sde"
    pooling: Pooling = "mean"
    projection: Projection | None = None
    similarity: Literal["cosine", "dot"] = "cosine"

    def __post_init__(self):
        if self.sharing == "ade_spl" and self.projection is None:
            raise ValueError("sharing='ade_spl' shares the projection, so it needs one: set projection")
        if self.pooling in EARLY_LAYERS and not self.backbone.shows_layers:
            raise ValueError(
                f"pooling={self.pooling!r} reads two layers, which {self.backbone.kind} does not return; use"
                " a BERT backbone or another pooling"
            )

    @property
    def dimension(self) -> int:
        return self.backbone.embed_dim if self.projection is None else self.projection.dimension

    @property
    def summary(self) -> str:
        sharing = {"sde": "", "ade": ", two towers", "ade_spl": ", two towers under one projection"}
        return (
            f"{self.backbone.summary}{sharing[self.sharing]}, {self.pooling} pooling,"
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

    @jaxtyped(typechecker=beartype)
    def encode(
        self,
        ids: Int[Array, "B L"],
        *,
        tower: Tower,
        key: Key[Array, ""] | None = None,
        edit: Edit | None = None,
    ) -> Float[Array, "B D"]:
        """Embeds token ids: returns float32 [B, D], of length 1 if the similarity is cosine.

        0 is padding, on the right; a text of only padding gives zeros, except with cls pooling. `edit`
        changes the token vectors [B, L, E] that the first block reads. A `key` of None turns dropout off.
        """
        return self.encode_together([(ids, tower, key)], [edit])[0]

    def unnormalized(self) -> "DualEncoderModel":
        """Returns a model of the same parameters whose vectors keep their length (`similarity="dot"`)."""
        model = nnx.merge(*nnx.split(self))
        model.config = dataclasses.replace(self.config, similarity="dot")
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
    ) -> list[jax.Array]:
        """Embeds several batches (token ids [B, L], tower, dropout key); `encode` embeds one batch.

        Batches of the same encoder run together: with FSDP its weights are gathered once for all.
        """
        return [embedding for embedding, _ in self.encode_with_tokens(texts, edits)]

    def encode_with_tokens(
        self,
        texts: Sequence[tuple[jax.Array, Tower, jax.Array | None]],
        edits: Sequence[Edit | None] | None = None,
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
            hidden = self._hidden(encoder, [texts[i][0] for i in at], [texts[i][2] for i in at], *more)
            found |= dict(zip(at, hidden, strict=True))
        return [
            (self._embedding(found[i][0], encoders[i].is_pooled(ids), tower), found[i][1])
            for i, (ids, tower, _) in enumerate(texts)
        ]

    def _hidden(self, encoder: Encoder, *args: Any) -> list[tuple[jax.Array, jax.Array]]:
        """Returns the vectors to pool and the last token vectors of each batch, both [B, L, E]."""
        if self.config.pooling not in EARLY_LAYERS:
            return [(last, last) for last in encoder.together(*args)]
        pairs = encoder.layer_and_last(*args, layer=EARLY_LAYERS[self.config.pooling])
        return [((early.astype(jnp.float32) + last.astype(jnp.float32)) / 2, last) for early, last in pairs]

    def _embedding(self, hidden: jax.Array, mask: jax.Array, tower: Tower) -> jax.Array:
        config = self.config
        x = constrain(pool(hidden, mask, how=config.pooling), ("batch", "activation_embed"))
        if config.projection is not None:
            x = getattr(self, f"{tower}_projection" if config.sharing == "ade" else "projection")(x)
            x = jnp.tanh(x) if config.projection.activation == "tanh" else x
        return constrain(self.compared(x), ("batch", None))


def _make_projection(config: DualEncoderConfig, *, rngs: nnx.Rngs) -> layers.Linear:
    width = config.backbone.embed_dim
    return layers.Linear(
        width,
        config.projection.dimension,
        axes=("embed", "affinity"),
        use_bias=config.projection.use_bias,
        dtype="float32",
        init=layers.normal(width**-0.5),
        rngs=rngs,
    )


@jaxtyped(typechecker=beartype)
def pool(hidden: Float[Array, "B L E"], mask: Bool[Array, "B L"], *, how: Pooling) -> Float[Array, "B E"]:
    """Pools `hidden` [B, L, E] into float32 [B, E]; `mask` is true at the tokens to pool."""
    if how == "cls":
        return hidden[:, 0].astype(jnp.float32)
    if how == "lasttoken":
        # Sum over a one-hot mask instead of gathering, so that rows stay on their devices.
        mask = jnp.arange(mask.shape[1])[None] == mask.sum(1, dtype=jnp.int32)[:, None] - 1
    kept = jnp.where(mask[..., None], hidden.astype(jnp.float32), 0.0)
    return kept.sum(1) / jnp.maximum(mask.sum(1, dtype=jnp.float32), 1.0)[:, None]


@jaxtyped(typechecker=beartype)
def l2_normalize(x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """Divides each row of x [B, D] by its length; a zero row stays zero and has a finite gradient."""
    return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-24))
