"""A stored model: configuration, parameters by name, tokenizer and settings.

Every format is read into this and written from it. A parameter's canonical name is its path in an unscanned
model, joined by dots: "encoder.layers.0.attention.query.kernel".
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.platforms import memory_of
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.model import kinds, quantizing
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.kinds import ModelConfig
from jaxir.interop.weights.lazy import LazyArray, loaded, place, stack
from jaxir.models import any_length, layers, outlines
from jaxir.models.adapters import is_base
from jaxir.models.backbones import BackboneConfig, check_padding
from jaxir.models.quantized import Scheme, is_quantized
from jaxir.models.sparse_config import SparseConfig
from jaxir.models.stacks import layers_of
from jaxir.runtime.partitioning import Partitioner


class Base(NamedTuple):
    """The model whose weights adapters change. A run and a folder of PEFT do not store it, but name it.

    Attributes:
      spec: the model, in a form that `model_dir.load` accepts.
      tokenizer: the tokenizer that opens a `t5x:` checkpoint; None for other models.
      digest: `lora.digest_of` its parameters; None: unknown.
      weights: how its encoders were quantised while the adapters were trained; None: not at all.
    """

    spec: str
    tokenizer: str | None = None
    digest: str | None = None
    weights: Scheme | None = None

    def holds(self, name: str) -> bool:
        """Whether the base has this parameter of the adapted model; an `hf:` base is only an encoder."""
        after_encoder = name.split(".")[0].endswith(("after_pooling", "layer_weights"))
        return is_base(name) and not (after_encoder and self.spec.startswith("hf:"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model on disk.

    Attributes:
      config: its configuration.
      params: float32 arrays by canonical name, in host memory or not yet loaded (see `lazy`).
      tokenizer: its tokenizer.
      settings: lengths and prompts.
      checkpoint: the checkpoint of a run, which a trainer may remove during reading; None for other models.
      base: the model that its adapters change, if its files only name that model.
      weights: how `build` quantises the encoders (see `quantized`); None: not at all.
      queries: the model of queries, if a sparse encoder encodes them with another one.
      folder: the local folder whose files hold all of it; None: not known.
    """

    config: ModelConfig
    params: Mapping[str, np.ndarray | LazyArray]
    tokenizer: Tokenizer
    settings: EncoderSettings
    checkpoint: Path | None = None
    base: Base | None = None
    weights: Scheme | None = None
    queries: "StoredModel | None" = None
    folder: Path | None = None


class LoadedModel(NamedTuple):
    """A model ready for use.

    Attributes:
      model: a dual encoder, a cross-encoder or a generator.
      tokenizer: its tokenizer.
      settings: lengths and prompts.
      fingerprint: SHA-256 (hex) of parameters, architecture and tokenizer.
      step: the step of the run's checkpoint that was loaded; None for other models.
      base: the model that its adapters change, if they are trained and stored alone.
      queries: the model of queries, if a sparse encoder encodes them with another one.
    """

    model: Any
    tokenizer: Tokenizer
    settings: EncoderSettings
    fingerprint: str
    step: int | None = None
    base: Base | None = None
    queries: "LoadedModel | None" = None

    def __repr__(self) -> str:
        return f"LoadedModel({self.model!r}, {self.settings}, {self.fingerprint[:12]})"


def canonical(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns float32 arrays by canonical name, with stacked layers split; loads no lazy array."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        at_rest = isinstance(value, LazyArray)
        value = value if at_rest else np.asarray(value, np.float32)
        head, layers_, tail = name.partition("layers.")
        if layers_ and not tail.split(".")[0].isdigit():
            parts = [value.layer(i) for i in range(value.shape[0])] if at_rest else value
            kind, _, rest = tail.partition(".")
            numbers, tail = (range(len(parts)), tail) if layers_of(kind) is None else (layers_of(kind), rest)
            found |= {f"{head}layers.{i}.{tail}": part for i, part in zip(numbers, parts, strict=True)}
        else:
            found[name] = value
    return found


def flatten(tree: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """Returns the arrays of nested dicts of parameters on the host, by canonical name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return canonical({".".join(str(key.key) for key in path): leaf for path, leaf in leaves})


def params_of(model: nnx.Module) -> dict[str, np.ndarray]:
    """Returns the parameters of `model` on the host, by canonical name.

    Raises:
      UserError: some are quantised.
    """
    if any(is_quantized(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param))):
        raise UserError(
            "the weights are quantised, so the model can neither be trained nor saved: leave out weights="
        )
    return flatten(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def encoder_shapes(config: BackboneConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter of an encoder by canonical name."""
    return _shapes(dataclasses.replace(config, scan_layers=True))


def model_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter of a model by canonical name."""
    return _shapes(config)


def shapes_alone(config: ModelConfig) -> dict[str, np.ndarray]:
    """Returns placeholders for parameters: views of one zero with the right shapes, which need no memory."""
    zero = np.zeros((), np.float32)
    return {name: np.broadcast_to(zero, shape) for name, shape in model_shapes(config).items()}


def abstract_model(config: BackboneConfig | ModelConfig) -> nnx.Module:
    """Returns a model or an encoder with shapes in place of its parameters' values."""
    return outlines.outline(lambda rngs: config.make(rngs=rngs))


@functools.lru_cache(maxsize=32)
def _outline(config: BackboneConfig | ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns an abstract model; cached, because a run's start needs it several times."""
    return nnx.split(abstract_model(config))


def _shapes(config: BackboneConfig | ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns shapes by canonical name."""
    parameters = nnx.to_pure_dict(nnx.filter_state(_outline(config)[1], nnx.Param))
    zero = np.zeros((), np.float32)
    shapes = flatten(jax.tree.map(lambda leaf: np.broadcast_to(zero, leaf.shape), parameters))
    return {name: value.shape for name, value in shapes.items()}


def check_params(params: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Checks that parameters have the names and shapes of a configuration; errors begin with `where`."""
    missing, extra = sorted(shapes.keys() - params.keys()), sorted(params.keys() - shapes.keys())
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] if missing else []
        parts += [f"has unknown {_some(extra)}"] if extra else []
        raise UserError(
            f"{where} does not fit its configuration: it {' and '.join(parts)}; use the weights of one model"
        )
    for name, shape in shapes.items():
        if params[name].shape != shape:
            raise UserError(
                f"{where}: {name} has shape {params[name].shape}, but its configuration requires {shape}; use"
                " weights and configuration of one model"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_lengths(settings: EncoderSettings, config: ModelConfig, where: str) -> None:
    """Checks that the model has enough positions for `settings`; errors begin with `where`."""
    limit = config.backbone.max_positions
    for name, length in kinds.of(config).lengths(settings).items():
        if limit is not None and length > limit:
            raise UserError(
                f"{where}: {name} is {length}, but the model has only {limit} positions; reduce it"
            )


def replace_backbone(config: ModelConfig, **changes: Any) -> ModelConfig:
    """Returns `config` with fields of its backbone changed."""
    return dataclasses.replace(config, backbone=dataclasses.replace(config.backbone, **changes))


def build(stored: StoredModel, partitioner: Partitioner | None = None, *, halved: bool = False) -> nnx.Module:
    """Makes the model that `stored` describes.

    With `halved`, kernels and tables whose products are computed in bfloat16 are also kept in bfloat16. The
    model then takes half of the memory and computes the same numbers, but only its adapters can be trained,
    which stay in float32.

    With a partitioner, each device gets only its own part of each parameter, and none gets a complete one.
    Without a partitioner, all parameters go to the default device. With `stored.weights`, kernels and
    tables are quantised while they are read.
    """
    graphdef, state = _outline(stored.config)
    scan, low = stored.config.backbone.scan_layers, _in_bfloat16(graphdef, state) if halved else set()
    parts: dict[tuple[str, ...], Any] = {}  # numbers and scales of quantised parameters, by path
    if stored.weights is not None:
        graphdef, state, hows = quantizing.outline(graphdef, state, stored.weights)
        for path, how in hows.items():
            numbers, scales = quantizing.quantized(_stacked(stored.params, list(path), scan), how)
            parts |= {path: numbers, (*path[:-1], "scales"): scales}

    def put(path: tuple[Any, ...], leaf: nnx.Variable, sharding: Any = None) -> nnx.Variable:
        names = tuple(str(key.key) for key in path)
        if names in parts:
            value, dtype = parts.pop(names), leaf.get_value().dtype
        else:
            value = _stacked(stored.params, list(names), scan)
            dtype = jnp.bfloat16 if names in low else np.float32
        if partitioner is None:
            return leaf.replace(jax.device_put(loaded(value, dtype)))
        return leaf.replace(place(value, sharding.get_value(), dtype))

    shardings = [] if partitioner is None else [layers.param_shardings(state, partitioner)]
    is_leaf = layers.is_variable
    placed = jax.tree_util.tree_map_with_path(put, state, *shardings, is_leaf=is_leaf)
    model = nnx.merge(graphdef, placed)
    check_padding(model, partitioner)
    return model


def rounded(config: ModelConfig, params: Mapping[str, Any], weights: Scheme | None) -> dict[str, Any]:
    """Returns a model's parameters; those that `weights` quantises are rounded to their quantised values."""
    if weights is None:
        return dict(params)
    graphdef, state = _outline(replace_backbone(config, scan_layers=False))
    hows = quantizing.outline(graphdef, state, weights)[2]
    changed = {".".join(path): how for path, how in hows.items()}
    return {**params, **{name: quantizing.rounded(params[name], how) for name, how in changed.items()}}


def halved_outline(model: nnx.Module) -> nnx.Module:
    """Returns an abstract model with the parameter types that `build(halved=True)` would give it."""
    graphdef, state = nnx.split(model)
    low = _in_bfloat16(graphdef, state)

    def typed(path: tuple[Any, ...], leaf: nnx.Variable) -> nnx.Variable:
        shape, halved = leaf.get_value(), tuple(str(key.key) for key in path) in low
        return leaf.replace(jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16)) if halved else leaf

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(typed, state, is_leaf=layers.is_variable))


def _in_bfloat16(graphdef: nnx.GraphDef, state: nnx.State) -> set[tuple[str, ...]]:
    return only_in_bfloat16(nnx.merge(graphdef, state))


def only_in_bfloat16(model: nnx.Module) -> set[tuple[str, ...]]:
    """Returns the paths of parameters that are only used in bfloat16."""
    found = set()
    for path, module in nnx.iter_modules(model):
        for kind, name in ((layers.Linear, "kernel"), (layers.Embedding, "embedding")):
            if isinstance(module, kind) and module.dtype == "bfloat16":
                found.add((*map(str, path), name))
    return found


def _stacked(params: Mapping[str, Any], names: list[str], scan: bool) -> Any:
    """Returns a model's parameter. For scanned layers, stacks the layers, which are stored one by one."""
    if not (scan and "layers" in names):
        return params[".".join(names)]
    at = names.index("layers") + 1
    head, numbers = ".".join(names[:at]), layers_of(names[at])
    tail = ".".join(names[at if numbers is None else at + 1 :])
    if numbers is None:
        numbers = range(len({name.split(".")[at] for name in params if name.startswith(f"{head}.")}))
    return stack([params[f"{head}.{i}.{tail}"] for i in numbers])


def initialize(config: ModelConfig, *, seed: int, partitioner: Partitioner | None = None) -> nnx.Module:
    """Makes a model with random parameters, which depend on the seed and not on the mesh.

    With a partitioner, each device computes only its own part of each parameter.
    """

    def make() -> nnx.State:
        return nnx.split(config.make(rngs=nnx.Rngs(seed)))[1]

    graphdef, abstract = nnx.split(abstract_model(config))
    _check_memory(config, abstract, 1 if partitioner is None else partitioner.mesh.size)
    shardings = None if partitioner is None else layers.param_shardings(abstract, partitioner)
    model = nnx.merge(graphdef, jax.jit(make, out_shardings=shardings)())
    check_padding(model, partitioner)
    any_length.warn(model)
    return model


def _check_memory(config: ModelConfig, abstract: nnx.State, devices: int) -> None:
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract))
    memory = memory_of(jax.local_devices()[0])
    if memory is not None and size > memory * devices:
        raise UserError(
            f"the parameters of {config.summary} would take {size / 2**30:,.1f} GiB, but the devices have"
            f" {memory * devices / 2**30:,.1f} GiB of memory: use smaller sizes (vocab_size is"
            f" {config.backbone.vocab_size:,}, embed_dim {config.backbone.embed_dim:,})"
        )


def describe_config(config: ModelConfig) -> dict[str, Any]:
    """Returns `config` as JSON values; `model_json` reads them."""
    described, kind = dataclasses.asdict(config), {"kind": config.backbone.kind}
    module = type(config.backbone).__module__
    if not module.startswith("jaxir."):
        kind["module"] = module  # a reader must import this module first
    if isinstance(config, SparseConfig) and config.form != SparseConfig.form:
        described["form"] = config.form
    return described | {"backbone": kind | described["backbone"]}
