"""Cross-encoders: a query and a passage read as one sequence give one score (Nogueira & Cho 2019)."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from beartype import beartype
from flax import nnx
from jaxtyping import Array, Float, Int, jaxtyped

from jaxir.models import layers
from jaxir.models.backbones import BackboneConfig
from jaxir.partitioning import constrain


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEncoderConfig:
    """What a cross-encoder is made of.

    Attributes:
      backbone: the encoder. One with two token types is told which tokens are the query's (0) and which the
        passage's (1); others (RoBERTa, DistilBERT) have only the separators between them.
      activation: what follows the layer over the first token's vector: "tanh" (BERT, RoBERTa) or "relu"
        (DistilBERT).
    """

    backbone: BackboneConfig
    activation: Literal["tanh", "relu"] = "tanh"


class CrossEncoderModel(nnx.Module):
    """An encoder, a layer over its first token, and a linear map to one logit; the last two in float32.

    Args:
      config: what it is made of.
      rngs: source of the `params` key.
    """

    def __init__(self, config: CrossEncoderConfig, *, rngs: nnx.Rngs):
        def dense(outputs: int, axis: str | None) -> layers.Linear:
            return layers.Linear(
                config.backbone.embed_dim,
                outputs,
                axes=("embed", axis),
                use_bias=True,
                dtype="float32",
                init=layers.normal(0.02),
                rngs=rngs,
            )

        self.config = config
        self.encoder = config.backbone.make(rngs=rngs)
        self.pooler = dense(config.backbone.embed_dim, "affinity")
        self.classifier = dense(1, None)

    def __repr__(self) -> str:
        return f"CrossEncoderModel({self.config.backbone.summary}, {layers.size_of(self)})"

    __str__ = __repr__  # nnx's own shows every array

    @jaxtyped(typechecker=beartype)
    def score(self, ids: Int[Array, "B L"], token_types: Int[Array, "B L"]) -> Float[Array, " B"]:
        """Scores pairs.

        Args:
          ids: [B, L] tokens of query and passage, [CLS] first; 0 is padding, on the right.
          token_types: [B, L] 0 for a query's tokens, 1 for a passage's; not read by an encoder that has fewer
            than two types.

        Returns:
          float32 [B] logits: the greater, the more relevant.
        """
        types = {"token_types": token_types} if self.config.backbone.num_token_types > 1 else {}
        hidden = self.encoder(ids, **types)
        first = constrain(hidden[:, 0].astype(jnp.float32), ("batch", "activation_embed"))
        activation = {"tanh": jnp.tanh, "relu": nnx.relu}[self.config.activation]
        return constrain(self.classifier(activation(self.pooler(first)))[:, 0], ("batch",))
