"""Readers of a run's saved files."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np


def log(run_dir: Path) -> list[dict[str, Any]]:
    """The whole lines of log.jsonl; a run that is being written may end in half a line."""
    path = run_dir / "log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def losses(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in log(run_dir) if "loss" in line}


def saved_steps(run_dir: Path) -> list[int]:
    return sorted(int(p.name) for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit())


def arrays(run_dir: Path, step: int, *items: str) -> dict[str, np.ndarray]:
    """The arrays of a checkpoint by item and name, read by Orbax alone; all items by default."""
    import orbax.checkpoint as ocp

    found = {}
    for item in items or ("params", "opt_state", "auxiliary", "statistics"):
        directory = (run_dir / "checkpoints" / str(step) / item).absolute()
        if not directory.is_dir():
            continue
        with ocp.PyTreeCheckpointer() as checkpointer, jax.transfer_guard("allow"):
            tree = checkpointer.metadata(directory).item_metadata.tree
            as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            restored = checkpointer.restore(directory, restore_args=as_numpy)
        for path, x in jax.tree_util.tree_leaves_with_path(restored):
            found[item + jax.tree_util.keystr(path)] = x
    return found
