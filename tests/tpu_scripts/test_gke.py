import os
import re
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "us-docker.pkg.dev/my-project/mine/jaxir"


@pytest.fixture
def gke(cloud):
    cloud.configure(IMAGE=IMAGE)
    return cloud


def test_a_dry_run_prints_the_commands_that_are_run(gke):
    life = ["create.sh", "install.sh", "launch.sh", "status.sh", "logs.sh", "logs.sh --worker=all"]
    printed = []
    for line in (*life, "delete.sh --job", "delete.sh"):
        script, *flags = line.split()
        printed += gke.ok(f"gke/{script}", "--dry_run", *flags).stdout.splitlines()
    assert gke.calls() == []
    commands = [command for command in map(shlex.split, printed) if command[0] != "git"]
    for line in (*life, "delete.sh --job"):
        script, *flags = line.split()
        done = gke.ok(f"gke/{script}", *flags)
        if script in ("create.sh", "delete.sh"):
            assert "Cluster test-slice (1 x v5p-16, spot, and machines without TPUs) is RUNN" in done.stderr
            assert f"gke/delete.sh --config={shlex.quote(str(gke.config))}" in done.stderr
    assert "there is no cluster test-slice" in gke.ok("gke/delete.sh").stderr
    real = [call if call[0] in ("xpk", "kubectl") else ["gcloud", *call] for call in gke.calls()]
    assert [call for call in real if call[:4] != ["gcloud", "container", "clusters", "list"]] == commands
    git = ["git", "-C", gke.checkout, "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.check_output(git, text=True)
    image = f"{IMAGE}:{commit.strip()}"
    where = ["--cluster=test-slice", "--project=my-project", "--zone=us-east5-a"]
    size = ["--tpu-type=v5p-16", "--num-slices=1"]
    assert commands[0] == ["xpk", "cluster", "create", *where, *size, "--spot"]
    assert f"--substitutions=^;^_IMAGE={image};_EXTRAS=tpu,seqio" in commands[1]
    kept = ["--max-restarts=50", "--restart-on-exit-codes=75", "--termination-grace-period-seconds=300"]
    job = ["--workload=test-slice", *size, f"--docker-image={image}", *kept]
    assert commands[2][:-1] == ["xpk", "workload", "create", *where, *job]


def test_sigterm_of_xpk_reaches_training(gke, tmp_path):
    """xpk runs the command in a subshell, to which it sends the signal."""
    words = shlex.split(gke.ok("gke/launch.sh", "--dry_run").stdout)
    command = words[-1].removeprefix("--command=")
    home, python = tmp_path / "pod", tmp_path / "python"
    home.mkdir()
    python.mkdir()
    (python / "python").symlink_to(gke.environment["REAL_PYTHON"])
    shutil.copy(gke.checkout / "job.py", home)
    wait = "while kill -0 $! 2>/dev/null; do sleep 0.1; done; wait $!"
    around = ["bash", "-c", f"({command}) & trap 'kill -TERM $!' TERM; {wait}"]
    environment = gke.environment | {"HOME": str(home), "PATH": f"{python}:{os.environ['PATH']}"}
    with subprocess.Popen(around, cwd=home, env=environment, stdout=subprocess.PIPE, text=True) as pod:
        saved = gke.bucket / "pod"
        gke.until(lambda: saved.exists() and saved.read_text() == "3")
        pod.send_signal(signal.SIGTERM)
        out, _ = pod.communicate(timeout=30)
    assert pod.returncode == 143  # the status for which xpk restarts a job
    assert out.endswith("saved\n") and "it's a 'quoted' $word" in out
    assert (home / "data" / "pairs").read_text() == "some data\n"  # SETUP wrote this file


def test_setup_is_one_line_of_xpks_job(gke, tmp_path):
    """xpk writes the command into an indented block of YAML, which a second line would end."""
    lines, semicolon = "\nmkdir data &&\nexport SEEN=yes\n", "mkdir data; export SEEN=yes;"
    for number, setup in enumerate((lines, semicolon, "mkdir data && export SEEN=yes # comment")):
        place = tmp_path / str(number)
        place.mkdir()
        train = 'TRAIN=(bash -c "echo \\$SEEN" --output_dir=gs://bucket/run)\n'
        gke.configure(train, IMAGE=IMAGE, SETUP=setup)
        command = shlex.split(gke.ok("gke/launch.sh", "--dry_run").stdout)[-1].removeprefix("--command=")
        assert "\n" not in command
        done = subprocess.run(["bash", "-c", f"({command})"], cwd=place, capture_output=True, text=True)
        assert (done.stdout, done.stderr, done.returncode) == ("yes\n", "", 0)
        assert (place / "data").is_dir()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"IMAGE": None}, "IMAGE must be in an Artifact Registry: REGION-docker.pkg.dev/PROJECT/REPOSITORY"),
        ({"TIER": "reserved"}, "TIER=reserved requires RESERVATION=NAME"),
        ({"MAX_RESTARTS": "often"}, "MAX_RESTARTS must be a whole number, not 'often'"),
    ],
)
def test_unusable_settings_are_refused(gke, changed, message):
    gke.configure(**{"IMAGE": IMAGE} | changed)
    gke.refused("gke/create.sh", message)


def test_a_reservation_is_passed_to_xpk(gke):
    gke.configure(IMAGE=IMAGE, TIER="reserved", RESERVATION="ours", SLICES="2")
    assert gke.ok("gke/create.sh", "--dry_run").stdout.endswith("--num-slices=2 --reservation=ours\n")


def test_missing_tool_is_reported(gke, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "git", "gcloud"):
        (tools / tool).symlink_to(shutil.which(tool, path=gke.environment["PATH"]))
    done = gke.run("gke/create.sh", env={"PATH": str(tools)})
    assert done.returncode == 1 and "error: xpk is not installed, or not on the PATH" in done.stderr


def test_the_build_passes_all_arguments_of_the_image():
    folder = ROOT / "tpu_scripts/gke"
    build, docker = (folder / "cloudbuild.yaml").read_text(), (folder / "Dockerfile").read_text()
    passed = re.search(r"--substitutions=\"\^;\^(.*)\"", (folder / "install.sh").read_text())[1]
    assert set(re.findall(r"\$\{(\w+)\}", build)) == {part.split("=")[0] for part in passed.split(";")}
    (file,) = re.findall(r"--file=([^,]+)", build)
    assert (ROOT / file).samefile(folder / "Dockerfile")
    assert set(re.findall(r"--build-arg=(\w+)=", build)) == set(re.findall(r"(?m)^ARG (\w+)", docker))
