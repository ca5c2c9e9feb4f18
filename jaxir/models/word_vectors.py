"""Word vectors (word2vec, GloVe, static embeddings): a table; mean pooling averages a text's vectors."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from jaxir.core.values import Size, checked
from jaxir.models import layers
from jaxir.models.backbones import BackboneConfig, Edit, Encoder, edited, register


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WordVectorsConfig(BackboneConfig):
    """The shape of a table of word vectors. It has no blocks: `remat` and `scan_layers` have no effect.

    Attributes:
      vocab_size: rows of the table; the first is for padding and unknown words.
      embed_dim: E, the width.
      pools_padding_tokens: whether pooling reads tokens that are padding in the text itself; otherwise, they
        stand for unknown words and are ignored.
      dtype: the type of the vectors that are looked up.
      remat: no effect.
      scan_layers: no effect.
    """

    kind: ClassVar[str] = "word_vectors"
    token_table: ClassVar[str] = "table"
    num_layers: ClassVar[int] = 0
    added: ClassVar[Mapping[str, Any]] = {"pools_padding_tokens": False}
    vocab_size: Size
    embed_dim: Size
    pools_padding_tokens: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: layers.Remat = False
    scan_layers: bool = False

    @property
    def summary(self) -> str:
        return f"word vectors, {self.vocab_size - 1:,} words x {self.embed_dim}"

    def make(self, *, rngs: nnx.Rngs) -> "WordVectors":
        return WordVectors(self, rngs=rngs)


class WordVectors(Encoder):
    """A table of word vectors, which start from N(0, 1/E)."""

    def __init__(self, config: WordVectorsConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.table = layers.Embedding(
            config.vocab_size,
            config.embed_dim,
            axis="vocab",
            dtype=config.dtype,
            init=layers.normal(config.embed_dim**-0.5),
            rngs=rngs,
        )

    def is_pooled(self, ids: jax.Array) -> jax.Array:
        """Returns a mask, bool [B, L], of the tokens that are words of the table."""
        return ids != 0 if self.config.pools_padding_tokens else ids > 0

    def together(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        edits: Sequence[Edit | None] | None = None,
    ) -> list[jax.Array]:
        xs = [layers.constrain_activation(x) for x in self.table.together(ids)]
        return edited(xs, edits)
