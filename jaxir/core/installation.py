"""The directories of jaxir's recipes, clone and cache, and the commands that install its extras."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from jaxir.core.errors import UserError, suggest
from jaxir.version import __version__

PACKAGE = Path(__file__).resolve().parent.parent
# The parent of gin/ (a link in a clone), so that "gin/quickstart.gin" is found from any directory.
# A file of the same name in the working directory comes first.
RECIPES = PACKAGE
MISSPELT = 0.9  # difflib ratio from which a path is a misspelling of another, not just similar


def find_recipe(file: str | Path) -> Path | None:
    """Returns a gin file's path in the working directory, else among jaxir's recipes, else None."""
    return next((path for path in (Path(file), RECIPES / file) if path.is_file()), None)


def missing_recipe(file: str) -> str:
    """Returns the error message for a missing gin file, with the file that may be meant."""
    path = Path(file)
    if (path / "config.gin").is_file():
        return f"{file} is a directory; did you mean {str(path / 'config.gin')!r}?"
    shipped = sorted((RECIPES / "gin").rglob("*.gin"))
    known = [str(found.relative_to(RECIPES)) for found in shipped]
    if path.parent.is_dir():
        known += [str(found) for found in sorted(path.parent.glob("*.gin"))]
    name = file if file.endswith(".gin") else f"{file}.gin"
    same_name = [found for found in known if Path(found).name == Path(name).name]
    meant = suggest(name, known, likeness=MISSPELT) or (
        f"; did you mean {same_name[0]!r}?" if same_name else ""
    )
    return f"gin file {file} does not exist" + (meant or suggest(name, known))


def included_in(text: str) -> list[str]:
    """Returns the gin files that a gin file's text includes, as it names them."""
    return re.findall(r"""^include\s+['"](.+?)['"]""", text, re.M)


def clone() -> Path | None:
    """Returns the root of the clone that jaxir runs from; None if it was installed from a wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


@functools.cache
def state_of_code(*rooms: str) -> str:
    """Returns the paths, sizes and times of the files of jaxir's rooms; they change when the code does."""
    files = (path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py")))
    return states_of_files(files)


def states_of_files(files: Iterable[Path]) -> str:
    return " ".join(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)


def cache_directory() -> Path:
    """Returns the user's cache: $XDG_CACHE_HOME/jaxir, else ~/.cache/jaxir."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxir"
    except RuntimeError:  # for example, a container's user without an entry in /etc/passwd
        raise UserError(
            f"user {os.getuid()} has no home directory here; set HOME or XDG_CACHE_HOME to a directory"
        ) from None


def pip_install(*arguments: str) -> str:
    """Returns the command that installs into the environment of this process."""
    if importlib.util.find_spec("pip"):
        return shlex.join([sys.executable, "-m", "pip", "install", *arguments])
    return shlex.join(
        ["uv", "pip", "install", "--python", sys.executable, *arguments]
    )  # Environments that uv creates have no pip.


def how_to_install(extra: str) -> str:
    """Returns the command that adds an extra of pyproject.toml to this environment."""
    root = clone()
    return pip_install("-e", f"{root}[{extra}]") if root else pip_install(_origin(extra))


def _origin(extra: str) -> str:
    """Returns a requirement of jaxir with an extra: the origin that pip recorded (PEP 610), else a wheel."""
    import importlib.metadata  # imported here, because every command imports this file
    import json
    from urllib.parse import unquote, urlsplit

    origin = {}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        origin = json.loads(importlib.metadata.distribution("jaxir").read_text("direct_url.json") or "{}")
    if not origin:
        return f"jaxir-{__version__}-py3-none-any.whl[{extra}]"
    url = urlsplit(origin["url"])
    if url.scheme == "file":
        return f"{unquote(url.path)}[{extra}]"
    vcs = origin.get("vcs_info", {}).get("vcs")
    return f"jaxir[{extra}] @ {f'{vcs}+' if vcs else ''}{origin['url']}"


def require(extra: str, *modules: str) -> None:
    """Raises a UserError that says how to install an extra if one of its modules is missing."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise UserError(f"the package {module} is not installed; run: {how_to_install(extra)}")
