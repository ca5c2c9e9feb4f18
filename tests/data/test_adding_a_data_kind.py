"""docs/adding_a_data_kind.md, as a stranger follows it: its file, its gin piece and its command train."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding_a_data_kind.md").read_text()
WORDS = ["harbour", "volcano", "violin", "glacier", "tractor", "compass", "lantern", "orchard"]


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess:
    command = re.search(r"^python -m (jaxir\.train .*?) \\\n +(--output_dir=RUN)$", PAGE, re.M | re.S)
    arguments = f"{command[1]} {command[2]}".split()
    return subprocess.run(
        [sys.executable, "-m", *arguments, f"--gin.MODEL='st:{ROOT / 'tests/golden/bert'}'", *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.slow
def test_the_pages_data_train_and_a_bad_line_is_named(tmp_path):
    code, recipe = (re.search(rf"```{kind}\n(.*?)^```", PAGE, re.M | re.S)[1] for kind in ("python", "gin"))
    (tmp_path / "tickets.py").write_text(code)
    (tmp_path / "tickets.gin").write_text(recipe)
    tickets = [{"id": str(n), "question": f"where is the {w}?", "answer": f"The {w} is here."}
               for n, w in enumerate(WORDS)]  # fmt: skip
    lines = [json.dumps(ticket) for ticket in tickets]
    (tmp_path / "tickets.jsonl").write_text("\n".join(lines))
    few = ("--gin.BATCH_SIZE=4", "--gin.STEPS=3")
    done = train(tmp_path, *few)
    assert done.returncode == 0, done.stderr
    log = [json.loads(line) for line in (tmp_path / "RUN" / "log.jsonl").read_text().splitlines()]
    assert any("loss" in row for row in log)
    record = json.loads((tmp_path / "RUN" / "run.json").read_text())["settings"]
    assert "8 pairs" in record["data"], record["data"]

    (tmp_path / "tickets.jsonl").write_text("\n".join([*lines, '{"id": "9", "question": "who?"}']))
    done = train(tmp_path, *few)
    assert done.returncode == 1
    told = "tickets.jsonl:9: no field 'answer' (it has 'id', 'question')"
    assert done.stderr.splitlines()[-1].endswith(told), done.stderr
