import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxir.core.errors import UserError
from jaxir.experiments import cell_runner
from jaxir.experiments.experiment_settings import GridSettings
from jaxir.experiments.grid_cells import Cell, Commands, Row, plan_cells
from jaxir.storage.locks import locked

ROOT = Path(__file__).resolve().parents[2]
# A training run: a log line per step, COMPLETE at the end, status 143 on SIGTERM.
TRAIN = """
import json, pathlib, signal, sys, time
run, steps, pause = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
run.mkdir(parents=True, exist_ok=True)
log = run / "log.jsonl"
(run / "run.json").write_text(json.dumps({"run": str(time.time_ns())}))
done = len(log.read_text().splitlines()) if log.exists() else 0
for step in range(done + 1, steps + 1):
    time.sleep(pause)
    with log.open("a") as file:
        file.write(json.dumps({"step": step}) + "\\n")
(run / "COMPLETE").touch()
print("trained")
"""
TEST = """
import json, pathlib, sys
run, result = map(pathlib.Path, sys.argv[1:])
steps = len((run / "log.jsonl").read_text().splitlines())
result.write_text(json.dumps({"metrics": {"P@1": steps / 10}, "per_query": {"P@1": {"q": steps / 10}}}))
"""
JUDGE = 'import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(\'{"spearman": {"all": 50.0}}\')'
FAIL = "import sys; print('so far so good'); sys.exit('error: the data are bad')"


def cell(directory: Path, *, fails: bool = False, pause: float = 0.0, steps: int = 4) -> Cell:
    run = directory / "model"
    train = ("-c", FAIL) if fails else ("-c", TRAIN, str(run), str(steps), str(pause))
    testing = ("-c", TEST, str(run), str(directory / "test.json"))
    return Cell(
        row=Row(model="tiny", sharing="sde", objective=directory.name, variant=""),
        dataset="data",
        seed=0,
        directory=directory,
        commands=Commands(training=((run, train),), testing=testing),
        identity=("python train " + ("--fail" if fails else f"--steps={steps}"), "python test"),
    )


def run_all(cells: list[Cell], steps: int = 4) -> list[tuple[Cell, str]]:
    return cell_runner.run_cells(cells, steps=steps, on_result=lambda: None)


def test_failed_cell_does_not_stop_the_others(tmp_path, capsys):
    cells = [cell(tmp_path / "a"), cell(tmp_path / "b", fails=True), cell(tmp_path / "c")]
    results = []
    failures = cell_runner.run_cells(cells, steps=4, on_result=lambda: results.append(len(results)))
    assert failures == [(cells[1], "the data are bad")]
    assert "so far so good" in cells[1].log.read_text()
    assert [c.result.exists() for c in cells] == [True, False, True]
    assert len(results) == 2
    log = capsys.readouterr().err
    assert "[3/3] c" in log and "failed: the data are bad" in log and "P@1 0.4000" in log

    made = [c.result.stat().st_mtime_ns for c in (cells[0], cells[2])]
    mended = [cells[0], cell(tmp_path / "b"), cells[2]]
    assert run_all(mended) == [], "b has no results"
    with pytest.raises(UserError, match=r"b was started with --steps=\d; give another output_dir"):
        run_all([cells[1]])
    assert [c.result.stat().st_mtime_ns for c in (cells[0], cells[2])] == made
    assert "2 of 3 cells are already finished" in capsys.readouterr().err


@pytest.fixture
def grid_of(tmp_path, folder, model, tiny_gin):
    """Plans a grid of finished cells with every kind of input."""
    (tmp_path / "mine.gin").write_text(f"include '{tmp_path}/base.gin'\n")
    (tmp_path / "base.gin").write_text("include 'gin/objectives/in_batch_softmax.gin'\n")
    (tmp_path / "sts.tsv").write_text("score\tsentence1\tsentence2\n5\ta cat\tcats\n")
    (tmp_path / "dev.tsv").write_text("score\tsentence1\tsentence2\n5\ta cat\tcats\n")
    (tmp_path / "bm25.trec").write_text("q1 Q0 d1 1 1.0 bm25\n")
    made = shutil.copytree(folder, tmp_path / "data")
    for name in ("theirs", "other", "third"):
        shutil.copytree(model.removeprefix("hf:"), tmp_path / name)
    with tiny_gin.open("a") as opened:
        opened.write(f'DECODER = "hf:{tmp_path / "third"}"\n')

    def planned():
        given = {"recipe": ["gin/pairs.gin"], "steps": 4, "metrics": "RR", "sharing": ["sde"]}
        given |= {"models": [str(tiny_gin)], "objectives": ["standard", f"mine={tmp_path / 'mine.gin'}"]}
        given |= {"datasets": [f"toy={made}"], "untrained": [f"BERT=hf:{tmp_path / 'theirs'}"]}
        given |= {"judges": [f"rated=sts:{tmp_path}/sts.tsv"], "runs": [f"BM25={tmp_path}/bm25.trec"]}
        bindings = [f"MODEL='hf:{tmp_path}/other'", f"STS={tmp_path}/dev.tsv", "DEV_SPLIT=dev"]
        return plan_cells(GridSettings(**given, bindings=bindings), tmp_path / "grid")

    for cell in planned():
        cell_runner.begin(cell.directory, cell.identity, cell_runner.inputs_of(cell))
        for path in (cell.result, *cell.judged.values()):
            path.write_text(json.dumps({"metrics": {"RR": 1.0}, "per_query": {"RR": {"q": 1.0}}}))
    return planned


CHANGES = {
    "mine.gin": ("train.train.seed = 3\n", "toy-tiny-sde-mine-seed0 was started when .*mine.gin had other"),
    "base.gin": ("TEMPERATURE = 0.5\n", "-mine-seed0 was started when .*base.gin had other content"),
    "data/qrels/dev.tsv": ("q1\td2\t1\n", "was started when split dev of data set toy had other content"),
    "data/corpus.jsonl": ('{"_id": "x", "text": "x"}\n', "was started when data set toy had other content"),
    "bm25.trec": ("q1 Q0 d2 2 0.5 bm25\n", "toy-BM25 was started when run BM25 had other content"),
    "dev.tsv": ("1\ta cat\ta dog\n", "-seed0 was started when STS had other content"),
    "sts.tsv": ("1\ta cat\ta dog\n", r"judge_rated.json holds an evaluation on other data than --judges"),
    "theirs/model.safetensors": (None, "toy-BERT was started when model BERT had other content"),
    "other/model.safetensors": (None, "-seed0 was started when MODEL had other content"),
    "third/model.safetensors": (None, "-seed0 was started when DECODER of .*tiny.gin had other content"),
}


def test_cells_that_read_changed_files_are_refused(grid_of, tmp_path):
    with (tmp_path / "mine.gin").open("a") as opened:
        opened.write("# A comment.\n")
    (tmp_path / "theirs" / "README.md").write_text("what a model is does not depend on this")
    assert run_all(grid_of()) == []
    for file, (added, sentence) in CHANGES.items():
        content = (tmp_path / file).read_bytes()
        # Without text to add, change the content but not its size.
        changed = content[:-4] + bytes(4) if added is None else content + added.encode()
        assert changed != content
        (tmp_path / file).write_bytes(changed)
        with pytest.raises(UserError, match=sentence):
            run_all(grid_of())
        (tmp_path / file).write_bytes(content)
    assert run_all(grid_of()) == []


def judged(before: Cell, content: str) -> Cell:
    judging = {"rated": ("-c", JUDGE, str(before.directory / "judge_rated.json"))}
    commands = before.commands._replace(judging=judging)
    return dataclasses.replace(before, commands=commands, judged_by={"rated": content})


def test_finished_steps_of_a_cell_are_kept(tmp_path, capsys):
    def commands_of(made: Cell) -> list[str]:
        assert run_all([made]) == []
        log = (tmp_path / "a" / "log.txt").read_text()
        return [line[-9:] for line in log.splitlines() if line.startswith("$ python")]

    plain = cell(tmp_path / "a")
    assert len(commands_of(plain)) == 2
    plain.result.unlink()
    assert len(commands_of(plain)) == 3
    assert len(commands_of(judged(plain, "1"))) == 4
    assert "rated Spearman 0.5000" in capsys.readouterr().err


def test_judged_results_of_other_data_are_refused_until_removed(tmp_path):
    plain = cell(tmp_path / "a")
    assert run_all([judged(plain, "1")]) == []
    plain.result.unlink()
    assert run_all([plain]) == []  # records the inputs, except the judge's data
    other = judged(plain, "2")
    with pytest.raises(UserError, match=r"judge_rated\.json holds an evaluation on other data"):
        run_all([other])
    other.judged["rated"].unlink()  # do what the error advises
    assert run_all([other]) == [] and run_all([other]) == []


def test_progress_adds_the_steps_of_stages(tmp_path):
    first = cell(tmp_path / "a")
    second = tmp_path / "a" / "second"
    train = (second, ("-c", TRAIN, str(second), "3", "0"))
    both = first.commands._replace(training=(*first.commands.training, train))
    seen = []
    cell_runner.run_cell(dataclasses.replace(first, commands=both), on_steps=seen.append)
    assert seen == sorted(seen) and seen[-1] == 4 + 3 and 4 in seen


def test_incomplete_log_lines_are_skipped(tmp_path):
    assert cell_runner.last_step(tmp_path) == 0
    log = tmp_path / "log.jsonl"
    for torn in ("", '{"step": 9', '{"loss": 1}\n', "null\n"):
        log.write_text("".join(f'{{"step": {n}, "loss": 0.5}}\n' for n in range(1, 300)) + torn)
        assert cell_runner.last_step(tmp_path) == 299
    log.write_bytes(b"a bar\r1 of 2\r2 of 2\rerror: no room\n")
    assert cell_runner.last_line(log) == "no room"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
@pytest.mark.slow
def test_cell_resumes_after_a_signal(tmp_path, number):
    slow = cell(tmp_path / "slow", pause=0.1, steps=40)
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from jaxir.experiments import cell_runner\nfrom tests.experiments.test_runner import cell\n"
        "slow = cell(Path(sys.argv[1]), pause=0.1, steps=40)\n"
        "try:\n    cell_runner.run_cells([slow], steps=40, on_result=lambda: None)\n"
        "except cell_runner.Interrupted as stop:\n    sys.exit(128 + stop.args[0])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(slow.directory)], cwd=ROOT)
    deadline = time.monotonic() + 60
    while cell_runner.last_step(slow.directory / "model") < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(60) == (143 if number == signal.SIGTERM else -number)
    time.sleep(0.2)  # a grid that SIGKILL ended does not wait for its command
    before = cell_runner.last_step(slow.directory / "model")
    time.sleep(0.3)
    assert 2 <= before < 40
    assert cell_runner.last_step(slow.directory / "model") == before  # the command has ended too
    assert not slow.result.exists()

    quick = cell(tmp_path / "slow", steps=40)
    assert run_all([quick], steps=40) == []
    lines = (slow.directory / "model" / "log.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == list(range(1, 41))


def test_killed_command_is_a_failure(tmp_path):
    victim = cell(tmp_path / "victim")
    kill = ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    commands = victim.commands._replace(training=((tmp_path / "victim" / "model", kill),))
    ((_, reason),) = run_all([dataclasses.replace(victim, commands=commands)])
    assert reason == "killed by SIGKILL"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # handlers are restored


@pytest.mark.parametrize("ends", ["os.kill(os.getpid(), signal.SIGTERM)", "sys.exit(128 + signal.SIGTERM)"])
def test_command_stopped_from_outside_stops_the_grid(tmp_path, ends):
    """If a user or a shutdown stops a command, the grid must not start the next cell."""
    stopped = cell(tmp_path / "stopped")
    stop = ("-c", f"import os, signal, sys; {ends}")
    commands = stopped.commands._replace(training=((tmp_path / "stopped" / "model", stop),))
    cells = [dataclasses.replace(stopped, commands=commands), cell(tmp_path / "next")]
    with pytest.raises(cell_runner.Interrupted) as stop:
        run_all(cells)
    assert stop.value.args == (signal.SIGTERM,)
    assert not (tmp_path / "next").exists()


def test_command_ends_if_its_caller_raises(tmp_path):
    place = tmp_path / "pid"
    script = "import os, sys, time; os.write(os.open(sys.argv[1], 65), b'%d' % os.getpid()); time.sleep(60)"

    def give_up():
        if place.exists() and place.read_text():
            raise KeyError

    with pytest.raises(KeyError):
        cell_runner.run_attended(["-c", script, str(place)], give_up)
    with pytest.raises(ProcessLookupError):
        os.kill(int(place.read_text()), 0)


WORKS = """
import sys
from pathlib import Path
from jaxir.experiments import cell_runner
from jaxir.storage.locks import locked
out = Path(sys.argv[1])
with locked(out, "held"):
    cell_runner.run_attended(["-c", sys.argv[2], str(out)])
"""
SAVES = """
import pathlib, signal, sys, time
out = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (out / "terminated").touch())
(out / "begun").touch()
while not (out / "saved").exists():
    time.sleep(0.02)
"""


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


@pytest.mark.skipif(not cell_runner._terminated_with_parent(), reason="no setpriv here")
def test_command_of_a_killed_grid_keeps_the_lock_until_it_has_saved(tmp_path):
    """Without the lock, the next grid would start the cell while its old command still saves."""
    out = tmp_path / "out"
    grid = subprocess.Popen([sys.executable, "-c", WORKS, str(out), SAVES])
    try:
        wait_for(out / "begun")
        grid.kill()
        grid.wait()
        wait_for(out / "terminated")
        with pytest.raises(UserError, match="another works there"), locked(out, "another works there"):
            pass
    finally:
        grid.kill()
        (out / "saved").touch()
    deadline = time.monotonic() + 60
    while True:
        try:
            with locked(out, "another works there"):
                break
        except UserError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
