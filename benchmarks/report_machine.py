"""Describes the machine in a report of report.py: its devices, packages and processor, and jaxir's commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "numpy")


def machine() -> dict[str, Any]:
    """Returns facts about this machine: devices, processor, versions and the commit."""
    import jax

    import jaxir
    from jaxir.costs import targets

    devices, ours = jax.devices(), jax.local_devices()[0]
    target = targets.of_devices(devices)
    versions = {}
    for name in VERSIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    limit = (ours.memory_stats() or {}).get("bytes_limit")
    return {
        "platform": ours.platform,
        "kind": ours.device_kind,
        "devices": len(devices),
        "machines": jax.process_count(),
        "topology": target.name if target else None,
        "memory_gib": limit / 2**30 if limit else None,
        "jaxir": f"{jaxir.__version__} ({commit(ROOT)})",
        "python": platform.python_version(),
        "versions": versions,
        "runtime": ours.client.platform_version.splitlines()[0],
        "system": platform.platform(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def commit(root: Path) -> str:
    """Returns the commit of a checkout, or of an export by `git archive`, which a slice's machines have."""
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
        git = subprocess.run(command, capture_output=True, text=True)
        if git.returncode == 0:
            return git.stdout.strip()
    archival = root / ".git_archival.txt"
    told = archival.read_text().removeprefix("node: ").strip() if archival.exists() else ""
    return told[:12] if told and not told.startswith("$") else "commit unknown"


def processor() -> str:
    """Returns the name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
