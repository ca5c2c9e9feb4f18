import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest


def test_a_report_is_measured_and_copied(cloud, tmp_path):
    cloud.all_ok("create.sh", "install.sh", "launch.sh")
    flags = ["--scale=tiny", f"--to={tmp_path / 'the report.md'}"]
    done = cloud.run("report.sh", *flags)
    assert done.returncode == 1 and done.stderr.count("jaxir-run runs and uses the chips") == 2
    (cloud.bucket / "go").touch()
    cloud.until(lambda: "2 workers: exit 0" in cloud.ok("status.sh").stdout)
    done = cloud.ok("report.sh", *flags)
    assert done.stdout.endswith("# both parts\n")
    assert (tmp_path / "the report.md").read_text() == "# both parts\n"
    assert "is ACTIVE: it costs money" in done.stderr
    assert "the job is complete on all workers" in cloud.ok("resume.sh").stderr  # the training job


def measuring(cloud, tmp_path):
    cloud.all_ok("create.sh", "install.sh")
    process = cloud.start("report.sh", f"--to={tmp_path / 'report.md'}")
    parts = [cloud.folder / f"worker{n}/jaxir-report/report.md" for n in (0, 1)]
    cloud.until(lambda: all(part.exists() and part.read_text() for part in parts))
    return process


def test_a_report_is_awaited_though_a_worker_misses_a_poll(cloud, tmp_path):
    with measuring(cloud, tmp_path) as report:
        for silence in ("silent1", "unreachable"):
            (cloud.folder / silence).touch()
            polls = len(cloud.calls("ssh")) + 2
            cloud.until(lambda polls=polls: len(cloud.calls("ssh")) > polls or report.poll() is not None)
            (cloud.folder / silence).unlink()
            assert report.poll() is None
        (cloud.bucket / "go").touch()
        output = report.communicate(timeout=60)[0]
    assert report.returncode == 0, output
    assert (tmp_path / "report.md").read_text() == "# both parts\n"


@pytest.mark.slow
def test_waiting_ends_if_workers_never_answer(cloud, tmp_path):
    with measuring(cloud, tmp_path) as report:
        (cloud.folder / "unreachable").touch()
        output = report.communicate(timeout=60)[0]
    assert report.returncode == 1
    assert "error: not all workers of test-slice answer" in output.splitlines()[-1]
    assert not (tmp_path / "report.md").exists()


def test_a_report_is_copied_though_one_worker_never_answers(cloud, tmp_path):
    with measuring(cloud, tmp_path) as report:
        (cloud.folder / "silent1").touch()
        (cloud.bucket / "go").touch()
        output = report.communicate(timeout=60)[0]
    assert report.returncode == 1 and "error: some benchmarks failed" in output.splitlines()[-1]
    assert (tmp_path / "report.md").read_text() == "# both parts\n"


def test_an_earlier_report_is_not_copied(cloud, tmp_path):
    cloud.all_ok("create.sh", "install.sh")
    (cloud.bucket / "go").touch()
    cloud.ok("report.sh", f"--to={tmp_path}/first.md")
    for worker in (0, 1):
        broken = cloud.folder / f"worker{worker}/jaxir/benchmarks/report.py"
        broken.write_text("import nothing_there\n")
    done = cloud.run("report.sh", f"--to={tmp_path}/second.md")
    assert done.returncode == 1 and not (tmp_path / "second.md").exists()
    assert "error: worker 0 has no report: see jaxir-report/log on that worker" in done.stderr
    assert "nothing_there" in (cloud.folder / "worker0/jaxir-report/log").read_text()


def interrupted_report(cloud, to: Path, *whens) -> str:
    """Runs report.sh, interrupts it once each of `whens` is true, and returns its stderr."""
    with cloud.start("report.sh", "--scale=tiny", f"--to={to}", stderr=subprocess.PIPE) as report:
        for when in whens:
            cloud.until(when)
        os.killpg(report.pid, signal.SIGINT)
        _, err = report.communicate(timeout=30)
    assert report.returncode == 130, err
    assert "interrupted: ending the benchmarks" in err and "is ACTIVE: it costs money" in err
    return err


def test_an_interrupted_report_is_copied(cloud, tmp_path):
    cloud.all_ok("create.sh", "install.sh")
    first, to = cloud.folder / "worker0/jaxir-report/report.md", tmp_path / "report.md"
    whens = [lambda: first.exists() and first.read_text()]
    whens.append(lambda: "worker.sh status ||" in str(cloud.calls("ssh")[-1]))  # all workers have started
    err = interrupted_report(cloud, to, *whens)
    assert to.read_text() == "# part 1 on worker0 ['--scale=tiny']\n"
    assert f"written: {to}\n" in err
    cloud.until(lambda: not any(cloud.runs(group) for group in cloud.groups()))


def test_an_interrupt_while_measuring_begins_ends_it(cloud, tmp_path):
    """Regression: only the script ended, and workers that had begun continued to measure."""
    cloud.all_ok("create.sh", "install.sh")
    for worker in ("worker0", "worker1"):
        (cloud.folder / worker / "jaxir-report").mkdir()
    (cloud.folder / "worker0/jaxir-report/report.md").write_text("an earlier one")
    os.mkfifo(cloud.folder / "worker1/jaxir-report/log")  # worker 1 blocks, as nothing reads this pipe
    slow = cloud.folder.parent / "bin/setsid"  # the interrupt arrives before the command is started
    slow.write_text(f'#!/bin/sh\nsleep 1\nexec {shutil.which("setsid")} "$@"\n')
    slow.chmod(0o755)
    begun, to = cloud.folder / "worker0/jaxir-report/log", tmp_path / "report.md"
    err = interrupted_report(cloud, to, lambda: begun.exists() and begun.read_text())
    cloud.until(lambda: not any(cloud.runs(group) for group in cloud.groups()))
    assert not to.exists() and "written" not in err
