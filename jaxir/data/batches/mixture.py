"""Training on several datasets: each batch comes from one dataset, or holds examples of all datasets.

Rates decide how often a dataset is used. They are given, or follow from the datasets' sizes n by a
temperature T: p_i = n_i^(1/T) / sum_j n_j^(1/T) (Raffel et al. 2020, "Exploring the Limits of Transfer
Learning with a Unified Text-to-Text Transformer", section 3.5.2; Xue et al. 2021, "mT5", has alpha = 1/T).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxir.core.errors import UserError
from jaxir.core.features import Features, TokenCounts
from jaxir.core.values import Positive, check_value
from jaxir.data.batches.batch_plan import Batch, Batching
from jaxir.data.batches.dataset import Dataset
from jaxir.data.batches.text_data import TextData
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.data.text.truncation import Truncation
from jaxir.storage import fingerprints

_STEPS_AT_ONCE = 1 << 16  # number of steps of an epoch that are computed at once
_SMALLEST_BLOCK = 100  # after this many steps the rates are met; small, so that short runs meet them
_LARGEST_BLOCK = 1 << 20  # maximum steps of a block, whose order is held in memory (4 MB)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(TextData):
    """Training data from several sources of pairs.

    Each batch comes from one source, so that in-batch negatives belong to the query's own task. Passages of
    another task are easy negatives, because their style reveals them.

    Attributes:
      sources: the sources, such as BeirPairs(...) or MultiReqaPairs(...).
      rates: relative number of batches of each source; None: each epoch has all batches of each source.
      temperature: instead of `rates`, makes a source of n pairs as frequent as n^(1/temperature). 1 is
        proportional to n; the larger the temperature, the more equal are the sources.
      mix_within_batch: whether every batch holds pairs of all sources instead, in a fixed proportion. Texts
        of two sources with the same id are then treated as one text, so a negative with the id of a positive
        is lost.
    """

    sources: Sequence[TextData]
    rates: Sequence[float] | None = None
    temperature: Positive | None = None
    mix_within_batch: bool = False

    def dataset(self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput) -> MixtureDataset:
        """Builds the dataset of every source.

        Raises:
          UserError: there is no source, `rates` does not have one positive number per source, or
            `temperature` is not positive or given together with `rates`.
        """
        check_value("the mixture's temperature", self.temperature, Positive | None)
        if self.rates is not None and self.temperature is not None:
            raise UserError("a mixture has rates or a temperature, not both: leave one of them out")
        names = [f"source {number} of the mixture" for number in range(1, len(self.sources) + 1)]
        if not names:
            raise UserError("a mixture needs at least one source: add one to sources")
        if self.rates is not None and len(self.rates) != len(names):
            raise UserError(
                f"the mixture's {len(names)} sources have {len(self.rates)} rates: give one rate per source"
            )
        for name, rate in zip(names, self.rates or (), strict=False):
            if not (rate > 0 and np.isfinite(rate)):
                raise UserError(f"{name}: the rate must be a positive number, got {rate}")
        built = [source.dataset(tokenizer, features, on_bad_input) for source in self.sources]
        rates = self.rates
        if self.temperature is not None:
            rates = rates_at(self.temperature, [dataset.num_examples for dataset in built])
        return MixtureDataset(
            dict(zip(names, built, strict=True)), rates=rates, mix_within_batch=self.mix_within_batch
        )


def rates_at(temperature: float, sizes: Sequence[int]) -> list[float]:
    """Returns the rates n^(1/temperature) of datasets with `sizes` n, divided by their sum."""
    logarithms = np.log(np.array(sizes, np.float64))
    powers = np.exp((logarithms - logarithms.max()) / temperature)
    return (powers / powers.sum()).tolist()


class MixtureDataset(Dataset):
    """A dataset whose batches come from several datasets. Created by `Mixture.build`.

    With rates, each block of steps has the datasets' shares of its batches in random order; see `_Rates`.
    Without rates, each epoch of the mixture has every full batch of every dataset once, in random order. A
    dataset's batches run through its own shuffled epochs.
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
        self.own_prompts = any(d.own_prompts for d in self._datasets)
        self.features = self._datasets[0].features

    def __repr__(self) -> str:
        parts = [f"{name} {size:,}" for name, size in zip(self._names, self._sizes, strict=True)]
        if self._rates is not None:
            parts = [f"{part} ({rate:.2%})" for part, rate in zip(parts, self._rates, strict=True)]
        return f"MixtureDataset({self.num_examples:,} pairs: {', '.join(parts)})"

    @property
    def fingerprint(self) -> str:
        """A hash of the datasets' fingerprints, their order and how they are mixed."""
        rates = None if self._rates is None else self._rates.tolist()
        parts = [d.fingerprint for d in self._datasets]
        # Older versions drew each step independently; this text gives their runs another hash.
        how = [] if rates is None or self._mix_within_batch else ["in blocks"]
        found = fingerprints.of_values(parts, rates, self._mix_within_batch, *how)[: fingerprints.DIGITS]
        return f"{self.num_examples} pairs of {len(self._datasets)} data sets, hash {found}"

    def batched(self, how: Batching) -> Iterator[Batch]:
        mine, count = how.share, len(self._datasets)
        if self._mix_within_batch and how.batch_size > 1:
            # Every process assembles the global batch, because the number of processes may not divide a
            # dataset's part of the batch.
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
        # All datasets get equal lengths. A dataset that cannot be shortened reports its own lengths in
        # `needed_lengths`.
        found._datasets = [dataset.with_lengths(lengths) for dataset in self._datasets]
        found.features = found._datasets[0].features
        return found

    def token_counts(self, field: str, vocab_size: int) -> TokenCounts:
        counts = [dataset.token_counts(field, vocab_size) for dataset in self._datasets]
        return TokenCounts(*map(sum, zip(*counts, strict=True)))

    def _schedule(self, batch_size: int, seed: int) -> _Epochs | _Rates:
        if self._rates is None:
            return _Epochs(np.maximum(self._sizes // batch_size, 1), seed)
        for name, rate in zip(self._names, self._rates, strict=True):
            if rate * _LARGEST_BLOCK < 2:
                raise UserError(
                    f"{name}: its share of the batches is {rate:.2g}, less than one in"
                    f" {_LARGEST_BLOCK // 2:,}: give a higher rate or temperature, or leave it out"
                )
        return _Rates(self._rates, seed)

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


class _Rates:
    """Maps steps to datasets by their rates p: after n blocks of b steps, dataset i has had n b p_i batches.

    The numbers are rounded so that they add up to n b; each is off by less than 1, however many blocks there
    are. Each block has its own random order.
    """

    def __init__(self, rates: np.ndarray, seed: int):
        self._seed, self._upper = seed, np.append(np.cumsum(rates)[:-1], 1.0)
        # A block has at least one batch of each dataset. Otherwise rounding could reduce the number of its
        # batches from one block to the next.
        self._block = max(_SMALLEST_BLOCK, int(np.ceil(1 / rates.min())) + 1)

    def __call__(self, first: int, count: int) -> np.ndarray:
        """Returns int [1 to `count`]: the dataset of each step from `first` on, up to the block's end."""
        block, at = divmod(first, self._block)
        counts = self._up_to(block + 1) - self._up_to(block)
        order = np.repeat(np.arange(len(counts)), counts)
        return np.random.default_rng([self._seed, block]).permutation(order)[at : at + count]

    def count(self, steps: int, datasets: int) -> np.ndarray:
        block, rest = divmod(steps, self._block)
        return self._up_to(block) + np.bincount(self(steps - rest, rest), minlength=datasets)

    def _up_to(self, block: int) -> np.ndarray:
        """Returns int64 [datasets]: the number of batches of each dataset before block `block`."""
        ends = np.floor(block * self._block * self._upper + 0.5).astype(np.int64)
        return np.diff(ends, prepend=0)


def _alternating(parts: Sequence[Iterator[Batch]], schedule: _Epochs | _Rates, step: int) -> Iterator[Batch]:
    while True:
        of_steps = schedule(step, _STEPS_AT_ONCE)
        for dataset in of_steps:
            yield next(parts[dataset])
        step += len(of_steps)


def _packed(parts: Sequence[Iterator[Batch]], mine: slice) -> Iterator[Batch]:
    while True:
        batches = [next(part) for part in parts]
        yield {name: np.concatenate([b[name] for b in batches])[mine] for name in batches[0]}
