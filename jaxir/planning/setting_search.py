"""Which setting of a step is quickest of those that fit, with few of them compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxir.models.layers import Remat
from jaxir.planning.plan_report import gib
from jaxir.planning.step_figures import Figures

_MESH = ("fsdp", "tensor")
# What is thought to need this much more than there is, is not compiled.
_DOUBT = 1.02
# What no TPU has run yet must be worth this much by the compiler's account.
_WORTH = 1.02


class Choice(NamedTuple):
    """How a step may be run, which changes nothing of what it computes.

    Attributes:
      fsdp: chips over which parameters are split.
      tensor: chips over which heads and feed-forward units are split.
      remat: what is recomputed of blocks.
      chunks: of gradient caching.
      scan: whether blocks are scanned over.
      sparse_cores: whether the chips' SparseCores send.
    """

    fsdp: int
    tensor: int
    remat: Remat
    chunks: int
    scan: bool
    sparse_cores: bool

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in zip(self._fields, self.words, strict=True)]
        return " ".join(words if self.sparse_cores else words[:-1])

    @property
    def words(self) -> tuple[str, ...]:
        """Its values as a user would say them."""
        remat = {False: "none", True: "all"}.get(self.remat, self.remat)
        return str(self.fsdp), str(self.tensor), str(remat), *map(str, self[3:])


# What is tried of each, in rising order; of `remat` what keeps most first.
Levels = Mapping[str, Sequence[Any]]
# Choice -> why it is none; "" where it is one.
Refuse = Callable[[Choice], str]
# Choice -> its figures, or why there are none.
Measure = Callable[[Choice], Figures | str]
# (choice, its figures, how many more are to be compiled as far as is known).
Say = Callable[[Choice, Figures, int], None]


def search(
    start: Choice, levels: Levels, refuse: Refuse, measure: Measure, say: Say
) -> dict[Choice, Figures | str]:
    """Compiles what may be quickest; returns figures, or why something was not compiled, in order.

    First something that fits: `start` with all recomputed, else with parameters split further. Then what
    differs from it in one thing. Then, of the combinations, those that would be quicker than the best so far
    if each change did what it does alone. More chunks are tried only where nothing fits with fewer, as
    CHUNKS=auto does.

    Args:
      start: where to begin.
      levels: what may be tried of each field of a `Choice`.
      refuse: says why a choice cannot be run, without compiling it.
      measure: compiles a choice, or says why it cannot be run after all.
      say: told of each that was compiled.
    """
    found = _Search(levels, refuse, measure, say)
    for chunks in levels["chunks"]:
        reference = found.something_that_fits(start._replace(chunks=chunks, remat=levels["remat"][-1]))
        if reference is not None:
            found.change_one_thing(reference)
            found.combine(reference)
            break
    return found.rows


def best(rows: Mapping[Choice, Figures | str]) -> Choice | None:
    """Returns the quickest that fits, None if none does; with SparseCores only if that is 2 % quicker."""
    fitting = {choice: f for choice, f in rows.items() if isinstance(f, Figures) and f.fits and f.timed}
    seconds = {c: f.scheduled * (_WORTH if c.sparse_cores else 1) for c, f in fitting.items()}
    return min(seconds, key=seconds.get, default=None)


class _Search:
    def __init__(self, levels: Levels, refuse: Refuse, measure: Measure, say: Say):
        self.levels, self.refuse, self.measure, self.say = levels, refuse, measure, say
        self.rows: dict[Choice, Figures | str] = {}

    def something_that_fits(self, start: Choice) -> Choice | None:
        """Returns the first choice that fits, with parameters split ever further; None if none does.

        A larger `tensor` is no help where `fsdp` can be larger: it leaves each chip more rows.
        """
        for fsdp in [fsdp for fsdp in self.levels["fsdp"] if fsdp >= start.fsdp]:
            choice = start._replace(fsdp=fsdp)
            figures = self._try(choice, len(self._beside(choice)))
            if figures is not None and figures.fits:
                return choice
        return None

    def change_one_thing(self, reference: Choice) -> None:
        """Tries what differs in one field; of numbers ever further ones, until it gets slower."""
        left = len(self._beside(reference))
        for name, values in self._ways(reference):
            last, slower = self.rows[reference].scheduled, ""
            for value in values:
                choice = reference._replace(**{name: value})
                left -= not self.refuse(choice)
                if slower:
                    self.rows.setdefault(choice, self.refuse(choice) or slower)
                    continue
                figures = self._try(choice, left)
                if name not in _MESH or figures is None or not figures.timed:
                    continue
                saves = name == "fsdp" and value > reference.fsdp and self._lacks_little(reference)
                if figures.scheduled >= last and not saves:
                    slower = f"{name}={value} is slower already"
                last = figures.scheduled

    def _ways(self, reference: Choice) -> list[tuple[str, list[Any]]]:
        """Returns fields with the values to try of each, one after the other, beside a reference's."""
        ways: list[tuple[str, list[Any]]] = [("remat", list(reversed(self.levels["remat"]))[1:])]
        for name in _MESH:
            values, now = self.levels[name], getattr(reference, name)
            ways += [(name, [n for n in values if n > now]), (name, [n for n in reversed(values) if n < now])]
        for name in ("scan", "sparse_cores"):
            ways += [(name, [on for on in self.levels[name] if on != getattr(reference, name)])]
        return ways

    def _beside(self, reference: Choice) -> list[Choice]:
        """Returns what differs from a choice in one field and can be run."""
        ways = self._ways(reference)
        beside = [reference._replace(**{name: value}) for name, values in ways for value in values]
        return [choice for choice in beside if not self.refuse(choice)]

    def _lacks_little(self, reference: Choice) -> bool:
        """Returns whether more could be kept of blocks if parameters were split further."""
        others = (self.rows.get(reference._replace(remat=remat)) for remat in self.levels["remat"])
        return any(isinstance(f, Figures) and not f.fits and f.at_least <= f.allowed for f in others)

    def combine(self, reference: Choice) -> None:
        """Tries what differs in several fields, the one thought to be quickest first."""
        values = [list(self._known(reference, name)) for name in Choice._fields]
        combinations = [Choice(*each) for each in itertools.product(*values)]
        for choice in combinations:
            if refused := self.refuse(choice):
                self.rows.setdefault(choice, refused)
        allowed = self.rows[reference].allowed
        while True:
            quickest = self.rows[best(self.rows)].scheduled
            thought = {c: self._thought(reference, c) for c in combinations if c not in self.rows}
            worth = {
                choice: (not unknown, seconds)
                for choice, (size, seconds, unknown) in thought.items()
                if size <= _DOUBT * allowed and (unknown or seconds < quickest)
            }
            if not worth:
                break
            self._try(min(worth, key=worth.get), len(worth) - 1)
        for choice, (size, seconds, _) in thought.items():
            tells = f"{gib(size)} GiB" if size > _DOUBT * allowed else f"{seconds * 1e3:.3g} ms"
            self.rows[choice] = f"by what each change does, {tells}"

    def _known(self, reference: Choice, name: str) -> Iterator[Any]:
        """Yields the values of a field of which it is known what they do alone."""
        for value in (reference.chunks,) if name == "chunks" else self.levels[name]:
            if isinstance(self.rows.get(reference._replace(**{name: value})), Figures):
                yield value

    def _thought(self, reference: Choice, choice: Choice) -> tuple[float, float, bool]:
        """Returns bytes and seconds if each change does what it does alone, and whether one is not known."""
        base = self.rows[reference]
        size, seconds, unknown = float(base.size), base.scheduled, False
        for name, value in zip(Choice._fields, choice, strict=True):
            size += self.rows[reference._replace(**{name: value})].size - base.size
            effect = self._effect(reference, name, value)
            seconds, unknown = seconds + (effect or 0.0), unknown or effect is None
        return size, seconds, unknown

    def _effect(self, reference: Choice, name: str, value: Any) -> float | None:
        """Returns the seconds that a change adds: alone, or where that has no program, in a combination."""
        base = self.rows[reference].scheduled
        alone = self.rows[reference._replace(**{name: value})]
        if alone.timed:
            return alone.scheduled - base
        for choice, figures in self.rows.items():
            if not isinstance(figures, Figures) or not figures.timed or getattr(choice, name) != value:
                continue
            rest = [n for n in Choice._fields if n != name]
            others = [self.rows.get(reference._replace(**{n: getattr(choice, n)})) for n in rest]
            if all(isinstance(other, Figures) and other.timed for other in others):
                return figures.scheduled - base - sum(other.scheduled - base for other in others)
        return None

    def _try(self, choice: Choice, left: int) -> Figures | None:
        """Returns a choice's figures; None where there is no need of them, or none can be had."""
        if choice not in self.rows:
            self.rows[choice] = self.refuse(choice) or self._needs_more(choice) or self.measure(choice)
            if isinstance(self.rows[choice], Figures):
                self.say(choice, self.rows[choice], left)
        found = self.rows[choice]
        return found if isinstance(found, Figures) else None

    def _needs_more(self, choice: Choice) -> str:
        """Returns why a choice needs no compiling to be known not to fit; "" where it does."""
        policies = list(self.levels["remat"])
        for other, figures in self.rows.items():
            if not isinstance(figures, Figures) or figures.fits:
                continue
            if (other.scan, other.sparse_cores) != (choice.scan, choice.sparse_cores):
                continue
            # Of rows each chip has at least as many, and keeps at least as much of a block.
            as_much = policies.index(choice.remat) <= policies.index(other.remat)
            if choice.tensor != other.tensor or not as_much:
                continue
            size = figures.size if choice.fsdp <= other.fsdp else figures.at_least
            # Memory falls no faster than the chunks grow.
            if size * other.chunks > figures.allowed * choice.chunks:
                return f"needs more than there is, as {other} tells"
        return ""
