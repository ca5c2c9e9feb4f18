"""Fingerprints of settings are equal in all processes, and differ if a function's behaviour differs."""

import dataclasses
import enum
import functools
import importlib.util
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxir.core.errors import UserError
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.weighted_sum import Ramp, WeightedSum
from jaxir.training.run.run_fingerprint import describe, difference
from tests.training.tiny_run import run

MINE = '''
import functools
import jax

HALF, TABLE = 0.5, {}

def twice(x):
    return x * 2

def decorated(function):
    @functools.wraps(function)
    def inner(step):
        return function(step)
    return inner

@decorated
def weight(step):
    """Doubles."""
    half = [HALF for _ in range(1)][0]
    return twice(half) if step is None else twice(half) / 1.0

def between(start):
    return lambda step: start

jitted = jax.jit(weight)
fixed = between(0.5)
'''


@pytest.fixture
def written(tmp_path):
    """Writes a user's module and imports it again."""

    def write(source):
        (tmp_path / "mine.py").write_text(source)
        spec = importlib.util.spec_from_file_location("mine", tmp_path / "mine.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    # Python would take bytecode of the first text for the second, written within the same second.
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    yield write
    sys.dont_write_bytecode = before


@pytest.mark.parametrize(
    ("old", "new", "differ"),
    [
        ("# nothing", "", ()),
        ("def between", "# A comment, further lines.\n\n\ndef between", ()),
        ('"""Doubles."""', '"""Makes it two times as large."""', ()),
        ("TABLE = 0.5, {}", "TABLE = 0.5, {1: 2}", ()),  # mutable globals are not compared
        # A constant that a comprehension reads.
        ("HALF, TABLE = 0.5", "HALF, TABLE = 0.25", ("weight", "jitted")),
        ("return x * 2", "return x * 3", ("weight", "jitted")),  # changes a function that `weight` calls
        ("/ 1.0", "/ 1.5", ("weight", "jitted")),
        ("function(step)", "function(step) + 1", ("weight", "jitted")),
        ("between(0.5)", "between(0.75)", ("fixed",)),
        ("lambda step: start", "lambda step: start * 2", ("fixed",)),
    ],
)
def test_functions_are_compared_by_what_they_do(written, old, new, differ):
    before = written(MINE)
    told = {name: describe({"f": getattr(before, name)}) for name in ("weight", "jitted", "fixed")}
    after = written(MINE.replace(old, new))
    now = {name: describe({"f": getattr(after, name)}) for name in told}
    found = {name: difference("objective", told[name], now[name]) for name in told}
    assert {name for name, difference in found.items() if difference} == {*differ}
    for sentence in filter(None, found.values()):
        assert sentence.startswith(("other code in objective.f", "objective.f.start=0.5, not 0.75"))


def test_fingerprints_are_equal_in_another_process(written, tmp_path):
    module = written(MINE)
    here = [str(describe(getattr(module, name))) for name in ("weight", "jitted", "fixed")]
    program = (
        "import mine; from jaxir.training.run.run_fingerprint import describe;"
        "print([str(describe(getattr(mine, n))) for n in ('weight', 'jitted', 'fixed')])"
    )
    where = {"PYTHONPATH": f"{tmp_path}:{':'.join(sys.path)}", "JAX_PLATFORMS": "cpu"}
    how = {"env": where | {"PYTHONHASHSEED": "1"}, "capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", program], **how).stdout == f"{here}\n"


def test_code_of_another_python_is_not_compared_and_packages_are_known_by_name():
    mine = describe(lambda step: 1.0)
    assert difference("f", mine.replace("__code__='3.", "__code__='2."), mine) is None
    assert "__code__" not in describe(optax.global_norm)
    was, now = (describe(optax.linear_schedule(0.0, 1.0, steps)) for steps in (10, 20))
    assert difference("f", was, now) == "f.transition_steps=10, not 20"
    assert describe(jax.nn.relu) != describe(jax.nn.silu)


class Kind(enum.Enum):
    A, B = 1, 2


class Slotted:
    __slots__ = ("rate",)

    def __init__(self, rate):
        self.rate = rate

    def at(self, step):
        return self.rate


class Undecorated(Ramp):
    """A subclass of a dataclass that is not a dataclass, with settings outside its fields."""

    kind = "a"

    def __init__(self, rate):
        super().__init__(start=0.0, end=1.0, steps=4)
        object.__setattr__(self, "_rate", rate)


class OtherKind(Undecorated):
    kind = "b"


OtherKind.__qualname__ = Undecorated.__qualname__


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Undecorated(1), Undecorated(2)),
        (Undecorated(1), OtherKind(1)),
        (np.float32(0.5), np.float32(0.25)),
        (np.arange(3), np.array([0, 2, 1])),
        (jnp.arange(3), jnp.arange(4)),
        (jax.jit(jnp.sin), jax.jit(jnp.cos)),
        (np.maximum, np.minimum),
        (Kind.A, Kind.B),
        (Slotted(1), Slotted(2)),
        (Slotted(1).at, Slotted(2).at),
        (Slotted, Kind),
        (jnp.float32, jnp.bfloat16),
        (np.dtype("int8"), np.dtype("int16")),
        ({"a", "b"}, {"a", "c"}),
        (b"a", b"b"),
        (max, min),
        (functools.partial(max, 1), functools.partial(max, 2)),
    ],
)
def test_settings_of_any_kind_are_distinguished(one, other):
    first, second = describe({"x": one}), describe({"x": other})
    assert difference("f", first, describe({"x": one})) is None
    assert difference("f", first, second).startswith("f.x")
    assert describe(np.float32(0.5)) == describe(0.5)


def test_runs_of_earlier_versions_without_closures_or_further_attributes_resume(written):
    now = describe({"f": written(MINE).fixed, "g": optax.linear_schedule(0.0, 1.0, 10)})
    was = "dict(f=mine.between.<locals>.<lambda>(), g=optax.schedules._schedule.polynomial_schedule.<locals>"
    assert difference("objective", f"{was}.schedule())", now) is None
    assert difference("objective", f"{was}.other())", now).startswith("objective.g=optax.schedules._sch")
    was = str(describe(Ramp(start=0.0, end=1.0, steps=4))).replace("Ramp(", "Undecorated(", 1)
    assert difference("objective", was, describe(Undecorated(1))) is None


@dataclasses.dataclass(frozen=True)
class Grown(Ramp):
    """`Ramp` as a later version might define it, with another field."""

    margin: float = 0.0


Grown.__qualname__ = "Ramp"


def test_a_field_that_was_added_later_is_no_difference_if_it_has_its_default():
    settings = {"start": 0.0, "end": 1.0, "steps": 4}
    was, now = describe(Ramp(**settings)), describe(Grown(**settings))
    assert difference("f", was, now) is None
    wider = describe(Grown(**settings, margin=1.0))
    assert difference("f", was, wider) == "no setting f.margin, which is now 1.0"
    assert difference("f", now, was) == "f.margin=0.0, a setting that no longer exists"


@pytest.mark.slow
def test_a_run_whose_function_was_changed_is_not_resumed(written, tmp_path):
    """A user edits the function's file between two runs."""
    settings = {"steps": 6, "checkpoint_every": 3, "dev": None}

    def objective(source):
        weights = {"a": written(source).weight, "b": Ramp(start=0.0, end=1.0, steps=4)}
        return WeightedSum(parts={"a": Contrastive(), "b": Contrastive()}, weights=weights)

    place, source = tmp_path / "run", "import jax.numpy as jnp\nweight = lambda step: jnp.float32(0.5)\n"
    run(place, objective=objective(source), **settings)
    shutil.rmtree(place / "checkpoints" / "6")
    (place / "COMPLETE").unlink()
    with pytest.raises(UserError, match=r"other code in objective\.weights\.a \(mine\.<lambda>\); give the"):
        run(place, objective=objective(source.replace("0.5", "0.25")), **settings)
    assert run(place, objective=objective(f"# Mine.\n{source}"), **settings).started_at == 3
