"""A command restarts itself with huge pages, once, and only if that helps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxir.runtime import cpu

pytestmark = pytest.mark.skipif(
    not cpu._would_help(), reason="glibc 2.35 and a system that gives huge pages on request are needed"
)

PROBE = """
import os, sys
from pathlib import Path
with Path("starts").open("a") as file:
    print(os.getpid(), file=file)
if __name__ == "__main__":
    from jaxir.runtime.cpu import restart_with_huge_pages
    restart_with_huge_pages("probe")
    print(os.environ.get("GLIBC_TUNABLES"), sys.argv[1:], sys.flags.utf8_mode, sys.stdin.read())
    sys.exit(7)
"""


def run(folder: Path, *command: str, **environment: str) -> tuple[list[str], list[str]]:
    """Runs a command in a folder with the probe; returns its output, and the process id of each start."""
    (folder / "probe.py").write_text(PROBE)
    inherited = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    # The probe must be on the path both with -c and with -m.
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(folder)} | environment,
        input="typed",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (7, "")
    return done.stdout.splitlines(), (folder / "starts").read_text().split()


def test_command_restarts_once_in_the_same_process(tmp_path):
    printed, starts = run(tmp_path, "-X", "utf8", "-m", "probe", "a", "b c")
    assert printed == ["glibc.malloc.hugetlb=1 ['a', 'b c'] 1 typed"]
    assert len(starts) == 2 and len(set(starts)) == 1


CODE = "import runpy; runpy.run_module('probe', run_name='__main__')"
OWN = "glibc.malloc.arena_max=1"


@pytest.mark.parametrize(
    ("command", "environment", "printed"),
    [
        (["-m", "probe", "--help"], {}, "None ['--help']"),
        (["-m", "probe"], {"GLIBC_TUNABLES": OWN}, f"{OWN} []"),
        (["-c", CODE], {}, "None "),
        (["-m", "launcher"], {}, "None "),
        (["launcher.py", "-m", "probe"], {}, "None "),
    ],
)
def test_help_launchers_and_users_settings_are_not_restarted(tmp_path, command, environment, printed):
    (tmp_path / "launcher.py").write_text(CODE)
    found, starts = run(tmp_path, *command, **environment)
    assert found[-1].startswith(printed) and len(starts) == 1


def test_training_restarts_with_huge_pages(tmp_path):
    inherited = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    (tmp_path / "sitecustomize.py").write_text(
        "import os, pathlib\n"
        "with pathlib.Path(__file__).with_name('seen').open('a') as file:\n"
        "    print(os.environ.get('GLIBC_TUNABLES'), file=file)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "jaxir.train"],
        env=inherited | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert (tmp_path / "seen").read_text().split() == ["None", "glibc.malloc.hugetlb=1"]
