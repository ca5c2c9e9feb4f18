"""MPNet encoders (Song et al. 2020, arXiv:2004.09297): BERT without token types, with T5's relative
biases."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxir.core.values import Natural, checked
from jaxir.models import backbones, bert
from jaxir.models.backbones import register
from jaxir.models.blocks import PostNormBlock
from jaxir.models.codec import Changed, HuggingFace, ScoreHead
from jaxir.models.relative_bias import RelativeBias

_BUCKETS, _MAX_DISTANCE = 32, 128  # fixed, because transformers ignores the number of buckets in config.json
_POSITIONS = "max_position_embeddings"
_RESERVED = 2  # transformers counts positions from 2, whatever the padding id in config.json


_WEIGHTS = bert.weights(
    projections={name: f"attn.{name[0]}" for name in ("query", "key", "value", "out")},
    norm="LayerNorm",
    positions=bert.shifted_positions(_RESERVED),
) | {"relative_bias": Changed("encoder.relative_attention_bias", np.transpose, np.transpose)}
_FOLDER = HuggingFace(
    model_type="mpnet",
    architecture="MPNetModel",
    entries={ours: theirs for ours, theirs in bert.ENTRIES.items() if ours != "num_token_types"},
    weights=lambda config: _WEIGHTS,
    implied={"num_token_types": 0, "reserved_positions": _RESERVED},
    fixed={"relative_attention_num_buckets": _BUCKETS},
    read_more=lambda content, pad_id: {"max_positions": content[_POSITIONS] - _RESERVED},
    write_more=lambda config, pad_id: {_POSITIONS: config.max_positions + _RESERVED},
    pad_id=1,
    counts_from_padding=True,
    ignores_pad_id=True,
    left_out=(*bert.LEFT_OUT, "lm_head"),
    token_head=dataclasses.replace(bert.LM_HEAD, prefix="mpnet."),
    score_head=ScoreHead(
        pooler="classifier.dense",
        classifier="classifier.out_proj",
        activations=("tanh",),
        prefix="mpnet.",
    ),
    tokenizer_class="MPNetTokenizer",
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class MPNetConfig(bert.BertConfig):
    """The sizes and settings of an MPNet encoder: see `bert.BertConfig`. The defaults are MPNet
    base."""

    kind: ClassVar[str] = "mpnet"
    title: ClassVar[str] = "MPNet"
    model_type: ClassVar[str] = "mpnet"
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = (_FOLDER,)
    vocab_size: int = 30527
    reserved_positions: Natural = _RESERVED
    num_token_types: Natural = 0

    def make(self, *, rngs: nnx.Rngs) -> "MPNet":
        return MPNet(self, rngs=rngs)


backbones.PUBLISHED["sentence-transformers/all-mpnet-base-v2"] = MPNetConfig()


class MPNet(bert.Bert):
    """An MPNet encoder: all blocks add the same biases of distances to attention's logits."""

    def __init__(self, config: MPNetConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs, block=_Block)
        self.relative_bias = RelativeBias(
            config.num_heads, num_buckets=_BUCKETS, max_distance=_MAX_DISTANCE, stddev=0.02, rngs=rngs
        )

    def block_args(self, ids: Sequence[jax.Array], xs: Sequence[jax.Array]) -> list[tuple[jax.Array, ...]]:
        return [(batch != 0, self.relative_bias(batch.shape[1])) for batch in ids]


class _Block(PostNormBlock):
    def attend(
        self, x: jax.Array, mask: jax.Array, bias: Float[Array, "1 H L L"], *, key: jax.Array | None
    ) -> jax.Array:
        return self.attention(x, mask, bias=bias, key=key)
