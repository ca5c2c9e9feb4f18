"""A plan that is stopped while the TPU's compiler works: it ends at once, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxir.core.errors import UserError
from jaxir.interop.huggingface import hf_config
from jaxir.interop.weights.weights import write_json
from jaxir.models import t5
from jaxir.planning import devices
from jaxir.runtime.compile_cache import aside

TINY = t5.T5Config(
    vocab_size=64, embed_dim=32, num_layers=2, num_heads=2, head_dim=16, mlp_dim=64, dropout_rate=0.0
)
SMALL = ["QUERY_LENGTH=8", "PASSAGE_LENGTH=16", "BATCH_SIZE=16", "PROJECTION=8", "STEPS=1000", "FSDP=2"]


def has_compiler() -> bool:
    try:
        return devices.find_libtpu().is_file()
    except UserError:
        return False


def of_session(number: int) -> list[str]:
    """Returns the processes of a session."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, *fields = path.read_text().rpartition(") ")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[2]) == number and state != "Z":
            found.append(path.parent.name)
    return found


@pytest.mark.skipif(not has_compiler(), reason="libtpu is not installed (make plan-tools)")
@pytest.mark.slow
def test_a_signal_while_the_step_is_compiled(tmp_path):
    (tmp_path / "model").mkdir()
    write_json(tmp_path / "model" / "config.json", hf_config.describe(TINY, 0))
    (tmp_path / "tmp").mkdir()
    clean = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    clean |= {"TMPDIR": str(tmp_path / "tmp"), "JAX_LOG_COMPILES": "1", "JAX_COMPILATION_CACHE_DIR": ""}
    tiny = [f"--gin.{binding}" for binding in (*SMALL, f"MODEL=hf:{tmp_path / 'model'}")]
    command = [sys.executable, "-m", "jaxir.plan", "--gin_file=gin/samtone_base.gin", "--topology=v5e:2x2"]
    left = {path.name for path in Path("/tmp").glob("*libtpu*")}
    # To compile the recipe's own model takes minutes.
    for number, more in ((signal.SIGTERM, []), (signal.SIGINT, tiny), (signal.SIGKILL, tiny)):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        start = {"cwd": tmp_path, "env": clean, "start_new_session": True}
        with subprocess.Popen([*command, *more], **start, **pipes) as process:
            said = next(line for line in process.stderr if "MLIR module conversion jit(step)" in line)
            process.send_signal(number)
            try:
                out, rest = process.communicate(timeout=20)
            finally:
                process.kill()
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number), rest
        words = [line for line in rest.splitlines() if not line.startswith("WARNING:jax")]
        stopped = {signal.SIGTERM: ["stopped by SIGTERM"], signal.SIGINT: ["interrupted"], signal.SIGKILL: []}
        assert said and not out and words == stopped[number]
        assert not of_session(process.pid) and not list((tmp_path / "tmp").iterdir())
        assert {path.name for path in tmp_path.iterdir()} == {"model", "tmp"}
    assert {path.name for path in Path("/tmp").glob("*libtpu*")} <= left
    quick = {
        "JAX_EXEC_TIME_OPTIMIZATION_EFFORT": "-1.0",
        "JAX_OPTIMIZATION_LEVEL": "O1",
        "JAX_LOG_COMPILES": "0",
    }
    done = subprocess.run([*command, *tiny], env=clean | quick, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "compiled by the TPU's compiler" in done.stdout, done.stderr


def test_background_compilation_returns_raises_and_hears_signals():
    assert aside(lambda: threading.current_thread().name) == "compiler"
    with pytest.raises(ZeroDivisionError):
        aside(lambda: 1 // 0)
    going = threading.Event()
    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        aside(lambda: going.wait(30))
    going.set()
