"""Golden models of fewer layers, for tests in which their numbers do not matter."""

import json
import re
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file


def first_layers(folder: Path, name: str, counts: tuple[str, ...], others: str) -> Path:
    """Copies a golden model with its first layer alone.

    `counts` are the entries of config.json that count layers; `others` matches the other layers' parameters.
    """
    shutil.copytree(Path(__file__).parent / "golden" / name, folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | dict.fromkeys(counts, 1)))
    kept = {name: x for name, x in load_file(weights).items() if not re.search(others, name)}
    save_file(kept, weights, {"format": "pt"})
    return folder
