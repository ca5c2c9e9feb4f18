"""Compiled programs on disk that a later process runs without tracing the model.

JAX's own cache (`compile_cache`) finds a program by its traced code, and tracing takes a fifth of the time of
compiling. Here a program is found by what it depends on: the model's structure, the function, the shapes, the
versions and jaxir's own code.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jaxlib

from jaxir.core.installation import state_of_code, states_of_files
from jaxir.runtime.compile_cache import processor, program_directory
from jaxir.storage.files import atomic_file

MAX_BYTES = 1 << 30  # maximum size of all stored programs; the least recently used are removed
# The code that models are made of. A program is compiled again after any of these files changes.
_SOURCES = ("runtime", "models", "retrieval/encoding")
_ADDRESS = " at 0x"  # marks a repr that shows an object's address instead of its content


class ProgramStore:
    """The stored programs of one function, such as a kind of model's forward pass.

    Nothing is stored or loaded if the user turned JAX's cache off, if a program runs on several devices, or
    if a repr does not show all settings of the model or function.

    Args:
      function: the compiled function; the values in its closure must have a complete repr.
      *facts: objects whose repr shows all else that the program depends on, such as a model's structure.
      modules: names of the Python modules that define the model's classes.
      devices: the devices that the program runs on.
    """

    def __init__(
        self, function: Callable[..., Any], *facts: Any, modules: Iterable[str], devices: Sequence[jax.Device]
    ):
        self._directory = None
        self._devices = devices
        directory = program_directory()
        known = all(module.partition(".")[0] in ("jaxir", "flax") for module in modules)
        if directory is None or len(devices) != 1 or jax.process_count() != 1 or not known:
            return
        device = devices[0]
        described = [
            *map(repr, (*facts, device.id, device.device_kind, device.client.platform_version)),
            *(jax.__version__, jaxlib.__version__, processor()),
            *_described(function),
            _settings(),
            state_of_code(*_SOURCES),
        ]
        if not any(_ADDRESS in text for text in described):
            self._directory = directory
            self._name = hashlib.sha256("\n".join(described).encode()).hexdigest()[:32]

    def program(
        self, label: str, arguments: tuple[Any, ...], result: Any, compile: Callable[[], jax.stages.Compiled]
    ) -> Any:
        """Returns the stored program, or calls `compile` and stores what it returns.

        Args:
          label: tells the programs of this function apart, by the shapes of its arguments.
          arguments: nested lists and tuples with the structure of the arguments.
          result: the same for the result.
        """
        if self._directory is None:
            return compile()
        path = self._directory / f"{self._name}-{label}"
        trees = jax.tree.structure((arguments, {})), jax.tree.structure(result)
        found = _loaded(path, trees, self._devices)
        if found is None:
            _this_thread.found_in_cache = False
            found = compile()
            # JAX serialises a program from its own cache without the compiled functions, so a saved copy
            # could not run later (0.10.2 and 0.12.0.1 on CPUs;
            # findings/jax_serializes_cached_programs_without_code.sh).
            if not _this_thread.found_in_cache:
                _save(found, path)
        return found


class StoredFunction:
    """A jitted function that maps arrays to a tuple of arrays, with its programs in a `ProgramStore`.

    Args:
      jitted: the function.
      store: where its programs are kept.
      num_results: the length of the tuple.
    """

    def __init__(self, jitted: Any, store: ProgramStore, num_results: int):
        self._jitted, self._store, self._result = jitted, store, (0,) * num_results
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._lock = threading.Lock()

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        key = tuple((x.shape, x.dtype) for x in arrays)
        with self._lock:
            if key not in self._programs:
                described = " ".join(f"{dtype}{list(shape)}" for shape, dtype in key)
                label = hashlib.sha256(described.encode()).hexdigest()[:16]
                self._programs[key] = self._store.program(
                    label, (0,) * len(arrays), self._result, lambda: self._jitted.lower(*arrays).compile()
                )
        return self._programs[key](*arrays)


_this_thread = threading.local()


def _note(event: str, **_: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _this_thread.found_in_cache = True


jax.monitoring.register_event_listener(_note)


def _loaded(path: Path, trees: tuple[Any, Any], devices: Sequence[jax.Device]) -> Any:
    """Returns a stored program, or None if it is not stored or cannot be loaded."""
    if not path.is_file():
        return None
    from jax.experimental import serialize_executable

    try:
        program = serialize_executable.deserialize_and_load(
            path.read_bytes(), *trees, backend=devices[0].client, execution_devices=devices
        )
    except Exception:  # the file is damaged, or written by another build of the same version
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # marks the program as used now, for `_remove_oldest`
    return program


def _save(program: jax.stages.Compiled, path: Path) -> None:
    """Stores a program; if that fails, only the next start takes longer."""
    from jax.experimental import serialize_executable

    with contextlib.suppress(Exception):
        content, _, _ = serialize_executable.serialize(program)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_file(path, "wb") as file:
            file.write(content)
        _remove_oldest(path.parent)


def _described(function: Callable[..., Any]) -> list[str]:
    """Returns a function's name, the values it closes over, and the state of its file."""
    if isinstance(function, functools.partial):
        return [repr(function.args), repr(function.keywords), *_described(function.func)]
    values = [repr(cell.cell_contents) for cell in function.__closure__ or ()]
    file = getattr(sys.modules.get(function.__module__), "__file__", None)
    state = states_of_files([Path(file)] if file else [])
    return [f"{function.__module__}.{function.__qualname__}", *values, state]


def _settings() -> str:
    """Returns JAX's and XLA's settings, except where programs are kept."""
    values = {name: value for name, value in jax.config.values.items() if "cache" not in name}
    return f"{sorted(values.items(), key=lambda item: item[0])} {os.environ.get('XLA_FLAGS', '')}"


def _remove_oldest(directory: Path) -> None:
    """Removes the programs that were not used for longest, until the others take `MAX_BYTES`."""
    states = [(entry, entry.stat()) for entry in os.scandir(directory)]
    size = sum(state.st_size for _, state in states)
    for entry, state in sorted(states, key=lambda item: item[1].st_mtime):
        if size <= MAX_BYTES:
            return
        Path(entry).unlink()
        size -= state.st_size
