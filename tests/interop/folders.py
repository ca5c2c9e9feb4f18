"""Changes to copies of golden folders."""

import json
import shutil
from pathlib import Path


def change(path: Path, **entries) -> None:
    """Changes entries of a JSON file, which need not be there, and removes those that become `...`."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (content | entries).items() if v is not ...}))


def edited(golden: Path, place: Path, **entries) -> Path:
    """Copies a golden folder to `place`/model and changes entries of its config.json."""
    folder = Path(shutil.copytree(golden, place / "model"))
    change(folder / "config.json", **entries)
    return folder
