"""Work on the machines of a Ray cluster, window by window: Ray Data says where, and starts again what died.

Windows are read on the machine where the command runs, and what is made of them comes back there. So the
other machines need nothing but this package and the model, and a file is written by one process, as ever.
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

# Windows that one process works on: while one is computed the next is tokenised. As many wait there.
AT_ONCE = 2
ANSWERS_WITHIN = 10.0  # seconds, the head of a cluster
W = TypeVar("W")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Worker:
    """What each process of the cluster is sent: a model by its name, and what is done with it.

    Attributes:
      load: loads the model: a class method of a module, which pickle knows by name.
      spec: the model, as that machine finds it.
      work: (model, window, **how) -> what is made of a window, a function of a module.
    """

    load: Callable[..., Any]
    spec: str
    fingerprint: str
    options: dict[str, Any]
    work: Callable[..., Any]
    how: dict[str, Any]

    def start(self) -> Callable[[Any], Any]:
        """Loads the model; returns what is called with each window, in `AT_ONCE` threads.

        Raises:
          UserError: the model is not there, or is another one.
        """
        model = self.load(self.spec, **self.options)
        if model.fingerprint != self.fingerprint:
            raise UserError(
                f"a machine of the cluster has another model under the name {self.spec} than this machine:"
                " copy this machine's there"
            )
        return functools.partial(self._call, model)

    def _call(self, model: Any, window: Any) -> Any:
        return self.work(model, window, **self.how)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Ray cluster that this process is connected to.

    One process works on each machine with all its TPUs, on each GPU, or on each machine where none has
    either. Machines that join are given work, those that are lost are not waited for.

    Attributes:
      batch_tokens: tokens of a batch on one device; None suits the machines.
    """

    batch_tokens: int | None = None

    @classmethod
    def connect(cls, address: str, *, batch_tokens: int | None = None) -> Cluster:
        """Connects this process, which from now on uses no accelerator itself, for the cluster's may be here.

        Args:
          address: HOST:PORT of the cluster's head, or "auto" for the one that this machine belongs to.

        Raises:
          UserError: Ray is not installed, or there is no such cluster.
        """
        require("ray", "ray", "pandas", "pyarrow")
        try:
            if address != "auto":  # Ray itself would try for minutes
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=ANSWERS_WITHIN).close()
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

    def map(self, worker: Worker, windows: Callable[[], Iterable[W]]) -> Iterator[Any]:
        """Yields what is made of each window, in the order in which they are done.

        Args:
          worker: starts once in each process; what it returns is called with windows.
          windows: makes them, in a process of its own on this machine, again where that dies.

        Raises:
          UserError: one that a worker or `windows` raises, or no machine has a processor to give.
        """
        import ray
        from ray.data import ActorPoolStrategy, DataContext, read_datasource

        needs, count = _share([node["Resources"] for node in ray.nodes() if node["Alive"]])
        context = DataContext.get_current()
        context.enable_progress_bars = False
        # Ray Data joins and splits rows into blocks of a size of its own; here a window is a block.
        context.target_max_block_size = context.target_min_block_size = 1
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        pool = ActorPoolStrategy(
            min_size=1,
            initial_size=count,
            max_concurrent_calls_per_actor=AT_ONCE,
            enable_true_multi_threading=True,
        )
        made = read_datasource(_source(windows), override_num_blocks=1, num_cpus=0).map_batches(
            _Started,
            fn_constructor_args=(pickle.dumps(worker),),
            batch_size=1,
            batch_format="pyarrow",
            compute=pool,
            **needs,
        )
        for table in made.iter_batches(batch_size=1, batch_format="pyarrow", prefetch_batches=0):
            value = _unpacked(table)
            if isinstance(value, UserError):
                raise value
            yield value


class _Started:
    """A process of the cluster."""

    def __init__(self, worker: bytes):
        keep_compiled_programs()  # before JAX is imported, as the worker does
        started = _or_error(lambda: pickle.loads(worker).start())
        self._call = (lambda _: started) if isinstance(started, UserError) else started

    def __call__(self, table: pa.Table) -> pa.Table:
        window = _unpacked(table)
        return _packed(window if isinstance(window, UserError) else _or_error(lambda: self._call(window)))


def _or_error(function: Callable[[], Any]) -> Any:
    """Returns what a function does, or a UserError that it raises: of that Ray would say a hundred lines."""
    try:
        return function()
    except UserError as error:
        return UserError(str(error))


def _packed(value: Any) -> pa.Table:
    """Returns a table of one row. Its column has room for more than 2 GiB."""
    import pyarrow as pa

    return pa.table({"pickled": pa.array([pickle.dumps(value)], pa.large_binary())})


def _unpacked(table: pa.Table) -> Any:
    return pickle.loads(table["pickled"][0].as_py())  # of this run's own processes


def _share(machines: list[dict[str, float]]) -> tuple[dict[str, Any], int]:
    """Returns what a process takes of a machine's resources, and how many processes all have room for."""
    for name in ("TPU", "GPU", "CPU"):
        there = [int(machine.get(name, 0)) for machine in machines if machine.get(name, 0) >= 1]
        if not there:
            continue
        each = 1 if name == "GPU" else min(there)
        needs = {"TPU": {"resources": {"TPU": each}}, "GPU": {"num_gpus": each}, "CPU": {"num_cpus": each}}
        return needs[name], sum(count // each for count in there)
    raise UserError("no machine of the Ray cluster has a CPU, GPU or TPU to give: start Ray with --num-cpus")


def _source(windows: Callable[[], Iterable[Any]]) -> Any:
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    directory = Path.cwd()

    def read() -> Iterator[pa.Table]:
        os.chdir(directory)  # where relative paths begin
        remaining = iter(windows())
        while (window := _or_error(lambda: next(remaining, None))) is not None:
            yield _packed(window)
            if isinstance(window, UserError):
                return

    class Windows(Datasource):
        supports_distributed_reads = False  # here, where the files are

        def estimate_inmemory_data_size(self) -> None:
            return None

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
            nothing = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
            return [ReadTask(read, nothing)]

    return Windows()
