import contextlib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
FLAGS = {
    "mine": ["--run={run}", "--dataset=beir:{folder}", "--negatives=2"],
    "export a SavedModel": [f"--model=hf:{GOLDEN / 'bert'}", "--format=saved_model", "--signatures=ids"],
    "whiten": [f"--model=hf:{GOLDEN / 'bert'}", "--input={folder}/corpus.jsonl"],
}
# Files whose names or content are random, in Orbax's and TensorFlow's formats.
VARY = {"export a SavedModel": r"fingerprint\.pb|SHA256SUMS", "whiten": r"params/.+"}


def files(path: Path, but: str | None) -> dict[str, str]:
    found = {str(p.relative_to(path)): p for p in sorted([path, *path.rglob("*")]) if p.is_file()}
    return {
        name: hashlib.sha256(p.read_bytes()).hexdigest()
        for name, p in found.items()
        if not (but and re.fullmatch(but, name))
    }


def is_written(directory: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):  # the file may have been renamed meanwhile
        parts = [p for part in directory.glob(".*.part") for p in (part, *part.rglob("*"))]
        return any(p.is_file() and p.stat().st_size for p in parts)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("command", FLAGS)
def test_a_kill_while_the_output_is_written(command, folder, tmp_path):
    run = tmp_path / "run.trec"
    run.write_text("".join(f"q{i} Q0 d{(i + n) % 56} {n} {20 - n} t\n" for i in range(56) for n in range(20)))
    place, temporary = tmp_path / "place", tmp_path / "tmp"
    place.mkdir()
    temporary.mkdir()
    flags = [flag.format(run=run, folder=folder) for flag in FLAGS[command]]
    line = [sys.executable, "-m", f"jaxir.{command.split()[0]}", *flags]
    varying = VARY.get(command)
    environment = os.environ | {"TMPDIR": str(temporary)}

    def start(output: Path) -> subprocess.Popen:
        return subprocess.Popen([*line, f"--output={output}"], env=environment, stderr=subprocess.DEVNULL)

    def killed(output: Path, number: int) -> int:
        """Kills the command while it writes, which may take a millisecond, and returns its status."""
        for _ in range(20):
            with start(output) as process:
                while process.poll() is None and not is_written(place):
                    time.sleep(0.0002)
                process.send_signal(number)
            if not output.exists():
                return process.returncode
            assert files(output, varying) == expected, "it has its name when it is whole"
            shutil.rmtree(output) if output.is_dir() else output.unlink()
        raise AssertionError("it was never killed before it had written all")

    with start(tmp_path / "whole") as process:
        assert process.wait(300) == 0
    expected = files(tmp_path / "whole", varying)
    before = set(temporary.iterdir())  # ONNX Runtime always leaves the file .ses here
    assert expected and not [p for p in before if p.name != ".ses"]
    for number in (signal.SIGKILL, signal.SIGTERM):
        out = place / number.name
        assert killed(out, number) == (-number if number == signal.SIGKILL else 128 + number)
        assert number == signal.SIGKILL or not list(place.glob(".*")), "SIGTERM leaves nothing"
        with start(out) as process:
            assert process.wait(300) == 0
        assert files(out, varying) == expected
        assert not list(place.glob(".*")) and set(temporary.iterdir()) == before
