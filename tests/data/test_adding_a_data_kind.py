import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxir.core.errors import BadInputError
from jaxir.data.formats.lines import needed_text
from jaxir.data.formats.tables import parsed_rows

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding_a_data_kind.md").read_text()
WORDS = ["harbour", "volcano", "violin", "glacier", "tractor", "compass", "lantern", "orchard"]


def train(folder: Path, *flags: str, piece: str = "tickets.gin") -> subprocess.CompletedProcess:
    command = re.search(rf"^python -m (jaxir\.train .*={piece} .*)$", PAGE, re.M)
    return subprocess.run(
        [sys.executable, "-m", *command[1].split(), f"--gin.MODEL='st:{ROOT / 'tests/golden/bert'}'", *flags],
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
    of_dev = re.search(r"`tickets_dev.gin`:\n\n```gin\n(.*?)^```", PAGE, re.M | re.S)[1]
    (tmp_path / "tickets_dev.gin").write_text(of_dev)
    tickets = [{"id": str(n), "question": f"where is the {w}?", "answer": f"The {w} is here."}
               for n, w in enumerate(WORDS)]  # fmt: skip
    lines = [json.dumps(ticket) for ticket in tickets]
    (tmp_path / "tickets.jsonl").write_text("\n".join(lines))
    (tmp_path / "dev.jsonl").write_text("\n".join(line.replace("The", "Our") for line in lines))
    few = ("--gin.BATCH_SIZE=4", "--gin.STEPS=3")
    done = train(tmp_path, *few, piece="tickets_dev.gin")
    assert done.returncode == 0, done.stderr
    assert "step 3/3  dev  nDCG@10" in done.stderr
    log = [json.loads(line) for line in (tmp_path / "RUN" / "log.jsonl").read_text().splitlines()]
    assert any("loss" in row for row in log)
    record = json.loads((tmp_path / "RUN" / "run.json").read_text())["settings"]
    assert "8 pairs" in record["data"], record["data"]

    (tmp_path / "tickets.jsonl").write_text("\n".join([*lines, '{"id": "9", "question": "who?"}']))
    done = train(tmp_path, *few)
    assert done.returncode == 1
    message = "tickets.jsonl:9: no field 'answer' (it has 'id', 'question')"
    assert done.stderr.splitlines()[-1].endswith(message), done.stderr


@pytest.mark.parametrize("how", ["stop", "skip"])
def test_rows_of_csv_are_parsed_and_bad_ones_named_or_skipped(tmp_path, how, capsys):
    path = tmp_path / "tickets.csv.gz"
    rows = b'\xef\xbb\xbfid,question\r\n1,"a, ""b""\nc"\r\n2\r\n\r\n3,\r\n4,caf\xc3\xa9\r\n'
    path.write_bytes(gzip.compress(rows))

    def parse(row, line):
        return line, int(row["id"]), needed_text(row, "question")

    rows = parsed_rows(path, parse, how)
    assert next(rows) == (2, 1, 'a, "b"\nc')
    if how == "stop":
        with pytest.raises(BadInputError, match=r"gz:4: expected 2 columns \(id, question\) but found 1"):
            next(rows)
        return
    assert list(rows) == [(7, 4, "café")]
    assert "skipped 1 record: field 'question' is empty" in capsys.readouterr().err
