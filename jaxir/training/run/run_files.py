"""The files of a run beside its checkpoints and logs; what is removed while it trains is written again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxir.interop import model_dir
from jaxir.interop.model_dir import LoadedModel
from jaxir.storage.files import atomic_file
from jaxir.training.run.damage import keep_aside
from jaxir.training.run.marker import MARKER
from jaxir.training.run.recipe_file import NAME

TOKENIZER = "tokenizer"


class RunFiles:
    """What process 0 writes before the first step, so that every command can open the run as a model.

    Args:
      run_dir: the run's directory.
      loaded: the model that is trained; without a tokenizer its checkpoints are not models.
      on_start: writes what else belongs to the run, such as RUN/config.gin.
    """

    def __init__(self, run_dir: Path, loaded: LoadedModel, on_start: Callable[[Path], None]):
        self._run_dir, self._loaded, self._on_start = run_dir, loaded, on_start
        self._written: dict[Path, bytes] = {}

    def write(self) -> None:
        """Writes the files, also those that were damaged or removed since the run began."""
        if jax.process_index() != 0:
            return
        loaded = self._loaded
        if loaded.tokenizer is not None:
            model_dir.write_description(self._run_dir, loaded.model.config, loaded.tokenizer, loaded.settings)
        self._on_start(self._run_dir)
        self._written = {path: path.read_bytes() for path in self._files()}

    def restore(self) -> None:
        """Writes what was removed or changed since `write`; a changed file is kept in RUN/broken."""
        for path, content in self._written.items():
            found = path.read_bytes() if path.is_file() else None
            if found == content:
                continue
            told, kept = "removed", None
            if found is not None:
                told, kept = "changed", keep_aside(self._run_dir, str(path.relative_to(self._run_dir)))
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path, "wb") as file:
                file.write(content)
            aside = f"; the changed one is {kept}" if kept else ""
            print(
                f"warning: {path} was {told} while the run trained, and is written again{aside}",
                file=sys.stderr,
            )

    def _files(self) -> Iterator[Path]:
        tokenizer = self._run_dir / TOKENIZER
        found = [self._run_dir / name for name in (model_dir.CONFIG, MARKER, "config.gin", NAME)]
        found += tokenizer.iterdir() if tokenizer.is_dir() else ()
        yield from (path for path in found if path.is_file())
