"""Multi-vector encoders (late interaction, ColBERT: Khattab and Zaharia 2020): a vector for each token.

A query may be expanded: to a minimum length it is filled with mask tokens, whose vectors are scored too.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Size, checked
from jaxir.models import layers
from jaxir.models.adapters import Adapters, attach
from jaxir.models.after_pooling import AfterPooling, width_after
from jaxir.models.backbones import BackboneConfig, make_encoder
from jaxir.models.dual_encoder import Tower

# The id of a token that expands a query; differs from all token ids, `features.PADDING_TOKEN` (-1), and
# `token_edits.NEW` (-2).
EXPANSION_TOKEN = -3


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Expansion:
    """How queries are filled with further tokens.

    Attributes:
      length: queries get at least this many tokens.
      token: the id of the token that fills them, in general the mask token; `features.PADDING_TOKEN` if it is
        the padding token too, as in PyLate's folders.
      attend: whether other tokens attend to the added ones. If not, the added ones still attend to the query.
    """

    length: Size
    token: int
    attend: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MultiVectorConfig:
    """The components of a multi-vector encoder. Both towers share all parameters.

    Attributes:
      backbone: the encoder.
      token_modules: what follows for each token's vector, in order.
      similarity: "maxsim", the sum over query tokens of the largest product with a passage token, or
        "meanmaxsim", this sum divided by the number of query tokens.
      expansion: how queries are filled; None: not at all.
      skipped: ids of tokens that are not scored.
      skipped_in: the towers whose texts leave out `skipped`.
      kept: if not empty, only tokens with these ids are scored in passages.
      adapters: LoRA in the encoder; None: none.
    """

    backbone: BackboneConfig
    token_modules: tuple[AfterPooling, ...] = ()
    similarity: Literal["maxsim", "meanmaxsim"] = "maxsim"
    expansion: Expansion | None = None
    skipped: tuple[int, ...] = ()
    skipped_in: tuple[Tower, ...] = ("passage",)
    kept: tuple[int, ...] = ()
    adapters: Adapters | None = None

    def __post_init__(self):
        if self.expansion is None:
            return
        backbone, length = self.backbone, self.expansion.length
        if backbone.max_positions is not None and length > backbone.max_positions:
            raise ValueError(
                f"queries of {length} tokens exceed the model's {backbone.max_positions} positions"
            )
        if self.expansion.attend:
            return
        if not backbone.embeds_unattended:
            raise ValueError(f"{backbone.kind} embeds no tokens that others do not attend to")
        if backbone.reach is not None and length > backbone.reach + 1:
            raise ValueError(
                f"queries are expanded to {length} tokens, but the last see only {backbone.reach} before them"
            )

    @property
    def dimension(self) -> int:
        return width_after(self.token_modules, self.backbone.output_dim)

    @property
    def summary(self) -> str:
        expanded = "" if self.expansion is None else f", queries expanded to {self.expansion.length} tokens"
        return f"{self.backbone.summary}, {self.dimension} dimensions a token, {self.similarity}{expanded}"

    def make(self, *, rngs: nnx.Rngs) -> "MultiVectorModel":
        return MultiVectorModel(self, rngs=rngs)

    def scored(self, ids: Any, tower: Tower) -> Any:
        """Returns which tokens of texts are scored: bool like `ids`, an array of NumPy or of JAX."""
        found = ids != 0
        if tower in self.skipped_in and self.skipped:
            found = found & ~_among(ids, self.skipped)
            if self.expansion is not None and self.expansion.token in self.skipped:
                found = found & (ids != EXPANSION_TOKEN)
        return found & _among(ids, self.kept) if tower == "passage" and self.kept else found


class MultiVectorModel(layers.Summarised):
    """The module of a multi-vector encoder."""

    def __init__(self, config: MultiVectorConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = make_encoder(config.backbone, rngs=rngs)
        made, width = [], config.backbone.output_dim
        for module in config.token_modules:
            made.append(module.make(width, rngs=rngs))
            width = width_after((module,), width)
        self.token_modules = nnx.List(made)
        attach(self, config.adapters, rngs=rngs)

    @checked_shapes
    def encode(self, ids: Int[Array, "B L"], *, key: Key[Array, ""] | None = None) -> Float[Array, "B L D"]:
        """Embeds each token of texts: returns float32 [B, L, D].

        0 is padding, on the right; vectors at padding and at tokens that are not `scored` have no meaning.
        Tokens `EXPANSION_TOKEN` are those of `config.expansion`. If these are not attended, compute in
        float32: fused kernels for bfloat16 skip positions that are not attended.
        """
        expansion = self.config.expansion
        added = ids == EXPANSION_TOKEN
        full = ids if expansion is None else jnp.where(added, expansion.token, ids)
        if expansion is None or expansion.attend:
            hidden = self.encoder(full, key=key)
        else:
            # As padding, an added token is not attended, but its own vector goes through the blocks.
            def edit(x: jax.Array) -> jax.Array:
                return jnp.where(added[..., None], self.encoder.embed([full], [None])[0], x)

            hidden = self.encoder.together([jnp.where(added, 0, ids)], [key], [edit])[0]
        x = hidden.astype(jnp.float32).reshape(-1, hidden.shape[-1])
        for module in self.token_modules:
            x = module(x)
        return x.reshape(*hidden.shape[:2], -1)


def _among(ids: Any, chosen: tuple[int, ...]) -> Any:
    return (ids[..., None] == np.array(chosen, np.int32)).any(-1)
