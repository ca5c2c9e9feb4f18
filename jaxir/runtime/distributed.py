"""Several processes as one run: how they connect, share a batch, agree, and end."""

import contextlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxir.core import error_report
from jaxir.core.errors import BadValueError, Terminated, UserError
from jaxir.core.values import Count, Natural, parse
from jaxir.runtime.partitioning import Partitioner
from jaxir.storage.locks import leave_nothing_empty

HEARTBEAT_SECONDS = 100  # the default of JAX
SHUTDOWN_SECONDS = 20
# Exit status after another process was preempted or lost (EX_TEMPFAIL), so that a scheduler can restart the
# job.
TRY_AGAIN, SIGTERM_STATUS = 75, 143
WAITING_MESSAGE_SECONDS = 10
WEEK_MILLISECONDS = 7 * 24 * 3600 * 1000
# Words in the error of a collective whose other process is gone.
LOST = ("Connection", "connection", "Gloo", "gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "Socket", "heartbeat")


def maybe_initialize_distributed() -> None:
    """Connects this process with the others of its run, if any; call before any other use of JAX.

    On TPU machines JAX finds the other workers of the pod. Elsewhere a run has other processes if
    JAX_COORDINATOR_ADDRESS is set, with JAX_NUM_PROCESSES and JAX_PROCESS_ID unless Slurm or Open MPI
    provide them. JAXIR_HEARTBEAT_SECONDS is how long a process may be silent before it is considered dead.
    """
    if jax.distributed.is_initialized():
        return
    requested = "JAX_COORDINATOR_ADDRESS" in os.environ
    if not requested and not _has_tpu():
        return
    numbers = {"num_processes": ("JAX_NUM_PROCESSES", Count), "process_id": ("JAX_PROCESS_ID", Natural)}
    given = {name: _number_of(v, kind) for name, (v, kind) in numbers.items() if v in os.environ}
    try:
        with _waiting_message():
            jax.distributed.initialize(
                **given,
                cluster_detection_method="deactivate" if len(given) == 2 else None,
                heartbeat_timeout_seconds=_heartbeat_seconds(),
                shutdown_timeout_seconds=SHUTDOWN_SECONDS,
            )
    except ValueError as error:
        if not requested:
            return  # a single machine with TPUs
        raise UserError(
            f"JAX_COORDINATOR_ADDRESS also needs JAX_NUM_PROCESSES and JAX_PROCESS_ID: set them ({error})"
        ) from error
    except RuntimeError as error:
        raise UserError(f"the run's processes did not connect; start all of them ({error!s:.200})") from error


@contextlib.contextmanager
def _waiting_message() -> Iterator[None]:
    """Reports what this process waits for, for example if only one worker of a pod was started."""
    sentence = "waiting for the other processes of this run: start the same command on each machine of it"
    timer = threading.Timer(WAITING_MESSAGE_SECONDS, print, [sentence], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _heartbeat_seconds() -> int:
    name = "JAXIR_HEARTBEAT_SECONDS"
    return _number_of(name, Count) if name in os.environ else HEARTBEAT_SECONDS


def _number_of(variable: str, kind: Any) -> int:
    try:
        return parse(os.environ[variable], kind)
    except BadValueError as error:
        raise UserError(f"the environment variable {variable} {error}") from None


def _has_tpu() -> bool:
    wanted = os.environ.get("JAX_PLATFORMS", "tpu")
    return "tpu" in wanted and (any(Path("/dev").glob("accel*")) or Path("/dev/vfio/0").exists())


@contextlib.contextmanager
def together() -> Iterator[None]:
    """While in force, the processes of a run end together: none waits for a process that is gone.

    A process that fails reports its error to the others. They print it and exit within seconds, with status
    75 if that process was ended by SIGTERM, else 1. A killed or disconnected process is noticed after half
    of the heartbeat timeout; the others then exit with 75. All exits are immediate, because cleanup would
    wait for other processes. A process that is done waits for the slowest process: JAX would wait only for
    `SHUTDOWN_SECONDS` and then abort all processes. Does nothing in a single process.
    """
    if jax.process_count() == 1:
        yield
        return
    heartbeat = _Heartbeat()
    heartbeat.start()
    try:
        yield
        heartbeat.finish()
    except BaseException as error:
        heartbeat.fail(error)


@contextlib.contextmanager
def joined(with_others: bool = True) -> Iterator[None]:
    """Connects this process with the others of its run, if any, and ends `together` with them."""
    if with_others:
        maybe_initialize_distributed()
    with together():
        yield


class _Heartbeat(threading.Thread):
    """Signals by JAX's key-value service that this process is alive, and watches the others."""

    ALIVE, FAILED = "jaxir/alive/", "jaxir/failed/"

    def __init__(self):
        super().__init__(name="heartbeat", daemon=True)
        # JAX has no public access to the service; Orbax does the same.
        self._client = jax._src.distributed.global_state.client
        self._patience = 0.5 * _heartbeat_seconds()
        self._interval = min(1.0, self._patience / 6)
        self._ended = threading.Event()

    def run(self) -> None:
        seen: dict[str, tuple[str, float]] = {}
        reached = time.monotonic()
        for beat in itertools.count():
            now = time.monotonic()
            try:
                self._client.key_value_set(f"{self.ALIVE}{jax.process_index()}", str(beat), True)
                beats = dict(self._client.key_value_dir_get(self.ALIVE))
                failed = self._client.key_value_dir_get(self.FAILED)
                reached = time.monotonic()
            except jax.errors.JaxRuntimeError:
                if now - reached > self._patience:
                    self._exit("process 0 no longer answers", TRY_AGAIN)
                beats, failed = {}, []
            for key, report in failed:
                status, _, reason = report.partition(" ")
                again = int(status) in (TRY_AGAIN, SIGTERM_STATUS)
                self._exit(f"process {key.rpartition('/')[2]} stopped ({reason})", TRY_AGAIN if again else 1)
            for key, value in beats.items():
                if seen.get(key, ("", 0.0))[0] != value:
                    seen[key] = value, now
                elif now - seen[key][1] > self._patience:
                    self._exit(f"process {key.rpartition('/')[2]} no longer answers", TRY_AGAIN)
            if self._ended.wait(self._interval):
                return

    def finish(self) -> None:
        """Waits until all processes are done, then disconnects."""
        self._client.wait_at_barrier("jaxir/parting", WEEK_MILLISECONDS)
        self._ended.set()
        self.join()
        jax.distributed.shutdown()

    def fail(self, error: BaseException) -> None:
        """Reports the error to the other processes and ends this one."""
        self._ended.set()
        first_line, status = str(error).partition("\n")[0], 1
        if isinstance(error, KeyboardInterrupt | Terminated):
            reason, status = (
                ("interrupted", 130) if isinstance(error, KeyboardInterrupt) else ("SIGTERM", SIGTERM_STATUS)
            )
        elif isinstance(error, UserError | OSError):
            reason = error_report.explain(error).sentence
        elif _has_lost_process(error):
            reason = f"another process is gone ({first_line:.160}); run the same command again to resume"
            status = TRY_AGAIN
        else:
            whose, status = error_report.blame(error)
            reason = f"{whose}: {type(error).__name__}: {first_line:.160}"
            # Print the traceback: a file with it could be lost with a machine of a pod.
            with contextlib.suppress(OSError):  # the readers of the streams may be gone
                traceback.print_exception(error)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"{self.FAILED}{jax.process_index()}", f"{status} {reason}")
        self._end(reason, status)

    def _exit(self, what: str, status: int) -> None:
        if not self._ended.is_set():
            me = jax.process_index()
            self._end(f"{what}, so process {me} ends too; run the same command again to resume", status)

    def _end(self, sentence: str, status: int) -> None:
        with contextlib.suppress(OSError):  # the readers of the streams may be gone
            print(f"error: {sentence}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        if jax.process_index() == 0:
            time.sleep(
                3 * self._interval
            )  # the service ends with this process: let the others read the report first
        leave_nothing_empty()
        os._exit(status)


def _has_lost_process(error: BaseException) -> bool:
    """Returns whether a collective failed because another process is gone."""
    if isinstance(error, ValueError):
        return "Gloo" in str(error)
    return isinstance(error, jax.errors.JaxRuntimeError) and any(word in str(error) for word in LOST)


def share_of_batch(partitioner: Partitioner) -> tuple[int, int]:
    """Returns the part of every batch that this process reads, as (part, parts); parts are equal.

    Processes whose devices hold the same rows (tensor parallelism) read the same part. A process with
    non-contiguous rows reads the whole batch.
    """
    divisor = partitioner.batch_divisor()
    indices = partitioner.sharding(("batch",)).addressable_devices_indices_map((divisor,))
    rows = {s.start or 0 for (s,) in indices.values()}
    first, parts = min(rows), divisor // len(rows)
    together = rows == set(range(first, first + len(rows)))
    if not together or divisor % len(rows) or first % len(rows):
        return 0, 1
    return first // len(rows), parts


def place_share(
    batch: Mapping[str, np.ndarray], partitioner: Partitioner, part: int, parts: int
) -> dict[str, jax.Array]:
    """Puts this process's part of a batch (see `share_of_batch`) onto the mesh."""
    rows = partitioner.sharding(("batch",))

    def one(x: np.ndarray) -> jax.Array:
        first, shape = part * len(x), (parts * len(x), *x.shape[1:])

        def of_device(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            return x[start - first : stop - first]

        return jax.make_array_from_callback(shape, rows, of_device)

    return {name: one(x) for name, x in batch.items()}


def say(text: str) -> None:
    """Prints a line, in process 0 only."""
    if jax.process_index() == 0:
        print(text)


def note(text: str) -> None:
    """Prints a note on standard error, in process 0 only."""
    if jax.process_index() == 0:
        print(f"note: {text}", file=sys.stderr)


def wait_for_all(where: str) -> None:
    """Waits until every process has called this function."""
    if jax.process_count() > 1:
        with jax.transfer_guard("allow"):
            multihost_utils.sync_global_devices(where)


def all_agree(fine: bool) -> bool:
    """Returns whether `fine` is true in every process; all processes must call it."""
    if jax.process_count() == 1:
        return fine
    with jax.transfer_guard("allow"):
        return bool(np.all(multihost_utils.process_allgather(np.array(fine))))


def of_all(text: str) -> list[str]:
    """Returns the texts of all processes in order; all processes must call it."""
    if jax.process_count() == 1:
        return [text]
    own = np.frombuffer(text.encode(), np.uint8)
    with jax.transfer_guard("allow"):
        sizes = np.ravel(multihost_utils.process_allgather(np.int32(len(own))))
        rows = multihost_utils.process_allgather(np.pad(own, (0, int(sizes.max()) - len(own))))
    return [bytes(row[:size]).decode() for row, size in zip(np.asarray(rows), sizes, strict=True)]


def as_first(values: Mapping[str, float]) -> dict[str, float]:
    """Returns the values of process 0; all processes must pass the same names."""
    if jax.process_count() == 1:
        return dict(values)
    names = sorted(values)
    numbers = np.array([values[n] for n in names], np.float64).view(np.uint32)  # JAX has no float64
    with jax.transfer_guard("allow"):
        known = np.asarray(multihost_utils.broadcast_one_to_all(numbers)).view(np.float64)
    return dict(zip(names, map(float, known), strict=True))
