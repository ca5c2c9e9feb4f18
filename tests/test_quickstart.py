import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxir.data.sets import package_docs

SIZES = {"train": 300, "dev": 20, "test": 60}
# The quickstart's own recipe of 110 steps would take five minutes of a core.
WITH_ANOTHER_RECIPE = """
import sys
from jaxir import cli, quickstart
quickstart.RECIPE = sys.argv.pop()
cli.end(cli.main("jaxir.quickstart:quickstart", example=""))
"""


def quickstart(output, recipe) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITH_ANOTHER_RECIPE, f"--output={output}", str(recipe)],
        # Without the tests' settings, as users run it.
        env=os.environ | {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_quickstart_trains_compares_and_answers(tmp_path, minilm_folder):
    output, sources = tmp_path / "quickstart", tmp_path / "site-packages"
    for name in ("numpy", "chex", "rich"):  # a train, a dev and a test package; reading all takes minutes
        for path in (minilm_folder.parents[1] / name).rglob("*.py"):
            copy = sources / path.relative_to(minilm_folder.parents[1])
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    entries = package_docs.collect([sources])
    chosen = [[e for e in entries if e.split == split][:size] for split, size in SIZES.items()]
    assert [len(part) for part in chosen] == list(SIZES.values())
    package_docs.write_beir(output / "pydocs", [entry for part in chosen for entry in part])
    recipe = tmp_path / "fewer_steps.gin"
    recipe.write_text('include "gin/quickstart.gin"\nSTEPS = 40\nLEARNING_RATE = 1e-4\n')

    said = quickstart(output, recipe)
    assert re.findall(r"^== (\d) of 6", said, re.MULTILINE) == list("123456")
    assert "(pydocs is done" in said
    found = {
        name: [float(x) for x in row.split("|")[:2]]
        for name, row in re.findall(r"^\| (\S+) +\|(.*)\|$", said, re.MULTILINE)
        if name != "metric"
    }
    assert list(found) == ["P@1", "RR@10", "nDCG@10", "R@100"]
    before, after = found["nDCG@10"]
    assert 0.5 < before < 1 and 0.5 < after < 1 and before != after
    log = [json.loads(line) for line in (output / "model" / "log.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in log if "loss" in row]
    assert losses[-1] < losses[0] / 2
    answers = said[said.index("== 6 of 6") :]
    assert len(re.findall(r"^ +1  0\.\d+  \S+", answers, re.MULTILINE)) == 4  # one for each question

    again = quickstart(output, recipe)
    run = re.findall(r"^\$ python -m jaxir\.(\w+)", again, re.MULTILINE)
    assert run == ["train", "evaluate", "search"]
    assert "was already complete" in again


def commands_in(output: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process has ended meanwhile
            continue
        if any(argument.startswith(f"--output={output}/") for argument in arguments):
            found.append(int(path.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_second_quickstart_is_refused_and_its_command_ends_with_the_first(tmp_path, number):
    output = tmp_path / "quickstart"
    command = [sys.executable, "-m", "jaxir.quickstart", f"--output={output}"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not commands_in(output):
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)
        if number == signal.SIGTERM:
            second = subprocess.run(command, capture_output=True, text=True, timeout=100)
            assert second.returncode == 1
            assert second.stderr == f"error: another process works in {output}\n"
        first.send_signal(number)
        _, errors = first.communicate(timeout=100)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        assert f"{output}: stopped by {number.name}; run the same command again to continue\n" in errors
    deadline = time.monotonic() + 60
    while commands_in(output):
        assert time.monotonic() < deadline, "its command still runs"
        time.sleep(0.05)
    assert not output.exists() or not list(output.iterdir())
