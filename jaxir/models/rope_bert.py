"""BERT with RoPE in place of a table of positions: Nomic BERT, GTE and Jina Embeddings v3 (without its
adapters).

Nussbaum et al. 2024, arXiv:2402.01613; Zhang et al. 2024, arXiv:2407.19669; Sturua et al. 2024,
arXiv:2409.10173. Blocks are post-norm, as in BERT. The feed-forward layer is gated in Nomic BERT and GTE.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxir.core.values import Layers, Natural, Positive, Rate, Size, checked
from jaxir.models import backbones, layers, stacks
from jaxir.models.attention import Attention, rope_frequencies
from jaxir.models.backbones import BackboneConfig, StackEncoder, register
from jaxir.models.bert import LM_HEAD
from jaxir.models.blocks import FeedForward, PostNormBlock
from jaxir.models.codec import ACTIVATIONS, Entry, HuggingFace, ScoreHead, TokenHead, Weights
from jaxir.models.rotary import rope_of

_WEIGHTS = {
    "token": "embeddings.word_embeddings",
    "token_type": "embeddings.token_type_embeddings",
    "token_norm": "embeddings.LayerNorm",
    "layers.*.attention.query": "layers.*.self_attn.q_proj",
    "layers.*.attention.key": "layers.*.self_attn.k_proj",
    "layers.*.attention.value": "layers.*.self_attn.v_proj",
    "layers.*.attention.out": "layers.*.self_attn.o_proj",
    "layers.*.attention_norm": "layers.*.post_attention_layernorm",
    "layers.*.mlp_norm": "layers.*.post_mlp_layernorm",
}
_GATED = {
    "layers.*.mlp.wi_0": "layers.*.mlp.gate_proj",
    "layers.*.mlp.wi_1": "layers.*.mlp.up_proj",
    "layers.*.mlp.wo": "layers.*.mlp.down_proj",
}
_PLAIN = {"layers.*.mlp.wi_0": "layers.*.mlp.fc1", "layers.*.mlp.wo": "layers.*.mlp.fc2"}
# Names of older folders -> names that transformers 5.24 writes.
_OLDER_NOMIC = (
    (r"encoder\.layers\.", "layers."),
    (r"emb_ln\.", "embeddings.LayerNorm."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.Wqkv\.", ".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."),
    (r"\.fc11\.", ".up_proj."),
    (r"\.fc12\.", ".gate_proj."),
    (r"(layers\.\d+\.mlp)\.fc2\.", r"\1.down_proj."),
    (r"\.norm1\.", ".post_attention_layernorm."),
    (r"\.norm2\.", ".post_mlp_layernorm."),
)
_OLDER_GTE = (
    (r"encoder\.layer\.", "layers."),
    (r"\.attention\.o_proj\.", ".self_attn.o_proj."),
    (r"\.attention\.qkv_proj\.", ".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."),
    (r"\.attn_ln\.", ".post_attention_layernorm."),
    (r"\.mlp_ln\.", ".post_mlp_layernorm."),
    (r"\.up_gate_proj\.", ".up_proj.", ".gate_proj."),
)
_OLDER_JINA = (
    (r"emb_ln\.", "embeddings.LayerNorm."),
    (r"encoder\.layers\.", "layers."),
    (r"\.mixer\.out_proj\.", ".self_attn.o_proj."),
    (r"\.mixer\.Wqkv\.", ".self_attn.q_proj.", ".self_attn.k_proj.", ".self_attn.v_proj."),
    (r"\.norm1\.", ".post_attention_layernorm."),
    (r"\.norm2\.", ".post_mlp_layernorm."),
)
# Entries of Nomic's older config.json -> today's.
_OLDER_ENTRIES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "max_trained_positions": "max_position_embeddings",
}


def _reader(base: float) -> Any:
    """Returns the function that reads heads and RoPE, whose default base is `base`."""

    def read(content: Mapping[str, Any], pad_id: int) -> dict[str, Any]:
        heads = content.get("num_attention_heads", 12)
        head_dim = content.get("head_dim") or content.get("hidden_size", 768) // heads
        scaling = content.get("rope_scaling") or {}
        kind = scaling.get("type", scaling.get("rope_type"))
        if kind == "ntk":
            # Fixed NTK scaling, as in the code of GTE's authors.
            factor = float(scaling["factor"])
            base_ = float(content.get("rope_theta", base)) * factor
            return {"head_dim": head_dim, "rope_base": base_, "rope_divisor": factor ** (2 / head_dim)}
        rope = rope_of(content, None, base)
        if rope["rope_type"] != "default":
            raise ValueError(f"RoPE of type {rope['rope_type']!r} is not supported, only default and ntk")
        return {"head_dim": head_dim, "rope_base": float(rope["rope_theta"])}

    return read


def _write(config: "RopeBertConfig", pad_id: int) -> dict[str, Any]:
    if config.rope_divisor != 1.0:
        raise ValueError(f"{config.model_type} has no NTK scaling of RoPE; use format jaxir or onnx")
    if config.model_type != "nomic_bert" and config.head_dim * config.num_heads != config.embed_dim:
        raise ValueError(
            f"{config.model_type} needs head_dim x num_heads = embed_dim {config.embed_dim}, not"
            f" {config.head_dim} x {config.num_heads}; use another format"
        )
    return {
        "head_dim": config.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_base},
    }


def _folder(model_type: str, architecture: str, weights: Weights, defaults: Mapping[str, Any], **more: Any):
    names = {
        "vocab_size": "vocab_size",
        "embed_dim": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "mlp_dim": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "num_token_types": "type_vocab_size",
        "layer_norm_epsilon": "layer_norm_eps",
        "dropout_rate": "hidden_dropout_prob",
        "attention_dropout_rate": "attention_probs_dropout_prob",
    }
    entries = {ours: Entry(theirs, defaults[theirs]) for ours, theirs in names.items()}
    more["implied"] = {"model_type": model_type} | more["implied"]
    return HuggingFace(
        model_type=model_type,
        architecture=architecture,
        entries=entries | {"activation": Entry("hidden_act", defaults["hidden_act"], ACTIVATIONS)},
        weights=lambda config: weights,
        read_more=_reader(defaults["rope_theta"]),
        write_more=_write,
        left_out=("pooler.", "lm_head.", "cls.", "classifier.", "embeddings.position_ids"),
        **more,
    )


_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
}
_NOMIC = _folder(
    "nomic_bert",
    "NomicBertModel",
    _WEIGHTS | _GATED,
    _DEFAULTS
    | {
        "vocab_size": 30528,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "type_vocab_size": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "rope_theta": 1000.0,
    },
    implied={"gated": True, "attention_bias": False, "mlp_biases": "none"},
    renamed=_OLDER_NOMIC,
    renamed_entries=_OLDER_ENTRIES,
    token_head=TokenHead(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.layer_norm",
        decoder="cls.predictions.decoder",
        bias="cls.predictions",
        prefix="nomic_bert.",
    ),
    tokenizer_class="BertTokenizer",
)
_GTE = _folder(
    "gte",
    "GteModel",
    _WEIGHTS | _GATED,
    _DEFAULTS
    | {
        "vocab_size": 250_048,
        "hidden_act": "gelu",
        "max_position_embeddings": 8192,
        "type_vocab_size": 1,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.0,
        "rope_theta": 160_000.0,
    },
    implied={"gated": True, "attention_bias": True, "mlp_biases": "out"},
    pad_id=1,
    renamed=_OLDER_GTE,
    token_head=dataclasses.replace(LM_HEAD, norm="lm_head.norm", bias="lm_head.decoder", prefix="gte."),
    score_head=ScoreHead(pooler="pooler.dense", activations=("tanh",), prefix="gte.", pooler_prefix="gte."),
)
_NEW = dataclasses.replace(
    _GTE,
    model_type="new",
    fixed={"logn_attention_scale": False, "layer_norm_type": "layer_norm"},
)
_JINA = _folder(
    "jina_embeddings_v3",
    "JinaEmbeddingsV3Model",
    _WEIGHTS | _PLAIN,
    {
        "vocab_size": 250_002,
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "max_position_embeddings": 8194,
        "type_vocab_size": 1,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "rope_theta": 20_000.0,
    },
    implied={"gated": False, "attention_bias": True, "mlp_biases": "all"},
    pad_id=1,
    renamed=_OLDER_JINA,
    token_head=LM_HEAD,
)


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class RopeBertConfig(BackboneConfig):
    """The sizes and settings of a BERT with RoPE. The defaults are Nomic's embed-text v1.5.

    Attributes:
      model_type: the family, whose folders Hugging Face's transformers reads.
      vocab_size: rows of the token table.
      embed_dim: E, the width.
      num_layers: number of blocks.
      num_heads: heads of attention.
      head_dim: dimensions of a head.
      mlp_dim: units of the feed-forward layer.
      max_positions: maximum number of tokens per text.
      num_token_types: rows of the token type table, of which the first is read unless types are given; 0: no
        table.
      gated: whether the activation's result is multiplied by a second linear map.
      attention_bias: whether attention's projections have biases.
      mlp_biases: which maps of the feed-forward layer have biases.
      rope_base: base of RoPE's angles.
      rope_divisor: divisor of RoPE's angles.
      layer_norm_epsilon: epsilon of every norm.
      activation: activation of the feed-forward layer.
      dropout_rate: dropout of embeddings and of each sublayer's output.
      attention_dropout_rate: dropout of attention weights.
      dtype, remat, scan_layers: see `BackboneConfig`.
    """

    kind: ClassVar[str] = "rope_bert"
    token_table: ClassVar[str] = "token"
    shows_layers: ClassVar[bool] = True
    embeds_unattended: ClassVar[bool] = True
    hugging_face: ClassVar[tuple[HuggingFace, ...]] = (_NOMIC, _GTE, _NEW, _JINA)
    model_type: Literal["nomic_bert", "gte", "jina_embeddings_v3"] = "nomic_bert"
    vocab_size: Size = 30528
    embed_dim: Size = 768
    num_layers: Layers = 12
    num_heads: Size = 12
    head_dim: Size = 64
    mlp_dim: Size = 3072
    max_positions: Size = 2048
    num_token_types: Natural = 2
    gated: bool = True
    attention_bias: bool = False
    mlp_biases: Literal["none", "out", "all"] = "none"
    rope_base: Positive = 1000.0
    rope_divisor: Positive = 1.0
    layer_norm_epsilon: Positive = 1e-12
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "silu"
    dropout_rate: Rate = 0.0
    attention_dropout_rate: Rate = 0.0
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: layers.Remat = False
    scan_layers: bool = False

    def __post_init__(self):
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, but RoPE rotates pairs of dimensions")

    @property
    def title(self) -> str:
        return {"nomic_bert": "Nomic BERT", "gte": "GTE"}.get(self.model_type, "Jina Embeddings v3")

    def make(self, *, rngs: nnx.Rngs) -> "RopeBert":
        return RopeBert(self, rngs=rngs)


backbones.PUBLISHED["nomic-ai/nomic-embed-text-v1.5"] = RopeBertConfig()
backbones.PUBLISHED["Alibaba-NLP/gte-multilingual-base"] = RopeBertConfig(
    model_type="gte",
    vocab_size=250_048,
    max_positions=8192,
    num_token_types=1,
    attention_bias=True,
    mlp_biases="out",
    rope_base=160_000.0,
    activation="gelu",
    dropout_rate=0.1,
)


class RopeBert(StackEncoder):
    """A BERT with RoPE; weights start from N(0, 0.02^2)."""

    def __init__(self, config: RopeBertConfig, *, rngs: nnx.Rngs):
        def table(num: int, axis: str | None) -> layers.Embedding:
            return layers.Embedding(num, config.embed_dim, axis=axis, dtype=config.dtype, rngs=rngs)

        self.config = config
        self.token = table(config.vocab_size, "vocab")
        self.token_type = table(config.num_token_types, None) if config.num_token_types else None
        self.token_norm = layers.LayerNorm(
            config.embed_dim, epsilon=config.layer_norm_epsilon, dtype=config.dtype
        )
        self.layers = stacks.make_stack(
            lambda rngs: _Block(config, rngs=rngs), config.num_layers, scan=config.scan_layers, rngs=rngs
        )

    def embed(
        self,
        ids: Sequence[jax.Array],
        keys: Sequence[jax.Array | None],
        *,
        token_types: Sequence[jax.Array | None] | None = None,
    ) -> list[jax.Array]:
        """Returns the normalised sums of the vectors of tokens and `token_types` [B, L]."""
        longest = max(batch.shape[1] for batch in ids)
        if longest > (limit := self.config.max_positions):
            raise ValueError(f"{longest} tokens exceed the model's {limit} positions: truncate the text")
        types = [None] * len(ids) if token_types is None else token_types
        return [
            layers.constrain_activation(
                layers.dropout(self.token_norm(self._typed(x, kind)), self.config.dropout_rate, key)
            )
            for x, kind, key in zip(self.token.together(ids), types, keys, strict=True)
        ]

    def _typed(self, x: jax.Array, types: jax.Array | None) -> jax.Array:
        if self.token_type is not None:
            return x + self.token_type(jnp.zeros((1, 1), jnp.int32) if types is None else types)
        if types is not None:
            raise ValueError("token types were given to an encoder without a table for them: omit them")
        return x

    def block_args(self, ids: Sequence[jax.Array], xs: Sequence[jax.Array]) -> list[tuple[Any, ...]]:
        config = self.config
        frequencies = rope_frequencies(config.head_dim, config.rope_base) / config.rope_divisor
        return [(batch != 0, jnp.asarray(frequencies, jnp.float32)) for batch in ids]


class _Block(PostNormBlock):
    def __init__(self, config: RopeBertConfig, *, rngs: nnx.Rngs):
        how = {"dtype": config.dtype, "rngs": rngs}
        attention = Attention(
            config.embed_dim,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            use_bias=config.attention_bias,
            stddevs=(0.02,) * 4,
            dropout_rate=config.attention_dropout_rate,
            **how,
        )
        mlp = FeedForward(
            config.embed_dim,
            config.mlp_dim,
            activation=config.activation,
            gated=config.gated,
            biases=(config.mlp_biases == "all", config.mlp_biases != "none"),
            stddevs=(0.02, 0.02),
            dropout_rate=config.dropout_rate if config.model_type == "gte" else 0.0,
            **how,
        )
        super().__init__(config, attention, mlp=mlp, rngs=rngs)

    def attend(
        self, x: jax.Array, mask: jax.Array, frequencies: Float[Array, " F"], *, key: jax.Array | None
    ) -> jax.Array:
        return self.attention(x, mask, frequencies=frequencies, key=key)
