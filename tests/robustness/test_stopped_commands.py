import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
CODE = "from jaxir import cli; cli.end(cli.main('waiting:wait'))"
ENDS = {signal.SIGINT: (130, "", "interrupted\n"), signal.SIGTERM: (143, "", "stopped by SIGTERM\n")}


def stopped(folder, module: str, number: int, *starter: str, **environment: str) -> tuple[int, str, str]:
    """Runs a module's command `wait`, which sends itself a signal; returns its status and output."""
    (folder / "waiting.py").write_text(module)
    starter = starter or ("env", "--default-signal=INT")
    command = [*starter, sys.executable, "-c", CODE, f"--number={int(number)}"]
    environment = os.environ | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


STOPPED_WITHIN = """
import gc, os, time

def wait(*, number: int) -> None:
    \"\"\"Waits.\"\"\"

    def callback(phase, info):  # JAX has one, too; Python drops exceptions that it raises
        gc.callbacks.remove(callback)
        os.kill(os.getpid(), number)
        time.sleep(0)

    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(50)
"""
STOPPED_BEFORE_AWAITING = """
import os

async def write():
    pass

def wait(*, number: int) -> None:
    \"\"\"Waits.\"\"\"
    writing = write()
    os.kill(os.getpid(), number)
"""
STOPPED_COMPILING = """
import os, threading
import jax
import jax.numpy as jnp

def wait(*, number: int) -> None:
    \"\"\"Compiles for some seconds.\"\"\"

    def f(x):
        for i in range(100):
            x = jnp.sort(x * i, axis=0) @ x
        return x.sum()

    lowered = jax.jit(jax.grad(f)).lower(jnp.ones((8, 8)))
    threading.Timer(0.5, os.kill, [os.getpid(), number]).start()
    lowered.compile()
    print("it has compiled before it was stopped")
"""


@pytest.mark.parametrize(
    ("module", "number"),
    [
        pytest.param(STOPPED_WITHIN, signal.SIGTERM, id="in garbage collection"),
        pytest.param(STOPPED_BEFORE_AWAITING, signal.SIGINT, id="before awaiting a coroutine"),
        pytest.param(STOPPED_COMPILING, signal.SIGINT, id="compiling, by SIGINT"),
        pytest.param(STOPPED_COMPILING, signal.SIGTERM, id="compiling, by SIGTERM"),
    ],
)
def test_stopped_command_ends_with_its_status_and_one_line(tmp_path, module, number):
    assert stopped(tmp_path, module, number, JAX_COMPILATION_CACHE_DIR="") == ENDS[number]


CLOSED = """
import sys, time
from pathlib import Path

def wait(*, number: int) -> None:
    \"\"\"Waits, and cleans up when it is stopped.\"\"\"
    try:
        print("ready", flush=True)
        time.sleep(50)
    finally:
        print("said to", "nobody", flush=True)
        print("said to nobody", file=sys.stderr, flush=True)
        Path("in_order").touch()
"""


def test_command_whose_terminal_is_closed_cleans_up(tmp_path):
    (tmp_path / "waiting.py").write_text(CLOSED)
    ours, theirs = os.openpty()
    # `env` restores SIGHUP, which children of tests under nohup would ignore.
    command = ["env", "--default-signal=HUP", "setsid", "--ctty", sys.executable, "-c", CODE, "--number=0"]
    process = subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    said = b""
    while not said.endswith(b"\n"):
        said += os.read(ours, 100)
    os.close(ours)
    assert process.wait(60) == 143 and (tmp_path / "in_order").exists()


HUNG_UP = """
import os

def wait(*, number: int) -> None:
    \"\"\"Goes on.\"\"\"
    os.kill(os.getpid(), number)
    print("on")
"""


def test_command_under_nohup_outlives_its_terminal(tmp_path):
    status, said, errors = stopped(tmp_path, HUNG_UP, signal.SIGHUP, "nohup")
    assert (status, said) == (0, "on\n"), errors


DONE = """
import gc, os

class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        print("closed", flush=True)
        os.kill(os.getpid(), self.number)

def wait(*, number: int) -> None:
    \"\"\"Leaves an object that closes itself.\"\"\"
    gc.disable()
    gc.collect()
    Cycle().number = number
"""


def test_interrupt_while_a_command_ends_prints_no_traceback(tmp_path):
    assert stopped(tmp_path, DONE, signal.SIGINT) == (-signal.SIGINT, "closed\n", "")
