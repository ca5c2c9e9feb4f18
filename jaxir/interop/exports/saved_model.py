"""Models as TensorFlow SavedModels, which need neither jaxir nor JAX: texts in, vectors or scores out."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install
from jaxir.interop.exports import exported, saved_model_readme
from jaxir.interop.exports.exported import ExportedFunction, ExportedModel, GraphSearch, Signature
from jaxir.interop.exports.graph_tokenizer import GraphTokenizer, renumbered
from jaxir.models import activations, layers
from jaxir.runtime.lean_tensorflow import import_tensorflow
from jaxir.storage.checksums import directory_with_checksums
from jaxir.storage.temporary_outputs import temporary_directory

if TYPE_CHECKING:
    import tensorflow as tf

Signatures = Literal["ids", "text"]
PLATFORMS = ("cpu", "cuda", "tpu")
# XLA compiles a program for each shape, which takes seconds, so inputs are padded to one of these lengths and
# to a power of two of rows. The last is the limit of models without a table of positions.
LENGTHS = tuple(n for i in range(4, 15) for n in (1 << i, 3 << (i - 1)) if n != 24)


# The first of these that a model has is its default signature.
_DEFAULTS = ("search", "query", "score", "query_ids", "score_ids")


def write(
    output: str | Path,
    source: ExportedModel,
    *,
    signatures: Signatures = "text",
    search: Callable[[], GraphSearch] | None = None,
) -> None:
    """Writes a SavedModel with a README.md, which appears only when complete.

    Signatures of a dual encoder, for any number of rows: `query_ids` and `passage_ids` (ids, int32 [B, L] ->
    vectors, float32 [B, D]), `query` and `passage` (texts, string [B] -> vectors) and `search` (texts -> ids,
    string [B, K], and scores, float32 [B, K]). Signatures of a cross-encoder: `score_ids` (ids, and maybe
    token_types, int32 [B, L] -> scores, float32 [B]), `score` (queries and passages, string [B] -> scores).
    Programs are lowered for CPU, CUDA and TPU. The argument `search` is a function that makes the index,
    called once TensorFlow is imported.
    """
    programs = exported.form_of(source).programs
    if search is not None and programs[0].name != "query":
        raise UserError(f"{source.name} is a cross-encoder, which cannot search an index: omit --index")
    if search is not None and signatures == "ids":
        raise UserError("a search takes texts: omit --signatures=ids or --index")
    exported.check_backend("a SavedModel is")
    tf = _tensorflow()
    with directory_with_checksums(output) as temporary, _own_temporary_files():
        tokenizer = None
        if signatures == "text":
            tokenizer = GraphTokenizer(source.tokenizer, num_texts=len(programs[0].texts))
        index = search() if search is not None else None
        module = tf.Module()
        module.tokenizer = tokenizer.state if tokenizer is not None else None
        module.index = index.state if index is not None else None
        found = _signatures(module, source, tokenizer, index)
        functions = {name: signature.function for name, signature in found.items()}
        module.signatures_ = functions
        default = next(name for name in _DEFAULTS if name in found)
        served = functions | {"serving_default": functions[default]}
        try:
            tf.saved_model.save(module, str(temporary), signatures=served)
        except tf.errors.OpError as error:
            if (why := _words_of_system(error.message)) is None:
                raise
            raise UserError(f"{output} could not be written: {why}") from error
        packages = ["tensorflow"]
        packages += ["tensorflow-text"] if tokenizer is not None else []
        packages += index.packages if index is not None else []
        saved_model_readme.write(
            temporary,
            source,
            signatures=found,
            default=default,
            versions={p: metadata.version(p) for p in [*packages, "jax"]},
            index=index,
        )


@contextlib.contextmanager
def _own_temporary_files() -> Iterator[None]:
    """Makes AutoGraph write into a temporary directory of jaxir, which is removed even after a kill."""
    usual = tempfile.tempdir
    with temporary_directory() as directory:
        tempfile.tempdir = str(directory)
        try:
            yield
        finally:
            tempfile.tempdir = usual


def _words_of_system(message: str) -> str | None:
    """Returns why TensorFlow could not write a file, from the end of its message; None for other errors."""
    found = re.search(r"; ([^;]+?)(?: \[Op:\w+\])?$", message)
    return found[1].lower() if found and found[1] in map(os.strerror, errno.errorcode) else None


def _signatures(
    module: tf.Module, source: ExportedModel, tokenizer: GraphTokenizer | None, index: GraphSearch | None
) -> dict[str, Signature]:
    """Returns the signatures by name; their state is in `module`."""
    import tensorflow as tf

    programs = exported.form_of(source).programs
    computed = _converted(module, source.model, programs)
    ids_spec, texts_spec = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.string)

    def signature(
        spec: tf.TensorSpec, inputs: Iterable[str], compute: Callable[..., Any], **outputs: str
    ) -> Signature:
        specs = [tf.TensorSpec(spec.shape, spec.dtype, name) for name in inputs]
        function = tf.function(
            lambda *given: dict(zip(outputs, compute(*given), strict=True)),
            input_signature=specs,
            autograph=False,
        )
        kind = "string [B]" if spec is texts_spec else "int32 [B, L]"
        return Signature(function, dict.fromkeys(inputs, kind), outputs)

    def of_texts(program: ExportedFunction, *texts: tf.Tensor) -> tuple[tf.Tensor]:
        prompts = program.texts.values()
        prompted = [tf.strings.join([p, t]) if p else t for p, t in zip(prompts, texts, strict=True)]
        tokens = tokenizer(prompted, program.max_length)[: len(program.inputs)]
        return computed[program.compute](*(t.to_tensor(0) for t in tokens))

    def of_ids(program: ExportedFunction, ids: tf.Tensor, *types: tf.Tensor) -> tuple[tf.Tensor]:
        # Requests have the tokenizer's ids. In a row, only padding follows the last id that is not the
        # padding id.
        pad_swap = source.tokenizer.pad_swap
        others = tf.cast(ids != (pad_swap or 0), tf.int32)
        in_text = tf.cumsum(others, axis=1, reverse=True) > 0
        own = tf.where(in_text, renumbered(ids, pad_swap), 0)
        return computed[program.compute](own, *types)

    found = {}
    for program in programs:
        gives = {program.output: f"float32 {program.shape}"}
        compute = functools.partial(of_ids, program)
        found[f"{program.name}_ids"] = signature(ids_spec, program.inputs, compute, **gives)
        if tokenizer is not None:
            compute = functools.partial(of_texts, program)
            found[program.name] = signature(texts_spec, program.texts, compute, **gives)
    if index is not None:
        gives = {"ids": f"string [B, {index.k}]", "scores": f"float32 [B, {index.k}], best first"}
        query = functools.partial(of_texts, programs[0])
        found["search"] = signature(texts_spec, ("texts",), lambda texts: index(*query(texts)), **gives)
    return found


def _converted(
    module: tf.Module, model: nnx.Module, programs: Iterable[ExportedFunction]
) -> dict[Callable[..., jax.Array], Callable[..., tuple[tf.Tensor]]]:
    """Returns each program in TensorFlow by its `compute`; the parameters become variables of `module`."""
    import tensorflow as tf
    from jax.experimental import jax2tf

    graph, state = nnx.split(_narrowed(model))
    leaves, tree = jax.tree.flatten(state)
    module.parameters = [tf.Variable(np.asarray(leaf), trainable=False) for leaf in leaves]
    limit = model.config.backbone.max_positions or LENGTHS[-1]

    def convert(program: ExportedFunction) -> Callable[..., tuple[tf.Tensor]]:
        def compute(parameters: list[jax.Array], *inputs: jax.Array) -> jax.Array:
            with activations.without_erf():
                return program.compute(nnx.merge(graph, jax.tree.unflatten(tree, parameters)), *inputs)

        converted = jax2tf.convert(
            compute,
            polymorphic_shapes=[None, *["(b, l)"] * len(program.inputs)],
            polymorphic_constraints=[f"l <= {limit}"],
            native_serialization_platforms=PLATFORMS,
            with_gradient=False,
        )

        def of_any_shape(*inputs: tf.Tensor) -> tuple[tf.Tensor]:
            return (converted(module.parameters, *_padded(inputs, limit))[: tf.shape(inputs[0])[0]],)

        spec = [tf.TensorSpec([None, None], tf.int32)] * len(program.inputs)
        return tf.function(of_any_shape, input_signature=spec, autograph=False)

    return {compute: convert(program) for compute, program in {p.compute: p for p in programs}.items()}


def _padded(inputs: Sequence[tf.Tensor], limit: int) -> list[tf.Tensor]:
    """Returns inputs [B, L] padded with zeros to one of the few shapes that programs are compiled for."""
    import tensorflow as tf

    rows, length = tf.shape(inputs[0])[0], tf.shape(inputs[0])[1]
    checks = [
        tf.debugging.assert_equal(tf.shape(other), tf.shape(inputs[0]), message="inputs differ in shape")
        for other in inputs[1:]
    ]
    checks.append(
        tf.debugging.assert_less_equal(
            length, limit, message=f"ids has more columns than the {limit} tokens that the model can read"
        )
    )
    with tf.control_dependencies(checks):
        lengths = tf.constant([*(n for n in LENGTHS if n < limit), limit])
        to_length = tf.gather(lengths, tf.searchsorted(lengths, length[None])[0])
        powers = tf.constant([1 << i for i in range(31)])
        to_rows = tf.gather(powers, tf.searchsorted(powers, rows[None])[0])
        return [tf.pad(given, [[0, to_rows - rows], [0, to_length - length]]) for given in inputs]


def _narrowed(model: nnx.Module) -> nnx.Module:
    """Returns a copy of the model whose matrices used in bfloat16 are stored in bfloat16."""
    model = nnx.clone(model)
    for _, module in nnx.iter_graph(model):
        if isinstance(module, (layers.Linear, layers.Embedding)) and module.dtype == "bfloat16":
            for p in jax.tree.leaves(nnx.state(module), is_leaf=lambda x: isinstance(x, nnx.Variable)):
                p.set_value(p.get_value().astype(jnp.bfloat16))
    return model


def _tensorflow() -> Any:
    try:
        import_tensorflow()
        import tensorflow as tf
    except ImportError as error:
        raise UserError(f"a SavedModel needs TensorFlow ({error}): {how_to_install('seqio')}") from error
    return tf
