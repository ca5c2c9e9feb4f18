"""Models as TensorFlow SavedModels, which need neither jaxir nor JAX: ids or texts in, vectors out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxir.checksums import directory_with_checksums
from jaxir.errors import UserError
from jaxir.installation import how_to_install
from jaxir.interop.exports import saved_model_readme
from jaxir.interop.exports.exported import TOWERS, Source
from jaxir.interop.exports.graph_tokenizer import GraphTokenizer
from jaxir.lean_tensorflow import import_tensorflow
from jaxir.models import layers
from jaxir.models.dual_encoder import DualEncoderModel

if TYPE_CHECKING:
    import tensorflow as tf

Signatures = Literal["ids", "text"]
PLATFORMS = ("cpu", "cuda", "tpu")
# XLA compiles a program for each shape, in seconds: inputs are padded to one of these lengths, and to a power
# of two of rows. A model without a table of positions reads no more than the last.
LENGTHS = tuple(n for i in range(4, 15) for n in (1 << i, 3 << (i - 1)) if n != 24)


class GraphSearch(Protocol):
    """An index in a graph (see `retrieval.saved_search`).

    Attributes:
      state: what a SavedModel must hold.
      packages: the packages whose operations it uses.
      about: a sentence about it for the README.
      k: documents for each query.
    """

    state: Any
    packages: tuple[str, ...]
    about: str
    k: int

    def __call__(self, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (document ids, string [B, K], scores, float32 [B, K]) of vectors [B, D]."""


def write(
    output: str | Path,
    source: Source,
    *,
    signatures: Signatures = "text",
    search: Callable[[], GraphSearch] | None = None,
) -> None:
    """Writes a SavedModel with a README.md, which appears only when whole.

    Signatures, all of any number of rows: `query_ids` and `passage_ids` (ids, int32 [B, L] -> vectors,
    float32 [B, D]), `query` and `passage` (texts, string [B] -> vectors) and `search` (texts -> ids, string
    [B, K], and scores, float32 [B, K]). Programs are lowered for CPU, CUDA and TPU.

    Args:
      output: a directory that does not exist or is empty.
      source: the model. Its backbone's dtype is that of the matrix products; with bfloat16 their weights
        are stored in it too.
      signatures: "text" for all, "ids" for those that take ids alone.
      search: makes the index of `search`, once TensorFlow is there; None for no such signature.

    Raises:
      UserError: TensorFlow or TensorFlow Text is not installed, JAX runs on an accelerator, the tokenizer
        cannot be a part of a graph, or `output` is not empty.
    """
    if search is not None and signatures == "ids":
        raise UserError("a search takes texts: leave out --signatures=ids or --index")
    if jax.default_backend() != "cpu":
        raise UserError(
            f"a SavedModel is written by JAX on the CPU, not on {jax.default_backend()}, whose own kernels"
            " other platforms lack: set JAX_PLATFORMS=cpu"
        )
    tf = _tensorflow()
    with directory_with_checksums(output) as aside:
        tokenizer = GraphTokenizer(source.tokenizer) if signatures == "text" else None
        index = search() if search is not None else None
        module = tf.Module()
        module.tokenizer = tokenizer.state if tokenizer is not None else None
        module.index = index.state if index is not None else None
        functions = _functions(module, source, tokenizer, index)
        module.signatures_ = functions
        tf.saved_model.save(
            module, str(aside), signatures=functions | {"serving_default": _default(functions)}
        )
        packages = ["tensorflow"]
        packages += ["tensorflow-text"] if tokenizer is not None else []
        packages += index.packages if index is not None else []
        saved_model_readme.write(
            aside,
            source,
            signatures=list(functions),
            default=next(n for n, f in functions.items() if f is _default(functions)),
            versions={p: metadata.version(p) for p in [*packages, "jax"]},
            index=index,
        )


def _default(functions: Mapping[str, Any]) -> Any:
    return next(functions[n] for n in ("search", "query", "query_ids") if n in functions)


def _functions(
    module: tf.Module, source: Source, tokenizer: GraphTokenizer | None, index: GraphSearch | None
) -> dict[str, tf.types.experimental.GenericFunction]:
    """Returns the functions behind the signatures, whose state is in `module`."""
    import tensorflow as tf

    encoders = _encoders(module, source.model)
    ids_spec = tf.TensorSpec([None, None], tf.int32, name="ids")
    texts_spec = tf.TensorSpec([None], tf.string, name="texts")

    def function(spec: tf.TensorSpec, compute: Callable[[tf.Tensor], dict[str, tf.Tensor]]) -> Any:
        return tf.function(compute, input_signature=[spec], autograph=False)

    def of_text(tower: str, texts: tf.Tensor) -> tf.Tensor:
        max_length, prompt = source.of_tower(tower)
        prompted = tf.strings.join([prompt, texts]) if prompt else texts
        return encoders[tower](tokenizer(prompted, max_length).to_tensor(0))

    def found(texts: tf.Tensor) -> dict[str, tf.Tensor]:
        ids, scores = index(of_text("query", texts))
        return {"ids": ids, "scores": scores}

    functions = {}
    for tower in TOWERS:
        functions[f"{tower}_ids"] = function(
            ids_spec, lambda ids, tower=tower: {"vectors": encoders[tower](ids)}
        )
        if tokenizer is not None:
            functions[tower] = function(
                texts_spec, lambda texts, tower=tower: {"vectors": of_text(tower, texts)}
            )
    if index is not None:
        functions["search"] = function(texts_spec, found)
    return functions


def _encoders(module: tf.Module, model: DualEncoderModel) -> dict[str, Callable[[tf.Tensor], tf.Tensor]]:
    """Returns ids [B, L] -> float32 [B, D] for each tower; the parameters become variables of `module`."""
    import tensorflow as tf
    from jax.experimental import jax2tf

    graph, state = nnx.split(_narrowed(model))
    leaves, tree = jax.tree.flatten(state)
    module.parameters = [tf.Variable(np.asarray(leaf), trainable=False) for leaf in leaves]
    limit = model.config.backbone.max_positions or LENGTHS[-1]

    def encoder(tower: str) -> Callable[[tf.Tensor], tf.Tensor]:
        def encode(parameters: list[jax.Array], ids: jax.Array) -> jax.Array:
            return nnx.merge(graph, jax.tree.unflatten(tree, parameters)).encode(ids, tower=tower)

        converted = jax2tf.convert(
            encode,
            polymorphic_shapes=[None, "(b, l)"],
            polymorphic_constraints=[f"l <= {limit}"],
            native_serialization_platforms=PLATFORMS,
            with_gradient=False,
        )

        def of_any_shape(ids: tf.Tensor) -> tf.Tensor:
            padded = _padded(ids, limit)
            return converted(module.parameters, padded)[: tf.shape(ids)[0]]

        spec = [tf.TensorSpec([None, None], tf.int32)]
        return tf.function(of_any_shape, input_signature=spec, autograph=False)

    if model.config.sharing == "sde":
        return dict.fromkeys(TOWERS, encoder("query"))
    return {tower: encoder(tower) for tower in TOWERS}


def _padded(ids: tf.Tensor, limit: int) -> tf.Tensor:
    """Returns ids [B, L] with zeros added to the next shape of the few that programs are compiled for."""
    import tensorflow as tf

    rows, length = tf.shape(ids)[0], tf.shape(ids)[1]
    fits = tf.debugging.assert_less_equal(
        length, limit, message=f"ids has more columns than the {limit} tokens that the model can read"
    )
    with tf.control_dependencies([fits]):
        lengths = tf.constant([*(n for n in LENGTHS if n < limit), limit])
        to_length = tf.gather(lengths, tf.searchsorted(lengths, length[None])[0])
        powers = tf.constant([1 << i for i in range(31)])
        to_rows = tf.gather(powers, tf.searchsorted(powers, rows[None])[0])
        return tf.pad(ids, [[0, to_rows - rows], [0, to_length - length]])


def _narrowed(model: DualEncoderModel) -> DualEncoderModel:
    """Returns a copy of the model whose matrices that are used in bfloat16 are stored in bfloat16."""
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
