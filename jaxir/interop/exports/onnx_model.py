"""Models as ONNX graphs, which need neither jaxir nor JAX: tokens in, vectors or scores out."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.core.installation import how_to_install
from jaxir.interop.exports import exported, onnx_operators, onnx_outliers, onnx_readme
from jaxir.interop.exports.exported import ExportedFunction, ExportedModel
from jaxir.interop.exports.onnx_readme import OUTPUTS, inputs_of
from jaxir.models.operators import named
from jaxir.storage.checksums import directory_with_checksums

if TYPE_CHECKING:
    import onnx_ir

Operators = Literal["onnx", "onnxruntime"]
WEIGHTS = "weights.bin"
_PAGE = 4096  # size in bytes; tensors begin at a page, so that they can be memory-mapped
_TOLERANCE = 1e-4  # largest difference of ONNX Runtime and JAX, relative to the largest number


def write(output: str | Path, source: ExportedModel, *, operators: Operators = "onnx") -> None:
    """Writes query.onnx and passage.onnx, or score.onnx, their weights, the tokenizer and a README.md.

    Each graph takes int64 [B, L] `input_ids` and `attention_mask` (and `token_type_ids` if a cross-encoder
    reads them) with any B and L, as tokenizers give them (padding is where the mask is 0, on the right), and
    returns `sentence_embedding`, float32 [B, D], or `logits`, float32 [B, 1]. ONNX Runtime's numbers are
    compared with the model's before the directory appears. Operators "onnxruntime" are ONNX's and those that
    only ONNX Runtime knows.
    """
    if source.model.config.backbone.dtype != "float32":
        raise UserError("ONNX graphs can only be written in float32; for bfloat16 use --format=saved_model")
    exported.check_backend("ONNX graphs are")
    with _quiet(), directory_with_checksums(output) as temporary:
        ir = _libraries()
        graphs: dict[Any, onnx_ir.Model] = {}  # keys are the programs' `compute`
        programs = exported.form_of(source).programs
        with (temporary / WEIGHTS).open("wb") as file:
            weights = _Weights(file)
            for program in programs:
                if program.compute not in graphs:
                    graphs[program.compute] = graph = _graph(source, program, operators)
                    weights.take(graph)
                ir.save(graphs[program.compute], temporary / f"{program.name}.onnx")
        for program in programs:
            _compare(temporary, source, program)
        source.tokenizer.save(temporary)
        versions = {p: metadata.version(p) for p in ("jax2onnx", "onnxruntime", "jax")}
        opset = graph.opset_imports[""]
        onnx_readme.write(temporary, source, opset=opset, versions=versions)


def _graph(source: ExportedModel, program: ExportedFunction, allowed: Operators) -> onnx_ir.Model:
    from jax2onnx import to_onnx

    longest = source.model.config.backbone.max_positions
    constraints = [] if longest is None else [f"L <= {longest}"]
    shape = jax.export.symbolic_shape("B, L", constraints=constraints)
    given = [jax.ShapeDtypeStruct(shape, jnp.int32)] * len(inputs_of(program))
    # Trace the program before jax2onnx does. jax2onnx replaces functions of jax.numpy, which breaks shape
    # checks and some shapes; a traced program has only primitives.
    try:
        with named():
            traced = jaxpr_as_fun(jax.make_jaxpr(lambda *inputs: _computed(source, program, *inputs))(*given))
        onnx_operators.register()
        outliers = onnx_outliers.find(lambda: _computed(source, program, *_random_inputs(source, program)))
        own = onnx_operators.own_operators(allowed == "onnxruntime")
        with own, onnx_outliers.separated(outliers):
            model = to_onnx(
                lambda *inputs: traced(*inputs)[0],
                given,
                model_name=program.name,
                return_mode="ir",
                input_names=inputs_of(program),
                output_names=[OUTPUTS[program.output]],
            )
    except Exception as error:  # jax2onnx raises errors of many types
        kind = source.model.config.backbone.kind
        reason = " ".join(str(error).split())
        raise UserError(
            f"jax2onnx cannot convert the backbone {kind!r} with texts of any number and length"
            f" ({type(error).__name__}: {reason:.200}); --format=saved_model can"
        ) from error
    if allowed == "onnxruntime":
        model.opset_imports[onnx_operators.ONNX_RUNTIME] = 1
    for node in model.graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = value.meta.get(onnx_operators.SHAPE)  # jax2onnx's own guess is sometimes wrong
    _take_int64(model.graph)
    return model


def _computed(
    source: ExportedModel,
    program: ExportedFunction,
    input_ids: jax.Array,
    attention_mask: jax.Array,
    *token_types: jax.Array,
) -> jax.Array:
    """Returns the program's output, float32 [B, D] or [B, 1], for the model's own ids, int32 [B, L]."""
    pad_swap = source.tokenizer.pad_swap
    ids = input_ids if pad_swap is None else jnp.where(input_ids == 0, pad_swap, input_ids)
    ids = jnp.where(input_ids == (pad_swap or 0), PADDING_TOKEN, ids)
    found = program.compute(source.model, jnp.where(attention_mask != 0, ids, 0), *token_types)
    return found if found.ndim == 2 else found[:, None]


def _random_inputs(source: ExportedModel, program: ExportedFunction) -> list[jax.Array]:
    """Returns int32 inputs [8, 64]: random tokens between those that the tokenizer adds."""
    shape = 8, min(64, source.model.config.backbone.max_positions or 64)
    ids = np.random.default_rng(0).integers(1, source.model.config.backbone.vocab_size, shape)
    (added,) = source.tokenizer.encode_batch([""], max_length=shape[1])
    if len(added):
        ids[:, 0], ids[:, -1] = added[0], added[-1]
    inputs = ids, np.ones(shape), np.zeros(shape)
    return [jnp.asarray(x, jnp.int32) for x in inputs[: len(inputs_of(program))]]


def _take_int64(graph: onnx_ir.Graph) -> None:
    """Changes a graph's int32 inputs to int64, the type of tokenizers' ids."""
    import onnx_ir as ir

    for at, old in enumerate(list(graph.inputs)):
        new = ir.Value(name=old.name, type=ir.TensorType(ir.DataType.INT64), shape=old.shape)
        old.name = f"{old.name}_int32"
        cast = ir.node("Cast", [new], {"to": ir.DataType.INT32}, name=f"narrow_{new.name}")
        old.replace_all_uses_with(cast.outputs[0])
        cast.outputs[0].name = old.name
        graph.inputs[at] = new
        graph.insert_before(graph[0], cast)


class _Weights:
    """One file for the tensors of several graphs, each tensor stored once."""

    def __init__(self, file: Any):
        self._file = file
        self._at: dict[bytes, int] = {}

    def take(self, model: onnx_ir.Model) -> None:
        """Moves tensors larger than a page out of a graph."""
        import onnx_ir as ir

        for value in model.graph.initializers.values():
            tensor = value.const_value
            if tensor.nbytes <= _PAGE:
                continue
            content = tensor.tobytes()
            digest = hashlib.sha256(content).digest()
            if digest not in self._at:
                self._file.write(bytes(-self._file.tell() % _PAGE))
                self._at[digest] = self._file.tell()
                self._file.write(content)
            value.const_value = ir.ExternalTensor(
                WEIGHTS, self._at[digest], len(content), tensor.dtype, shape=tensor.shape, name=value.name
            )


def _compare(directory: Path, source: ExportedModel, program: ExportedFunction) -> None:
    """Checks that ONNX Runtime computes what the model does, on rows of several lengths."""
    from onnxruntime import InferenceSession

    mask = (np.arange(17) < np.array([17, 1, 9])[:, None]).astype(np.int64)
    ids = np.random.default_rng(0).integers(1, source.model.config.backbone.vocab_size, mask.shape)
    second = (np.arange(17) > 5).astype(np.int64) * mask
    given = dict(zip(inputs_of(program), (ids, mask, second), strict=False))
    found = InferenceSession(str(directory / f"{program.name}.onnx")).run(None, given)[0]
    expected = np.asarray(_computed(source, program, *(jnp.asarray(x, jnp.int32) for x in given.values())))
    error = np.abs(found - expected).max()
    if not error <= _TOLERANCE * np.abs(expected).max():
        raise UserError(
            f"ONNX Runtime's {program.output} of {program.name}.onnx differ by {error:.1g} from the model's:"
            " jax2onnx converted it incorrectly, so nothing was written; use --format=saved_model"
        )


def _libraries() -> Any:
    try:
        import jax2onnx  # noqa: F401
        import onnx_ir
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise UserError(f"an ONNX export needs jax2onnx ({error}): {how_to_install('onnx')}") from error
    return onnx_ir


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the converter's warnings about its own plugins and untyped values."""
    loggers = {logging.getLogger(name): logging.getLogger(name).level for name in ("jax2onnx", "onnx_ir")}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in loggers.items():
            logger.setLevel(level)
