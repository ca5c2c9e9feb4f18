"""Collections of the Hugging Face hub, or local folders in BEIR's, MTEB's, NanoBEIR's or BRIGHT's layout."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxir.core.errors import UserError, root_reason
from jaxir.data.formats import hub_layout
from jaxir.data.formats.hub_layout import README, Chosen
from jaxir.data.formats.lines import MalformedRecord, OnBadInput, as_grade
from jaxir.data.formats.qrels import Qrel
from jaxir.data.formats.sources import Document, Query
from jaxir.data.formats.tables import Table
from jaxir.storage.files import local_path

_TIMEOUT_SECONDS = 20  # timeout of the request that lists a data set's files
_COLUMNS = {
    "id": ("_id", "id"),
    "text": ("text", "content"),
    "query": ("text", "query"),
    "query_id": ("query-id", "query_id"),
    "document_id": ("corpus-id", "corpus_id"),
}


# Returns the files to download.
Needed = Callable[[str, dict[str, hub_layout.Splits], "str | None"], list[str]]


class StoredCollection(NamedTuple):
    """A collection that is not read yet.

    Attributes:
      identity: values that change when the collection's content may have changed.
      documents: returns an iterator of the documents.
      queries: returns an iterator of the queries.
      qrels: functions that return the judgements, by the name of the split.
      excluded: returns ids of documents that results must not have, by the id of the query.
    """

    identity: Sequence[object]
    documents: Callable[[], Iterator[Document]]
    queries: Callable[[], Iterator[Query]]
    qrels: dict[str, Callable[[], Iterator[Qrel]]]
    excluded: Callable[[], dict[str, tuple[str, ...]]] = dict


def open_hub_collection(name: str, on_bad_input: OnBadInput) -> StoredCollection:
    """Opens hf:NAME: a local folder or OWNER/NAME of the hub, both with an optional /PART and @REVISION.

    Only the needed files are downloaded, into the cache of huggingface_hub.

    Raises:
      UserError: the data set does not exist, or has no corpus and queries in a known layout.
    """
    place, part, identity = _local(name) or _from_hub(name, _needed_files)
    known = _configurations(place)
    chosen = hub_layout.choose(name.removesuffix(f"/{part}"), known, part)
    if not chosen.qrels:
        chosen, identity = _with_other_qrels(name, place, chosen, identity)
    hub_layout.check_complete(name, chosen)
    rows = functools.partial(_rows, place, on_bad_input=on_bad_input)
    if chosen.style == "beir":
        judged = {split: functools.partial(rows, files, _qrels) for split, files in chosen.qrels.items()}
        excluded = dict
    else:
        excluded = lambda: dict(rows(chosen.queries, _excluded))  # noqa: E731
        gold = functools.partial(_gold, "gold_ids" if chosen.style == "bright" else "gold_ids_long")
        judged = {"test": functools.partial(rows, chosen.queries, gold)}
    qrels = {split: functools.partial(_joined, read) for split, read in judged.items()}
    documents = functools.partial(rows, chosen.corpus, _document)
    queries = functools.partial(rows, chosen.queries, _query)
    return StoredCollection(identity, documents, queries, qrels, excluded)


def _local(name: str) -> tuple[Path, str | None, list[object]] | None:
    """Returns directory, part and identity of a local data set; None if there is no such directory."""
    if name.startswith("gs://"):
        local_path(name)
    whole, above = Path(name).expanduser(), Path(name).expanduser().parent
    of_part = "/" in name and above.is_dir() and _has_documents(above)
    if whole.is_dir() and (_has_documents(whole) or not of_part):
        place, part = whole, None
    elif of_part:
        place, part = above, whole.name
    else:
        return None
    return place, part, [part, *_status(place)]


def _has_documents(place: Path) -> bool:
    return any(name.endswith(("corpus", "documents")) for name in _configurations(place))


def _status(place: Path) -> list[object]:
    """Returns the path, and each file's size and modification time, to notice changes."""
    found = ((file, (place / file).stat()) for file in _files_of(place))
    return [str(place.resolve()), *((file, s.st_size, s.st_mtime_ns) for file, s in found)]


def _from_hub(name: str, needed: Needed) -> tuple[Path, str | None, list[object]]:
    hub_name, _, revision = name.partition("@")
    parts = hub_name.split("/")
    if not 2 <= len(parts) <= 3 or not all(parts):
        raise UserError(f"hf:{name}: no such directory; give hf:DIRECTORY or hf:OWNER/NAME[/PART][@REVISION]")
    repository, part = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    place, commit = _downloaded(repository, revision or "main", part, needed)
    return place, part, [repository, part, commit]


def _downloaded(repository: str, revision: str, part: str | None, needed: Needed) -> tuple[Path, str]:
    """Downloads the files of a collection; returns their directory and the commit."""
    import glob

    import huggingface_hub
    from huggingface_hub.utils import tqdm

    class Hidden(tqdm):
        def __init__(self, *args: Any, **how: Any):
            super().__init__(*args, **how | {"disable": not sys.stderr.isatty()})

    def fetch(**how: Any) -> Path:
        how |= {"repo_type": "dataset", "tqdm_class": Hidden}
        return Path(huggingface_hub.snapshot_download(repository, **how))

    try:
        about = huggingface_hub.HfApi().dataset_info(repository, revision=revision, timeout=_TIMEOUT_SECONDS)
        files = [file.rfilename for file in about.siblings or []]
        place = fetch(revision=about.sha, allow_patterns=[README])
        wanted = needed(repository, hub_layout.configurations(files, _metadata(place)), part)
        print(f"hf:{repository}: reading {len(wanted)} files of the hub", file=sys.stderr)
        # Request the revision by its name, because huggingface_hub then records the name for use without a
        # network.
        place = fetch(revision=revision, allow_patterns=[glob.escape(file) for file in wanted])
        return place, place.name
    except UserError:
        raise
    except Exception as error:
        if (place := _cached(repository, revision)) is None:
            raise _explained(error, repository, revision) from error
        print(f"note: the hub is not available; using the cached copy of {repository}", file=sys.stderr)
        return place, place.name


def _cached(repository: str, revision: str) -> Path | None:
    """Returns the cached directory of a commit, branch or tag, which may lack files of other parts."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"datasets--{repository.replace('/', '--')}"
    ref = folder / "refs" / revision
    place = folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    return place if place.is_dir() else None


def _needed_files(where: str, known: dict[str, hub_layout.Splits], part: str | None) -> list[str]:
    return hub_layout.choose(where, known, part).files


def _judgement_files(where: str, known: dict[str, hub_layout.Splits], part: str | None) -> list[str]:
    return [file for files in known.get("default", {}).values() for file in files]


def _explained(error: Exception, repository: str, revision: str) -> UserError:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"hf:{repository} has no revision {revision!r}: give a branch, tag or commit after @"
        )
    if isinstance(error, errors.GatedRepoError):
        where = f"{constants.ENDPOINT}/datasets/{repository}"
        return UserError(f"hf:{repository} is gated: accept its terms on {where}, then run `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        how = "check the name, or run `hf auth login` if it is private"
        return UserError(f"hf:{repository}: neither a local directory nor a data set on the hub: {how}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UserError(
            f"hf:{repository} is not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE forbids a"
            " download: unset it, or give a local copy, hf:DIRECTORY"
        )
    reason = root_reason(error, implicit=True)
    return UserError(
        f"hf:{repository}: the hub ({constants.ENDPOINT}) cannot be reached ({reason}): try again, or give a"
        " local copy, hf:DIRECTORY"
    )


def _with_other_qrels(
    name: str, place: Path, chosen: Chosen, identity: list[object]
) -> tuple[Chosen, list[object]]:
    """Adds the judgements of the data set NAME-qrels, as BEIR's data sets on the hub have them."""
    beside = place.with_name(f"{place.name}-qrels")
    if not beside.is_dir() and (local_path(name).expanduser().is_dir() or name.count("/") != 1):
        raise UserError(f"hf:{name} has no judgements (qrels), and there is no {beside}: give data with both")
    if beside.is_dir():
        other, its = beside, _status(beside)
    else:
        other, _, its = _from_hub(f"{name.partition('@')[0]}-qrels", _judgement_files)
    qrels = _configurations(other).get("default", {})
    if not qrels:
        raise UserError(f"hf:{name}-qrels has no tables of judgements: give a data set that has some")
    files = {split: [str((other / file).absolute()) for file in files] for split, files in qrels.items()}
    return chosen._replace(qrels=files), [*identity, *its]


def _configurations(place: Path) -> dict[str, hub_layout.Splits]:
    return hub_layout.configurations(_files_of(place), _metadata(place))


def _files_of(place: Path) -> list[str]:
    """Returns the files of a data set, at most one folder deep, except hidden files."""
    found = [p for p in (*place.glob("*"), *place.glob("*/*")) if p.is_file()]
    names = (p.relative_to(place).as_posix() for p in found)
    return sorted(name for name in names if not name.startswith(".") and "/." not in name)


def _metadata(place: Path) -> dict[str, Any]:
    """Returns the metadata at the beginning of a README, between lines of three hyphens."""
    import yaml

    if not (readme := place / README).is_file():
        return {}
    match = re.match(r"\s*---\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        found = yaml.safe_load(match[1]) if match else {}
    except yaml.YAMLError as error:
        raise UserError(f"{readme}: the metadata are not YAML ({str(error).splitlines()[0]})") from None
    return found if isinstance(found, dict) else {}


def _rows(
    place: Path, files: Sequence[str], parse: Callable[[dict[str, Any]], Any], *, on_bad_input: OnBadInput
) -> Iterator[Any]:
    for file in files:
        yield from Table(place / file).parsed(lambda row, _: parse(row), on_bad_input)


def _document(row: dict[str, Any]) -> Document:
    return Document(_id(row, "id"), row.get("title") or "", _text(row, "text"))


def _query(row: dict[str, Any]) -> Query:
    return Query(_id(row, "id"), _text(row, "query"))


def _excluded(row: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Returns a query's id and BRIGHT's excluded ids, where ["N/A"] means none."""
    return _id(row, "id"), tuple(str(i) for i in row.get("excluded_ids") or [] if i != "N/A")


def _joined(read: Callable[[], Iterator[list[Qrel]]]) -> Iterator[Qrel]:
    return (qrel for of_row in read() for qrel in of_row)


def _qrels(row: dict[str, Any]) -> list[Qrel]:
    """Returns the judgements of a row, whose corpus-id may be a list."""
    score = row.get("score", 1)
    if (grade := as_grade(str(score))) is None:
        raise MalformedRecord("the score is not a whole number:", repr(score))
    query, documents = _id(row, "query_id"), _column(row, "document_id")
    listed = documents if isinstance(documents, list) else [documents]
    return [Qrel(query, _as_id(document), grade) for document in listed]


def _gold(name: str, row: dict[str, Any]) -> list[Qrel]:
    return [Qrel(_id(row, "id"), str(document), 1) for document in dict.fromkeys(row.get(name) or [])]


def _column(row: dict[str, Any], kind: str) -> Any:
    for name in _COLUMNS[kind]:
        if name in row:
            return row[name]
    raise MalformedRecord(f"no column {' or '.join(_COLUMNS[kind])}", f"(it has {', '.join(row):.200})")


def _id(row: dict[str, Any], kind: str) -> str:
    return _as_id(_column(row, kind))


def _as_id(value: Any) -> str:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise MalformedRecord("an id is neither a text nor a whole number:", f"{value!r:.40}")
    return str(value)


def _text(row: dict[str, Any], kind: str) -> str:
    value = _column(row, kind)
    if not isinstance(value, str):
        raise MalformedRecord("a text is not a string:", f"{value!r:.40}")
    return value
