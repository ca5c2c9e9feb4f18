"""Tokenized data, and programs compiled before training, with which evaluators measure a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from scipy import sparse

from jaxir.core.errors import UserError
from jaxir.core.features import Features, TextFormat
from jaxir.data.batches.text_data import check_data, dataset_of
from jaxir.data.formats.lines import Policy
from jaxir.data.text.tokenizer import Tokenizer, pad_batch
from jaxir.models.decoding import Decoding
from jaxir.objectives.objective import Objective
from jaxir.retrieval.encoding.generator import check_tokens, text_of
from jaxir.runtime import cpu
from jaxir.runtime.compile_cache import aside
from jaxir.runtime.partitioning import Partitioner
from jaxir.storage import fingerprints

Rows = Mapping[str, np.ndarray]  # arrays [N, ...] by name
WRITTEN = ", written with "  # separates the data's hash from the settings of generated texts in a fingerprint
ONE_BATCH = ", in one batch of "
EVALUATED = ", evaluated by "


class State(Protocol):
    """The arrays to evaluate: those of the model and of the objective's auxiliary module."""

    params: Any
    auxiliary: Any
    statistics: Any


@dataclasses.dataclass(frozen=True)
class Examples:
    """Dev data, read and tokenized.

    Attributes:
      dataset: the dataset, as training would read it.
      arrays: each example once, as arrays [N, ...] by name, shared by evaluators with equal data.
      fingerprint: a text that is the same only for the same data.
    """

    dataset: Any
    arrays: Rows
    fingerprint: str

    @functools.cached_property
    def rows(self) -> list[Rows]:
        """The examples one by one, as {name: array}."""
        return _rows_of(self.arrays)


class TokenWeights(NamedTuple):
    """Vectors [B, V] of a sparse encoder; the host stores a CSR matrix, because most numbers are 0."""

    weights: jax.Array


class BatchedFunction:
    """A function of (model, auxiliary, batch) that is compiled once and run on the mesh, batch after batch.

    Args:
      function: maps (model, auxiliary, {name: [B, ...]}) to arrays, without dropout.
      rows: all rows on which the function is run, as {name: [N, ...]}.
      batch_size: maximum number of rows per batch.
      partitioner: the mesh.
      chunked: whether to divide the batch size by the objective's number of chunks, to save memory.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        rows: Rows,
        *,
        batch_size: int,
        partitioner: Partitioner,
        chunked: bool = False,
    ):
        self._function, self._rows, self._partitioner = function, rows, partitioner
        self._chunked = chunked
        self._sharding = partitioner.sharding(("batch",))
        self.count = len(next(iter(rows.values())))
        divisor = partitioner.batch_divisor()
        self.size = min(batch_size, -(-self.count // divisor) * divisor)

    def compile(self, plan: Any, chunks: int = 1) -> None:
        """Compiles the function for the model of a `train_state.Plan`; `chunks` is that of the objective."""
        if self._chunked:
            divisor = self._partitioner.batch_divisor()
            self.size = -(-self.size // (chunks * divisor)) * divisor

        def run(params: Any, auxiliary: Any, statistics: Any, batch: Any) -> Any:
            model, beside = plan.modules(params, auxiliary, statistics)
            return self._function(model, beside, batch)

        def shape(x: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.size, *x.shape[1:]), x.dtype, sharding=self._sharding)

        like, everywhere = plan.abstract, NamedSharding(self._partitioner.mesh, PartitionSpec())
        jitted = jax.jit(run, out_shardings=everywhere)
        batch = {name: shape(x) for name, x in self._rows.items()}
        with self._partitioner():
            lowered = jitted.lower(like.params, like.auxiliary, like.statistics, batch)
            self._compiled = aside(lowered.compile)

    def of_rows(self, state: State) -> Any:
        """Returns the results for each row, as host arrays [N, ...]; `TokenWeights` as a CSR matrix."""
        parts, last = [], None
        for found in self._run(state, range(0, self.count, self.size)):
            if last is not None:  # fetch one result while the next is computed; devices hold two results
                parts.append(_on_host(last))
            last = found
        parts.append(_on_host(last))
        return jax.tree.map(lambda *x: _concatenated(x)[: self.count], *parts)

    def of_batches(self, state: State) -> list[Any]:
        """Returns the function's results for each full batch, on the host.

        Rows after the last full batch are left out: padding would change their in-batch negatives.
        """
        return jax.device_get(list(self._run(state, range(0, self.count - self.size + 1, self.size))))

    def _run(self, state: State, starts: range) -> Iterator[Any]:
        for at in starts:
            batch = {name: self._place(x[at : at + self.size]) for name, x in self._rows.items()}
            found = self._compiled(state.params, state.auxiliary, state.statistics, batch)
            yield cpu.when_done(found) if self._partitioner.on_cpu else found

    def _place(self, rows: np.ndarray) -> jax.Array:
        """Puts rows onto the mesh, padded to a full batch; every process must have all of these rows."""
        rows = np.pad(rows, [(0, self.size - len(rows)), *[(0, 0)] * (rows.ndim - 1)])
        return jax.make_array_from_callback(rows.shape, self._sharding, lambda index: rows[index])


class Bench:
    """The argument of `Evaluator.prepare`: training settings, and methods to read data and make programs.

    Args:
      tokenizer: the model's tokenizer.
      form: maximum lengths and prompts of the model's texts; its `num_negatives` is the number in training.
      objective: the training objective.
      training_data: the dataset to train on.
      batch_size: the batch size of training, over all devices together.
      partitioner: the mesh.
      on_bad_input: what to do with malformed records.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        form: TextFormat,
        objective: Objective,
        training_data: Any,
        batch_size: int,
        partitioner: Partitioner,
        on_bad_input: Policy = "stop",
    ):
        self.tokenizer, self.form, self.objective = tokenizer, form, objective
        self.training_data, self.batch_size = training_data, batch_size
        self.partitioner, self.on_bad_input = partitioner, on_bad_input
        self._programs: list[BatchedFunction] = []
        self._read: list[tuple[Any, Features, Examples]] = []

    def examples(self, data: Any, features: Features, *, drawn: bool = False) -> Examples:
        """Reads and tokenizes data; equal data are read only once. Items of a list keep the record's order.

        Args:
          data: a `data.batches.text_data.TextData`, or a built dataset.
          features: the features to read of each example.
          drawn: whether lists may have another length than the feature's `count`. They are then read as in
            training: of a longer list, some items are drawn, always the same ones; a shorter list is
            repeated. If `drawn` is false, such a list raises a UserError.
        """
        if data is None:
            raise UserError("the evaluator has no data: set DEV_SPLIT, or the setting that names its data")
        check_data("the evaluator's data", data)
        for known, its_features, examples in self._read:
            # If a gin file names the same data twice, gin makes two objects, which are equal.
            if (known is data or known == data) and its_features == features:
                if not drawn:
                    _check_lists(examples.dataset, features)
                return examples
        built = dataset_of(data, self.tokenizer, features, on_bad_input=self.on_bad_input)
        dataset = built.shortened() if built is not data else built
        if not drawn:
            _check_lists(built, features)
        examples = Examples(dataset, dataset.once(), built.fingerprint)
        self._read.append((data, features, examples))
        return examples

    def tokens(self, texts: Sequence[str], tower: str) -> np.ndarray:
        """Returns token ids int32 [N, L]: texts with a tower's prompt, truncated at its maximum length."""
        form = self.form
        prompt, length = form.passage_prompt, form.passage_length
        if tower == "query":
            prompt, length = form.query_prompt, form.query_length
        return pad_rows(self.tokenizer.encode_batch([prompt + t for t in texts], max_length=length), length)

    def program(self, function: Callable[..., Any], rows: Rows, *, chunked: bool = False) -> BatchedFunction:
        """Returns a `BatchedFunction` that runs `function` on `rows`; it is compiled before the first step.

        The function, such as `lambda model, _, batch: ...`, is traced once and may use outer variables as
        constants. With `chunked`, a batch is divided by the objective's number of chunks, to save memory.
        """
        how = {"batch_size": self.batch_size, "partitioner": self.partitioner, "chunked": chunked}
        self._programs.append(BatchedFunction(function, rows, **how))
        return self._programs[-1]

    def vectors(self, ids: np.ndarray, tower: str, *, dense: bool = False) -> Callable[[State], np.ndarray]:
        """Returns a function that encodes `ids` [N, L] by a tower of the model in a state: float32 [N, D].

        A sparse encoder gives a CSR matrix [N, V]; with `dense`, a sparse encoder is refused.
        """

        def encode(model: Any, _: Any, batch: Rows) -> Any:
            if hasattr(model, "token_vectors"):
                raise UserError(
                    "this evaluator compares one vector of each text, but the model makes a vector of each"
                    " token: use Retrieval, Reranking or Loss"
                )
            if dense:
                check_dense(model)
            return embedded(model, batch["ids"], tower)

        return self.program(encode, {"ids": ids}).of_rows

    def texts(self, ids: np.ndarray, how: Decoding) -> Callable[[State], list[str]]:
        """Returns a function that maps a state to the text generated for each source: ids [N, (P,) L]."""

        def write(model: Any, _: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
            tokens = model.generate(batch["source_ids"], how)[:, 0]
            return jnp.where(tokens == model.config.eos_id, 0, tokens)

        program = self.program(write, {"source_ids": ids}, chunked=True)

        def texts(state: State) -> list[str]:
            rows = program.of_rows(state)
            check_tokens(rows, "the model")
            return [text_of(tokens, self.tokenizer) for tokens in rows]

        return texts

    def compile(self, plan: Any) -> None:
        """Compiles all programs of the evaluators for the model of a `train_state.Plan`."""
        for program in self._programs:
            program.compile(plan, getattr(self.objective, "chunks", 1))


def embedded(model: Any, ids: jax.Array, tower: str, **how: Any) -> jax.Array | TokenWeights:
    """Returns the vectors of token ids [B, L]: [B, D], or `TokenWeights` [B, V] of a sparse encoder."""
    vectors = model.encode(ids, tower=tower, **how)
    return TokenWeights(vectors) if hasattr(model, "token_weights") else vectors


def check_dense(model: Any) -> None:
    if hasattr(model, "token_weights"):
        raise UserError(
            "this evaluator compares dense vectors, but the model is a sparse encoder: use Retrieval, Search,"
            " NanoBEIR or Loss"
        )


def _on_host(found: Any) -> Any:
    def fetched(x: Any) -> Any:
        return sparse.csr_matrix(x.weights) if isinstance(x, TokenWeights) else x

    return jax.tree.map(fetched, jax.device_get(found), is_leaf=lambda x: isinstance(x, TokenWeights))


def _concatenated(parts: Sequence[Any]) -> Any:
    return sparse.vstack(parts, format="csr") if sparse.issparse(parts[0]) else np.concatenate(parts)


def described(what: str, *values: object) -> str:
    """Returns a fingerprint of data: a phrase and a hash of their values."""
    return f"{what}, hash {fingerprints.of_values(*values)[: fingerprints.DIGITS]}"


def written(examples: str, how: Decoding) -> str:
    """Returns the fingerprint `examples`, extended by the settings with which texts are generated."""
    return f"{examples}{WRITTEN}max_new_tokens={how.max_new_tokens}, num_beams={how.num_beams}"


def _check_lists(dataset: Any, features: Features) -> None:
    """Raises a UserError if some list has another length than the feature's `count`."""
    fields = {f.field: f.count for f in features.values() if f.count is not None}
    found = dataset.list_lengths() if fields else set()
    for field, count in fields.items():
        if others := sorted(found - {count}):
            lengths = ", ".join(map(str, others[:3])) + (", ..." if len(others) > 3 else "")
            raise UserError(
                f"the evaluator reads {count} items of each list {field!r}, but some lists have {lengths}:"
                f" give lists of {count} items, set the feature's count, or draw items as in training by"
                " bench.examples(..., drawn=True)"
            )


def pad_rows(rows: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Returns int32 [N, L]: rows of at most `most` token ids, padded with zeros.

    L is as small as possible: a multiple of 16, for which attention has kernels, or `most`.
    """
    longest = max(map(len, rows), default=1)
    return pad_batch(rows, min(most, -(-longest // 16) * 16))


def read_rows(data: Any, count: int | None = None) -> list[Mapping[str, np.ndarray]]:
    """Returns `count` examples of a dataset, or all, each once, in a random order that is always the same."""
    return _rows_of(data.once(count))


def _rows_of(arrays: Rows) -> list[Rows]:
    return [dict(zip(arrays, row, strict=True)) for row in zip(*arrays.values(), strict=True)]


def stack(rows: list[np.ndarray]) -> np.ndarray:
    """Stacks arrays of the same rank, each padded with 0 to the largest size of each dimension."""
    shape = np.max([row.shape for row in rows], axis=0)
    out = np.zeros((len(rows), *shape), rows[0].dtype)
    for number, row in enumerate(rows):
        out[(number, *(slice(n) for n in row.shape))] = row
    return out
