"""Runs functions of a model over rows of tokens; encoders, rerankers and servers use it."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.models.layers import param_shardings
from jaxir.retrieval.encoding.batching import Batch, EncodingReport, fill, plan_batches
from jaxir.runtime.partitioning import Partitioner
from jaxir.runtime.program_store import ProgramStore

WINDOW = 16_384  # rows tokenised, sorted and batched together: enough to fill batches, few enough for memory
# Number of threads that run batches. While one thread computes, the other fills a batch or fetches results.
# On a CPU, parts of a program that use one core overlap with the other thread's program.
RUNNERS = 2
BATCH_TOKENS = {"cpu": 1024}  # tokens of a batch on one device; the fastest of the values tried
ACCELERATOR_BATCH_TOKENS = 32_768
# One more shape is compiled only if it saves the time of this many batches. On a CPU, compiling takes as long
# as 3 batches of MiniLM. The value is lower, because `jaxir.runtime.compile_cache` keeps compiled programs
# for later runs.
SHAPE_COST = {"cpu": 0.5}
ACCELERATOR_SHAPE_COST = 8
# The minimum size of a CUDA graph, set so high that none is made. Recording one while another thread runs or
# loads a program fails with "operation not permitted when stream is capturing" (H200, JAX 0.11.2).
COMPILER_OPTIONS = {"gpu": {"xla_gpu_graph_min_graph_size": 2**30}}

# Maps (model, int32 arrays [B, L]) to [B, ...], without dropout. Programs are cached by the function object.
Function = Callable[..., jax.Array]

_program_lock = threading.Lock()


class Runner:
    """Runs functions of a model on batches, split over the partitioner's devices, which keep the weights."""

    def __init__(self, model: nnx.Module, partitioner: Partitioner, *, batch_tokens: int | None = None):
        if batch_tokens is not None and batch_tokens < 1:
            raise UserError(f"batch_tokens must be at least 1, not {batch_tokens}")
        platform = jax.default_backend()
        self.partitioner = partitioner
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(platform, ACCELERATOR_BATCH_TOKENS)
        self._shape_cost = int(SHAPE_COST.get(platform, ACCELERATOR_SHAPE_COST) * self.batch_tokens)
        # Programs that communicate between devices deadlock if devices receive them in different orders.
        self._dispatch_lock = threading.Lock() if partitioner.mesh.size > 1 else contextlib.nullcontext()
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        shardings = jax.tree.leaves(param_shardings(state, partitioner))
        types = tuple(str(x.dtype) for x in leaves)
        self._structure = (graph, tree, types, tuple(shardings), partitioner)
        self.parameters = jax.device_put(leaves, shardings)

    def program(self, function: Function) -> CompiledShapes:
        """Returns the `CompiledShapes` of a function; models of one architecture share compiled programs."""
        with _program_lock:  # otherwise two threads could make the same program and compile it twice
            return _program(*self._structure, function)

    def call(self, function: Function, *arrays: np.ndarray) -> np.ndarray:
        """Returns the function's [B, ...] for a batch of arrays [B, L]; compiles if their shape is new."""
        program = self.program(function)
        with program.compiling(self.parameters, [arrays[0].shape], len(arrays)):
            return np.asarray(program(self.parameters, *arrays))

    def run(
        self,
        function: Function,
        *columns: Sequence[np.ndarray],
        row_shape: tuple[int, ...] = (),
        dtype: type[np.number] = np.float32,
        **how: Any,
    ) -> np.ndarray:
        """Runs N rows of any lengths in batches of few shapes (see `batching`).

        Args:
          *columns: the function's arguments, each N rows of token ids; row i has the same length in every
              column.
          row_shape: the shape of the result for a row.
          dtype: the type of the result.
          **how: further arguments of `batches`.

        Returns:
          the results [N, *row_shape], in the order of the rows.
        """
        results = np.empty([len(columns[0]), *row_shape], dtype)
        for rows, part in self.batches(function, *columns, **how):
            results[rows] = part
        return results

    def batches(
        self,
        function: Function,
        *columns: Sequence[np.ndarray],
        num_windows: int = 1,
        max_rows: int | None = None,
        report: EncodingReport | None = None,
        on_batch: Callable[[int], Any] | None = None,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Like `run`, but yields (numbers of rows [n], their results [n, ...]) of each batch as it ends.

        Args:
          *columns: as in `run`.
          num_windows: the approximate number of calls that share compiled shapes; more calls justify more
            shapes.
          max_rows: maximum number of rows per batch on one device; None: as many as the token budget allows.
          report: the counts of this call are added to it.
          on_batch: called with the number of rows of each finished batch.
        """
        counts = np.array([len(row) for row in columns[0]], np.int64)
        program = self.program(function)
        in_flight: collections.deque[tuple[Batch, Future[np.ndarray]]] = collections.deque()

        def compute(batch: Batch) -> np.ndarray:
            arrays = [fill(rows, batch) for rows in columns]
            with self._dispatch_lock:
                output = program(self.parameters, *arrays)
            return np.asarray(output)

        def fetch() -> tuple[np.ndarray, np.ndarray]:
            batch, output = in_flight.popleft()
            found = output.result()[: len(batch.texts)]
            if on_batch is not None:
                on_batch(len(batch.texts))
            return batch.texts, found

        plan = plan_batches(
            counts,
            batch_tokens=self.batch_tokens,
            shape_cost=self._shape_cost // num_windows,
            row_multiple=self.partitioner.mesh.size,
            max_rows=max_rows,
        )
        with (
            program.compiling(self.parameters, [batch.shape for batch in plan], len(columns)),
            ThreadPoolExecutor(RUNNERS, thread_name_prefix="runner") as runners,
        ):
            for batch in plan:
                in_flight.append((batch, runners.submit(compute, batch)))
                if report is not None:
                    report.add(batch, counts)
                if len(in_flight) > RUNNERS:
                    yield fetch()
            while in_flight:
                yield fetch()


class CompiledShapes:
    """Maps (parameters, arrays [B, L]) to [B, ...]; has a compiled executable for each shape (B, L).

    Executables are kept on disk, where the runtime's `ProgramStore` finds them again.
    """

    def __init__(self, jitted: Any, store: ProgramStore):
        self.jitted, self._store = jitted, store
        self.executables: dict[tuple[int, ...], Future[Any]] = {}

    @contextlib.contextmanager
    def compiling(
        self, parameters: list[jax.Array], shapes: Iterable[tuple[int, ...]], num_arrays: int
    ) -> Iterator[None]:
        """Compiles missing shapes in threads, in the given order; the first shapes can already run."""
        missing = [shape for shape in dict.fromkeys(shapes) if shape not in self.executables]
        if not missing:
            yield
            return
        pool = ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compiler")
        try:
            for shape in missing:
                self.executables[shape] = pool.submit(self._compile, parameters, shape, num_arrays)
            yield
        except BaseException:
            for shape in missing:
                self.executables.pop(shape).cancel()
            raise
        finally:
            pool.shutdown()

    def __call__(self, parameters: list[jax.Array], *arrays: np.ndarray) -> jax.Array:
        return self.executables[arrays[0].shape].result()(parameters, arrays)

    def _compile(self, parameters: list[jax.Array], shape: tuple[int, ...], num_arrays: int) -> Any:
        arrays = (jax.ShapeDtypeStruct(shape, np.int32),) * num_arrays
        label = f"{num_arrays}x{'x'.join(map(str, shape))}"
        arguments = ([0] * len(parameters), (0,) * num_arrays)
        return self._store.program(
            label, arguments, 0, lambda: self.jitted.lower(parameters, arrays).compile()
        )


@functools.lru_cache(maxsize=16)
def _program(
    graph: Any,
    tree: Any,
    types: tuple[str, ...],
    shardings: tuple[Any, ...],
    partitioner: Partitioner,
    function: Function,
) -> CompiledShapes:
    """`types` keeps the programs of int8 and nf4 apart, whose parameter trees have equal structure."""

    def run(parameters: list[jax.Array], arrays: tuple[jax.Array, ...]) -> jax.Array:
        with partitioner():
            return function(nnx.merge(graph, jax.tree.unflatten(tree, parameters)), *arrays)

    batch, row = partitioner.sharding(("batch", "length")), partitioner.sharding(("batch",))
    options = COMPILER_OPTIONS.get(jax.default_backend())
    shardings_in = (list(shardings), batch)
    jitted = jax.jit(run, in_shardings=shardings_in, out_shardings=row, compiler_options=options)
    store = ProgramStore(
        function,
        *(graph, tree, types, shardings, partitioner, options),
        modules={node.type.__module__ for node in graph.nodes if hasattr(node, "type")},
        devices=list(partitioner.mesh.devices.flat),
    )
    return CompiledShapes(jitted, store)
