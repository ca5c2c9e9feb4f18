"""Uploads a folder with a model to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from jaxir.core.errors import UserError, root_reason


def check_name(repo: str) -> None:
    """Raises a UserError unless `repo` is OWNER/NAME."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise UserError(f"{repo!r} is not a name on the hub: write OWNER/NAME")


def push(directory: str | Path, repo: str, *, private: bool = False) -> str:
    """Uploads all files of a folder as one commit, and creates the repository if there is none.

    The token is that of `hf auth login`, or HF_TOKEN.

    Args:
      directory: the folder.
      repo: OWNER/NAME.
      private: whether a new repository is private.

    Returns:
      the address of the model's page.

    Raises:
      UserError: the hub refuses the upload, or cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    check_name(repo)
    api = huggingface_hub.HfApi()
    try:
        # None: use the default of the owner's account.
        api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=directory, commit_message="Upload a model of jaxir")
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        hints = {
            401: "run `hf auth login` or set HF_TOKEN",
            403: "the token may not write there: use one that may, or another owner",
        }
        more = hints.get(status, "try again later")
        raise UserError(f"{repo}: the hub refuses the upload (status {status}): {more}") from error
    except Exception as error:
        reason = root_reason(error, implicit=True)
        raise UserError(
            f"{repo}: the upload to {constants.ENDPOINT} failed ({reason}); {directory} is complete: upload"
            f" it again by `hf upload {repo} {directory}`"
        ) from error
    return f"{constants.ENDPOINT}/{repo}"
