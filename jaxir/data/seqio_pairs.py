"""Batches by way of SeqIO: tasks and mixtures of text pairs -> the same features as `pairs.PairDataset`."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import numpy as np

from jaxir.data import fingerprints, seqio_tasks
from jaxir.data.batch_plan import Batch, choose, features_of, negative_keys, share
from jaxir.data.lines import OnBadInput
from jaxir.data.mixture import MixtureDataset
from jaxir.data.sources import stable_keys, text_id
from jaxir.data.text_pairs import PairFormat, TextPairs
from jaxir.data.tokenizer import Tokenizer, pad_batch
from jaxir.errors import UserError, suggest
from jaxir.lean_tensorflow import import_tensorflow

_TOKENISE_AT_ONCE = 256
_UNFINISHED: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()


@atexit.register
def _close_unfinished() -> None:
    # TensorFlow's threads call back into Python; one that does so while the interpreter shuts down waits
    # forever, and so does the shutdown. Iterators must be gone before.
    for batches in list(_UNFINISHED):
        with contextlib.suppress(ValueError):  # at work on another thread
            batches.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioPairs(TextPairs):
    """A SeqIO task or mixture whose examples are texts: `query`, `passage`, and optionally ids and negatives.

    Each batch of a mixture comes from one of its tasks, drawn by SeqIO's rates, so that in-batch negatives
    are of the query's own task.

    Attributes:
      mixture: its registered name; the functions of `jaxir.tasks` register one and return its name.
      split: its split.
      mix_within_batch: whether a batch of a mixture holds examples of several tasks, as SeqIO mixes them.
    """

    mixture: str
    split: str = "train"
    mix_within_batch: bool = False

    def dataset(
        self, tokenizer: Tokenizer, form: PairFormat, on_bad_input: OnBadInput
    ) -> SeqioPairDataset | MixtureDataset:
        """Reads the files of this project's tasks through once.

        Raises:
          BadInputError: a malformed record, unless they are skipped.
          UserError: no such task or split, or SeqIO is not installed.
        """
        seqio = seqio_tasks.import_seqio()

        known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
        if self.mixture not in known:
            raise UserError(f"no SeqIO task or mixture named {self.mixture!r}{suggest(self.mixture, known)}")
        provider = seqio.get_mixture_or_task(self.mixture)
        if self.split not in provider.splits:
            raise UserError(f"{self.mixture} has no split {self.split!r} (has: {', '.join(provider.splits)})")
        seqio_tasks.check_sources(provider, self.split, on_bad_input)
        if self.mix_within_batch or not isinstance(provider, seqio.Mixture):
            return SeqioPairDataset(provider, split=self.split, tokenizer=tokenizer, form=form)
        tasks = [task for task in provider.tasks if self.split in task.splits]
        return MixtureDataset(
            {
                task.name: SeqioPairDataset(task, split=self.split, tokenizer=tokenizer, form=form)
                for task in tasks
            },
            rates=[provider.get_rate(task) for task in tasks],
        )


class SeqioPairDataset:
    """What a trainer reads, from a SeqIO task or mixture. Made by `SeqioPairs.build`.

    Unlike `PairDataset` it shuffles within a buffer of 65,536 examples, each process reads its own share of
    the examples, and resuming at step s reads the texts before it again (without tokenising them).

    Attributes:
      num_examples: as the task or mixture counts them; one that does not is read through.
      features: the features of a batch and the shape that one example has in each.
      order_depends_on_parts: each process reads its own share, so more of them make other batches.
    """

    order_depends_on_parts = True

    def __init__(
        self,
        provider: Any,
        *,
        split: str,
        tokenizer: Tokenizer,
        form: PairFormat,
    ):
        self.num_examples = _count(provider, split)
        self.features = features_of(form.query_length, form.passage_length, form.num_negatives)
        self._provider, self._split, self._tokenizer, self._form = provider, split, tokenizer, form

    @functools.cached_property
    def fingerprint(self) -> str:
        """Tells this data from other: by what its tasks read (`seqio_tasks.content_of`) and its tokenizer."""
        tasks = getattr(self._provider, "tasks", None)
        rates = [self._provider.get_rate(task) for task in tasks or ()]
        tasks = [task for task in tasks or [self._provider] if self._split in task.splits]
        content = [seqio_tasks.content_of(task, self._split) for task in tasks]
        form = self._form
        found = fingerprints.of_values(content, rates, self._tokenizer.fingerprint, dataclasses.astuple(form))
        return (
            f"{self.num_examples} pairs of {form.query_length} + {form.passage_length} tokens,"
            f" hash {found[: fingerprints.DIGITS]}"
        )

    def batches(
        self,
        *,
        batch_size: int,
        seed: int,
        start_step: int = 0,
        process_index: int = 0,
        process_count: int = 1,
    ) -> Iterator[Batch]:
        """Yields batches without end, from step `start_step` on: a function of (seed, step, process_count).

        Args and errors are those of `PairDataset.batches`.
        """
        return self._read(batch_size, process_index, process_count, seed=seed, start_step=start_step)

    def ordered(self, batch_size: int, *, process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
        """Yields the pairs once, in their own order, in whole batches, each with its first N negatives."""
        return self._read(batch_size, process_index, process_count, seed=None, start_step=0)

    def _read(
        self, batch_size: int, index: int, count: int, *, seed: int | None, start_step: int
    ) -> Iterator[Batch]:
        import_tensorflow()
        import seqio
        import tensorflow as tf

        mine = share(batch_size, index, count)
        size = mine.stop - mine.start
        if batch_size > self.num_examples:
            raise UserError(
                f"batch_size is {batch_size:,}, but there are only {self.num_examples:,} pairs:"
                " give a smaller one"
            )
        first = start_step * size
        texts = self._provider.get_dataset(
            sequence_length=None,
            split=self._split,
            shuffle=seed is not None,
            seed=seed,
            shard_info=seqio.ShardInfo(index, count),
            num_epochs=None if seed is not None else 1,
        ).skip(first)
        form = self._form
        converter = _converter_class()(
            self._tokenizer,
            use_negatives=bool(form.num_negatives),
            prompts={"query": form.query_prompt, "passage": form.passage_prompt},
            seed=None if seed is None else (seed, index),
            first_example=first,
        )
        lengths = {
            "query": form.query_length,
            "passage": form.passage_length,
            "negatives": form.num_negatives,
        }
        lengths = {name: lengths.get(name, 0) for name in converter.TASK_FEATURES}
        ds = converter(texts, lengths).batch(size, drop_remainder=True).prefetch(2)

        def read() -> Generator[Batch, None, None]:
            try:
                yield from ds.as_numpy_iterator()
            except tf.errors.OpError as error:
                reason = str(error.message).strip().rpartition("UserError: ")[2].partition("\n")[0]
                raise UserError(f"SeqIO task {self._provider.name}: {reason}") from error

        batches = read()
        _UNFINISHED.add(batches)
        return batches


def __getattr__(name: str) -> Any:
    if name == "DualEncoderFeatureConverter":
        return _converter_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _converter_class() -> type:
    import_tensorflow()
    import seqio
    import tensorflow as tf

    spec = seqio.FeatureConverter.FeatureSpec
    text, texts, row = spec(tf.string, rank=0), spec(tf.string, rank=1), spec(tf.int32, rank=1)

    class DualEncoderFeatureConverter(seqio.FeatureConverter):
        """Text pairs -> query_ids, passage_ids, query_key, passage_key (and negative_ids, negative_key).

        Task features: query, passage (strings) and, with `use_negatives`, negatives (a list of strings); the
        features query_id, passage_id and negative_ids are used where the task has them, else the id of a text
        is its hash. Feature lengths: {"query": Lq, "passage": Lp, "negatives": N}.

        Args:
          tokenizer: makes the ids.
          use_negatives: whether batches have negatives.
          prompts: what to put before a "query" and before a "passage"; nothing by default.
          seed: of the choice of negatives where an example has more than N; None takes the first N.
          first_example: the number of the first example, counted on from one that a resumed run began with.
        """

        PACKING_FEATURE_DTYPES = None

        def __init__(
            self,
            tokenizer: Tokenizer,
            *,
            use_negatives: bool = False,
            prompts: Mapping[str, str] | None = None,
            seed: tuple[int, int] | None = None,
            first_example: int = 0,
        ):
            self.TASK_FEATURES = {"query": text, "passage": text}
            self.MODEL_FEATURES = dict.fromkeys(("query_ids", "passage_ids", "query_key", "passage_key"), row)
            if use_negatives:
                self.TASK_FEATURES["negatives"] = texts
                matrix = spec(tf.int32, rank=2)
                self.MODEL_FEATURES |= {"negative_ids": matrix, "negative_key": matrix}
            super().__init__(pack=False, apply_length_check=False)
            self._tokenizer, self._seed, self._first = tokenizer, seed, first_example
            self._prompts = prompts or {}

        def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
            return {name: shape[0] for name, shape in self._shapes(task_feature_lengths).items()}

        def _shapes(self, lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
            return features_of(lengths["query"], lengths["passage"], lengths.get("negatives", 0))

        def _convert_features(
            self, ds: tf.data.Dataset, task_feature_lengths: Mapping[str, int]
        ) -> tf.data.Dataset:
            shapes = self._shapes(task_feature_lengths)
            wanted = [f for f in seqio_tasks.FEATURES if f in ds.element_spec]
            if "negatives" not in self.TASK_FEATURES:
                wanted = [f for f in wanted if not f.startswith("negative")]

            def ids(*columns: np.ndarray) -> list[np.ndarray]:
                number, batch = columns[0], dict(zip(wanted, columns[1:], strict=True))
                return list(self._batch(number, batch, task_feature_lengths).values())

            def convert(number: tf.Tensor, example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
                rows = [number, *(_dense(example[f]) for f in wanted)]
                arrays = tf.numpy_function(ids, rows, [tf.int32] * len(shapes))
                for array, shape in zip(arrays, shapes.values(), strict=True):
                    array.set_shape([None, *shape])
                return dict(zip(shapes, arrays, strict=True))

            numbered = ds.enumerate(start=self._first)
            return numbered.ragged_batch(_TOKENISE_AT_ONCE).map(convert, num_parallel_calls=1).unbatch()

        def _batch(
            self, numbers: np.ndarray, columns: Mapping[str, np.ndarray], lengths: Mapping[str, int]
        ) -> dict[str, np.ndarray]:
            def encoded(
                name: str, rows: list[str], ids: list[str] | None, length: int
            ) -> dict[str, np.ndarray]:
                prompt = self._prompts.get("query" if name == "query" else "passage", "")
                tokens = self._tokenizer.encode_batch([prompt + r for r in rows], max_length=length)
                keys = stable_keys([text_id(r) for r in rows] if ids is None else ids)
                return {f"{name}_ids": pad_batch(tokens, length), f"{name}_key": keys}

            found: dict[str, np.ndarray] = {}
            for name in ("query", "passage"):
                ids = columns.get(f"{name}_id")
                found |= encoded(
                    name, _strings(columns[name]), ids if ids is None else _strings(ids), lengths[name]
                )
            if "negatives" in columns:
                found |= self._negatives(numbers, columns, lengths, encoded)
                found["negative_key"] = negative_keys(found["negative_ids"], found["negative_key"], found)
            return {name: found[name] for name in self._shapes(lengths)}

        def _negatives(
            self,
            numbers: np.ndarray,
            columns: Mapping[str, np.ndarray],
            lengths: Mapping[str, int],
            encoded: Any,
        ) -> dict[str, np.ndarray]:
            filled = columns["negatives"] != b""
            counts = filled.sum(axis=1)
            if not counts.all():
                raise UserError(
                    f"num_negatives is {lengths['negatives']}, but a pair has no negative passage"
                )
            chosen = choose(lengths["negatives"], counts, numbers, self._seed)
            ids = columns.get("negative_ids")
            flat = encoded(
                "negative",
                _strings(np.take_along_axis(columns["negatives"], chosen, axis=1).ravel()),
                None if ids is None else _strings(np.take_along_axis(ids, chosen, axis=1).ravel()),
                lengths["passage"],
            )
            return {name: array.reshape(*chosen.shape, -1) for name, array in flat.items()}

    def _dense(column: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
        return column.to_tensor("") if isinstance(column, tf.RaggedTensor) else column

    return DualEncoderFeatureConverter


def _count(provider: Any, split: str) -> int:
    tasks = [task for task in getattr(provider, "tasks", [provider]) if split in task.splits]
    counts = [task.num_input_examples(split) for task in tasks]
    for i, task in enumerate(tasks):
        if counts[i] is None:
            ds = task.get_dataset(sequence_length=None, split=split, shuffle=False)
            counts[i] = sum(1 for _ in ds.as_numpy_iterator())
    return sum(counts)


def _strings(column: np.ndarray) -> list[str]:
    return [value.decode() for value in column]
