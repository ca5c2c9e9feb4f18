"""The user's command line with some settings changed, so that advice can be pasted into a shell."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

# Macros of the mesh's axes in the shipped recipes (gin/runs/samtone_paper.gin).
MACROS = {"slices": "SLICES", "data": "MESH_DATA", "fsdp": "FSDP", "tensor": "TENSOR"}


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line of `jaxir.plan`, or of `jaxir.train --plan`."""

    words: Sequence[str]  # the words of the command line, from "python" on
    # Setting that may be changed -> the flags that set it; advice uses the first flag.
    flags: Mapping[str, Sequence[str]]

    def changed(self, settings: Mapping[str, Any]) -> str:
        """Returns the command with other values of settings, quoted for a shell; None removes a setting."""
        replaced = {flag for name in settings for flag in self.flags[name]}
        kept, value_follows = [], False
        for word in self.words:
            flag = word.partition("=")[0]
            flag = flag if flag.startswith("--gin.") else f"--{flag.removeprefix('--').replace('-', '_')}"
            if flag not in replaced and not value_follows:
                kept.append(word)
            value_follows = flag in replaced and "=" not in word  # as in `--topology v5e:2x2`
        new = [f"{self.flags[name][0]}={value}" for name, value in settings.items() if value is not None]
        return shlex.join([*kept, *new])


OF_RECIPES = Command(
    words=("python", "-m", "jaxir.plan"),
    flags={
        "topology": ("--topology",),
        "prices": ("--prices",),
        "batch_size": ("--batch_size", "--gin.BATCH_SIZE"),
        "remat": ("--remat", "--gin.REMAT"),
        "chunks": ("--chunks", "--gin.CHUNKS"),
        **{axis: (f"--{macro.lower()}", f"--gin.{macro}") for axis, macro in MACROS.items()},
    },
)
