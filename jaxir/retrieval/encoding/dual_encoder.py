"""`DualEncoder`: a trained model as its users see it, texts in and vectors out."""

import collections
import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from jaxir.errors import UserError
from jaxir.interop import model_dir
from jaxir.models.layers import param_shardings, size_of
from jaxir.models.products import as_run_on
from jaxir.partitioning import MeshConfig, Partitioner
from jaxir.progress import progress
from jaxir.retrieval.encoding.batching import Batch, EncodingReport, fill, plan_batches

Tower = Literal["query", "passage"]
T = TypeVar("T")

# Texts that are tokenised, sorted and batched together: enough for full batches, little enough to hold in
# memory.
WINDOW = 16_384
# Threads that each run a batch: while one fills a batch or fetches vectors the other computes, and on a CPU
# the parts of a program that use one core overlap.
RUNNERS = 2
# Tokens of a batch on one device, and how many such batches one more shape must save. On a CPU the first is
# measured; a shape costs as much CPU time to compile as 3 batches of MiniLM to compute, but commands compile
# it only once (`jaxir.compile_cache`), so the many later passes count for more than the first.
BATCH_TOKENS = {"cpu": 1024}
ACCELERATOR_BATCH_TOKENS = 32_768
SHAPE_COST = {"cpu": 0.5}
ACCELERATOR_SHAPE_COST = 8


class DualEncoder:
    """Encodes queries and passages.

    Texts are sorted by tokens and batched to a token budget (see `encoding.batching`), batches are split
    over all devices of this process, and the next texts are tokenised while the present ones are computed.
    Vectors come back in the order of the texts.

    Attributes:
      model: the `DualEncoderModel`.
      tokenizer: its tokenizer.
      settings: maximum lengths and prompts of the two towers.
      fingerprint: identifies the weights and the tokenizer; vectors of two fingerprints must not be compared.
        It is computed where it is not given.
      spec: what was loaded, None for a model that never had a name.
      dimension: D.
      similarity: "cosine" (vectors have length 1) or "dot".
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: Any,
        fingerprint: str | None = None,
        *,
        spec: str | None = None,
        batch_tokens: int | None = None,
        partitioner: Partitioner | None = None,
    ):
        if batch_tokens is not None and batch_tokens < 1:
            raise UserError(f"batch_tokens must be at least 1, not {batch_tokens}")
        self.model, self.tokenizer, self.settings, self.spec = model, tokenizer, settings, spec
        self.fingerprint: str = fingerprint or model_dir.fingerprint_of(model, tokenizer, settings)
        self.similarity: str = model.config.similarity
        # Of several processes each encodes for itself: they have no batch in common.
        self.partitioner = partitioner or MeshConfig().build(jax.local_devices())
        platform = jax.default_backend()
        self.batch_tokens = batch_tokens or BATCH_TOKENS.get(platform, ACCELERATOR_BATCH_TOKENS)
        self._shape_cost = int(SHAPE_COST.get(platform, ACCELERATOR_SHAPE_COST) * self.batch_tokens)
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        self._shardings = tuple(jax.tree.leaves(param_shardings(state, self.partitioner)))
        self._structure = (graph, tree)
        self._parameters = jax.device_put(leaves, list(self._shardings))
        self.dimension: int = model.config.dimension

    @classmethod
    def load(
        cls,
        spec: str,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        batch_tokens: int | None = None,
    ) -> "DualEncoder":
        """Loads a model.

        Args:
          spec: a jaxir model or run directory, or `st:` or `hf:` and a local directory or hub name.
          dtype: of the matrix products; vectors are float32 all the same.
          batch_tokens: tokens of a batch on one device; None suits the platform.

        Raises:
          UserError: there is no such model, or it cannot be read.
        """
        loaded = model_dir.load(spec, dtype=dtype)
        return cls(
            loaded.model,
            loaded.tokenizer,
            loaded.settings,
            loaded.fingerprint,
            spec=_lasting(spec),
            batch_tokens=batch_tokens,
        )

    def save(self, directory: str | Path) -> None:
        """Writes a model directory, which `load` and every command take; it appears only when whole.

        Raises:
          UserError: `directory` exists and is not empty.
        """
        model_dir.save(directory, self.model, self.tokenizer, self.settings)

    def __repr__(self) -> str:
        name = f"{self.spec!r}: " if self.spec else ""
        settings = self.settings
        return (
            f"DualEncoder({name}{self.model.config.summary}, {size_of(self.model)}, queries of"
            f" {settings.query_max_length} tokens, passages of {settings.passage_max_length})"
        )

    def encode_queries(self, texts: Sequence[str], *, show_progress: bool = True) -> Float[np.ndarray, "N D"]:
        """Returns float32 vectors [N, D] of N queries."""
        return self.encode(texts, tower="query", show_progress=show_progress)

    def encode_passages(
        self, texts: Sequence[str], *, show_progress: bool = True
    ) -> Float[np.ndarray, "N D"]:
        """Returns float32 vectors [N, D] of N passages."""
        return self.encode(texts, tower="passage", show_progress=show_progress)

    def encode(
        self,
        texts: Sequence[str],
        *,
        tower: Tower,
        show_progress: bool = True,
        report: EncodingReport | None = None,
    ) -> Float[np.ndarray, "N D"]:
        """Encodes texts by one tower.

        Args:
          texts: N texts; one beyond the tower's maximum length is cut, an empty one is allowed.
          tower: "query" or "passage".
          show_progress: whether to show a bar (on a terminal only).
          report: adds what was done to this.

        Returns:
          float32 vectors [N, D] in the order of the texts.

        Raises:
          TypeError: `texts` is one string, or holds something that is not a string.
          UserError: the model gives vectors that are not finite.
        """
        if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
            raise TypeError("texts must be a list of strings")
        windows = (texts[start : start + WINDOW] for start in range(0, len(texts), WINDOW))
        vectors = np.empty([len(texts), self.dimension], np.float32)
        with contextlib.ExitStack() as stack:
            bar = None
            if show_progress:
                what = "queries" if tower == "query" else "passages"
                bar = stack.enter_context(progress(total=len(texts), what=f"encoding {what}", unit="texts"))
            start = 0
            for part in self.encode_windows(
                windows,
                tower=tower,
                num_windows=max(1, -(-len(texts) // WINDOW)),
                report=report,
                on_batch=bar.update if bar is not None else None,
            ):
                vectors[start : start + len(part)] = part
                start += len(part)
        return vectors

    def encode_windows(
        self,
        windows: Iterable[Sequence[str]],
        *,
        tower: Tower,
        num_windows: int = 1,
        report: EncodingReport | None = None,
        on_batch: Callable[[int], Any] | None = None,
    ) -> Iterator[np.ndarray]:
        """Encodes a stream of lists of texts, each sorted and batched by itself.

        The vectors of a list depend on nothing but the list (and the model and the machine), so that a
        stream can be taken up again at any of them. Lists are drawn from `windows` and tokenised in a
        thread, one list ahead.

        Args:
          windows: lists of texts.
          tower: "query" or "passage".
          num_windows: how many lists there will be about. They share compiled shapes: the more, the finer.
          report: adds what was done to this.
          on_batch: called with the number of texts of each batch when it is done.

        Yields:
          For each list of n texts its float32 vectors [n, D].
        """
        prompt, max_length = self.text_settings(tower)

        def tokenized() -> Iterator[list[np.ndarray]]:
            for texts in windows:
                yield self.tokenizer.encode_batch([prompt + text for text in texts], max_length=max_length)

        report = EncodingReport() if report is None else report
        for tokens in _one_ahead(tokenized()):
            started = time.perf_counter()
            vectors = self._encode_tokens(tokens, tower, self._shape_cost // num_windows, report, on_batch)
            report.seconds += time.perf_counter() - started
            yield vectors

    def text_settings(self, tower: Tower) -> tuple[str, int]:
        """Returns (prompt, maximum length in tokens) of a tower."""
        settings = self.settings
        if tower == "query":
            return settings.query_prompt, settings.query_max_length
        return settings.passage_prompt, settings.passage_max_length

    def _encode_tokens(
        self,
        tokens: list[np.ndarray],
        tower: Tower,
        shape_cost: int,
        report: EncodingReport,
        on_batch: Callable[[int], Any] | None,
    ) -> np.ndarray:
        counts = np.array([len(t) for t in tokens], np.int64)
        vectors = np.empty([len(tokens), self.dimension], np.float32)
        program = _program(*self._structure, self._shardings, self.partitioner, tower)
        in_flight: collections.deque[tuple[Batch, Future[np.ndarray]]] = collections.deque()

        # Programs that speak to other devices must reach all devices in one order, or they wait forever.
        dispatching = threading.Lock() if self.partitioner.mesh.size > 1 else contextlib.nullcontext()

        def run(batch: Batch) -> np.ndarray:
            ids = fill(tokens, batch)
            with dispatching:
                output = program(self._parameters, ids)
            return np.asarray(output)

        def fetch() -> None:
            batch, output = in_flight.popleft()
            vectors[batch.texts] = output.result()[: len(batch.texts)]
            if on_batch is not None:
                on_batch(len(batch.texts))

        plan = plan_batches(
            counts,
            batch_tokens=self.batch_tokens,
            shape_cost=shape_cost,
            row_multiple=self.partitioner.mesh.size,
        )
        with (
            program.compiling(self._parameters, [batch.shape for batch in plan]),
            ThreadPoolExecutor(RUNNERS, thread_name_prefix="runner") as runners,
        ):
            for batch in plan:
                in_flight.append((batch, runners.submit(run, batch)))
                report.add(batch, counts)
                if len(in_flight) > RUNNERS:
                    fetch()
            while in_flight:
                fetch()
        if not np.isfinite(vectors).all():
            raise UserError(f"model {self.spec or self.fingerprint} gives vectors that are not finite")
        return vectors


def _lasting(spec: str) -> str:
    """Returns `spec` with a local directory made absolute, so that it can be loaded from anywhere."""
    kind, colon, place = spec.rpartition(":")
    return f"{kind}{colon}{Path(place).resolve()}" if Path(place).exists() else spec


class _Program:
    """(parameters, ids [B, L]) -> vectors [B, D], with one executable for each shape of ids.

    Attributes:
      executables: by shape; a future where it is still being compiled.
    """

    def __init__(self, jitted: Any):
        self._jitted = jitted
        self.executables: dict[tuple[int, int], Future[Any]] = {}

    @contextlib.contextmanager
    def compiling(self, parameters: list[jax.Array], shapes: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Compiles what is missing in threads, in the order of `shapes`, while the first ones already run."""
        missing = [shape for shape in dict.fromkeys(shapes) if shape not in self.executables]
        pool = ThreadPoolExecutor(max(1, os.cpu_count() or 1), thread_name_prefix="compiler")
        try:
            for shape in missing:
                self.executables[shape] = pool.submit(self._compile, parameters, shape)
            yield
        except BaseException:
            for shape in missing:
                self.executables.pop(shape).cancel()
            raise
        finally:
            pool.shutdown()

    def __call__(self, parameters: list[jax.Array], ids: np.ndarray) -> jax.Array:
        return self.executables[ids.shape].result()(parameters, ids)

    def _compile(self, parameters: list[jax.Array], shape: tuple[int, int]) -> Any:
        return self._jitted.lower(parameters, jax.ShapeDtypeStruct(shape, np.int32)).compile()


@functools.lru_cache(maxsize=16)
def _program(
    graph: Any, tree: Any, shardings: tuple[Any, ...], partitioner: Partitioner, tower: Tower
) -> _Program:
    """Returns the program of a tower; models of one architecture share it and all that is compiled."""

    def encode(parameters: list[jax.Array], ids: jax.Array) -> jax.Array:
        with partitioner(), as_run_on(partitioner.mesh):
            model = nnx.merge(graph, jax.tree.unflatten(tree, parameters))
            return model.encode(ids, tower=tower)

    batch = partitioner.sharding(("batch", "length"))
    return _Program(jax.jit(encode, in_shardings=(list(shardings), batch), out_shardings=batch))


def _one_ahead(items: Iterator[T]) -> Iterator[T]:
    """Yields `items`, drawing the next one in a thread while the consumer works on the present one."""
    end = object()
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as pool:
        future: Future[Any] = pool.submit(next, items, end)
        while (item := future.result()) is not end:
            future = pool.submit(next, items, end)
            yield item
