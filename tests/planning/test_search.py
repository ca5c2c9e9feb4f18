"""Which settings a search compiles and which it skips; the command with a compiler."""

import dataclasses
import itertools
import signal
import subprocess
import sys
import types

import pytest

from jaxir.costs import targets
from jaxir.interop.huggingface import hf_config
from jaxir.interop.weights.weights import write_json
from jaxir.planning import setting_search, slices
from jaxir.planning.setting_search import Choice
from jaxir.planning.step_figures import Figures
from tests.planning.conftest import QUICK, SMALL, users_environment

GIB = 2**30
LEVELS = {
    "fsdp": [1, 2, 4],
    "tensor": [1, 2, 4],
    "remat": [False, "products", True],
    "chunks": [1, 2, 4, 8],
    "scan": [True, False],
    "sparse_cores": [False],
}
START = Choice(1, 1, True, 1, True, False)


class Machine:
    """Steps whose memory and time are sums: a state split by `fsdp`, activations split by chunks."""

    def __init__(self, *, limit, state=2.0, kept=(40.0, 12.0, 2.0), fsdp_ms=1.0, scan_ms=-2.0, sent_ms=0.0):
        self.limit, self.state, self.kept = limit, state, dict(zip(LEVELS["remat"], kept, strict=True))
        self.fsdp_ms, self.scan_ms, self.sent_ms = fsdp_ms, scan_ms, sent_ms
        self.compiled = []

    def figures(self, choice):
        size = self.state / choice.fsdp + self.kept[choice.remat] / choice.chunks
        ms = 100 + {False: -30, "products": -20, True: 0}[choice.remat] + self.fsdp_ms * choice.fsdp
        ms += 5 * choice.tensor + 10 * choice.chunks + self.scan_ms * choice.scan
        ms += self.sent_ms * (choice.fsdp - 1) * (not choice.sparse_cores)
        fits = size <= self.limit
        return Figures(
            size=int(size * GIB),
            held=int(self.state / choice.fsdp * GIB),
            limit=int(self.limit * GIB / 0.92) + 1,
            parts={"HBM": ms / 1e3} if fits else {},
            at_once=ms / 1e3,
            scheduled=ms / 1e3,
            in_turn=ms / 1e3,
            waits=0.0,
            compiling=60.0,
        )

    def refuse(self, choice):
        return "" if 4 % (choice.fsdp * choice.tensor) == 0 else "cannot be split so"

    def measure(self, choice):
        self.compiled.append(choice)
        return self.figures(choice)

    def quickest(self, levels=LEVELS):
        """Returns the optimum of compiling everything, with the fewest chunks."""
        every = itertools.starmap(Choice, itertools.product(*levels.values()))
        fitting = [c for c in every if not self.refuse(c) and self.figures(c).fits]

        def cost(choice):
            return choice.chunks, self.figures(choice).scheduled * (1.02 if choice.sparse_cores else 1)

        return min(fitting, key=cost, default=None)


def run(machine, start=START, levels=LEVELS):
    reports = []
    rows = setting_search.search(
        start, levels, machine.refuse, machine.measure, lambda *given: reports.append(given)
    )
    assert [choice for choice, _, _ in reports] == machine.compiled == list(dict.fromkeys(machine.compiled))
    return rows


@pytest.mark.parametrize(
    ("limit", "most"),
    [
        (50.0, 8),  # everything fits: tries single changes, then the one faster combination
        (15.0, 7),  # keeping everything does not fit
        (12.8, 9),  # products fit only with parameters split by four, which alone is slower
        (1.5, 7),  # the step fits only in two chunks
    ],
)
def test_search_finds_the_optimum_with_few_compilations(limit, most):
    machine = Machine(limit=limit)
    rows = run(machine)
    assert setting_search.best(rows) == machine.quickest()
    assert len(machine.compiled) <= most
    for choice, found in rows.items():
        assert (choice in machine.compiled) == isinstance(found, Figures)


LARGER = "larger than fsdp=1 tensor=1 remat=products chunks=1 scan=True, which does not fit"


@pytest.mark.parametrize(
    ("machine", "changed", "reason"),
    [
        ({"limit": 15.0, "fsdp_ms": 2.0}, {"fsdp": 4}, "fsdp=2 is already slower"),
        ({"limit": 15.0, "fsdp_ms": 2.0}, {"fsdp": 2, "remat": "products"}, "from single changes: 97 ms"),
        ({"limit": 15.0, "fsdp_ms": 2.0}, {"fsdp": 2, "remat": False}, "from single changes: 41.00 GiB"),
        ({"limit": 15.0, "fsdp_ms": -1.0}, {"fsdp": 4, "tensor": 2}, "cannot be split so"),
        ({"limit": 5.0}, {"remat": False}, LARGER),
    ],
)
def test_skipped_settings_have_reasons(machine, changed, reason):
    assert run(Machine(**machine))[START._replace(**changed)].endswith(reason)


def test_search_skips_chunks_that_cannot_fit():
    machine = Machine(limit=0.75, state=0.4)
    rows = run(machine)
    assert setting_search.best(rows).chunks == 4 == machine.quickest().chunks
    assert "larger than " in rows[START._replace(chunks=2)]
    assert {c.chunks for c in machine.compiled} == {1, 4}


def test_search_finds_no_best_setting_if_nothing_fits():
    machine = Machine(limit=0.1)
    assert setting_search.best(run(machine)) is None and machine.quickest() is None


@pytest.mark.parametrize(("sent_ms", "sends"), [(10.0, True), (0.5, False)])
def test_sparse_cores_are_chosen_only_if_clearly_faster(sent_ms, sends):
    """Parameters must be split to fit, so they are sent; saving .5 % of the time is not enough."""
    machine = Machine(limit=3.2, state=4.8, sent_ms=sent_ms)
    levels = LEVELS | {"sparse_cores": [False, True]}
    rows = run(machine, levels=levels)
    best = setting_search.best(rows)
    assert best == machine.quickest(levels) and best.fsdp > 1 and best.sparse_cores == sends
    assert str(best).endswith("scan=True sparse_cores=True" if sends else "scan=True")
    assert len(machine.compiled) <= 8


@pytest.mark.parametrize(
    ("prices", "hours", "chosen", "costs"),
    [
        (None, None, "v5e:4x4", []),
        ({"v5e": 1.0, "v5p": 4.0}, None, "v5e:2x2", ["8.00", "12.80", "12.80"]),
        # v5e:4x4 costs as much as v5p, but is faster
        ({"v5e": 1.0, "v5p": 4.0}, 1.5, "v5e:4x4", ["8.00", "12.80", "12.80"]),
        ({"v5e": 1.0, "v5p": 3.0}, 1.5, "v5p:2x2x1", ["8.00", "12.80", "9.60"]),
        ({"v5e": 1.0, "v5p": 4.0}, 0.5, None, ["8.00", "12.80", "12.80"]),
    ],
)
def test_cheapest_slice_within_the_time_limit_is_chosen(prices, hours, chosen, costs):
    """Each of 1,000 steps takes 7.2, 2.88 and 2.88 s on three slices; on the last slice nothing fits."""
    machine = Machine(limit=50.0)
    found = []
    for name, seconds in (("v5e:2x2", 7.2), ("v5e:4x4", 2.88), ("v5p:2x2x1", 2.8801), ("v5e:1x1", None)):
        figures = dataclasses.replace(machine.figures(START), scheduled=seconds or 1.0)
        rows = {START: figures if seconds else "too large"}
        found.append(slices.Searched(targets.parse(name), rows, START if seconds else None))
    recipe = types.SimpleNamespace(steps=1000)
    best = slices.choose(found, recipe, prices, hours)
    assert (best and best.target.name) == chosen
    reports = list(slices.comparison(found, best, recipe, prices, hours))
    assert [line.split()[0] for line in reports[2:6]] == [s.target.name for s in found]
    assert [cost in line for cost, line in zip(costs, reports[2:], strict=False)] == [True] * len(costs)
    late = [s for s in found if s.best and hours is not None and s.seconds / 3.6 > hours]
    assert sum(line.endswith("too slow") for line in reports) == len(late)
    assert ("  none is fast enough" in reports) == (chosen is None)


@pytest.mark.slow
def test_killed_search_continues_from_cached_figures(tpu_compiler, in_process, small_macros, model):
    write_json(model / "config.json", hf_config.describe(dataclasses.replace(SMALL, num_layers=1), 0))
    tmp_path = model.parent
    command = ["-m", "jaxir.plan", "--search", "--gin_file=gin/samtone_base.gin", "--scan=False"]
    command += ["--topology=v5e:1x1,v5e:16x16", "--prices=v5e=1.2", "--hours=24"]
    command += [macro for macro in small_macros if "FSDP" not in macro]
    more = QUICK | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    how = {"env": users_environment(**more), "cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, *command], **how) as process:
        first = process.stderr.readline()
        process.send_signal(signal.SIGKILL)
    assert "v5e:1x1 fsdp=1 tensor=1 remat=all chunks=1 scan=False: 0.0" in first and " s)" in first
    done = in_process(*command, **more)
    assert done.returncode == 0, done.stderr
    kept, *others = done.stderr.splitlines()
    assert kept.partition(" (")[0] == first.partition(" (")[0] and "(cached)" in kept
    assert [line.partition(":")[2].partition(" chunks")[0] for line in others] == [
        "1x1 fsdp=1 tensor=1 remat=kernels",
        "1x1 fsdp=1 tensor=1 remat=products",
        "1x1 fsdp=1 tensor=1 remat=none",
    ]
    verdict, settings, slices, table = done.stdout.split("\n\n")[:4]
    assert verdict.startswith("v5e:1x1: ") and verdict.endswith("below a gin file's includes:")
    assert [line.split()[3] for line in table.splitlines()[2:6]].count("all") == 1
    assert "fastest" in table.splitlines()[2]
    assert "batch_size must be a multiple of the 256 devices" in slices and "cheapest" in slices
    assert "SLICES = 1\nMESH_DATA = -1\nFSDP = 1\nTENSOR = 1\nREMAT = " in settings
    assert settings.endswith("\nSCAN = False\nCHUNKS = 1") and "compiled under quick settings" in done.stdout
