"""Multi-vector encoders (late interaction, ColBERT: Khattab and Zaharia 2020): a vector for each token.

A query may be expanded: to a minimum length it is filled with mask tokens, whose vectors are scored too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Size, checked
from jaxir.losses._types import TokenVectors
from jaxir.losses.maxsim import maxsim_of_lists
from jaxir.models import layers
from jaxir.models.adapters import Adapters, attach
from jaxir.models.after_pooling import AfterPooling, width_after
from jaxir.models.attention import Attention
from jaxir.models.backbones import BackboneConfig, make_encoder
from jaxir.models.dual_encoder import Tower
from jaxir.models.token_pooling import TokenPooling, pool_tokens
from jaxir.runtime.partitioning import constrain

# The id of a token that expands a query; differs from all token ids, `features.PADDING_TOKEN` (-1), and
# `token_edits.NEW` (-2).
EXPANSION_TOKEN = -3


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Expansion:
    """How queries are filled up with added tokens.

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
      token_modules: modules that are applied, in this order, to each token's vector from the encoder.
      token_modules: what follows for each token's vector, in order.
      similarity: "maxsim", the sum over query tokens of the largest product with a passage token, or
        "meanmaxsim", this sum divided by the number of query tokens.
      expansion: how queries are filled; None: they are not filled.
      skipped: ids of tokens that are not scored.
      skipped_in: the towers whose texts leave out `skipped`.
      kept: if not empty, only tokens with these ids are scored in passages.
      adapters: LoRA in the encoder; None: none.
      pooling: how the token vectors of an encoded text are pooled (never in training); None: not pooled.
    """

    backbone: BackboneConfig
    token_modules: tuple[AfterPooling, ...] = ()
    similarity: Literal["maxsim", "meanmaxsim"] = "maxsim"
    expansion: Expansion | None = None
    skipped: tuple[int, ...] = ()
    skipped_in: tuple[Tower, ...] = ("passage",)
    kept: tuple[int, ...] = ()
    adapters: Adapters | None = None
    pooling: TokenPooling | None = None

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
            raise ValueError(f"{backbone.kind} cannot embed tokens that no other token attends to")
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
        """Returns a mask of the tokens that are scored: bool, an array of NumPy or of JAX like `ids`."""
        found = ids != 0
        if tower in self.skipped_in and self.skipped:
            found = found & ~_among(ids, self.skipped)
            if self.expansion is not None and self.expansion.token in self.skipped:
                found = found & (ids != EXPANSION_TOKEN)
        return found & _among(ids, self.kept) if tower == "passage" and self.kept else found

    def scored_vectors(self, vectors: jax.Array, ids: jax.Array, tower: Tower) -> TokenVectors:
        """Returns the vectors [B, L, D] of tokens `ids` [B, L] with what MaxSim needs to score them."""
        mask, weight = self.scored(ids, tower), None
        if self.similarity == "meanmaxsim":
            weight = 1.0 / jnp.maximum(mask.sum(1, dtype=jnp.float32), 1.0)
        return TokenVectors(vectors, mask, weight)

    def chosen(self, vectors: np.ndarray, ids: np.ndarray, tower: Tower) -> np.ndarray:
        """Returns the vectors [M, D] that represent a text: those of its scored tokens, perhaps pooled.

        `ids` [L] are the text's tokens; `vectors` may end with padding.
        """
        found = vectors[: len(ids)][self.scored(ids, tower)]
        if self.pooling is None or (tower == "query" and not self.pooling.queries):
            return found
        return pool_tokens(found, self.pooling)

    def expanded(self, ids: jax.Array) -> jax.Array:
        """Returns token ids [B, L] of queries, filled with `EXPANSION_TOKEN` to the length of `expansion`."""
        if self.expansion is None:
            return ids
        length = self.expansion.length
        ids = jnp.pad(ids, [(0, 0), (0, max(0, length - ids.shape[1]))])
        filled = jnp.arange(ids.shape[1])[None] < length
        return jnp.where((ids == 0) & filled, EXPANSION_TOKEN, ids)


class MultiVectorModel(layers.Summarised):
    """The module of a multi-vector encoder."""

    def __init__(self, config: MultiVectorConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = make_encoder(config.backbone, rngs=rngs)
        self.token_modules = make_token_modules(config, rngs=rngs)
        attach(self, config.adapters, rngs=rngs)
        if config.expansion is not None and not config.expansion.attend:
            for _, module in nnx.iter_modules(self.encoder):
                if isinstance(module, Attention):
                    module.reads_at_padding = True

    @checked_shapes
    def encode(self, ids: Int[Array, "B L"], *, key: Key[Array, ""] | None = None) -> Float[Array, "B L D"]:
        """Embeds each token of texts: returns float32 [B, L, D].

        0 is padding, on the right; vectors at padding and at tokens that are not `scored` have no meaning.
        `EXPANSION_TOKEN` stands for an added token (`config.expansion`). A `key` of None turns dropout off.
        """
        return self._encode([ids], [key], [True])[0]

    def token_vectors(self, texts: Sequence[tuple[jax.Array, Tower, jax.Array | None]]) -> list[TokenVectors]:
        """Embeds several batches, each (token ids [B, L], tower, dropout key), for `losses.maxsim`.

        Queries are expanded first. With FSDP the encoder's weights are gathered once for all batches.
        """
        config = self.config
        ids = [config.expanded(batch) if tower == "query" else batch for batch, tower, _ in texts]
        found = []
        vectors = self._encode(ids, [key for _, _, key in texts], [tower == "query" for _, tower, _ in texts])
        for x, tokens, (_, tower, _) in zip(vectors, ids, texts, strict=True):
            found.append(config.scored_vectors(x, tokens, tower))
        return found

    def score_lists(
        self, query_ids: Int[Array, "B Lq"], passage_ids: Int[Array, "B C Lp"]
    ) -> Float[Array, "B C"]:
        """Returns the similarities [B, C] of each query with the C passages of its own list."""
        flat = constrain(passage_ids.reshape(-1, passage_ids.shape[-1]), ("batch", None))
        queries, passages = self.token_vectors([(query_ids, "query", None), (flat, "passage", None)])
        return maxsim_of_lists(queries, passages.in_lists(passage_ids.shape[1]))

    def _encode(
        self, ids: Sequence[jax.Array], keys: Sequence[jax.Array | None], expands: Sequence[bool]
    ) -> list[jax.Array]:
        """Returns the vectors [B, L, D] of batches; `expands` says which batches have `EXPANSION_TOKEN`."""
        expansion, seen, edits = self.config.expansion, list(ids), [None] * len(ids)
        for i, (batch, key) in enumerate(zip(ids, keys, strict=True)):
            if expansion is None or not expands[i]:
                continue
            added = batch == EXPANSION_TOKEN
            full = jnp.where(added, expansion.token, batch)
            # Other tokens do not attend to an added token, but its vector goes through the blocks.
            seen[i] = full if expansion.attend else jnp.where(added, 0, batch)
            if not expansion.attend:
                edits[i] = functools.partial(self._put, added, full, key)
        edited = [edits] if any(edits) else []
        return [token_vectors(self.token_modules, x) for x in self.encoder.together(seen, keys, *edited)]

    def _put(self, added: jax.Array, ids: jax.Array, key: jax.Array | None, x: jax.Array) -> jax.Array:
        """Returns the blocks' input x [B, L, E] with the vectors of added tokens."""
        # Split the key as `StackEncoder` does, to get the same dropout masks.
        dropout, *_ = layers.split_key(key, 3)
        return jnp.where(added[..., None], self.encoder.embed([ids], [dropout])[0], x)


def make_token_modules(config: Any, *, rngs: nnx.Rngs) -> nnx.List:
    """Makes a configuration's `token_modules`, which are applied to each token's vector from the encoder."""
    made, width = [], config.backbone.output_dim
    for module in config.token_modules:
        made.append(module.make(width, rngs=rngs))
        width = width_after((module,), width)
    return nnx.List(made)


def token_vectors(modules: nnx.List, hidden: jax.Array) -> jax.Array:
    """Applies modules to the encoder's output [B, L, E]: returns float32 [B, L, D]."""
    x = hidden.astype(jnp.float32).reshape(-1, hidden.shape[-1])
    for module in modules:
        x = module(x)
    return constrain(x.reshape(*hidden.shape[:2], -1), ("batch", "length", "affinity"))


def _among(ids: Any, chosen: tuple[int, ...]) -> Any:
    tokens = np.array(chosen, np.int32).reshape(*[1] * ids.ndim, -1)
    return (ids[..., None] == tokens).any(-1)
