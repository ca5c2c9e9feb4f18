"""From rows of tokens to what a model makes of them: the loop of encoders, rerankers and servers."""

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

# Rows that are tokenised, sorted and batched together: enough for full batches, little enough to hold in
# memory.
WINDOW = 16_384
# Threads that each run a batch: while one fills a batch or fetches results the other computes, and on a CPU
# the parts of a program that use one core overlap.
RUNNERS = 2
# Tokens of a batch on one device, and how many such batches one more shape must save. On a CPU the first is
# measured; a shape costs as much CPU time to compile as 3 batches of MiniLM to compute, but commands compile
# it only once (`jaxir.runtime.compile_cache`), so the many later passes count for more than the first.
BATCH_TOKENS = {"cpu": 1024}
ACCELERATOR_BATCH_TOKENS = 32_768
SHAPE_COST = {"cpu": 0.5}
# No CUDA graphs: one that a thread records while others run batches, or load what they have compiled, ends
# with "operation not permitted when stream is capturing" (seen on an H200 with JAX 0.11.2). A graph is to
# have at least so many operations.
COMPILER_OPTIONS = {"gpu": {"xla_gpu_graph_min_graph_size": 2**30}}
ACCELERATOR_SHAPE_COST = 8

# (model, int32 arrays [B, L]) -> [B, ...], without dropout; one function, not a new one for each call.
Function = Callable[..., jax.Array]

_finding = threading.Lock()


class Runner:
    """Runs functions of a model over rows of tokens; the model's arrays lie on the devices once for all.

    Args:
      partitioner: the devices, of this process, that share each batch.
      batch_tokens: tokens of a batch on one device; None suits the platform.

    Raises:
      UserError: `batch_tokens` is below 1.
    """

    def __init__(self, model: nnx.Module, partitioner: Partitioner, *, batch_tokens: int | None = None):
        if batch_tokens is not None and batch_tokens < 1:
            raise UserError(f"batch_tokens must be at least 1, not {batch_tokens}")
        platform = jax.default_backend()
        self.partitioner = partitioner
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(platform, ACCELERATOR_BATCH_TOKENS)
        self._shape_cost = int(SHAPE_COST.get(platform, ACCELERATOR_SHAPE_COST) * self.batch_tokens)
        # Programs that speak to other devices must reach all devices in one order, or they wait forever.
        self._dispatching = threading.Lock() if partitioner.mesh.size > 1 else contextlib.nullcontext()
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        shardings = jax.tree.leaves(param_shardings(state, partitioner))
        self._structure = (graph, tree, tuple(shardings), partitioner)
        self.parameters = jax.device_put(leaves, shardings)

    def program(self, function: Function) -> Program:
        """Returns the program of a function; models of one architecture share it and all that is compiled."""
        with _finding:  # of two that threads make at once, the one that is not kept has compiled in vain
            return _program(*self._structure, function)

    def call(self, function: Function, *arrays: np.ndarray) -> np.ndarray:
        """Runs one batch of arrays [B, L], compiled if its shape is new; returns [B, ...]."""
        program = self.program(function)
        with program.compiling(self.parameters, [arrays[0].shape], len(arrays)):
            return np.asarray(program(self.parameters, *arrays))

    def run(
        self,
        function: Function,
        *columns: Sequence[np.ndarray],
        of: tuple[int, ...] = (),
        dtype: type[np.number] = np.float32,
        num_windows: int = 1,
        report: EncodingReport | None = None,
        on_batch: Callable[[int], Any] | None = None,
    ) -> np.ndarray:
        """Runs N rows of any lengths in batches of few shapes (see `batching`).

        Args:
          *columns: its arrays, each N rows of tokens; row i has one length in all of them.
          of: the shape of what it makes of a row.
          num_windows: how many such calls there will be about. They share compiled shapes: the more, the
            finer.
          on_batch: called with the number of rows of each batch when it is done.

        Returns:
          [N, *of], in the order of the rows.
        """
        counts = np.array([len(row) for row in columns[0]], np.int64)
        results = np.empty([len(counts), *of], dtype)
        program, mesh = self.program(function), self.partitioner.mesh
        in_flight: collections.deque[tuple[Batch, Future[np.ndarray]]] = collections.deque()

        def compute(batch: Batch) -> np.ndarray:
            arrays = [fill(rows, batch) for rows in columns]
            with self._dispatching:
                output = program(self.parameters, *arrays)
            return np.asarray(output)

        def fetch() -> None:
            batch, output = in_flight.popleft()
            results[batch.texts] = output.result()[: len(batch.texts)]
            if on_batch is not None:
                on_batch(len(batch.texts))

        plan = plan_batches(
            counts,
            batch_tokens=self.batch_tokens,
            shape_cost=self._shape_cost // num_windows,
            row_multiple=mesh.size,
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
                    fetch()
            while in_flight:
                fetch()
        return results


class Program:
    """(parameters, arrays [B, L]) -> [B, ...], with one executable for each shape of the arrays.

    Attributes:
      executables: by shape; a future where it is still being compiled.
    """

    def __init__(self, jitted: Any):
        self.jitted = jitted
        self.executables: dict[tuple[int, ...], Future[Any]] = {}

    @contextlib.contextmanager
    def compiling(
        self, parameters: list[jax.Array], shapes: Iterable[tuple[int, ...]], num_arrays: int
    ) -> Iterator[None]:
        """Compiles what is missing in threads, in the order of `shapes`, while the first ones already run."""
        missing = [shape for shape in dict.fromkeys(shapes) if shape not in self.executables]
        if not missing:
            yield
            return
        pool = ThreadPoolExecutor(max(1, os.cpu_count() or 1), thread_name_prefix="compiler")
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
        return self.jitted.lower(parameters, arrays).compile()


@functools.lru_cache(maxsize=16)
def _program(
    graph: Any, tree: Any, shardings: tuple[Any, ...], partitioner: Partitioner, function: Function
) -> Program:
    def run(parameters: list[jax.Array], arrays: tuple[jax.Array, ...]) -> jax.Array:
        with partitioner():
            return function(nnx.merge(graph, jax.tree.unflatten(tree, parameters)), *arrays)

    batch, row = partitioner.sharding(("batch", "length")), partitioner.sharding(("batch",))
    options = COMPILER_OPTIONS.get(jax.default_backend())
    shardings_in = (list(shardings), batch)
    return Program(jax.jit(run, in_shardings=shardings_in, out_shardings=row, compiler_options=options))
