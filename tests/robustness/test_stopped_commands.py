"""A command that is stopped by a signal: at an awkward moment it ends as at any other."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
both = pytest.mark.parametrize(
    ("number", "status", "said"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "stopped by SIGTERM\n")],
)


def stopped(folder, module: str, number: int, **environment: str) -> tuple[int, str, str]:
    """Runs a module's command `wait`, which is sent a signal; returns its status and what it wrote."""
    (folder / "waiting.py").write_text(module)
    code = "from jaxir import cli; cli.end(cli.main('waiting:wait'))"
    command = ["env", "--default-signal=INT", sys.executable, "-c", code, f"--number={int(number)}"]
    environment = os.environ | environment
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


STOPPED_WITHIN = """
import gc, os, time

def wait(*, number: int) -> None:
    \"\"\"Waits.\"\"\"

    def callback(phase, info):  # as JAX has one; what is raised in there, Python drops
        gc.callbacks.remove(callback)
        os.kill(os.getpid(), number)
        time.sleep(0)

    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(50)
"""


@both
def test_a_signal_that_comes_while_garbage_is_collected_is_not_lost(tmp_path, number, status, said):
    assert stopped(tmp_path, STOPPED_WITHIN, number) == (status, "", said)


STOPPED_BEFORE_AWAITING = """
import os

async def write():
    pass

def wait(*, number: int) -> None:
    \"\"\"Waits.\"\"\"
    writing = write()
    os.kill(os.getpid(), number)
"""


@both
def test_stopped_command_prints_no_unawaited_coroutine_warning(tmp_path, number, status, said):
    assert stopped(tmp_path, STOPPED_BEFORE_AWAITING, number) == (status, "", said)


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


@both
def test_a_command_that_is_stopped_while_it_compiles_ends_in_good_order(tmp_path, number, status, said):
    assert stopped(tmp_path, STOPPED_COMPILING, number, JAX_COMPILATION_CACHE_DIR="") == (status, "", said)


CLOSED = """
import atexit, sys, time
from pathlib import Path

def wait(*, number: int) -> None:
    \"\"\"Waits, and puts things in order when it is stopped.\"\"\"
    try:
        print("ready", flush=True)
        time.sleep(50)
    finally:
        print("said to", "nobody", flush=True)
        print("said to nobody", file=sys.stderr, flush=True)
        Path("in_order").touch()
"""


def test_a_command_whose_terminal_is_closed_ends_in_good_order(tmp_path):
    (tmp_path / "waiting.py").write_text(CLOSED)
    code = "from jaxir import cli; cli.end(cli.main('waiting:wait'))"
    ours, theirs = os.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    # The signal is heard also where the tests run under nohup.
    command = ["env", "--default-signal=HUP", "setsid", "--ctty", sys.executable, "-c", code, "--number=0"]
    process = subprocess.Popen(command, cwd=tmp_path, **streams)
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


def test_a_command_under_nohup_stays_when_its_terminal_goes(tmp_path):
    (tmp_path / "waiting.py").write_text(HUNG_UP)
    code = "from jaxir import cli; cli.end(cli.main('waiting:wait'))"
    command = ["nohup", sys.executable, "-c", code, f"--number={int(signal.SIGHUP)}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "on\n"), done.stderr


DONE = """
import atexit, gc, os

class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        print("closed", flush=True)
        if self.number:
            os.kill(os.getpid(), self.number)

def wait(*, number: int) -> None:
    \"\"\"Leaves what closes itself.\"\"\"
    gc.disable()
    gc.collect()
    Cycle().number = number
    atexit.register(lambda: print("left aside:", gc.get_freeze_count() > len(gc.get_objects())))
"""


def test_a_command_that_is_done_closes_what_it_left_and_looks_for_no_more(tmp_path):
    """To look for cycles in all that JAX is, as the interpreter does at its end, takes 0.3 s."""
    assert stopped(tmp_path, DONE, 0) == (0, "closed\nleft aside: True\n", "")


def test_an_interrupt_as_a_command_ends_is_no_traceback(tmp_path):
    status, said, errors = stopped(tmp_path, DONE, signal.SIGINT)
    assert (status, said, errors) == (-signal.SIGINT, "closed\n", "")
