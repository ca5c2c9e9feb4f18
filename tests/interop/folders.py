"""Golden folders: copies with changes, the models in them, and their ids."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy

from jaxir.interop.huggingface import hf
from jaxir.interop.model import stored
from jaxir.models.dual_encoder import DualEncoderConfig

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def change(path: Path, **entries) -> None:
    """Sets entries of a JSON file, or of a new one; removes those that become `...`."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (content | entries).items() if v is not ...}))


def module_folder(name: str, place: Path) -> Path:
    """Copies a folder of `st_modules` and puts its BERT back."""
    folder = Path(shutil.copytree(GOLDEN / "st_modules" / name, place / name))
    for settings in folder.rglob("sentence_bert_config.json"):
        for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            if not (settings.parent / file).exists():
                shutil.copy(GOLDEN / "bert" / file, settings.parent / file)
        change(settings, max_seq_length=40)
        if name == "layers":
            change(settings.parent / "config.json", output_hidden_states=True)
    return folder


def edited(golden: Path, place: Path, **entries) -> Path:
    """Copies a golden folder to `place`/model and changes entries of its config.json."""
    folder = Path(shutil.copytree(golden, place / "model"))
    change(folder / "config.json", **entries)
    return folder


def add_normalize(folder: Path) -> None:
    listed = json.loads((folder / "modules.json").read_text())
    kind = "sentence_transformers.models.Normalize"
    listed.append({"idx": 3, "name": "3", "path": "3_Normalize", "type": kind})
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "3_Normalize").mkdir()


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return safetensors.numpy.load_file(folder / "model.safetensors")


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    tensors = tensors_of(folder)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def remove_tensors(folder: Path, beginning: str) -> None:
    kept = {name: value for name, value in tensors_of(folder).items() if not name.startswith(beginning)}
    assert kept.keys() < tensors_of(folder).keys()
    safetensors.numpy.save_file(kept, folder / "model.safetensors")


def exchange(ids: np.ndarray, pad_id: int) -> np.ndarray:
    """Converts the reference's ids to jaxir's: exchanges 0 and the padding id, so that padding is 0."""
    return np.where(ids == pad_id, 0, np.where(ids == 0, pad_id, ids)).astype(np.int32)


def built(encoder: hf.Encoder, **changes):
    config = DualEncoderConfig(backbone=dataclasses.replace(encoder.config, **changes))
    params = {f"encoder.{name}": value for name, value in encoder.params.items()}
    model = stored.StoredModel(config=config, params=params, tokenizer=None, settings=None)
    return stored.build(model).encoder
