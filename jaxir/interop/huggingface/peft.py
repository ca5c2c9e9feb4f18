"""Reads and writes folders of PEFT (huggingface/peft): adapters (LoRA), and the name of their encoder."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxir.core.errors import UserError
from jaxir.interop.hub import hub, hub_files
from jaxir.interop.weights.weights import open_safetensors, read_json, require, write_json, write_tensors
from jaxir.models.adapters import Adapters, adapted, within_encoder

_PARTS = (".lora_A.weight", ".lora_B.weight")
_PREFIX = "base_model.model."
# Entries of adapter_config.json that change what an adapter computes -> their only supported values.
_FIXED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
}


class Tensor(NamedTuple):
    """A kernel of a folder of transformers.

    Attributes:
      ours: the shape [I, O] of each of jaxir's kernels in it, which are concatenated along the output.
      split: maps an array in torch's layout [O, X] to {jaxir's name: its part [X, O]}.
      join: maps {jaxir's name: its part [X, O]} to an array in torch's layout [O, X].
    """

    ours: Mapping[str, tuple[int, int]]
    split: Callable[[Any], Mapping[str, np.ndarray]]
    join: Callable[[Mapping[str, Any]], np.ndarray]


def base_directory(directory: Path) -> Path:
    """Returns the folder of the model that a PEFT folder adapts; for other folders, the folder itself."""
    return directory if (name := base_name(directory)) is None else hub.resolve(name)


def base_name(directory: Path) -> str | None:
    """Returns the name or directory of the model that a PEFT folder adapts; None for other folders."""
    path = directory / hub_files.ADAPTER_CONFIG
    if not path.is_file() or (directory / hub_files.CONFIG).is_file():
        return None
    content = read_json(path, dict[str, Any])
    name = require(content, "base_model_name_or_path", path)
    revision = content.get("revision")
    if not isinstance(name, str) or not name:
        raise UserError(f"{path}: base_model_name_or_path is {name!r:.40}; write the adapted model's name")
    return f"{name}@{revision}" if revision and not Path(name).is_dir() else name


def read(
    directory: Path, tensors: Mapping[str, Tensor], left_out: Sequence[str] = ()
) -> tuple[Adapters, dict[str, np.ndarray]]:
    """Returns the adapters of a PEFT folder and their parameters by canonical name.

    Adapters with several ranks and factors get the largest rank (with zeros) and the most frequent factor.
    If a layer has an adapter, layers with the same name in other blocks get one, too, of zeros if need be.

    Args:
      directory: the folder.
      tensors: kernels of the adapted model, by their modules' names in transformers.
      left_out: beginnings of the names of modules outside the encoder, such as a pooler, which is not read.
    """
    path = directory / hub_files.ADAPTER_CONFIG
    content = read_json(path, dict[str, Any])
    for name, allowed in _FIXED.items():
        if content.get(name, allowed[0]) not in allowed:
            raise UserError(
                f"{path}: {name} {content[name]!r:.40} is not supported, only {allowed[0]!r}: merge the"
                " adapters with PEFT's merge_and_unload, and give the merged model"
            )
    found = _by_module(directory / hub_files.ADAPTER_WEIGHTS, tensors, left_out)
    factors = {module: _factor(content, module, len(down)) for module, (down, _) in found.items()}
    common = max(factors.values(), key=list(factors.values()).count)
    rank = max(len(down) for down, _ in found.values())
    params: dict[str, np.ndarray] = {}
    for module, (down, up) in found.items():
        more = rank - len(down)
        down = np.pad(down.T, ((0, 0), (0, more)))
        up = np.pad(up * (factors[module] / common), ((0, 0), (0, more)))
        for kernel, part in tensors[module].split(up).items():
            adapter = kernel.removesuffix(".kernel") + ".adapter"
            params |= {f"{adapter}.down": down, f"{adapter}.up": np.asarray(part)}
    targets = dict.fromkeys(within_encoder(module) for module in adapted(params))
    for kernel, (inputs, outputs) in (item for tensor in tensors.values() for item in tensor.ours.items()):
        module = kernel.removesuffix(".kernel")
        if within_encoder(module) in targets and f"{module}.adapter.down" not in params:
            params[f"{module}.adapter.down"] = np.zeros((inputs, rank), np.float32)
            params[f"{module}.adapter.up"] = np.zeros((rank, outputs), np.float32)
    return Adapters(rank=rank, alpha=common * rank, targets=tuple(targets)), params


def _by_module(
    path: Path, tensors: Mapping[str, Tensor], left_out: Sequence[str]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns {module: (A [r, I], B [O, r])} of a file of adapters."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; copy the folder again")
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, value in open_safetensors(path).items():
        part = next((part for part in _PARTS if name.endswith(part)), None)
        module = name.removesuffix(part or "")
        while module and module not in tensors:  # removes prefixes such as "base_model.model."
            module = module.partition(".")[2]
        if not module and any(f".{start}" in name for start in left_out):
            continue
        if part is None or not module:
            raise UserError(
                f"{path}: {name} is not the adapter of a dense layer of the encoder: merge the adapters with"
                " PEFT's merge_and_unload, and give the merged model"
            )
        found.setdefault(module, {})[part] = np.asarray(value)
    if incomplete := [module for module, parts in found.items() if len(parts) < 2]:
        raise UserError(f"{path}: {incomplete[0]} has only one of lora_A and lora_B; copy the folder again")
    if not found:
        raise UserError(f"{path} holds no adapter; give another folder")
    return {module: tuple(parts[part] for part in _PARTS) for module, parts in found.items()}


def _factor(content: Mapping[str, Any], module: str, rank: int) -> float:
    alphas = content.get("alpha_pattern") or {}
    alpha = next((v for p, v in alphas.items() if re.match(rf"(.*\.)?({p})$", module)), content["lora_alpha"])
    return float(alpha) / (rank**0.5 if content.get("use_rslora") else rank)


def write(
    directory: Path,
    base: str,
    adapters: Adapters,
    params: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Writes a folder that PEFT and `read` open; `base` is the adapted model's name.

    Some kernels of transformers are several kernels in jaxir. The adapters of these are then concatenated,
    and their ranks added.
    """
    arrays: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for module, tensor in tensors.items():
        modules = {kernel: kernel.removesuffix(".kernel") + ".adapter" for kernel in tensor.ours}
        present = [kernel for kernel, name in modules.items() if f"{name}.down" in params]
        if not present:
            continue
        ranks[module] = adapters.rank * len(present)
        down = np.concatenate([np.asarray(params[f"{modules[k]}.down"]) for k in present], axis=1)
        ups = {
            kernel: np.zeros((ranks[module], shape[1]), np.float32) for kernel, shape in tensor.ours.items()
        }
        for start, kernel in enumerate(present):
            rows = slice(start * adapters.rank, (start + 1) * adapters.rank)
            ups[kernel][rows] = np.asarray(params[f"{modules[kernel]}.up"])
        arrays |= {
            f"{_PREFIX}{module}{part}": x for part, x in zip(_PARTS, (down.T, tensor.join(ups)), strict=True)
        }
    write_tensors(directory / hub_files.ADAPTER_WEIGHTS, arrays)
    wider = {module: rank for module, rank in ranks.items() if rank != adapters.rank}
    content = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted(ranks),
        "rank_pattern": wider,
        "alpha_pattern": {module: adapters.factor * rank for module, rank in wider.items()},
    }
    write_json(directory / hub_files.ADAPTER_CONFIG, content)
