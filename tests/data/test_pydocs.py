import os
import re
import subprocess
import sys

import pytest

from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.sets import docstrings, package_docs

MODULE = '''
"""Tools to spin wheels at speed.

They are round."""

class Wheel(Base):
    """A wheel that turns
    Args:
      radius: how big it is.
    """

    def __init__(self, radius: float = 1.0, *, spokes=8):
        pass

    def turn(self, /, angle):
        """Turns the wheel by
        e.g. an angle. The angle is in radians."""

    def _private(self):
        """Nobody should read this one.

        Really not."""

if True:
    def spin(x: int, *more, fast=False) -> None:
        """Spin `x` round and round!

        Spin x round and round. Afterwards it stops.
        """

def short(x):
    """Too short.

    This is dropped."""

def bare(x):
    """There is nothing after this line.

    -----"""

def undocumented(x):
    pass

def signature(x):
    """signature(x) -> int and so on

    Not a summary."""
'''


@pytest.fixture
def tree(tmp_path):
    def write(name, text):
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("wheels/__init__.py", MODULE)
    other = MODULE.replace("heel", "og").replace("Spin", "Twist").replace("it stops", "it rests")
    write("wheels/_hidden/parts.py", other)
    write("wheels/tests/test_it.py", MODULE.replace("wheel", "test"))
    write("wheels/_vendor/six.py", MODULE.replace("wheel", "vendored"))
    write("wheels/broken.py", "def f(:\n")
    write("scipy/wheels.py", '"""Tools to SPIN wheels, at speed.\n\nOther words here."""\n')
    write("zoo.py", 'def f():\n    """Feed the hungry animals.\n\n    They are ROUND?"""\n')
    return tmp_path / "site"


def test_documented_public_objects_become_pairs(tree):
    entries = {e.name: e for e in package_docs.collect([tree])}
    assert "wheels.Wheel._private" not in entries and not any("test" in n or "six" in n for n in entries)
    for dropped in ("short", "bare", "undocumented", "signature"):
        assert not [name for name in entries if name.endswith(f".{dropped}")]
    turn = ("Turns the wheel by e.g. an angle.", "turn(angle)", "The angle is in radians.")
    # The body of this docstring begins with the summary again, which is removed there, too.
    spin = ("Spin `x` round and round!", "spin(x, *more, fast=False)", "Afterwards it stops.")
    wheel = ("A wheel that turns", "Wheel(radius=1.0, *, spokes=8)", "Args:\n  radius: how big it is.")
    for name, expected in {"Wheel": wheel, "Wheel.turn": turn, "spin": spin}.items():
        assert entries[f"wheels.{name}"] == docstrings.Entry(f"wheels.{name}", *expected)
    document = entries["wheels.spin"].document
    assert document.contents == f"wheels.spin {spin[1]}\n{spin[2]}"


def test_duplicates_keep_the_held_out_one(tree):
    names = [e.name for e in package_docs.collect([tree])]
    assert names == sorted(names) and len(set(names)) == len(names)
    # scipy.wheels and wheels have one summary; scipy.wheels stays, because it is in the test split.
    assert "scipy.wheels" in names and "wheels" not in names
    # zoo.f has the body of wheels. It is removed, although wheels is itself removed as a duplicate.
    assert "zoo.f" not in names
    # Wheel and Wog have the same body under two summaries: the first by name stays.
    assert "wheels.Wheel" in names and "wheels._hidden.parts.Wog" not in names
    assert "wheels._hidden.parts.spin" in names and "wheels.spin" in names


@pytest.fixture
def many(tree, monkeypatch):
    monkeypatch.setattr(package_docs, "FEWEST", 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    for number in range(40):
        docstring = f'"""Feed the animals of cage {number}.\n\n    They are {number + 1}."""'
        (tree / f"more{number}.py").write_text(f"def f{number}():\n    {docstring}\n")
    return tree


def test_several_processes_give_the_result_of_one(many, monkeypatch):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    together = package_docs.collect([many])
    assert len(started) == 3 and not any(process.returncode is None for process in started)
    monkeypatch.setattr(package_docs, "FEWEST", 1000)
    package_docs._collect.cache_clear()
    assert together == package_docs.collect([many]) and len(together) > 40
    assert len(started) == 3


def test_a_killed_process_is_reported(many, monkeypatch):
    monkeypatch.setattr(package_docs, "_CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(UserError, match="the process that reads docstrings ended with status -9"):
        package_docs.collect([many])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    output = tmp_path_factory.mktemp("pydocs") / "out"
    command = [sys.executable, "-m", "jaxir.pydocs", f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return output, done.stdout


@pytest.mark.slow
def test_command_writes_beir_folders_of_real_text(folder):
    output, printed = folder
    whole = BeirFolder(output)
    assert whole.splits == ["dev", "test", "train"]
    counts = {split: len(list(whole.pairs(split))) for split in whole.splits}
    assert counts["train"] > 10_000 and counts["test"] >= 1_500 and counts["dev"] >= 500
    for split, count in counts.items():
        assert re.search(rf"^{split} +{count:,} pairs from \d+ packages", printed, re.MULTILINE)

    packages = {split: {p.passage_id.partition(".")[0] for p in whole.pairs(split)} for split in whole.splits}
    assert packages["test"] <= docstrings.TEST_PACKAGES and {"scipy", "optax"} <= packages["test"]
    assert not packages["train"] & (packages["dev"] | packages["test"])
    assert not packages["dev"] & packages["test"]
    assert {"numpy", "jax", "collections"} <= packages["train"]

    held_out = BeirFolder(output / "test")
    assert list(held_out.pairs("test")) == list(whole.pairs("test"))
    assert len(list(held_out.corpus())) == counts["test"]


@pytest.mark.slow
def test_no_summary_is_in_its_passage_and_no_text_is_repeated(folder):
    def words(text):
        return f" {' '.join(re.findall(r'[a-z0-9_]+', text.lower()))} "

    output, _ = folder
    pairs = [p for split in docstrings.SPLITS for p in BeirFolder(output).pairs(split)]
    assert all(len(words(p.query).split()) >= 3 for p in pairs if p.query.isascii())
    english = [p for p in pairs if p.query.isascii() and p.passage.isascii()]
    assert len(english) > 0.9 * len(pairs)
    assert not [p.passage_id for p in english if words(p.query) in words(p.passage)]
    assert len({words(p.query) for p in english}) == len(english)
    assert len({p.passage for p in pairs}) == len(pairs)
    (minimize,) = (p for p in pairs if p.passage_id == "scipy.optimize._minimize.minimize")
    assert " minimize(fun, x0, args=(), method=None" in minimize.passage
