"""Runs a model on the machines of a Ray cluster, one window of texts at a time, scheduled by Ray Data.

The machine where the command runs reads the windows and receives the results. The other machines only need
this package and the model.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jaxir.core.errors import UserError
from jaxir.core.installation import require
from jaxir.runtime.compile_cache import keep_compiled_programs

if TYPE_CHECKING:
    import pyarrow as pa

WINDOWS_PER_PROCESS = 2  # one window is tokenised while the other is computed
CONNECT_SECONDS = 10.0  # timeout of a connection to the head of a cluster
W = TypeVar("W")


def start_worker(
    *,
    load: Callable[..., Any],
    spec: str,
    fingerprint: str,
    options: dict[str, Any],
    work: Callable[..., Any],
    how: dict[str, Any],
) -> Callable[[Any], Any]:
    """Loads a model on a cluster machine. Returns a function that maps a window to `work`'s result."""
    model = load(spec, **options)
    if model.fingerprint != fingerprint:
        raise UserError(
            f"a machine of the cluster has another model under the name {spec} than this machine:"
            " copy this machine's model there"
        )
    return functools.partial(work, model, **how)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to.

    There is one process per machine with all its TPUs, or one per GPU, or else one per machine. Machines that
    join get work; the work of lost machines is given to others.

    Attributes:
      batch_tokens: maximum number of tokens per batch on one device; None uses the platform's default.
    """

    batch_tokens: int | None = None

    @classmethod
    def connect(cls, address: str, *, batch_tokens: int | None = None) -> Cluster:
        """Connects to HOST:PORT or "auto". From then on, this process leaves accelerators to the cluster."""
        require("ray", "ray", "pandas", "pyarrow")
        try:
            if address != "auto":  # check the address first, because Ray would retry for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            import jax
            import ray

            jax.config.update("jax_platforms", "cpu")
            if not ray.is_initialized():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"there is no Ray cluster at {address} ({reason:.160}): start one with `ray start --head`,"
                " and on its other machines `ray start --address=HOST:PORT`"
            ) from None
        return cls(batch_tokens=batch_tokens)

    def map(
        self, start: Callable[[], Callable[[W], Any]], windows: Callable[[], Iterable[W]]
    ) -> Iterator[Any]:
        """Yields the windows' results as they finish. May call `windows` again after a process died."""
        import ray
        from ray.data import ActorPoolStrategy, DataContext, read_datasource

        needs, count = _share([node["Resources"] for node in ray.nodes() if node["Alive"]])
        context = DataContext.get_current()
        context.enable_progress_bars = False
        # Make each window a block; otherwise Ray Data would join and split rows into blocks of its own size.
        context.target_max_block_size = context.target_min_block_size = 1
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        pool = ActorPoolStrategy(
            min_size=1,
            initial_size=count,
            max_concurrent_calls_per_actor=WINDOWS_PER_PROCESS,
            enable_true_multi_threading=True,
        )
        results = read_datasource(_source(windows), override_num_blocks=1, num_cpus=0).map_batches(
            _WorkerProcess,
            fn_constructor_args=(pickle.dumps(start),),
            batch_size=1,
            batch_format="pyarrow",
            compute=pool,
            **needs,
        )
        for table in results.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=0):
            value = _unpacked(table)
            if isinstance(value, UserError):
                raise value
            yield value


class _WorkerProcess:
    """The Ray actor in each process of the cluster. It returns a UserError instead of raising it."""

    def __init__(self, start: bytes):
        keep_compiled_programs()  # must be called before the worker imports JAX
        started = _or_error(lambda: pickle.loads(start)())
        self._call = (lambda _: started) if isinstance(started, UserError) else started

    def __call__(self, table: pa.Table) -> pa.Table:
        window = _unpacked(table)
        return _packed(window if isinstance(window, UserError) else _or_error(lambda: self._call(window)))


def _or_error(function: Callable[[], Any]) -> Any:
    """Returns the function's result, or its UserError, which Ray would print as a hundred lines if raised."""
    try:
        return function()
    except UserError as error:
        return UserError(str(error))


def _packed(value: Any) -> pa.Table:
    """Returns a value pickled into a table of one row, of a type that may exceed 2 GiB."""
    import pyarrow as pa

    return pa.table({"pickled": pa.array([pickle.dumps(value)], pa.large_binary())})


def _unpacked(table: pa.Table) -> Any:
    return pickle.loads(table["pickled"][0].as_py())  # safe: only processes of this run write the table


def _share(machines: list[dict[str, float]]) -> tuple[dict[str, Any], int]:
    """Returns the Ray resources of one process, and how many processes fit on all machines."""
    for name in ("TPU", "GPU", "CPU"):
        counts = [int(machine.get(name, 0)) for machine in machines if machine.get(name, 0) >= 1]
        if not counts:
            continue
        each = 1 if name == "GPU" else min(counts)
        needs = {"TPU": {"resources": {"TPU": each}}, "GPU": {"num_gpus": each}, "CPU": {"num_cpus": each}}
        return needs[name], sum(count // each for count in counts)
    raise UserError("no machine of the Ray cluster offers a CPU, GPU or TPU: start Ray with --num-cpus")


def _source(windows: Callable[[], Iterable[Any]]) -> Any:
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    directory = Path.cwd()

    def read() -> Iterator[pa.Table]:
        os.chdir(directory)  # so that relative paths mean the same as in the command
        remaining = iter(windows())
        while (window := _or_error(lambda: next(remaining, None))) is not None:
            yield _packed(window)
            if isinstance(window, UserError):
                return

    class Windows(Datasource):
        supports_distributed_reads = False  # the files are only on this machine

        def estimate_inmemory_data_size(self) -> None:
            return None

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
            nothing = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
            return [ReadTask(read, nothing)]

    return Windows()
