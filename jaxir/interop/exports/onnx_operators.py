"""ONNX operators for `models.operators`, in the forms that ONNX Runtime fuses and quantises.

jax2onnx by itself would write a Gemm with an unused third input for a dense layer, ten nodes for a layer
norm, and broadcasts of the mask to [B, H, L, L]. `register` adds the operators to jax2onnx.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxir.interop.exports import onnx_outliers

if TYPE_CHECKING:
    import onnx_ir as ir

# If the largest column exceeds the median one by this factor, int8 loses two bits of the other columns.
_UNEVEN = 5
_INT32 = 6  # ONNX's number for the type int32
SHAPE = "jaxir.shape"  # key of a value's true shape in its `meta`; jax2onnx changes some shapes later
ONNX_RUNTIME = "com.microsoft"  # the domain of ONNX Runtime's own operators
# The logit of a masked key is minus this number, as in `attention`.
_MASKED = np.float32(0.7 * np.finfo(np.float32).max)
_for_onnx_runtime = contextvars.ContextVar("_for_onnx_runtime", default=False)


@contextlib.contextmanager
def own_operators(allowed: bool) -> Iterator[None]:
    """Lets graphs have ONNX Runtime's own operators, if `allowed`."""
    token = _for_onnx_runtime.set(allowed)
    try:
        yield
    finally:
        _for_onnx_runtime.reset(token)


class _Graph:
    """Appends operators to the graph that jax2onnx builds."""

    def __init__(self, context: Any):
        self._context = context
        self.for_onnx_runtime = _for_onnx_runtime.get()

    def __call__(self, operator: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Adds a node, and returns its only output."""
        name = self._context.fresh_name(operator.lower())
        return getattr(self._context.builder, operator)(*inputs, _outputs=[name], **attributes)

    def constant(self, value: Any, dtype: Any) -> ir.Value:
        return self._context.bind_const_for_var(object(), np.asarray(value, dtype))

    def bind(self, variable: Any, value: ir.Value) -> None:
        """Makes a node's output the value of the output variable of a JAX equation."""
        import onnx_ir as ir

        value.type = ir.TensorType(ir.DataType.from_numpy(variable.aval.dtype))
        value.meta[SHAPE] = ir.Shape([d if isinstance(d, int) else str(d) for d in variable.aval.shape])
        value.shape = value.meta[SHAPE]
        self._context.bind_value_for_var(variable, value)


def _evened(graph: _Graph, matrix: ir.Value) -> tuple[ir.Value, ir.Value | None]:
    """Returns a matrix [I, O] and the scales [O] of its columns, or the same matrix and None.

    Quantisers by default give a matrix one scale, which a column of large numbers would spoil for the others.
    Powers of two as scales change no bit of a float32 product.
    """
    if matrix.const_value is None:  # its values are unknown here, as in a scanned layer
        return matrix, None
    numbers = matrix.const_value.numpy()
    largest = np.abs(numbers).max(0)
    if not largest.max() > _UNEVEN * np.median(largest):
        return matrix, None
    scales = np.ldexp(np.float32(1), np.frexp(largest)[1])
    return graph.constant(numbers / scales, np.float32), graph.constant(scales, np.float32)


def _linear(graph: _Graph, x: ir.Value, kernel: ir.Value, bias: ir.Value | None) -> ir.Value:
    channels = None if kernel.const_value is None else onnx_outliers.of_kernel(kernel.const_value.numpy())
    kernel, scales = _evened(graph, kernel)
    y = graph("MatMul", x, kernel) if channels is None else _product_by_parts(graph, x, kernel, channels)
    y = y if scales is None else graph("Mul", y, scales)
    return y if bias is None else graph("Add", y, bias)


def _product_by_parts(graph: _Graph, x: ir.Value, kernel: ir.Value, channels: np.ndarray) -> ir.Value:
    """Returns x W as the sum of the product without some channels of x, and the product of these alone."""
    numbers = kernel.const_value.numpy()
    others = np.ones(len(numbers), np.float32)
    others[channels] = 0
    part = graph("Gather", x, graph.constant(channels, np.int64), axis=-1)
    part = graph("MatMul", part, graph.constant(numbers[channels], np.float32))
    y = graph("MatMul", graph("Mul", x, graph.constant(others, np.float32)), kernel)
    return graph("Add", y, part)


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
    table, scales = _evened(graph, table)
    found = graph("Gather", table, nearest, axis=0)
    found = found if scales is None else graph("Mul", found, scales)
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
    """Attention for [B, T, H, K]. Adds the mask to logits as [B, 1, 1, S], with `near` as [B, 1, T, S]."""
    heads, groups = query.shape[2], key.shape[2]
    if graph.for_onnx_runtime and heads == groups and near is None and bias is None:
        return _multi_head_attention(graph, query, key, value, mask, scale=scale)
    if heads != groups:
        return _grouped(graph, query, key, value, mask, near, bias, scale=scale)
    query = graph("Transpose", query, perm=[0, 2, 1, 3])
    logits = graph("MatMul", query, graph("Transpose", key, perm=[0, 2, 3, 1]))
    weights = _softmax(graph, logits, _added(graph, mask, near, axes=[1, 2]), bias, scale)
    mixed = graph("MatMul", weights, graph("Transpose", value, perm=[0, 2, 1, 3]))
    return graph("Transpose", mixed, perm=[0, 2, 1, 3])


def _grouped(graph, query, key, value, mask, near, bias, *, scale: float) -> ir.Value:
    """Like `_unfused`, if R = H / G query heads share a key: products of [B, G, R, T, K] broadcast over R."""
    if bias is not None:
        raise NotImplementedError("grouped heads cannot have a bias of attention")
    (heads, width), groups = query.shape[2:], key.shape[2]
    query = graph("Reshape", query, graph.constant([0, 0, groups, heads // groups, width], np.int64))
    query = graph("Transpose", query, perm=[0, 2, 3, 1, 4])
    axis = graph.constant([2], np.int64)
    key = graph("Unsqueeze", graph("Transpose", key, perm=[0, 2, 3, 1]), axis)
    value = graph("Unsqueeze", graph("Transpose", value, perm=[0, 2, 1, 3]), axis)
    added = _added(graph, mask, near, axes=[1, 2, 3])
    weights = _softmax(graph, graph("MatMul", query, key), added, None, scale)
    mixed = graph("Transpose", graph("MatMul", weights, value), perm=[0, 3, 1, 2, 4])
    return graph("Reshape", mixed, graph.constant([0, 0, heads, width], np.int64))


def _added(graph: _Graph, mask: ir.Value, near: ir.Value | None, *, axes: list[int]) -> ir.Value:
    """Returns the mask to add to logits: 0 for visible keys, else -`_MASKED`, which outweighs any logit."""
    seen = graph("Unsqueeze", mask, graph.constant(axes, np.int64))
    seen = seen if near is None else graph("And", seen, near)
    return graph("Where", seen, graph.constant(0.0, np.float32), graph.constant(-_MASKED, np.float32))


def _softmax(
    graph: _Graph, logits: ir.Value, added: ir.Value, bias: ir.Value | None, scale: float
) -> ir.Value:
    if scale != 1.0:
        logits = graph("Mul", logits, graph.constant(scale, np.float32))
    logits = logits if bias is None else graph("Add", logits, bias)
    return graph("Softmax", graph("Add", logits, added), axis=-1)


def _multi_head_attention(graph, query, key, value, mask, *, scale: float) -> ir.Value:
    # The standard operator Attention is as fast, but quantize_dynamic mistakes it for
    # com.microsoft.Attention.
    given = [graph("Reshape", x, graph.constant([0, 0, -1], np.int64)) for x in (query, key, value)]
    how = {"num_heads": query.shape[2], "scale": scale, "_domain": ONNX_RUNTIME}
    mixed = graph("MultiHeadAttention", *given, None, graph("Cast", mask, to=_INT32), **how)
    return graph("Reshape", mixed, graph.constant([0, 0, *query.shape[2:]], np.int64))


_OPERATORS: dict[str, Callable[..., ir.Value]] = {
    "linear": _linear,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "rows_of": _rows_of,
    "unfused": _unfused,
}


class _Operator:
    def __init__(self, write: Callable[..., ir.Value]):
        self._write = write

    def lower(self, ctx: Any, eqn: Any) -> None:
        settings, rest, graph = dict(eqn.params), iter(eqn.invars), _Graph(ctx)
        given = settings.pop("given")
        inputs = [ctx.get_value_for_var(next(rest)) if is_array else None for is_array in given]
        graph.bind(eqn.outvars[0], self._write(graph, *inputs, **settings))


class _Reshape:
    """Reshapes, if possible to a constant shape: 0 keeps a dimension, and one unknown dimension may be -1."""

    def __init__(self, usual: Any):
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


class _Broadcast:
    """Inserts dimensions of size 1 without copying."""

    def __init__(self, usual: Any):
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


def register() -> None:
    """Registers the operators with jax2onnx, in this process."""
    from jax2onnx.plugins.plugin_system import PLUGIN_REGISTRY, PrimitiveLeafPlugin, import_all_plugins

    def plugin(kind: type, of: Any) -> Any:
        return type(kind.__name__, (kind, PrimitiveLeafPlugin), {})(of)

    if "jaxir.linear" in PLUGIN_REGISTRY:
        return
    import_all_plugins()  # must come first, because some of its operators are replaced below
    for name, write in _OPERATORS.items():
        PLUGIN_REGISTRY[f"jaxir.{name}"] = plugin(_Operator, write)
    for name, better in {"reshape": _Reshape, "broadcast_in_dim": _Broadcast}.items():
        PLUGIN_REGISTRY[name] = plugin(better, PLUGIN_REGISTRY[name])
