"""The import rules of docs/architecture.md: and what stays out until it is used."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "jaxir"
LEAVES = {
    "asides",
    "checksums",
    "compile_cache",
    "cpu",
    "distributed",
    "errors",
    "faults",
    "features",
    "files",
    "installation",
    "leases",
    "json_files",
    "lean_tensorflow",
    "locks",
    "mapped",
    "outputs",
    "partitioning",
    "platforms",
    "progress",
    "reading",
    "simple_types",
    "__version__",
}
MAY_IMPORT = {
    "costs": set(),
    "losses": set(),
    "models": set(),
    "data": set(),
    "objectives": {"losses", "models"},
    "interop": {"models", "data"},
    "sidecar": {"cli"},  # its own command
    "retrieval": {"models", "data", "interop", "sidecar"},
    "evaluation": {"models", "data", "interop", "retrieval"},
    "evaluators": {"models", "data", "objectives", "interop", "retrieval", "evaluation"},
    "training": {
        "costs",
        "losses",
        "models",
        "data",
        "objectives",
        "interop",
        "retrieval",
        "evaluation",
        "evaluators",
    },
    "planning": {"costs", "models", "objectives", "interop", "training"},
    "experiments": {"models", "data", "interop", "retrieval", "evaluation"},
    "serving": {"models", "data", "interop", "retrieval"},
    "tasks": {"data"},  # the folder at the top of the repository
}
# Rooms within rooms, and which of their neighbours these may import.
INNER = {
    "retrieval/encoding": set(),
    "retrieval/indexes": {"encoding"},
    "retrieval/ranking": {"encoding", "indexes"},
    "retrieval/mining": {"encoding", "indexes", "ranking"},
    "retrieval/answering": {"encoding", "ranking"},
    "interop/huggingface": set(),
    "interop/t5x": set(),
    "interop/exports": set(),
}
RECIPES = {"gin"}  # no code
LAZY = (
    *("tensorflow", "seqio", "tensorflow_datasets", "scann", "matplotlib", "sklearn", "gcsfs", "jnius"),
    *("pymilvus", "milvus_lite", "faiss", "pandas", "grpc", "jax2onnx", "onnx", "onnx_ir", "onnxruntime"),
    *("pyarrow", "rouge_score", "nltk", "ray", "grain", "array_record"),
)


def project_imports(path: Path, room: str = "") -> set[str]:
    """Returns what a file imports, wherever in the file, of jaxir or of a room of it: names below that."""
    prefix = "jaxir." + (f"{room}." if room else "")
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names]
        else:
            continue
        found |= {n.removeprefix(prefix).split(".")[0] for n in names if n.startswith(prefix)}
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_one_way(room):
    files = list((ROOT / room).glob("**/*.py"))
    assert files
    for path in files:
        wrong = project_imports(path) - MAY_IMPORT[room] - LEAVES - {room}
        assert not wrong, f"{path.relative_to(ROOT)} must not import {sorted(wrong)}"


@pytest.mark.parametrize("inner", INNER)
def test_inner_rooms_import_one_way(inner):
    room, name = inner.split("/")
    files = list((ROOT / inner).glob("*.py"))
    assert len(files) > 1
    neighbours = {p.name for p in (ROOT / room).iterdir() if p.is_dir() and p.name != "__pycache__"}
    for path in files:
        wrong = project_imports(path, room) & neighbours - INNER[inner] - {name}
        assert not wrong, f"{path.relative_to(ROOT)} must not import {sorted(wrong)}"


def test_every_inner_room_is_ruled():
    inner = {p.parent for p in ROOT.glob("*/*/*.py")} - {ROOT / "sidecar/server", ROOT / "tasks"}
    assert {str(p.relative_to(ROOT)) for p in inner} == set(INNER)


def test_leaves_import_only_leaves():
    for leaf in LEAVES - {"__version__"}:
        assert project_imports(ROOT / f"{leaf}.py") <= LEAVES


def test_gin_stays_at_the_edge():
    users = [
        p.name for p in ROOT.glob("**/*.py") if re.search(r"^\s*(import|from) gin\b", p.read_text(), re.M)
    ]
    assert sorted(users) == ["gin_checks.py", "gin_config.py", "gin_errors.py", "gin_keys.py"]


def test_every_room_is_ruled():
    rooms = {p.name for p in ROOT.iterdir() if p.is_dir()}
    assert rooms - {"__pycache__"} == set(MAY_IMPORT) | RECIPES


def test_no_tensorflow_until_it_is_used():
    modules = [
        ".".join(p.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")
        for p in sorted(ROOT.glob("**/*.py"))
    ]
    code = (
        f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
        f"print([m for m in {LAZY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_scann_brings_tensorflow_but_not_keras_which_stays_to_be_had():
    code = (
        "import sys\nfrom jaxir.retrieval.indexes import scann_index\nscann_index._scann()\n"
        "print(*(m in sys.modules for m in ('tensorflow', 'keras', 'pandas', 'matplotlib')))\n"
        "import tensorflow as tf\nprint(tf.keras.layers.Dense.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "False", "False", "keras.src.layers.core.dense"]
