"""BERT encoders: BERT, MiniLM, DistilBERT, RoBERTa, XLM-RoBERTa and CamemBERT are one architecture with
different settings.

Devlin et al. 2019; Wang et al. 2020 (MiniLM); Sanh et al. 2019 (DistilBERT: no token types); Liu et al. 2019
(RoBERTa: one token type, see also `BertConfig.reserved_positions`). Blocks are post-norm. The pooler and the
heads of pretraining are left out.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.core.features import PADDING_TOKEN
from jaxir.core.values import Layers, Natural, Positive, Rate, Size, checked
from jaxir.models import layers, stacks
from jaxir.models.attention import Attention
from jaxir.models.backbones import BackboneConfig, StackEncoder, register
from jaxir.models.blocks import PostNormBlock
from jaxir.models.codec import ACTIVATIONS, Changed, Entry, HuggingFace, ScoreHead, TokenHead, Weights

_EMBEDDINGS = {
    "embeddings.token": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}
_PROJECTIONS = {"query": "self.query", "key": "self.key", "value": "self.value", "out": "output.dense"}


def weights(
    *, projections: Mapping[str, str] = _PROJECTIONS, norm: str = "output.LayerNorm", positions: Any = None
) -> Weights:
    """Returns a table of weights with a folder's names for attention's projections and attention's norm."""
    layer, table = "encoder.layer.*", _EMBEDDINGS["embeddings.position"] if positions is None else positions
    return (
        _EMBEDDINGS
        | {"embeddings.position": table, "embeddings.token_type": "embeddings.token_type_embeddings"}
        | {
            f"layers.*.attention.{ours}": f"{layer}.attention.{theirs}"
            for ours, theirs in projections.items()
        }
        | {
            "layers.*.attention_norm": f"{layer}.attention.{norm}",
            "layers.*.wi": f"{layer}.intermediate.dense",
            "layers.*.wo": f"{layer}.output.dense",
            "layers.*.mlp_norm": f"{layer}.output.LayerNorm",
        }
    )


def shifted_positions(by: int) -> Changed:
    """Returns the entry for a folder's table of positions that starts at position `by`; jaxir starts at 0."""

    def moved(by: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda table: np.roll(table, by, axis=0)

    return Changed(_EMBEDDINGS["embeddings.position"], moved(-by), moved(by))


_DISTILBERT = _EMBEDDINGS | {
    "layers.*.attention.query": "transformer.layer.*.attention.q_lin",
    "layers.*.attention.key": "transformer.layer.*.attention.k_lin",
    "layers.*.attention.value": "transformer.layer.*.attention.v_lin",
    "layers.*.attention.out": "transformer.layer.*.attention.out_lin",
    "layers.*.attention_norm": "transformer.layer.*.sa_layer_norm",
    "layers.*.wi": "transformer.layer.*.ffn.lin1",
    "layers.*.wo": "transformer.layer.*.ffn.lin2",
    "layers.*.mlp_norm": "transformer.layer.*.output_layer_norm",
}
ENTRIES = {
    "vocab_size": "vocab_size",
    "embed_dim": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_dim": "intermediate_size",
    "num_token_types": Entry("type_vocab_size", 2),
    "layer_norm_epsilon": Entry("layer_norm_eps", 1e-12),
    "activation": Entry("hidden_act", "gelu", ACTIVATIONS),
    "dropout_rate": Entry("hidden_dropout_prob", 0.1),
    "attention_dropout_rate": Entry("attention_probs_dropout_prob", 0.1),
}
_POSITIONS = "max_position_embeddings"
LEFT_OUT = ("pooler.", "cls.", "classifier.", "embeddings.position_ids", "embeddings.token_type_ids")


def _read_reserved(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
    return {"reserved_positions": pad_id + 1, "max_positions": content[_POSITIONS] - pad_id - 1}


def _write_reserved(config: "BertConfig", pad_id: int) -> dict[str, Any]:
    reserved = config.reserved_positions
    if reserved != pad_id + 1:
        raise ValueError(f"RoBERTa needs reserved_positions = padding id + 1 = {pad_id + 1}, not {reserved}")
    return {_POSITIONS: config.max_positions + reserved}


# The head of RoBERTa and of the families with its layout.
LM_HEAD = TokenHead(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    decoder="lm_head.decoder",
    bias="lm_head",
    prefix="roberta.",
    activation="gelu",
)
_ENCODER = {"position_embedding_type": "absolute", "is_decoder": False}
_ROBERTA = HuggingFace(
    model_type="roberta",
    architecture="RobertaModel",
    entries=ENTRIES,
    weights=lambda config: weights(positions=shifted_positions(config.reserved_positions)),
    implied={"family": None},
    fixed=_ENCODER,
    read_more=_read_reserved,
    write_more=_write_reserved,
    pad_id=1,
    counts_from_padding=True,
    left_out=(*LEFT_OUT, "lm_head"),
    token_head=LM_HEAD,
    score_head=ScoreHead(
        pooler="classifier.dense",
        classifier="classifier.out_proj",
        activations=("tanh",),
        prefix="roberta.",
    ),
    tokenizer_class="RobertaTokenizer",
)
_FOLDERS = (
    HuggingFace(
        model_type="bert",
        architecture="BertModel",
        entries=ENTRIES | {"max_positions": _POSITIONS},
        weights=lambda config: weights(),
        implied={"reserved_positions": 0, "family": None},
        fixed=_ENCODER,
        left_out=LEFT_OUT,
        token_head=TokenHead(
            dense="cls.predictions.transform.dense",
            norm="cls.predictions.transform.LayerNorm",
            decoder="cls.predictions.decoder",
            bias="cls.predictions",
            prefix="bert.",
        ),
        score_head=ScoreHead(
            pooler="pooler.dense", activations=("tanh",), prefix="bert.", pooler_prefix="bert."
        ),
        tokenizer_class="BertTokenizer",
    ),
    _ROBERTA,
    *(
        dataclasses.replace(
            _ROBERTA,
            model_type=model_type,
            architecture=architecture,
            implied={"family": model_type},
            tokenizer_class="",
        )
        for model_type, architecture in (("xlm-roberta", "XLMRobertaModel"), ("camembert", "CamembertModel"))
    ),
    HuggingFace(
        model_type="distilbert",
        architecture="DistilBertModel",
        entries={
            "vocab_size": "vocab_size",
            "embed_dim": "dim",
            "num_layers": "n_layers",
            "num_heads": "n_heads",
            "mlp_dim": "hidden_dim",
            "max_positions": _POSITIONS,
            "activation": Entry("activation", "gelu", ACTIVATIONS),
            "dropout_rate": Entry("dropout", 0.1),
            "attention_dropout_rate": Entry("attention_dropout", 0.1),
        },
        weights=lambda config: _DISTILBERT,
        implied={"num_token_types": 0, "layer_norm_epsilon": 1e-12, "reserved_positions": 0, "family": None},
        written={"sinusoidal_pos_embds": False},
        left_out=(*LEFT_OUT, "pre_classifier.", "vocab_", "qa_outputs."),
        token_head=TokenHead(
            dense="vocab_transform",
            norm="vocab_layer_norm",
            decoder="vocab_projector",
            bias="vocab_projector",
            prefix="distilbert.",
        ),
        score_head=ScoreHead(pooler="pre_classifier", activations=("relu",), prefix="distilbert."),
        tokenizer_class="BertTokenizer",
    ),
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class BertConfig(BackboneConfig):
    """The sizes and settings of a BERT encoder. The defaults are BERT base, uncased.

    Attributes:
      vocab_size: rows of the token table.
      embed_dim: E, the width.
      num_layers: number of blocks.
      num_heads: heads of attention, each of E / num_heads dimensions.
      mlp_dim: units of the feed-forward layer.
      max_positions: maximum number of tokens per text.
      reserved_positions: rows after the last position. RoBERTa counts positions from its padding id + 1 = 2;
        conversion moves the two unused rows to the end, so that positions start at 0. Only a padding token in
        the text itself reads one of these rows, the last.
      family: the model family, with RoBERTa's layout, of the folder that the model was read from; None: BERT,
        DistilBERT or RoBERTa.
      num_token_types: rows of the token type table, of which the first is read unless types are given; 0: no
        table.
      layer_norm_epsilon: epsilon of every norm.
      activation: activation of the feed-forward layer.
      dropout_rate: dropout of embeddings and of each sublayer's output.
      attention_dropout_rate: dropout of attention weights. Above 0, training cannot use GPUs' fused kernels.
      dtype, remat, scan_layers: see `BackboneConfig`.
    """

    kind: ClassVar[str] = "bert"
    added: ClassVar[Mapping[str, Any]] = {"family": None}
    title: ClassVar[str] = "BERT"
    shows_layers: ClassVar[bool] = True
    embeds_unattended: ClassVar[bool] = True
    token_table: ClassVar[str] = "embeddings.token"
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = _FOLDERS
    vocab_size: Size = 30522
    embed_dim: Size = 768
    num_layers: Layers = 12
    num_heads: Size = 12
    mlp_dim: Size = 3072
    max_positions: Size = 512
    reserved_positions: Natural = 0
    family: Literal["xlm-roberta", "camembert"] | None = None
    num_token_types: Natural = 2
    layer_norm_epsilon: Positive = 1e-12
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    dropout_rate: Rate = 0.1
    attention_dropout_rate: Rate = 0.1
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: layers.Remat = False
    scan_layers: bool = False

    def __post_init__(self):
        if self.embed_dim % self.num_heads:
            raise ValueError(f"embed_dim {self.embed_dim} must be a multiple of num_heads {self.num_heads}")

    @property
    def model_type(self) -> str:
        if self.family is not None:
            return self.family
        return "distilbert" if not self.num_token_types else "roberta" if self.reserved_positions else "bert"

    def make(self, *, rngs: nnx.Rngs) -> "Bert":
        return Bert(self, rngs=rngs)


class Bert(StackEncoder):
    """A BERT encoder; weights start from N(0, 0.02^2)."""

    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs, block: type[PostNormBlock] = PostNormBlock):
        self.config = config
        self.embeddings = _Embeddings(config, rngs=rngs)
        self.layers = stacks.make_stack(
            lambda rngs: _make_block(config, block, rngs=rngs),
            config.num_layers,
            scan=config.scan_layers,
            rngs=rngs,
        )

    def embed(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        *,
        token_types: Sequence[jax.Array | None] | None = None,
        positions: jax.Array | None = None,
    ) -> list[jax.Array]:
        """Returns sums of the vectors of tokens, `positions` [B, L] (None: 0, 1, ...) and `token_types`."""
        types = [None] * len(ids) if token_types is None else token_types
        return [self.embeddings(b, t, positions, key=k) for b, t, k in zip(ids, types, keys, strict=True)]


def _make_block(config: BertConfig, block: type[PostNormBlock], *, rngs: nnx.Rngs) -> PostNormBlock:
    attention = Attention(
        config.embed_dim,
        num_heads=config.num_heads,
        head_dim=config.embed_dim // config.num_heads,
        use_bias=True,
        stddevs=(0.02,) * 4,
        dropout_rate=config.attention_dropout_rate,
        dtype=config.dtype,
        rngs=rngs,
    )
    return block(config, attention, rngs=rngs)


class _Embeddings(nnx.Module):
    def __init__(self, config: BertConfig, *, rngs: nnx.Rngs):
        def table(num: int, axis: str | None) -> layers.Embedding:
            return layers.Embedding(num, config.embed_dim, axis=axis, dtype=config.dtype, rngs=rngs)

        self.config = config
        self.token = table(config.vocab_size, "vocab")
        self.position = table(config.max_positions + config.reserved_positions, "position")
        self.token_type = table(config.num_token_types, None) if config.num_token_types else None
        self.norm = layers.LayerNorm(config.embed_dim, epsilon=config.layer_norm_epsilon, dtype=config.dtype)

    def __call__(
        self,
        ids: jax.Array,
        token_types: jax.Array | None,
        positions: jax.Array | None = None,
        *,
        key: jax.Array | None,
    ) -> jax.Array:
        if positions is None and ids.shape[1] > self.config.max_positions:
            limit = self.config.max_positions
            raise ValueError(f"{ids.shape[1]} tokens exceed the model's {limit} positions: truncate the text")
        x = self.token(ids) + (self._positions(ids) if positions is None else self.position(positions))
        if self.token_type is not None:
            x += self.token_type(jnp.zeros((1, 1), jnp.int32) if token_types is None else token_types)
        elif token_types is not None:
            raise ValueError("token types were given to an encoder without a table for them: omit them")
        x = layers.dropout(self.norm(x), self.config.dropout_rate, key)
        return layers.constrain_activation(x)

    def _positions(self, ids: jax.Array) -> jax.Array:
        """Returns the vectors of positions, [1 or B, L, E].

        For RoBERTa a padding token in the text itself has the last reserved row and is not counted, as in
        `create_position_ids_from_input_ids` of transformers.
        """
        if not self.config.reserved_positions:
            return self.position(jnp.arange(ids.shape[1]))[None]
        counted = ids != PADDING_TOKEN
        last = self.config.max_positions + self.config.reserved_positions - 1
        return self.position(jnp.where(counted, jnp.cumsum(counted, axis=1, dtype=jnp.int32) - 1, last))
