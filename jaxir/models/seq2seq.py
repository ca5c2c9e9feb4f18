"""Generators of text: an encoder reads a source, a decoder writes a target (Raffel et al. 2020).

A source may be several passages, as in Fusion-in-Decoder (Izacard & Grave 2021, section 3.2). The encoder
reads each separately, and the decoder attends to their concatenated outputs.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxir.core.shapes import checked_shapes
from jaxir.core.values import Layers, Natural, checked
from jaxir.models import layers
from jaxir.models.adapters import Adapters, attach
from jaxir.models.attention import Cache
from jaxir.models.decoding import Decoding, beam_search, decode, greedy, sampler
from jaxir.models.t5 import T5Config
from jaxir.models.t5_decoder import Memory, T5Decoder
from jaxir.runtime.partitioning import constrain

START = 0  # the token before a target: T5's padding token


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Seq2SeqConfig:
    """The components of a generator.

    Attributes:
      backbone: the encoder; the decoder has the same width, heads and feed-forward layers.
      num_decoder_layers: blocks of the decoder.
      tied: whether logits are products with the token vectors (T5 1.0) or with a separate table (T5 1.1,
        LM-adapted, T0, Flan).
      scaled: whether the decoder's output is multiplied by E^-1/2 before the product with token vectors (T5
        1.0).
      eos_id: the token that ends a target.
      adapters: LoRA in encoder and decoder; None: none.
    """

    backbone: T5Config
    num_decoder_layers: Layers
    tied: bool = False
    scaled: bool = False
    eos_id: Natural = 1
    adapters: Adapters | None = None

    def __post_init__(self):
        if self.scaled and not self.tied:
            raise ValueError("scaled=True needs tied=True, as in T5 1.0")

    @property
    def summary(self) -> str:
        return f"{self.backbone.summary}, a decoder of {self.num_decoder_layers} layers"

    def make(self, *, rngs: nnx.Rngs) -> Seq2SeqModel:
        return Seq2SeqModel(self, rngs=rngs)


class Seq2SeqModel(layers.Summarised):
    """An encoder and a decoder that share token vectors, and the layer that computes logits."""

    def __init__(self, config: Seq2SeqConfig, *, rngs: nnx.Rngs):
        backbone = config.backbone
        self.config = config
        self.encoder = backbone.make(rngs=rngs)
        self.decoder = T5Decoder(backbone, num_layers=config.num_decoder_layers, rngs=rngs)
        head = functools.partial(
            layers.Embedding,
            backbone.vocab_size,
            backbone.embed_dim,
            axis="vocab",
            dtype=backbone.dtype,
            init=layers.normal(backbone.embed_dim**-0.5),
            rngs=rngs,
        )
        self.head = None if config.tied else head()
        attach(self, config.adapters, rngs=rngs)

    @property
    def output_table(self) -> jax.Array:
        """[V, E], the vectors whose products with the result of `predict` are the logits."""
        table = self.encoder.token if self.head is None else self.head
        return table.whole(self.config.backbone.dtype)

    @checked_shapes
    def predict(
        self,
        source_ids: Int[Array, "B *P S"],
        target_ids: Int[Array, "B T"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T E"]:
        """Returns the decoder's output at each target token, given the source and the target before it.

        0 is padding, on the right. Sources are [B, S], or [B, P, S] for P passages. Products of the result
        with `output_table` are the logits of each target token.
        """
        encoding, decoding = layers.split_key(key, 2)
        memory, mask = self._read(source_ids, encoding)
        x = self.encoder.token(jnp.pad(target_ids[:, :-1], ((0, 0), (1, 0)), constant_values=START))
        return self._scaled(self.decoder(x, memory, mask, key=decoding))

    @checked_shapes
    def __call__(
        self,
        source_ids: Int[Array, "B *P S"],
        target_ids: Int[Array, "B T"],
        *,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B T V"]:
        """Returns the logits of each target token, float32 [B, T, V]; see `predict` for the arguments."""
        return self._logits(self.predict(source_ids, target_ids, key=key))

    def remember(self, source_ids: jax.Array) -> Memory:
        """Encodes sources [B, S] or [B, P, S], and returns the keys, values and mask that decoding reads."""
        return self.decoder.remember(*self._read(source_ids))

    def next_logits(
        self, ids: jax.Array, caches: tuple[Cache, ...], memory: Memory
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Reads the next token of N outputs; returns the logits [N, V] of the token after it, and caches.

        For the first token, `ids` are START and `caches` the result of `decoder.empty_caches`. With a
        `memory` of B sources, output n belongs to source n // (N / B).
        """
        x, caches = self.decoder.extend(self.encoder.token(ids[:, None]), caches, memory)
        return constrain(self._logits(self._scaled(x))[:, 0], ("batch", "vocab")), caches

    def generate(self, source_ids: jax.Array, how: Decoding) -> jax.Array:
        """Generates outputs of sources [B, S] or [B, P, S].

        Returns int32 [B, how.num_outputs, how.max_new_tokens], 0 after the end, zeros for empty sources,
        and `decoding.FAULT` where logits are not finite. Samples depend only on the source and the seed, not
        on the batch.
        """
        rows = len(source_ids)
        none = (source_ids == 0).reshape(rows, -1).all(1)
        each = how.num_beams if how.num_beams > 1 else how.num_outputs
        memory = self.remember(source_ids)
        caches = self.decoder.empty_caches(rows * each, how.max_new_tokens)
        shared = {"max_new_tokens": how.max_new_tokens, "start_id": START, "eos_id": self.config.eos_id}

        def next_logits(ids: jax.Array, caches: tuple[Cache, ...]) -> tuple[jax.Array, tuple[Cache, ...]]:
            return self.next_logits(ids, caches, memory)

        if how.num_beams > 1:
            tokens, _ = beam_search(next_logits, caches, num_beams=each, ended=none, **shared)
            return tokens[:, : how.num_outputs]
        choose = sampler(_keys(source_ids, how.seed, each), how) if how.samples else greedy
        tokens = decode(next_logits, caches, choose, ended=jnp.repeat(none, each), **shared)
        return tokens.reshape(rows, each, -1)

    def _read(self, source_ids: jax.Array, key: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """Returns the output [B, P S, E] of the encoder for sources [B, (P,) S], and its mask [B, P S]."""
        rows, *_, length = source_ids.shape
        # Passages become rows, [B P, S], so that rows stay on their devices.
        memory = self.encoder(constrain(source_ids.reshape(-1, length), ("batch", "length")), key=key)
        memory = layers.constrain_activation(memory.reshape(rows, -1, memory.shape[-1]))
        return memory, (source_ids != 0).reshape(rows, -1)

    def _scaled(self, x: jax.Array) -> jax.Array:
        return x * self.config.backbone.embed_dim**-0.5 if self.config.scaled else x

    def _logits(self, x: jax.Array) -> jax.Array:
        return jnp.einsum("BTE,VE->BTV", x, self.output_table, preferred_element_type=jnp.float32)


def _keys(source_ids: jax.Array, seed: int, num: int) -> jax.Array:
    """Returns random keys [B num], `num` for each source [B, (P,) S], from its tokens and the seed."""

    def number(x: jax.Array) -> jax.Array:
        """Returns a polynomial hash modulo 2^32 along the last axis; zeros at the end add nothing."""
        powers = jnp.cumprod(jnp.full(x.shape[-1:], 0x9E3779B1, jnp.uint32))
        return (x.astype(jnp.uint32) * jnp.broadcast_to(powers, x.shape)).sum(-1, dtype=jnp.uint32)

    numbers = number(source_ids)
    numbers = number(numbers) if numbers.ndim > 1 else numbers
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), numbers)
    return jax.vmap(lambda key: jax.random.split(key, num))(keys).reshape(-1)
