"""Huge pages for the buffers of a training step on a CPU."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.hugetlb=1"
# glibc reads the setting since this version.
SINCE = (2, 35)
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_huge_pages(module: str) -> None:
    """Starts `python -m MODULE` anew with a malloc that asks for huge pages; call before heavy imports.

    XLA gives the buffers of a step back and allocates them again for the next one; with pages of 4 KiB the
    system spends a quarter of the time on handing them out. glibc reads the setting when a process starts,
    and nowhere else; process number, streams and exit status are those of one process. Nothing happens where
    it would not help (no glibc, a system that gives huge pages always or never), where the user has set
    GLIBC_TUNABLES, or where a debugger or a launcher runs the module.
    """
    if TUNABLES in os.environ or not _started_as(module) or not _would_help():
        return
    os.environ[TUNABLES] = SETTING
    with contextlib.suppress(OSError):  # a system that forbids it costs time, never the run
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _started_as(module: str) -> bool:
    given = sys.orig_argv
    return "-m" in given and given[given.index("-m") + 1 :] == [module, *sys.argv[1:]]


def _would_help() -> bool:
    try:
        library, _, version = os.confstr("CS_GNU_LIBC_VERSION").partition(" ")
        numbers = tuple(int(n) for n in version.split(".")[:2])
        return library == "glibc" and numbers >= SINCE and "[madvise]" in _SYSTEM.read_text()
    except (AttributeError, ValueError, OSError):  # another system, or another library
        return False
