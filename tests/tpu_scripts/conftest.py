"""A fake Google Cloud in a folder, and a checkout whose scripts use it."""

import ast
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]

# A job like training: it counts steps, saves the count in the bucket, and handles SIGTERM.
JOB = """
import os, pathlib, signal, sys, time
bucket, steps = pathlib.Path(os.environ["BUCKET"]), int(sys.argv[1])
home = pathlib.Path.home()
saved = bucket / home.name
at = int(saved.read_text()) if saved.exists() else 0
print(f"starting at step {at} with {sys.argv[2:]}", flush=True)
def stop(*_):
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
while at < steps:
    at += 1
    part = saved.with_suffix(".part")
    part.write_text(str(at))
    part.replace(saved)
    if (bucket / "fail").exists():
        sys.exit("it broke")
    while at >= 3 and not (bucket / "go").exists():
        time.sleep(0.02)
print("complete", flush=True)
"""

# A report like the real one, written part by part: the second when the bucket has "go".
REPORT = """
import os, pathlib, sys, time
output = pathlib.Path(sys.argv[1].removeprefix("--output="))
output.write_text(f"# part 1 on {pathlib.Path.home().name} {sys.argv[2:]}\\n")
while not (pathlib.Path(os.environ["BUCKET"]) / "go").exists():
    time.sleep(0.02)
output.write_text("# both parts\\n")
"""

TRAIN = """
TRAIN=(python job.py 5 --output_dir=gs://bucket/run "it's a 'quoted' \\$word" --gin.X='["a b"]')
"""

UV = """#!/usr/bin/env bash
echo "$@" >>"$HOME/uv_calls"
case "$1" in
  venv)
    mkdir -p .venv/bin
    # Without installed packages, because finding them takes longer than the jobs.
    printf '#!/bin/sh\\nexec "%s" -IS "$@"\\n' "$REAL_PYTHON" >.venv/bin/python
    chmod +x .venv/bin/python
    ;;
esac
"""


class Cloud:
    """A folder with the fake gcloud's state, a copy of `checkout`, and a bucket."""

    def __init__(self, folder: Path, checkout: Path):
        self.folder, self.bucket, self.checkout = folder / "cloud", folder / "bucket", folder / "checkout"
        binaries = folder / "bin"
        for directory in (self.folder, self.bucket, binaries):
            directory.mkdir(parents=True)
        shutil.copytree(checkout, self.checkout)
        for name, program in (("gcloud", "gcloud"), ("xpk", "xpk"), ("kubectl", "xpk")):
            # `env python3` is not used, because it may find a machine's slow shims.
            started = [sys.executable, "-IS", str(HERE / f"fake_{program}.py"), name]
            (binaries / name).write_text(f'#!/bin/sh\nexec {shlex.join(started)} "$@"\n')
        (binaries / "uv").write_text(UV)
        for file in binaries.iterdir():
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        self.environment = os.environ | {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "FAKE_CLOUD": str(self.folder),
            "BUCKET": str(self.bucket),
            "REAL_PYTHON": sys.executable,
            "POLL_SECONDS": "0.05",
            "TMPDIR": str(folder),
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        self.config = folder / "my slice.sh"  # a path with a blank
        self.configure()

    def configure(self, train: str = TRAIN, **changed: str) -> None:
        settings = {"PROJECT": "my-project", "ZONE": "us-east5-a", "NAME": "test-slice"}
        settings |= {"ACCELERATOR_TYPE": "v5p-16", "TIER": "spot", "VALID_UNTIL": "2h", "EXTRAS": "tpu,seqio"}
        settings |= {"SETUP": "mkdir data && echo some data >data/pairs"} | changed
        lines = [f"{name}='{value}'\n" for name, value in settings.items() if value is not None]
        self.config.write_text("".join(lines) + train)

    def run(self, script: str, *flags: str, **kwargs) -> subprocess.CompletedProcess:
        command = ["bash", str(self.checkout / "tpu_scripts" / script), f"--config={self.config}", *flags]
        environment = self.environment | kwargs.pop("env", {})
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, **kwargs)

    def ok(self, script: str, *flags: str, **kwargs) -> subprocess.CompletedProcess:
        done = self.run(script, *flags, **kwargs)
        assert done.returncode == 0, done.stderr
        return done

    def all_ok(self, *scripts: str) -> None:
        for script in scripts:
            self.ok(script)

    def refused(self, script: str, *words: str) -> None:
        """Runs a script that must end with one error that has these words, without calling gcloud."""
        done = self.run(script)
        assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")
        assert all(word in done.stderr for word in words) and self.calls() == []

    def on_worker(self, worker: int, command: str) -> None:
        home = self.folder / f"worker{worker}"
        environment = self.environment | {"HOME": str(home)}
        subprocess.run(["bash", "-c", command], check=True, cwd=home, env=environment)

    def calls(self, verb: str | None = None) -> list[list[str]]:
        path = self.folder / "calls"
        calls = [ast.literal_eval(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in calls if verb is None or call[3] == verb]

    def state(self) -> str | None:
        try:
            return (self.folder / "state").read_text().split()[0]
        except FileNotFoundError:
            return None

    def change_state(self, state: str) -> None:
        part = self.folder / "state.part"
        part.write_text(state)
        part.replace(self.folder / "state")

    def start(self, script: str, *flags: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", str(self.checkout / "tpu_scripts" / script), f"--config={self.config}", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=self.environment,
            start_new_session=True,
        )

    def steps(self) -> list[int]:
        return [int((self.bucket / f"worker{n}").read_text()) for n in (0, 1)]

    def log(self, worker: int = 0) -> str:
        return (self.folder / f"worker{worker}/jaxir-run/log").read_text()

    def groups(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("worker*/jaxir-*/pid")]

    def runs(self, process: int) -> bool:
        """Whether a process runs. Linux shows no command line for a zombie."""
        try:
            return bool(Path(f"/proc/{process}/cmdline").read_bytes())
        except (FileNotFoundError, ProcessLookupError):
            return False

    def until(self, condition) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, "timeout"
            time.sleep(0.02)

    def until_waiting(self) -> None:
        """Waits until the job has saved step 3 on both workers and waits for the file "go"."""
        saved = [self.bucket / f"worker{n}" for n in (0, 1)]
        self.until(lambda: all(path.exists() for path in saved) and self.steps() == [3, 3])

    def preempt(self) -> None:
        """Preempts the slice: kills processes, deletes disks, and sets the state SUSPENDED."""
        self.kill()
        for worker in self.folder.glob("worker*"):
            shutil.rmtree(worker)
        self.change_state("SUSPENDED")

    def kill(self) -> None:
        for group in self.groups():
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    checkout = tmp_path_factory.mktemp("small") / "checkout"
    shutil.copytree(ROOT / "tpu_scripts", checkout / "tpu_scripts")
    (checkout / "job.py").write_text(JOB)
    (checkout / "benchmarks").mkdir()
    (checkout / "benchmarks" / "report.py").write_text(REPORT)
    git = ["git", "-C", str(checkout), "-c", "user.name=t", "-c", "user.email=t"]
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}
    for command in (["init", "-q", "--template="], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True, env=environment)
    return checkout


@pytest.fixture
def cloud(tmp_path, checkout):
    cloud = Cloud(tmp_path, checkout)
    yield cloud
    cloud.kill()
