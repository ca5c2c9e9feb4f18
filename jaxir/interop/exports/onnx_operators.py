"""ONNX operators for `models.operators`, in the forms that ONNX Runtime fuses and quantises.

jax2onnx by itself would write a Gemm with an unused third input for a dense layer, ten nodes for a layer norm,
and broadcasts of the mask to [B, H, L, L]. Importing this module registers the operators with jax2onnx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from jax2onnx.plugins.plugin_system import PLUGIN_REGISTRY, PrimitiveLeafPlugin, import_all_plugins

SHAPE = "jaxir.shape"  # key of a value's true shape in its `meta`; jax2onnx changes some shapes later
_MASKED = np.float32(-0.7 * np.finfo(np.float32).max)  # the logit of a masked key, as in `attention`


class _Graph:
    """Appends operators to the graph that jax2onnx builds."""

    def __init__(self, context: Any):
        self._context = context

    def __call__(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Adds a node, and returns its only output."""
        name = self._context.fresh_name(operator.lower())
        return getattr(self._context.builder, operator)(*inputs, _outputs=[name], **attributes)

    def constant(self, value: Any, dtype: Any) -> ir.Value:
        return self._context.bind_const_for_var(object(), np.asarray(value, dtype))

    def bind(self, variable: Any, value: ir.Value) -> None:
        """Makes a node's output the value of an equation's output."""
        value.type = ir.TensorType(ir.DataType.from_numpy(variable.aval.dtype))
        value.meta[SHAPE] = ir.Shape([d if isinstance(d, int) else str(d) for d in variable.aval.shape])
        value.shape = value.meta[SHAPE]
        self._context.bind_value_for_var(variable, value)


def _linear(graph: _Graph, x: ir.Value, kernel: ir.Value, bias: ir.Value | None) -> ir.Value:
    y = graph("MatMul", x, kernel)
    return y if bias is None else graph("Add", y, bias)


def _layer_norm(
    graph: _Graph, x: ir.Value, scale: ir.Value, bias: ir.Value | None, *, epsilon: float
) -> ir.Value:
    given = [x, scale] if bias is None else [x, scale, bias]
    return graph("LayerNormalization", *given, axis=-1, epsilon=epsilon)


def _rms_norm(graph: _Graph, x: ir.Value, scale: ir.Value, *, epsilon: float) -> ir.Value:
    return graph("RMSNormalization", x, scale, axis=-1, epsilon=epsilon)


def _gelu(graph: _Graph, x: ir.Value) -> ir.Value:
    return graph("Gelu", x)


def _gelu_tanh(graph: _Graph, x: ir.Value) -> ir.Value:
    return graph("Gelu", x, approximate="tanh")


def _rows_of(graph: _Graph, table: ir.Value, ids: ir.Value, *, axes: Any, dtype: str) -> ir.Value:
    """Looks up rows; an id outside the table, which Gather would refuse, gives NaN."""
    rows = int(table.shape[0])
    first, last = graph.constant(0, np.int32), graph.constant(rows - 1, np.int32)
    nearest = graph("Clip", ids, first, last)
    found = graph("Gather", table, nearest, axis=0)
    known = graph("Unsqueeze", graph("Equal", ids, nearest), graph.constant([-1], np.int64))
    return graph("Where", known, found, graph.constant(np.nan, np.float32))


def _unfused(
    graph: _Graph,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    mask: ir.Value,
    near: ir.Value | None,
    bias: ir.Value | None,
    *,
    scale: float,
) -> ir.Value:
    """Attention of [B, T, H, K]; the mask is added to the logits as [B, 1, 1, S], or with `near` [B, 1, T, S]."""
    seen = graph("Unsqueeze", mask, graph.constant([1, 2], np.int64))
    if near is not None:
        seen = graph("And", seen, near)
    added = graph("Where", seen, graph.constant(0.0, np.float32), graph.constant(_MASKED, np.float32))
    heads_first = graph("Transpose", query, perm=[0, 2, 1, 3])
    logits = graph("MatMul", heads_first, graph("Transpose", key, perm=[0, 2, 3, 1]))
    if scale != 1.0:
        logits = graph("Mul", logits, graph.constant(scale, np.float32))
    if bias is not None:
        logits = graph("Add", logits, bias)
    weights = graph("Softmax", graph("Add", logits, added), axis=-1)
    mixed = graph("MatMul", weights, graph("Transpose", value, perm=[0, 2, 1, 3]))
    return graph("Transpose", mixed, perm=[0, 2, 1, 3])


_OPERATORS: dict[str, Callable[..., ir.Value]] = {
    "linear": _linear,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "rows_of": _rows_of,
    "unfused": _unfused,
}


class _Operator(PrimitiveLeafPlugin):
    def __init__(self, write: Callable[..., ir.Value]):
        self._write = write

    def lower(self, ctx: Any, eqn: Any) -> None:
        settings, rest, graph = dict(eqn.params), iter(eqn.invars), _Graph(ctx)
        given = settings.pop("given")
        inputs = [ctx.get_value_for_var(next(rest)) if is_array else None for is_array in given]
        graph.bind(eqn.outvars[0], self._write(graph, *inputs, **settings))


class _Reshape(PrimitiveLeafPlugin):
    """Reshapes to a constant shape if possible: 0 keeps a dimension, -1 is the only other unknown one."""

    def __init__(self, usual: PrimitiveLeafPlugin):
        self._usual = usual

    def lower(self, ctx: Any, eqn: Any) -> None:
        (x, *sizes_given), old, sizes = eqn.invars, eqn.invars[0].aval.shape, []
        for i, size in enumerate(eqn.params["new_sizes"]):
            kept = i < len(old) and size == old[i]
            sizes.append(size if isinstance(size, int) else 0 if kept else -1)
        if sizes_given or sizes.count(-1) > 1:
            self._usual.lower(ctx, eqn)
            return
        graph = _Graph(ctx)
        y = graph("Reshape", ctx.get_value_for_var(x), graph.constant(sizes, np.int64))
        graph.bind(eqn.outvars[0], y)


class _Broadcast(PrimitiveLeafPlugin):
    """Inserts dimensions of size 1 without copying."""

    def __init__(self, usual: PrimitiveLeafPlugin):
        self._usual = usual

    def lower(self, ctx: Any, eqn: Any) -> None:
        (x, *sizes_given), shape, at = eqn.invars, eqn.params["shape"], eqn.params["broadcast_dimensions"]
        new = [i for i in range(len(shape)) if i not in at]
        same = all(shape[i] == size for i, size in zip(at, x.aval.shape, strict=True))
        if sizes_given or not new or not same or any(shape[i] != 1 for i in new):
            self._usual.lower(ctx, eqn)
            return
        graph = _Graph(ctx)
        y = graph("Unsqueeze", ctx.get_value_for_var(x), graph.constant(new, np.int64))
        graph.bind(eqn.outvars[0], y)


import_all_plugins()  # before its operators are replaced
for _name, _write in _OPERATORS.items():
    PLUGIN_REGISTRY[f"jaxir.{_name}"] = _Operator(_write)
for _name, _better in {"reshape": _Reshape, "broadcast_in_dim": _Broadcast}.items():
    PLUGIN_REGISTRY[_name] = _better(PLUGIN_REGISTRY[_name])
