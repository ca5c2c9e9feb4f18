"""Training on several datasets: each batch comes from one dataset, or holds examples of all datasets."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, TokenCounts
from jaxir.data.batches.batch_plan import Batch, Batching, uniforms
from jaxir.data.batches.dataset import Dataset
from jaxir.data.batches.text_data import TextData
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.data.text.truncation import Truncation
from jaxir.storage import fingerprints

_DRAW_AT_ONCE = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(TextData):
    """Training data from several sources of pairs.

    Each batch comes from one source, so that in-batch negatives belong to the query's own task. Passages of
    another task are easy negatives, because their style reveals them.

    Attributes:
      sources: the sources, such as BeirPairs(...) or MultiReqaPairs(...).
      rates: relative sampling rate of each source; None: the source's number of pairs.
      mix_within_batch: whether every batch holds pairs of all sources instead, in a fixed proportion. Texts
        of two sources with the same id are then treated as one text, so a negative may be lost.
    """

    sources: Sequence[TextData]
    rates: Sequence[float] | None = None
    mix_within_batch: bool = False

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> MixtureDataset:
        """Builds the dataset of every source.

        Raises:
          UserError: there is no source, or `rates` does not have one positive number per source.
        """
        names = [f"source {number} of the mixture" for number in range(1, len(self.sources) + 1)]
        if not names:
            raise UserError("a mixture needs at least one source")
        if self.rates is not None and len(self.rates) != len(names):
            raise UserError(f"the mixture's {len(names)} sources have {len(self.rates)} rates: give one each")
        for name, rate in zip(names, self.rates or (), strict=False):
            if not (rate > 0 and np.isfinite(rate)):
                raise UserError(f"{name}: the rate must be a positive number, got {rate}")
        built = [source.dataset(tokenizer, features, on_bad_input) for source in self.sources]
        return MixtureDataset(
            dict(zip(names, built, strict=True)), rates=self.rates, mix_within_batch=self.mix_within_batch
        )


class MixtureDataset(Dataset):
    """A dataset whose batches come from several datasets. Created by `Mixture.build`.

    With rates, the dataset of each step is drawn at random. Without rates, each epoch of the mixture has
    every full batch of every dataset once, in random order.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        *,
        rates: Sequence[float] | None,
        mix_within_batch: bool = False,
    ):
        self._names, self._datasets = list(datasets), list(datasets.values())
        self._sizes = np.array([d.num_examples for d in self._datasets], np.int64)
        self._rates = None if rates is None else np.array(rates, np.float64) / sum(rates)
        self._mix_within_batch = mix_within_batch
        self.num_examples = int(self._sizes.sum())
        self.order_depends_on_parts = any(d.order_depends_on_parts for d in self._datasets)
        self.features = self._datasets[0].features

    def __repr__(self) -> str:
        parts = (f"{name} {size:,}" for name, size in zip(self._names, self._sizes, strict=True))
        return f"MixtureDataset({self.num_examples:,} pairs: {', '.join(parts)})"

    @property
    def fingerprint(self) -> str:
        """A hash of the datasets' fingerprints, their order and how they are mixed."""
        rates = None if self._rates is None else self._rates.tolist()
        parts = [d.fingerprint for d in self._datasets]
        found = fingerprints.of_values(parts, rates, self._mix_within_batch)[: fingerprints.DIGITS]
        return f"{self.num_examples} pairs of {len(self._datasets)} data sets, hash {found}"

    def batched(self, how: Batching) -> Iterator[Batch]:
        mine, count = how.share, len(self._datasets)
        if self._mix_within_batch and how.batch_size > 1:
            # Every process assembles the global batch: a dataset's part may not divide by the process count.
            whole = how._replace(process_index=0, process_count=1)
            sizes = self._quotas(how.batch_size)
            return _packed(self._opened(whole, sizes, [how.start_step] * count), mine)
        schedule = self._schedule(how.batch_size, how.seed)
        before = schedule.count(how.start_step, count).tolist()
        return _alternating(self._opened(how, [how.batch_size] * count, before), schedule, how.start_step)

    def once(self, count: int | None = None) -> Batch:
        """Returns `count` pairs (None: all), without repeats, from each dataset in proportion to its size."""
        wanted = [None] * len(self._datasets)
        if count is not None:
            wanted = np.bincount(_Epochs(self._sizes, 0)(0, count), minlength=len(wanted)).tolist()
        parts = [d.once(size) for d, size in zip(self._datasets, wanted, strict=True) if size != 0]
        sizes = np.array([len(next(iter(part.values()))) for part in parts])
        order = np.argsort(np.argsort(_Epochs(sizes, 0)(0, int(sizes.sum())), kind="stable"))
        return {name: np.concatenate([part[name] for part in parts])[order] for name in self.features}

    def list_lengths(self) -> set[int]:
        return set().union(*(dataset.list_lengths() for dataset in self._datasets))

    @property
    def truncation(self) -> dict[str, Truncation]:
        """The counts of truncated texts over all datasets; empty if a dataset has no counts."""
        found: dict[str, Truncation] = {}
        for dataset in self._datasets:
            if not dataset.truncation:
                return {}
            for name, count in dataset.truncation.items():
                found.setdefault(name, Truncation(count.length)).add(count.texts, count.cut)
        return found

    def needed_lengths(self) -> dict[str, int]:
        all_needed = [dataset.needed_lengths() for dataset in self._datasets]
        return {name: max(needed[name] for needed in all_needed) for name in all_needed[0]}

    def with_lengths(self, lengths: Mapping[str, int]) -> MixtureDataset:
        found = copy.copy(self)
        # All datasets get equal lengths: one that cannot be shortened has its lengths as `needed_lengths`.
        found._datasets = [dataset.with_lengths(lengths) for dataset in self._datasets]
        found.features = found._datasets[0].features
        return found

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        counts = [dataset.token_counts(field, vocab_size) for dataset in self._datasets]
        return TokenCounts(*map(sum, zip(*counts, strict=True)))

    def _schedule(self, batch_size: int, seed: int) -> _Epochs | _Draws:
        if self._rates is None:
            return _Epochs(np.maximum(self._sizes // batch_size, 1), seed)
        return _Draws(self._rates, seed)

    def _quotas(self, batch_size: int) -> list[int]:
        """Returns each dataset's number of pairs per batch, rounded by the largest remainder method."""
        rates = self._sizes / self._sizes.sum() if self._rates is None else self._rates
        exact = rates * batch_size
        quotas = np.floor(exact).astype(np.int64)
        quotas[np.argsort(quotas - exact, kind="stable")[: batch_size - int(quotas.sum())]] += 1
        for name, quota, rate in zip(self._names, quotas, rates, strict=True):
            if not quota:
                raise UserError(
                    f"{name}: its share of a batch of {batch_size:,} is {rate * batch_size:.2g} pairs, less"
                    " than one: give a higher rate or a larger batch_size"
                )
        return quotas.tolist()

    def _opened(self, how: Batching, sizes: Sequence[int], starts: Sequence[int]) -> list[Iterator[Batch]]:
        opened = []
        for name, dataset, size, start in zip(self._names, self._datasets, sizes, starts, strict=True):
            try:
                opened.append(dataset.batched(how._replace(batch_size=size, start_step=start)))
            except UserError as error:
                raise UserError(f"{name}: {error}") from error
        return opened


class _Epochs:
    """Maps steps to datasets: each epoch is a random order of all batches of all datasets."""

    def __init__(self, batches: np.ndarray, seed: int):
        self._seed, self._all = seed, np.repeat(np.arange(len(batches), dtype=np.int32), batches)

    def __call__(self, first: int, count: int) -> np.ndarray:
        """Returns int32 [1 to `count`]: the dataset of each step from `first` on, up to the epoch's end."""
        epoch, at = divmod(first, len(self._all))
        order = np.random.default_rng([self._seed, epoch]).permutation(self._all)
        return order[at : at + count]

    def count(self, steps: int, datasets: int) -> np.ndarray:
        epochs, rest = divmod(steps, len(self._all))
        counts = epochs * np.bincount(self._all, minlength=datasets)
        return counts + (np.bincount(self(steps - rest, rest), minlength=datasets) if rest else 0)


class _Draws:
    """Maps steps to datasets, which are drawn at random by their rates."""

    def __init__(self, rates: np.ndarray, seed: int):
        self._seed, self._upper = seed, np.cumsum(rates)[:-1]

    def __call__(self, first: int, count: int) -> np.ndarray:
        steps = np.arange(first, first + count, dtype=np.int64)
        return np.searchsorted(self._upper, uniforms(self._seed, steps), side="right").astype(np.int32)

    def count(self, steps: int, datasets: int) -> np.ndarray:
        counts = np.zeros(datasets, np.int64)
        for first in range(0, steps, _DRAW_AT_ONCE):
            counts += np.bincount(self(first, min(_DRAW_AT_ONCE, steps - first)), minlength=datasets)
        return counts


def _alternating(parts: Sequence[Iterator[Batch]], schedule: _Epochs | _Draws, step: int) -> Iterator[Batch]:
    while True:
        of_steps = schedule(step, _DRAW_AT_ONCE)
        for dataset in of_steps:
            yield next(parts[dataset])
        step += len(of_steps)


def _packed(parts: Sequence[Iterator[Batch]], mine: slice) -> Iterator[Batch]:
    while True:
        batches = [next(part) for part in parts]
        yield {name: np.concatenate([b[name] for b in batches])[mine] for name in batches[0]}
