import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_slice_is_created_used_and_deleted(cloud):
    done = cloud.ok("create.sh")
    assert "test-slice is WAITING_FOR_RESOURCES" in done.stderr
    assert done.stderr.endswith("test-slice is ACTIVE\n")
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
    words = ["--output_dir=gs://bucket/run", "it's a 'quoted' $word", '--gin.X=["a b"]']
    assert f"starting at step 0 with {words}" in cloud.log(1)
    assert cloud.ok("launch.sh").stdout.count(": already running") == 2
    status = "test-slice (1 x v5p-16, spot, us-east5-a): ACTIVE\n  2 workers: running\n"
    assert cloud.ok("status.sh").stdout == status
    groups = cloud.groups()
    cloud.ok("resume.sh")  # changes nothing while the job runs
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
def test_after_a_preemption_the_same_command_resumes_on_a_new_slice(cloud):
    cloud.ok("resume.sh")  # works without a slice, too
    cloud.until_waiting()
    first = next(c for c in cloud.calls("ssh") if "worker.sh start" in str(c))
    cloud.preempt()
    (cloud.bucket / "go").touch()
    done = cloud.ok("resume.sh", "--watch")
    assert "test-slice was preempted: requesting it again" in done.stderr
    assert "starting at step 3 with" in cloud.log() and "starting at step 0" not in cloud.log()
    assert cloud.steps() == [5, 5]
    verbs = [call[3] for call in cloud.calls() if call[3] in ("create", "delete")]
    assert verbs == ["create", "delete", "create"]
    creates, starts = cloud.calls("create"), [c for c in cloud.calls("ssh") if "worker.sh start" in str(c)]
    assert creates[0] == creates[1] and starts == [first, first]


@pytest.mark.slow
def test_if_one_worker_loses_its_job_all_start_again(cloud):
    cloud.ok("resume.sh")
    cloud.until_waiting()
    os.killpg(int((cloud.folder / "worker1/jaxir-run/pid").read_text()), signal.SIGKILL)
    cloud.until(lambda: "1 workers: died" in cloud.ok("status.sh").stdout)
    cloud.ok("resume.sh")
    cloud.until(lambda: [cloud.log(n).count("starting at step 3") for n in (0, 1)] == [1, 1])
    assert "saved" in cloud.log(0)  # SIGTERM ended the other worker's job, which saved
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


def test_watching_survives_a_failed_describe(cloud):
    with cloud.start("resume.sh", "--watch") as watch:
        cloud.until_waiting()
        (cloud.folder / "fail_describe").write_text("INTERNAL: connection reset")
        before = len(cloud.calls("describe"))
        cloud.until(lambda: len(cloud.calls("describe")) > before + 2 or watch.poll() is not None)
        (cloud.folder / "fail_describe").unlink()
        (cloud.bucket / "go").touch()
        output = watch.communicate(timeout=60)[0]
    assert watch.returncode == 0 and "INTERNAL: connection reset" in output
    assert "the job is complete on all workers" in output and cloud.steps() == [5, 5]
    assert len(cloud.calls("create")) == 1


@pytest.mark.slow
def test_watching_ends_if_gcloud_never_answers(cloud):
    with cloud.start("resume.sh", "--watch") as watch:
        cloud.until_waiting()
        (cloud.folder / "fail_describe").write_text("PERMISSION_DENIED: sign in again")
        output = watch.communicate(timeout=60)[0]
    assert watch.returncode == 1 and output.count("PERMISSION_DENIED") == 10
    assert "error: gcloud does not report the state of test-slice" in output.splitlines()[-1]
    done = cloud.run("resume.sh", "--watch")  # an error of the first poll is reported at once
    assert done.returncode == 1 and done.stderr.count("PERMISSION_DENIED") == 1


@pytest.mark.slow
def test_watching_continues_if_a_slice_is_lost_before_the_job_runs(cloud):
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
        output = watch.communicate(timeout=60)[0]
    assert watch.returncode == 0, output
    assert output.count("test-slice was preempted: requesting it again") == 2
    assert "the job is complete on all workers" in output and cloud.steps() == [5, 5]


def test_watching_ends_if_installing_fails(cloud):
    cloud.configure(SETUP="echo there is no such bucket >&2; false")
    done = cloud.run("resume.sh", "--watch")
    assert done.returncode == 1 and "there is no such bucket" in done.stderr
    assert len(cloud.calls("create")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("job", ["run", "report"])
def test_nothing_is_installed_while_a_job_runs(cloud, job):
    cloud.all_ok("create.sh", "install.sh")
    for worker in (0, 1):
        cloud.on_worker(worker, f"JAXIR_JOB={job} bash jaxir/tpu_scripts/worker.sh start sleep 600")
    groups = cloud.groups()
    done = cloud.run("install.sh")
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
    cloud.configure("TRAIN=(python job.py 5 --output_dir=gs://bucket/run/)\n")
    done = cloud.ok("fetch.sh", flag)
    copied = [call for call in cloud.calls() if call[0] == "storage"][-1]
    assert copied[3:5] == ["gs://bucket/run/log.jsonl", "gs://bucket/run/tensorboard"]
    assert (tmp_path / "to here" / "log.jsonl").read_text() == "{}"
    assert "test-slice is ABSENT, so no worker has a log" in done.stderr
    assert f"xprof {shlex.quote(str(tmp_path / 'to here'))}/tensorboard shows traces" in done.stderr


def test_earlier_logs_are_kept_if_workers_do_not_answer(cloud, tmp_path):
    (cloud.bucket / "run/tensorboard").mkdir(parents=True)
    (cloud.bucket / "run/log.jsonl").write_text("{}")
    cloud.ok("resume.sh")
    cloud.until_waiting()
    to, flag = tmp_path / "to", f"--to={tmp_path / 'to'}"
    (cloud.folder / "silent1").touch()
    assert "not all workers answered" in cloud.ok("fetch.sh", flag).stderr
    assert (to / "workers.log").read_text().count("starting at step 0") == 1
    (cloud.folder / "silent1").unlink()
    cloud.ok("fetch.sh", flag)
    whole = (to / "workers.log").read_text()
    assert whole.count("starting at step 0") == 2 and not (to / "workers.part").exists()
    (cloud.folder / "unreachable").touch()
    done = cloud.ok("fetch.sh", flag)
    assert "workers.log is from an earlier fetch" in done.stderr and (to / "workers.log").read_text() == whole
    (cloud.folder / "unreachable").unlink()
    (cloud.folder / "silent1").touch()
    cloud.ok("fetch.sh", flag)
    assert (to / "workers.log").read_text() == whole
    assert (to / "workers.part").read_text().count("starting at step 0") == 1


def test_an_interrupt_reports_what_exists(cloud):
    cloud.environment["FAKE_STATES"] = "WAITING_FOR_RESOURCES"
    with cloud.start("create.sh", stderr=subprocess.PIPE) as create:
        while "is WAITING_FOR_RESOURCES" not in create.stderr.readline():
            pass
        os.killpg(create.pid, signal.SIGINT)
        err = create.communicate(timeout=30)[1]
    assert create.returncode == 130
    assert "test-slice (1 x v5p-16, spot, us-east5-a) is WAITING_FOR_RESOURCES: it costs" in err
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
    for line in ("create describe", "install scp", "install ssh", "launch ssh", "logs ssh", "delete delete"):
        script, verb = line.split()
        fails(f"{script}.sh", verb)


def test_workers_that_do_not_answer_are_an_error(cloud):
    """gcloud prints a warning and exits with 0 if it could not connect to any worker."""
    cloud.ok("create.sh")
    (cloud.folder / "unreachable").touch()
    for script in ("install.sh", "launch.sh"):
        done = cloud.run(script)
        assert done.returncode == 1 and "error: no worker of test-slice answered" in done.stderr
    done = cloud.run("resume.sh")
    assert done.returncode == 1 and "the workers of test-slice cannot be reached" in done.stderr
    assert len(cloud.calls("create")) == 1


def test_a_request_that_fails_ends_the_waiting(cloud):
    done = cloud.run("create.sh", env={"FAKE_STATES": "WAITING_FOR_RESOURCES FAILED"})
    assert done.returncode == 1
    assert "error: test-slice is FAILED and will not become ACTIVE; delete it with" in done.stderr
    assert "  state: FAILED" in done.stderr  # gcloud's description
