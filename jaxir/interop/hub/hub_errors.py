"""Turns errors of the Hugging Face hub into sentences that say what to do."""

import contextlib
import errno
from collections.abc import Iterator
from typing import NamedTuple

from jaxir.core.errors import UserError, root_reason, suggest
from jaxir.models import backbones

# Names that are suggested for a misspelt name.
_KNOWN = (
    *backbones.PUBLISHED,
    *(f"google/mt5-{size}" for size in ("small", "base", "large", "xl", "xxl")),
    *(f"sentence-transformers/gtr-t5-{size}" for size in ("base", "large", "xl", "xxl")),
    *(f"sentence-transformers/sentence-t5-{size}" for size in ("base", "large", "xl", "xxl")),
    "sentence-transformers/all-MiniLM-L6-v2",
    "sentence-transformers/all-mpnet-base-v2",
    "cross-encoder/ms-marco-MiniLM-L6-v2",
    "google-bert/bert-base-uncased",
    "bert-base-uncased",
    "distilbert/distilbert-base-uncased",
    "FacebookAI/roberta-base",
)


class Request(NamedTuple):
    """A requested model: OWNER/NAME, a revision, its prefix (hf or st), and how it is to be read."""

    name: str
    revision: str
    kind: str
    modules: bool
    weights: bool


class UnavailableError(UserError):
    """The hub does not provide the model now, or not to this user. The caller may use a cached copy."""


@contextlib.contextmanager
def as_user_error(request: Request) -> Iterator[None]:
    """Turns errors of huggingface_hub, its HTTP library and the file system into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise _explained(error, request) from error


def _explained(error: Exception, request: Request) -> UserError:
    import huggingface_hub
    from huggingface_hub import constants, errors

    name, page, cache = request.name, f"{constants.ENDPOINT}/{request.name}", constants.HF_HUB_CACHE
    locally = f"or give a local copy of it, {request.kind}:DIR (in a recipe --model={request.kind}:DIR)"
    log_in = "run `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{name}: no such directory, and names on the hub have the form OWNER/NAME")
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(
            f"{name} has no revision {request.revision!r}: write a branch, a tag, a commit or refs/pr/N after"
            f" @; {page}/tree/main lists them"
        )
    if isinstance(error, errors.GatedRepoError):
        return UnavailableError(f"{name} is gated: accept its terms on {page}, then {log_in}, {locally}")
    if isinstance(error, errors.RepositoryNotFoundError):
        who = "at least with this token" if huggingface_hub.get_token() else f"unless it is private: {log_in}"
        near = suggest(name, _KNOWN) or "; check the name"
        return UnavailableError(f"{name}: neither a local directory nor a model on the hub, {who}{near}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnavailableError(
            f"{name} is not in the cache ({cache}), and HF_HUB_OFFLINE forbids a download: unset it,"
            f" {locally}"
        )
    if isinstance(error, errors.HfHubHTTPError) and getattr(error, "response", None) is not None:
        status = error.response.status_code
        refusals = {
            401: f"the hub does not accept the token: {log_in} again",
            403: f"the hub forbids this user to read it: request access on {page}",
            429: f"too many requests from here: wait, or {log_in}",
        }
        otherwise = f"the hub answers with status {status}: try again later, {locally}"
        return UnavailableError(f"{name}: {refusals.get(status, otherwise)}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"{name}: the disk of {cache} is full; complete files are kept: free some space and run the same"
            " command again, or set HF_HOME to a directory on another disk"
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(f"{name}: {cache} cannot be written to: set HF_HOME to another directory")
    reason = root_reason(error, implicit=True)
    return UnavailableError(
        f"{name}: the hub ({constants.ENDPOINT}) cannot be reached ({reason}): try again, {locally}"
    )
