"""Maps parameter names to T5X's (T5, dual encoders of T5X Retrieval), and infers a model from its shapes.

| here | one encoder for both towers (SDE) | two encoders (ADE, ADE-SPL) |
|---|---|---|
| token.embedding | token_embedder/embedding | left_encoder/token_embedder/embedding, right_encoder/... |
| relative_bias, layers.N, norm | encoder/... | left_encoder/..., right_encoder/... |
| projection | projection_layer | left_projection_layer, right_projection_layer |

The query tower is T5X Retrieval's left tower, the passage tower its right tower. T5X Retrieval has no name
for a projection that two encoders share: ADE-SPL's is written as `projection_layer`, and copied to both names
of ADE, which T5X Retrieval restores.

A generator has the encoder of SDE and a decoder. Its logits come from the token table (T5 1.0) or from
decoder/logits_dense, which is `head` transposed. Other arrays have the same orientation.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxir.core.errors import UserError
from jaxir.interop.model import stored
from jaxir.models.dual_encoder import DualEncoderConfig, Projection
from jaxir.models.seq2seq import Seq2SeqConfig
from jaxir.models.t5 import T5Config

# Names within one encoder; "*" is the layer's number.
_ENCODER = {
    "relative_bias.embedding": "relpos_bias/rel_embedding",
    "layers.*.attention_norm.scale": "layers_*/pre_attention_layer_norm/scale",
    "layers.*.attention.query.kernel": "layers_*/attention/query/kernel",
    "layers.*.attention.key.kernel": "layers_*/attention/key/kernel",
    "layers.*.attention.value.kernel": "layers_*/attention/value/kernel",
    "layers.*.attention.out.kernel": "layers_*/attention/out/kernel",
    "layers.*.mlp_norm.scale": "layers_*/pre_mlp_layer_norm/scale",
    "layers.*.mlp.wi_0.kernel": "layers_*/mlp/wi_0/kernel",
    "layers.*.mlp.wi_1.kernel": "layers_*/mlp/wi_1/kernel",
    "layers.*.mlp.wo.kernel": "layers_*/mlp/wo/kernel",
    "norm.scale": "encoder_norm/scale",
}
_ATTENTIONS = {"attention": "self_attention", "cross_attention": "encoder_decoder_attention"}
_DECODER = {
    "relative_bias.embedding": "relpos_bias/rel_embedding",
    "layers.*.attention_norm.scale": "layers_*/pre_self_attention_layer_norm/scale",
    "layers.*.cross_attention_norm.scale": "layers_*/pre_cross_attention_layer_norm/scale",
    "norm.scale": "decoder_norm/scale",
    **{name: path for name, path in _ENCODER.items() if ".mlp" in name},
    **{
        f"layers.*.{ours}.{part}.kernel": f"layers_*/{theirs}/{part}/kernel"
        for ours, theirs in _ATTENTIONS.items()
        for part in ("query", "key", "value", "out")
    },
}
_MODULES = {"encoder": _ENCODER, "decoder": _DECODER}
_TOKEN, _TOKEN_PATH = "token.embedding", "token_embedder/embedding"
_HEAD, _HEAD_PATH = "head.embedding", "decoder/logits_dense/kernel"
_SIDES = {"query": "left", "passage": "right"}
_OF_DECODER = "decoder/"
_COPIES = tuple(f"{side}_projection_layer/" for side in _SIDES.values())


def paths_of(config: DualEncoderConfig | Seq2SeqConfig) -> dict[str, str]:
    """Returns T5X's path of each parameter of a model, by canonical name."""
    check_kind(config)
    gated = config.backbone.gated
    return {name: _path(name, gated) for name in stored.model_shapes(config)}


def check_kind(config: DualEncoderConfig | Seq2SeqConfig) -> None:
    if config.backbone.kind != T5Config.kind:
        raise UserError(
            f"T5X holds only T5 encoders; this model has {config.backbone.summary}: use --format=hf"
        )


def copies_of(config: DualEncoderConfig | Seq2SeqConfig) -> dict[str, str]:
    """Returns {path of a second copy: canonical name} for parameters that are written twice."""
    if isinstance(config, Seq2SeqConfig) or config.sharing != "ade_spl":
        return {}
    leaves = ("kernel", "bias") if config.projection.use_bias else ("kernel",)
    return {f"{copy}{leaf}": f"projection.{leaf}" for copy in _COPIES for leaf in leaves}


def in_zarr(path: str) -> bool:
    """Whether an array is stored outside the index, as T5X stores large arrays."""
    large = path.endswith("/embedding") or path == _HEAD_PATH
    return large or ("layers_" in path and path.endswith("/kernel"))


def oriented(name: str, value: Any) -> Any:
    """Transposes the output head, which T5X stores transposed; returns any other parameter unchanged."""
    return value.T if name == _HEAD else value


def wanted(paths: Collection[str], where: str, *, generator: bool = False) -> tuple[list[str], list[str]]:
    """Returns the paths of a checkpoint that a model reads, and the paths of a decoder to leave out."""
    tops = {path.partition("/")[0] for path in paths}
    sides = {f"{side}_encoder" for side in _SIDES.values()} & tops
    if len(sides) == 1:
        raise UserError(f"{where}: it has only {sides.pop()}; give a checkpoint with both towers' encoders")
    if not sides and "encoder" not in tops:
        raise UserError(
            f"{where}: it has no encoder, only {', '.join(sorted(tops)) or 'nothing'}; give another"
            " checkpoint"
        )
    scanned = [path for path in paths if re.match(r"(\w+_)?encoder/(encoder|layers)/", path)]
    if scanned:
        raise UserError(
            f"{where}: its layers are stacked ({scanned[0]}), as in scalable_t5, whose layers have separate"
            " relative position biases; this is not supported; give another checkpoint"
        )
    if generator:
        if sides or "decoder" not in tops:
            raise UserError(
                f"{where}: not a generator: it has no decoder, only {', '.join(sorted(tops))}; give another"
            )
        return sorted(paths), []
    left_out = [path for path in paths if path.startswith(_OF_DECODER)]
    shared = bool(sides) and any(path.startswith("projection_layer/") for path in paths)
    copies = [path for path in paths if shared and path.startswith(_COPIES)]
    return sorted(set(paths) - set(left_out) - set(copies)), left_out


def interpret(arrays: Mapping[str, Any], where: str) -> tuple[DualEncoderConfig, dict[str, Any]]:
    """Infers the dual encoder whose parameters have these shapes, and names them canonically.

    Shapes do not determine everything. Gated feed-forward layers are taken as T5 1.1's (gelu), others as T5
    1.0's (relu). Distances from 128 on share the last bucket, pooling is the mean, similarity is cosine.
    """
    two = any(path.startswith("left_encoder/") for path in arrays)
    arrays = _with_tables(arrays, [f"{side}_encoder" for side in _SIDES.values()] if two else ["encoder"])
    prefix = "left_encoder" if two else "encoder"
    kernel = "left_projection_layer/kernel" if two else "projection_layer/kernel"
    sharing = "sde"
    if two:
        sharing = "ade_spl" if "projection_layer/kernel" in arrays else "ade"
        kernel = kernel if sharing == "ade" else "projection_layer/kernel"
    projection = None
    if kernel in arrays:
        bias = f"{kernel.removesuffix('kernel')}bias" in arrays
        projection = Projection(dimension=_shape(arrays, kernel, 2, where)[1], use_bias=bias)
    config = DualEncoderConfig(
        backbone=_backbone(arrays, prefix, where), sharing=sharing, projection=projection
    )
    return config, _named(config, arrays, where)


def interpret_generator(arrays: Mapping[str, Any], where: str) -> tuple[Seq2SeqConfig, dict[str, Any]]:
    """Infers the generator whose parameters have these shapes, and names them canonically.

    Without logits_dense the token table gives the logits, from scaled outputs as in T5 1.0. Other assumptions
    are those of `interpret`.
    """
    arrays = _with_tables(arrays, ["encoder"])
    tied = _HEAD_PATH not in arrays
    config = Seq2SeqConfig(
        backbone=_backbone(arrays, "encoder", where),
        num_decoder_layers=_layers(arrays, "decoder", where),
        tied=tied,
        scaled=tied,
    )
    return config, _named(config, arrays, where)


def _named(
    config: DualEncoderConfig | Seq2SeqConfig, arrays: Mapping[str, Any], where: str
) -> dict[str, Any]:
    paths = paths_of(config)
    shapes = stored.model_shapes(config)
    theirs = {p: shapes[n][::-1] if n == _HEAD else shapes[n] for n, p in paths.items()}
    stored.check_params(arrays, theirs, where)
    return {name: oriented(name, arrays[path]) for name, path in paths.items()}


def _path(name: str, gated: bool) -> str:
    """Returns the path of a canonical name such as "query_encoder.layers.0.mlp.wo.kernel"."""
    module, _, rest = name.partition(".")
    tower, _, kind = module.rpartition("_")
    side = f"{_SIDES[tower]}_" if tower else ""
    if kind == "projection":
        return f"{side}projection_layer/{rest}"
    if name == _HEAD:
        return _HEAD_PATH
    if rest == _TOKEN:
        return f"{side}encoder/{_TOKEN_PATH}" if side else _TOKEN_PATH
    layer = re.match(r"layers\.(\d+)\.", rest)
    pattern = rest if layer is None else rest.replace(layer[0], "layers.*.", 1)
    path = _MODULES[kind][pattern].replace("*", layer[1] if layer else "")
    return f"{side}{kind}/{path if gated else path.replace('/wi_0/', '/wi/')}"


def _with_tables(arrays: Mapping[str, Any], encoders: list[str]) -> dict[str, Any]:
    """Moves the token table to the path that `_path` gives; a checkpoint may share it between encoders."""
    found = dict(arrays)
    if encoders == ["encoder"]:
        inner = f"encoder/{_TOKEN_PATH}"
        if inner in found and _TOKEN_PATH not in found:
            found[_TOKEN_PATH] = found.pop(inner)
    elif _TOKEN_PATH in found:
        table = found.pop(_TOKEN_PATH)
        for encoder in encoders:
            found.setdefault(f"{encoder}/{_TOKEN_PATH}", table)
    return found


def _backbone(arrays: Mapping[str, Any], prefix: str, where: str) -> T5Config:
    table = _TOKEN_PATH if prefix == "encoder" else f"{prefix}/{_TOKEN_PATH}"
    vocab_size, embed_dim = _shape(arrays, table, 2, where)
    num_heads, buckets = _shape(arrays, f"{prefix}/relpos_bias/rel_embedding", 2, where)
    first = f"{prefix}/layers_0"
    joined = _shape(arrays, f"{first}/attention/query/kernel", 2, where)[1]
    if joined % num_heads:
        raise UserError(
            f"{where}: {first}/attention/query/kernel has {joined} columns, not a multiple of {num_heads}"
            f" heads (the columns of {prefix}/relpos_bias/rel_embedding); copy the checkpoint again"
        )
    gated = f"{first}/mlp/wi_0/kernel" in arrays
    mlp_dim = _shape(arrays, f"{first}/mlp/{'wi_0' if gated else 'wi'}/kernel", 2, where)[1]
    return T5Config(
        vocab_size=vocab_size,
        embed_dim=embed_dim,
        num_layers=_layers(arrays, prefix, where),
        num_heads=num_heads,
        head_dim=joined // num_heads,
        mlp_dim=mlp_dim,
        activation="gelu_tanh" if gated else "relu",
        gated=gated,
        relative_buckets=buckets,
    )


def _layers(arrays: Mapping[str, Any], prefix: str, where: str) -> int:
    layers = {m[1] for path in arrays if (m := re.match(rf"{prefix}/layers_(\d+)/", path))}
    if not layers:
        raise UserError(f"{where}: it lacks {prefix}/layers_0; give a complete T5 checkpoint")
    return len(layers)


def _shape(arrays: Mapping[str, Any], path: str, rank: int, where: str) -> tuple[int, ...]:
    if path not in arrays:
        raise UserError(f"{where}: it lacks {path}; give a complete T5 checkpoint")
    shape = tuple(arrays[path].shape)
    if len(shape) != rank:
        raise UserError(f"{where}: {path} has shape {shape}, but must have {rank} dimensions; copy it again")
    return shape
