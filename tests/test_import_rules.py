import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxir.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parent.parent / "jaxir"
ARCHITECTURE = ROOT.parent / "docs" / "architecture.md"
PARALLEL = {"models", "losses", "objectives", "training/evaluators"}  # a capability has one file in each
LAZY = (
    *("tensorflow", "seqio", "tensorflow_datasets", "scann", "matplotlib", "sklearn", "gcsfs", "jnius"),
    *("pymilvus", "milvus_lite", "faiss", "pandas", "grpc", "jax2onnx", "onnx", "onnx_ir", "onnxruntime"),
    *("pyarrow", "rouge_score", "qwix", "nltk", "ray", "grain", "array_record", "wandb", "trackio", "mteb"),
    *("bm25s", "psycopg", "qdrant_client"),
)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


# jaxir/tasks is a link, which `rglob` does not follow.
FILES = {name_of(path): path for path in (*ROOT.rglob("*.py"), *(ROOT / "tasks").glob("*.py"))}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Returns, for each module, the modules of jaxir that it imports, wherever in the file."""
    found = {}
    for name, path in FILES.items():
        mentioned = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                mentioned |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                mentioned |= {f if f in FILES else node.module for f in full}
        found[name] = mentioned & FILES.keys() - {name}
    return found


def room_of(module: str) -> str:
    """Returns the directory of a module, as the table of rooms names it."""
    directory = FILES[module].relative_to(ROOT).parent.as_posix()
    return "" if directory == "." else directory


def test_imports_have_no_circle():
    graphlib.TopologicalSorter(imports()).prepare()


def test_rooms_import_only_rooms_that_the_architecture_lists_above_them():
    rooms = re.findall(r"^\| `([a-z0-9_/]+)/` \|", ARCHITECTURE.read_text(), re.M)
    with_code = {room_of(m) for m, path in FILES.items() if path.stat().st_size} - {""}
    assert sorted(rooms) == sorted(with_code), "docs/architecture.md lists all rooms"
    place = {room: number for number, room in enumerate(rooms)}
    for module, others in imports().items():
        for other in others:
            if room_of(module) in place and room_of(other) in place:
                up = place[room_of(other)] > place[room_of(module)]
                assert not up, f"{module} must not import {other}: its room is below"


def test_no_room_imports_a_command():
    for module, others in imports().items():
        if room_of(module):
            wrong = {other for other in others if not room_of(other)} - {"jaxir.version"}
            assert not wrong, f"{module} must not import {sorted(wrong)}"


def test_top_level_holds_only_commands():
    commands = {name for names in COMMANDS.values() for name in names} - {"sidecar"}
    top = {path.stem for path in ROOT.glob("*.py")}
    assert top == commands | {"__init__", "__main__", "version"}


def test_a_file_name_occurs_once():
    seen: dict[str, Path] = {}
    for path in FILES.values():
        if path.stem.startswith("__") or path.is_relative_to(ROOT / "tasks"):
            continue
        other = seen.setdefault(path.name, path)
        rooms = {p.parent.relative_to(ROOT).as_posix() for p in (path, other)}
        assert other == path or rooms <= PARALLEL, f"{path} and {other} have the same name"


def test_only_cli_imports_gin():
    users = [p for p in FILES.values() if re.search(r"^\s*(import|from) gin\b", p.read_text(), re.M)]
    assert {p.parent.name for p in users} == {"cli"}


def test_importing_jaxir_imports_no_heavy_library():
    code = (
        f"import importlib, sys\nfor m in {sorted(FILES)!r}: importlib.import_module(m)\n"
        f"print([m for m in {LAZY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_scann_imports_tensorflow_without_keras_and_leaves_keras_usable():
    code = (
        "import sys\nfrom jaxir.retrieval.indexes import scann_index\nscann_index._scann()\n"
        "print(*(m in sys.modules for m in ('tensorflow', 'keras', 'pandas', 'matplotlib')))\n"
        "import tensorflow as tf\nprint(tf.keras.layers.Dense.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "False", "False", "keras.src.layers.core.dense"]
