"""Training data from SeqIO tasks and mixtures that yield texts."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxir.core.errors import UserError, suggest
from jaxir.core.features import Features, Key, Numbers, PromptTokens, Tokens, fields_of
from jaxir.data.batches.batch_plan import Batch, Batching, choose, mark_duplicates
from jaxir.data.batches.dataset import Dataset, in_words
from jaxir.data.batches.mixture import MixtureDataset
from jaxir.data.batches.text_data import TextData
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import stable_keys, text_id
from jaxir.data.seqio import seqio_tasks
from jaxir.data.text.tokenizer import Tokenizer, pad_batch
from jaxir.objectives.pair_batch import pair_format
from jaxir.runtime.lean_tensorflow import import_tensorflow
from jaxir.storage import fingerprints

if TYPE_CHECKING:
    import tensorflow as tf

_TOKENISE_AT_ONCE = 256
_READ_AT_ONCE = 1024
_UNFINISHED: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()


@atexit.register
def _close_unfinished() -> None:
    # TensorFlow's threads call Python functions. A call while the interpreter shuts down would block forever,
    # so unfinished iterators are closed first.
    for batches in list(_UNFINISHED):
        with contextlib.suppress(ValueError):  # raised if the iterator runs in another thread
            batches.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioPairs(TextData):
    """Pairs of a SeqIO task or mixture with the text features `query`, `passage` and, optionally, others.

    Each batch of a mixture comes from one of its tasks, drawn by SeqIO's rates, so that in-batch negatives
    belong to the query's own task.

    Attributes:
      mixture: registered name of the task or mixture; functions of `jaxir.tasks` register tasks.
      split: the split of the task or mixture.
      mix_within_batch: whether a batch of a mixture holds examples of several tasks, as SeqIO mixes them.
    """

    mixture: str
    split: str = "train"
    mix_within_batch: bool = False

    def dataset(
        self, tokenizer: Tokenizer, features: Features, on_bad_input: OnBadInput
    ) -> SeqioDataset | MixtureDataset:
        """Builds the dataset; reads the files of jaxir's own tasks once, to check them."""
        seqio = seqio_tasks.import_seqio()
        known = sorted({*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()})
        if self.mixture not in known:
            raise UserError(f"no SeqIO task or mixture named {self.mixture!r}{suggest(self.mixture, known)}")
        provider = seqio.get_mixture_or_task(self.mixture)
        if self.split not in provider.splits:
            raise UserError(f"{self.mixture} has no split {self.split!r} (has: {', '.join(provider.splits)})")
        seqio_tasks.check_sources(provider, self.split, on_bad_input)
        if self.mix_within_batch or not isinstance(provider, seqio.Mixture):
            return SeqioDataset(provider, split=self.split, tokenizer=tokenizer, features=features)
        tasks = [task for task in provider.tasks if self.split in task.splits]
        return MixtureDataset(
            {
                task.name: SeqioDataset(task, split=self.split, tokenizer=tokenizer, features=features)
                for task in tasks
            },
            rates=[provider.get_rate(task) for task in tasks],
        )


class SeqioDataset(Dataset):
    """The examples of a SeqIO task or mixture. Created by `SeqioPairs.build`.

    Unlike `ArrayDataset`, it shuffles within a buffer of 65,536 examples, and each process reads its own
    share of the examples. A resume at step s reads the texts of earlier steps again, but does not tokenise
    them.
    """

    order_depends_on_parts = True

    def __init__(self, provider: Any, *, split: str, tokenizer: Tokenizer, features: Features):
        self.num_examples = _count(provider, split)
        self.features = dict(features)
        self._provider, self._split, self._tokenizer = provider, split, tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the tasks' texts (`seqio_tasks.content_of`), rates, tokenizer and features."""
        tasks = getattr(self._provider, "tasks", None)
        rates = [self._provider.get_rate(task) for task in tasks or ()]
        tasks = [task for task in tasks or [self._provider] if self._split in task.splits]
        content = [seqio_tasks.content_of(task, self._split) for task in tasks]
        form = pair_format(self.features)
        if form is not None:  # hashed in this form to keep the fingerprints of older versions
            fields = [x for name, x in dataclasses.asdict(form).items() if name != "prompt_tokens"]
        else:
            fields = list(map(dataclasses.astuple, fields_of(self.features).values()))
        found = fingerprints.of_values(content, rates, self._tokenizer.fingerprint, fields)
        return f"{in_words(self.features, self.num_examples)}, hash {found[: fingerprints.DIGITS]}"

    def batched(self, how: Batching) -> Iterator[Batch]:
        """Like `Dataset.batched`, but the batches also depend on the number of processes."""
        if how.batch_size > self.num_examples:
            raise UserError(
                f"batch_size is {how.batch_size:,}, but there are only {self.num_examples:,} pairs:"
                " give a smaller batch_size"
            )
        size = how.share.stop - how.share.start
        first = how.start_step * size
        ds = self._converted(how.seed, how.process_index, how.process_count, first=first, epochs=None)
        return self._read(ds.batch(size, drop_remainder=True))

    def once(self, count: int | None = None) -> Batch:
        """Returns `count` examples (None: all) as a batch, without repeats, shuffled in SeqIO's buffer."""
        ds = self._converted(0, 0, 1, first=0, epochs=1)
        parts = list(self._read((ds if count is None else ds.take(count)).batch(_READ_AT_ONCE)))
        return {name: np.concatenate([part[name] for part in parts]) for name in self.features}

    def list_lengths(self) -> set[int]:
        """Returns the distinct lengths of the examples' lists, by reading all examples once."""
        names = [name for name, field in fields_of(self.features).items() if field.count is not None]
        texts = self._texts(0, 0, 1, epochs=1)
        return {int(_filled(example[name]).sum()) for example in texts.as_numpy_iterator() for name in names}

    def _converted(
        self, seed: int, index: int, count: int, *, first: int, epochs: int | None
    ) -> tf.data.Dataset:
        """Returns the features of each example of one process, as tf.data, from example `first` on.

        A text's id is the task's field `FIELD_id` (`negative_ids` for `negatives`), else the text's hash.
        """
        texts = self._texts(seed, index, count, epochs=epochs).skip(first)
        import tensorflow as tf

        fields, given = fields_of(self.features), texts.element_spec
        if missing := [name for name in fields if name not in given]:
            raise UserError(
                f"the objective reads the field {missing[0]!r}, but SeqIO task {self._provider.name} has only"
                f" {', '.join(given)}: use a task with this field, or another objective"
            )
        batcher = _Batcher(self._tokenizer, self.features, (seed, index), in_order=epochs is not None)
        names = [name for field in fields for name in (field, id_field(field)) if name in given]
        types = [tf.as_dtype(feature.dtype) for feature in self.features.values()]

        def arrays(numbers: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
            batch = batcher(numbers, dict(zip(names, columns, strict=True)))
            return [batch[name] for name in self.features]

        def dense(column: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
            if not isinstance(column, tf.RaggedTensor):
                return column
            return column.to_tensor("" if column.dtype == tf.string else float("nan"))

        def convert(number: tf.Tensor, example: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            found = tf.numpy_function(arrays, [number, *(dense(example[name]) for name in names)], types)
            for array, feature in zip(found, self.features.values(), strict=True):
                array.set_shape([None, *feature.shape])
            return dict(zip(self.features, found, strict=True))

        numbered = texts.enumerate(start=first).ragged_batch(_TOKENISE_AT_ONCE)
        return numbered.map(convert, num_parallel_calls=1).unbatch()

    def _texts(self, seed: int, index: int, count: int, *, epochs: int | None) -> tf.data.Dataset:
        import_tensorflow()
        import seqio

        return self._provider.get_dataset(
            sequence_length=None,
            split=self._split,
            shuffle=True,
            seed=seed,
            shard_info=seqio.ShardInfo(index, count),
            num_epochs=epochs,
        )

    def _read(self, ds: tf.data.Dataset) -> Iterator[Batch]:
        import tensorflow as tf

        def read() -> Generator[Batch, None, None]:
            try:
                yield from ds.prefetch(2).as_numpy_iterator()
            except tf.errors.OpError as error:
                reason = str(error.message).strip().rpartition("UserError: ")[2].partition("\n")[0]
                raise UserError(f"SeqIO task {self._provider.name}: {reason}") from error

        batches = read()
        _UNFINISHED.add(batches)
        return batches


class _Batcher:
    """Converts examples (texts, ids and numbers) to the arrays of a batch.

    `seed` determines the choice of list items; `in_order` keeps the order of the lists, as in evaluation.
    """

    def __init__(self, tokenizer: Tokenizer, features: Features, seed: tuple[int, int], *, in_order: bool):
        self._tokenizer, self._features, self._fields = tokenizer, features, fields_of(features)
        self._seed, self._in_order = seed, in_order

    def __call__(self, numbers: np.ndarray, columns: Mapping[str, np.ndarray]) -> Batch:
        """Returns the batch of the examples with `numbers`, from {field: bytes or numbers}."""
        ids: dict[str, np.ndarray] = {}
        keys: dict[str, np.ndarray] = {}
        values: dict[str, np.ndarray] = {}
        for name, field in self._fields.items():
            column, identifiers = columns[name], columns.get(id_field(name))
            if field.count is not None:
                chosen = self._chosen(name, field.count, numbers, column)
                column = np.take_along_axis(column, chosen, axis=1)
                if identifiers is not None:
                    identifiers = np.take_along_axis(identifiers, chosen, axis=1)
            if not isinstance(field, Tokens):
                values[name] = column.astype(np.float32)
                continue
            texts = _strings(column.ravel())
            tokens = self._tokenizer.encode_batch([field.prompt + t for t in texts], max_length=field.length)
            named = [text_id(t) for t in texts] if identifiers is None else _strings(identifiers.ravel())
            ids[name] = pad_batch(tokens, field.length).reshape(*column.shape, field.length)
            keys[name] = stable_keys(named).reshape(*column.shape, 2)
        prompts = {
            f.field: np.full(len(numbers), f.value, np.int32)
            for f in self._features.values()
            if isinstance(f, PromptTokens)
        }
        kinds = {Tokens: ids, Key: keys, Numbers: values, PromptTokens: prompts}
        batch = {name: kinds[type(f)][f.field] for name, f in self._features.items()}
        return mark_duplicates(batch, self._features)

    def _chosen(self, name: str, count: int, numbers: np.ndarray, column: np.ndarray) -> np.ndarray:
        filled = _filled(column)
        counts = filled.sum(axis=1)
        if not counts.all():
            raise UserError(
                f"a batch needs {count} {name} per example, but an example of the data has none: reduce the"
                " number"
            )
        items_first = np.argsort(~filled, axis=1, kind="stable")  # padding may be anywhere in a list
        chosen = choose(count, counts, numbers, self._seed, in_order=self._in_order)
        return np.take_along_axis(items_first, chosen, axis=1)


def _filled(column: np.ndarray) -> np.ndarray:
    """Returns bool, in the column's shape: whether each element is an item rather than padding."""
    return column != b"" if column.dtype == object else ~np.isnan(column)


def id_field(field: str) -> str:
    """Returns the name of the field with the ids of a field's texts, such as query_id or negative_ids."""
    return f"{field.removesuffix('s')}_ids" if field.endswith("s") else f"{field}_id"


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
