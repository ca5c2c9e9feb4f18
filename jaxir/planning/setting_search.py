"""Finds the fastest setting of a step that fits, with few compilations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxir.models.layers import Remat
from jaxir.planning.plan_report import gib
from jaxir.planning.step_figures import Figures

_MESH = ("fsdp", "tensor")
# Do not compile settings whose estimated memory exceeds the limit by this factor.
_DOUBT = 1.02
# SparseCores must make the predicted step faster by this factor, because no TPU has run them yet.
_WORTH = 1.02


class Choice(NamedTuple):
    """Settings of how a step runs. None of them changes what the step computes."""

    fsdp: int  # chips that split the parameters
    tensor: int  # chips that split heads and feed-forward units
    remat: Remat  # what the backward pass recomputes of blocks
    chunks: int  # number of chunks of gradient caching
    scan: bool  # whether the step scans over blocks
    sparse_cores: bool  # whether the chips' SparseCores run collectives

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in zip(self._fields, self.words, strict=True)]
        return " ".join(words if self.sparse_cores else words[:-1])

    @property
    def words(self) -> tuple[str, ...]:
        """The values as they are written on the command line."""
        remat = {False: "none", True: "all"}.get(self.remat, self.remat)
        return str(self.fsdp), str(self.tensor), str(remat), *map(str, self[3:])


# Values to try for each field, ascending; policies of `remat` from the one that keeps most.
Levels = Mapping[str, Sequence[Any]]
# Maps a choice to the reason why it cannot be run; "" if it can.
Refuse = Callable[[Choice], str]
# Maps a choice to its figures, or to the reason why it has none.
Measure = Callable[[Choice], Figures | str]
# Reports (choice, figures, estimated number of further compilations).
Report = Callable[[Choice, Figures, int], None]


def search(
    start: Choice, levels: Levels, refuse: Refuse, measure: Measure, report: Report
) -> dict[Choice, Figures | str]:
    """Compiles settings that may be fastest; returns the figures of each, or why it was not compiled.

    First finds a setting that fits: `start` with full remat, else with parameters split further. Then
    changes one field at a time. Then tries combinations predicted to be faster than the best so far,
    assuming that the effects of changes add up. More chunks are tried only if nothing fits with fewer.
    """
    found = _Search(levels, refuse, measure, report)
    for chunks in levels["chunks"]:
        reference = found.something_that_fits(start._replace(chunks=chunks, remat=levels["remat"][-1]))
        if reference is not None:
            found.change_one_thing(reference)
            found.combine(reference)
            break
    return found.rows


def best(rows: Mapping[Choice, Figures | str]) -> Choice | None:
    """Returns the fastest choice that fits, or None; a choice with SparseCores must be 2 % faster."""
    fitting = {choice: f for choice, f in rows.items() if isinstance(f, Figures) and f.fits and f.timed}
    seconds = {c: f.scheduled * (_WORTH if c.sparse_cores else 1) for c, f in fitting.items()}
    return min(seconds, key=seconds.get, default=None)


class _Search:
    def __init__(self, levels: Levels, refuse: Refuse, measure: Measure, report: Report):
        self.levels, self.refuse, self.measure, self.report = levels, refuse, measure, report
        self.rows: dict[Choice, Figures | str] = {}

    def something_that_fits(self, start: Choice) -> Choice | None:
        """Returns the first choice that fits, with parameters over ever more chips; None if none fits."""
        for fsdp in [fsdp for fsdp in self.levels["fsdp"] if fsdp >= start.fsdp]:
            choice = start._replace(fsdp=fsdp)
            figures = self._try(choice, len(self._beside(choice)))
            if figures is not None and figures.fits:
                return choice
        return None

    def change_one_thing(self, reference: Choice) -> None:
        """Tries changes of one field; mesh sizes are changed further until steps get slower."""
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
                    slower = f"{name}={value} is already slower"
                last = figures.scheduled

    def _ways(self, reference: Choice) -> list[tuple[str, list[Any]]]:
        """Returns fields with the values to try for each, in order."""
        ways: list[tuple[str, list[Any]]] = [("remat", list(reversed(self.levels["remat"]))[1:])]
        for name in _MESH:
            values, now = self.levels[name], getattr(reference, name)
            ways += [(name, [n for n in values if n > now]), (name, [n for n in reversed(values) if n < now])]
        for name in ("scan", "sparse_cores"):
            ways += [(name, [on for on in self.levels[name] if on != getattr(reference, name)])]
        return ways

    def _beside(self, reference: Choice) -> list[Choice]:
        """Returns the runnable choices that differ from `reference` in one field."""
        ways = self._ways(reference)
        beside = [reference._replace(**{name: value}) for name, values in ways for value in values]
        return [choice for choice in beside if not self.refuse(choice)]

    def _lacks_little(self, reference: Choice) -> bool:
        """Returns whether blocks could keep more if parameters were split further."""
        others = (self.rows.get(reference._replace(remat=remat)) for remat in self.levels["remat"])
        return any(isinstance(f, Figures) and not f.fits and f.at_least <= f.allowed for f in others)

    def combine(self, reference: Choice) -> None:
        """Tries changes of several fields, the fastest predicted first."""
        values = [list(self._known(reference, name)) for name in Choice._fields]
        combinations = [Choice(*each) for each in itertools.product(*values)]
        for choice in combinations:
            if refused := self.refuse(choice):
                self.rows.setdefault(choice, refused)
        allowed = self.rows[reference].allowed
        while True:
            quickest = self.rows[best(self.rows)].scheduled
            predicted = {c: self._predict(reference, c) for c in combinations if c not in self.rows}
            worth = {
                choice: (not unknown, seconds)
                for choice, (size, seconds, unknown) in predicted.items()
                if size <= _DOUBT * allowed and (unknown or seconds < quickest)
            }
            if not worth:
                break
            self._try(min(worth, key=worth.get), len(worth) - 1)
        for choice, (size, seconds, _) in predicted.items():
            estimate = f"{gib(size)} GiB" if size > _DOUBT * allowed else f"{seconds * 1e3:.3g} ms"
            self.rows[choice] = f"predicted from single changes: {estimate}"

    def _known(self, reference: Choice, name: str) -> Iterator[Any]:
        """Yields the values of a field whose effect was measured without other changes."""
        for value in (reference.chunks,) if name == "chunks" else self.levels[name]:
            if isinstance(self.rows.get(reference._replace(**{name: value})), Figures):
                yield value

    def _predict(self, reference: Choice, choice: Choice) -> tuple[float, float, bool]:
        """Predicts bytes and seconds as sums of the settings' effects; tells whether a time is unknown."""
        base = self.rows[reference]
        size, seconds, unknown = float(base.size), base.scheduled, False
        for name, value in zip(Choice._fields, choice, strict=True):
            size += self.rows[reference._replace(**{name: value})].size - base.size
            effect = self._effect(reference, name, value)
            seconds, unknown = seconds + (effect or 0.0), unknown or effect is None
        return size, seconds, unknown

    def _effect(self, reference: Choice, name: str, value: Any) -> float | None:
        """Returns the seconds that a change adds, measured by itself or else within a combination."""
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
        """Returns a choice's figures; None if it is not compiled."""
        if choice not in self.rows:
            self.rows[choice] = self.refuse(choice) or self._needs_more(choice) or self.measure(choice)
            if isinstance(self.rows[choice], Figures):
                self.report(choice, self.rows[choice], left)
        found = self.rows[choice]
        return found if isinstance(found, Figures) else None

    def _needs_more(self, choice: Choice) -> str:
        """Returns why a choice cannot fit, because another choice does not; "" if it may fit."""
        policies = list(self.levels["remat"])
        for other, figures in self.rows.items():
            if not isinstance(figures, Figures) or figures.fits:
                continue
            if (other.scan, other.sparse_cores) != (choice.scan, choice.sparse_cores):
                continue
            # Compare only with choices that give a chip no more rows, and that keep no more of a block.
            as_much = policies.index(choice.remat) <= policies.index(other.remat)
            if choice.tensor != other.tensor or not as_much:
                continue
            size = figures.size if choice.fsdp <= other.fsdp else figures.at_least
            # Memory falls at most in proportion to the number of chunks.
            if size * other.chunks > figures.allowed * choice.chunks:
                return f"larger than {other}, which does not fit"
        return ""
