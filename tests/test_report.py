import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "report.py"


def report(output: Path) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), "--scale=tiny", f"--output={output}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def figures_of(text: str) -> dict:
    return json.loads(text.split("```json\n")[1].split("\n```")[0])


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("report_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # NamedTuple resolves the script's types in its module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # the directory that Python adds for a script
        spec.loader.exec_module(module)
        yield module


def test_report_names_its_commit_in_a_clone_and_in_an_archive(module, tmp_path):
    repository, unpacked = tmp_path / "repository", tmp_path / "unpacked"
    repository.mkdir()
    unpacked.mkdir()
    for name in (".git_archival.txt", ".gitattributes"):
        shutil.copy(SCRIPT.parents[1] / name, repository)
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    archive = subprocess.run([*git, "archive", "HEAD"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(unpacked)], input=archive, check=True)
    full = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    commit = module.report_machine.commit
    assert full.startswith(commit(repository)) and len(commit(repository)) >= 7
    assert commit(unpacked) == full[:12]


def test_report_compares_measured_with_planned(module):
    training = {"model": "T5", "parameters": 110e6, "dtype": "bfloat16", "pairs": 512, "lengths": [64, 256]}
    training |= {"steps": 20, "compile_seconds": 61.2, "step_seconds": 0.4, "examples_per_second": 1280.0}
    training |= {"products_at_peak_seconds": 0.1, "mfu": 0.25, "peak_memory_gib": 4.75}
    training |= {"planned/memory_gib": 4.3, "planned/all_at_once_seconds": 0.2}
    training |= {"planned/as_scheduled_seconds": 0.3, "planned/one_after_another_seconds": 0.355}
    found = {"date": "2026-11-25", "scale": "base", "training": training, "loss": {"failed": "status 1: no"}}
    text = module.render(found)
    assert "| step, ms | 400 | 200 | 300 | 355 |\n| MFU | 25% | 50% | 33% | 28% |\n" in text
    assert "Memory of a device: 4.75 GiB at most, planned 4.30 GiB. 1,280 pairs/s." in text
    assert "## Loss\n\n**status 1: no**\n" in text and "## Encoding\n\n**not reached**\n" in text
    assert figures_of(text) == found


@pytest.mark.slow
def test_report_measures_fsdp_without_and_with_sparse_cores(module):
    found = module.sparse_cores(module.SCALES["tiny"], available=True)
    assert found["with"]["loss"] == found["without"]["loss"] and found["with"]["step_seconds"] > 0
    text = module.render({"date": "2026-11-26", "sparsecores": found})
    assert "## Sparsecores" in text and "| SPARSE_CORES | step, ms |" in text
    assert text.count(f"| {found['with']['loss']:.4f} |") == 2
    assert not module.has_sparse_cores()
    skipped = module.sparse_cores(module.SCALES["tiny"], available=False)
    assert "chips without SparseCores" in module.render({"date": "2026-11-26", "sparsecores": skipped})


@pytest.mark.slow
def test_one_command_measures_all_parts(tmp_path):
    with report(tmp_path / "report.md") as process:
        out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    text = (tmp_path / "report.md").read_text()
    assert text.startswith(out.rstrip("\n")) and "failed" not in text
    found = figures_of(text)
    machine, training, loss, encoding = (found[part] for part in ("machine", "training", "loss", "encoding"))
    assert machine["platform"] == "cpu" and machine["versions"].keys() >= {"jax", "jaxlib"}
    assert training["pairs"] == 8 * machine["devices"]
    assert training["step_seconds"] * training["examples_per_second"] == pytest.approx(training["pairs"])
    assert training["planned/memory_gib"] > 0 and training["mfu"] is None
    dense, blockwise = loss["rows"]
    assert blockwise["block_size"] and blockwise["loss"] == pytest.approx(dense["loss"], rel=1e-5)
    assert encoding["texts"] == 50 and encoding["passages_per_second"] > 0 and encoding["tokens"] > 50 * 10


@pytest.mark.slow
def test_interrupted_report_keeps_measured_parts(tmp_path):
    with report(tmp_path / "report.md") as process:
        end = time.monotonic() + 200
        while not (tmp_path / "report.md").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    text = (tmp_path / "report.md").read_text()
    assert figures_of(text)["machine"]["platform"] == "cpu"
    assert "## Training\n\n**interrupted**\n" in text and "## Loss\n\n**not reached**\n" in text
    assert text.startswith(out.rstrip("\n"))
