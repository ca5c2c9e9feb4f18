"""SeqIO tasks over jaxir's pair sources.

A task yields query, passage, their ids and negatives as strings. `seqio_pairs` tokenises the strings for
each model.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxir.core.errors import UserError
from jaxir.core.installation import how_to_install
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import PairExample, text_id
from jaxir.runtime.lean_tensorflow import import_tensorflow
from jaxir.storage.fingerprints import ValuesHash

if TYPE_CHECKING:
    from jaxir.data.sets.pair_sources import PairSource

# Number of examples in the buffer, which may hold examples of two consecutive epochs.
SHUFFLE_BUFFER = 1 << 16
# For the fingerprint of a task that jaxir did not register, files of at most 4 GB in all are hashed
# completely, larger files in pieces. The first examples are hashed, too, because preprocessors change what is
# read.
_READ_WHOLE, _PIECE, _FILES_AT_ONCE, _FIRST_EXAMPLES = 4 << 30, 1 << 16, 16, 1024
FEATURES = ("query_id", "query", "passage_id", "passage", "negative_ids", "negatives")


def import_seqio() -> ModuleType:
    """Imports SeqIO, which takes some seconds, because SeqIO imports TensorFlow."""
    try:
        import_tensorflow()
        import seqio
    except ImportError as error:
        raise UserError(f"SeqIO tasks need SeqIO ({error}): {how_to_install('seqio')}") from error
    return seqio


def add_task(kind: str, sources: Mapping[str, PairSource], *, name: str | None = None) -> str:
    """Registers a SeqIO task over `sources` ({split: pairs}), unless it exists; returns the task's name.

    The default name begins with `kind`. Raises UserError if another task has the name.
    """
    seqio = import_seqio()
    import tensorflow as tf

    name = name or f"{kind}_{text_id(repr(dict(sources)))[:8]}"
    if name in seqio.TaskRegistry.names():
        registered = seqio.TaskRegistry.get(name).source
        if getattr(registered, "sources", None) != dict(sources):
            raise UserError(f"another SeqIO task is already named {name!r}: give another name")
        return name
    texts = seqio.PassThroughVocabulary(0)
    ranks = {feature: int(feature.startswith("negative")) for feature in FEATURES}
    seqio.TaskRegistry.add(
        name,
        source=_source_class()(dict(sources)),
        preprocessors=[],
        output_features={
            feature: seqio.Feature(texts, add_eos=False, dtype=tf.string, rank=rank)
            for feature, rank in ranks.items()
        },
        shuffle_buffer_size=SHUFFLE_BUFFER,
    )
    return name


def check_sources(task_or_mixture: Any, split: str, on_bad_input: OnBadInput) -> None:
    """Reads all files of jaxir's own tasks once, so that malformed records stop a run before training."""
    for task in getattr(task_or_mixture, "tasks", [task_or_mixture]):
        if isinstance(task.source, _source_class()) and split in task.source.splits:
            task.source.check(split, on_bad_input)


def content_of(task: Any, split: str) -> str:
    """Returns a hash of the texts of a task.

    For jaxir's own tasks, the hash covers every text. For other tasks, it covers the task's files and first
    examples. Of files that are large or in a bucket, only sizes, beginnings, middles and ends are hashed.
    All examples of a task without files are hashed.
    """
    if isinstance(task.source, _source_class()):
        return task.source.check(split, OnBadInput(task.source._policy))[1]
    import tensorflow as tf

    names = [name for name in task.source.list_shards(split) if tf.io.gfile.exists(name)]
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        sizes = list(pool.map(lambda name: tf.io.gfile.stat(name).length, names))
        whole = sum(sizes) <= _READ_WHOLE and not any("://" in name for name in names)
        files = list(pool.map(functools.partial(_hash_of_file, whole=whole), names, sizes))
    found = ValuesHash()
    found.add((task.name, sizes, files))
    examples = task.get_dataset(sequence_length=None, split=split, shuffle=False).as_numpy_iterator()
    for example in itertools.islice(examples, _FIRST_EXAMPLES if names else None):
        found.add([(feature, _plain(example[feature])) for feature in FEATURES if feature in example])
    return found.hex()


def _hash_of_file(name: str, size: int, *, whole: bool) -> str:
    import tensorflow as tf

    digest = hashlib.blake2b()
    with tf.io.gfile.GFile(name, "rb") as file:
        for start in range(0, size, _PIECE) if whole else (0, size // 2, max(0, size - _PIECE)):
            file.seek(start)
            digest.update(file.read(_PIECE))
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Converts arrays and ragged arrays to lists of bytes; returns bytes unchanged."""
    if hasattr(value, "to_list"):
        return value.to_list()
    return value.tolist() if hasattr(value, "tolist") else value


@functools.cache
def _source_class() -> type:
    import seqio
    import tensorflow as tf

    class PairDataSource(seqio.DataSource):
        """The pairs of `PairSource`s for SeqIO. All files are read once before the first example."""

        supports_arbitrary_sharding = True

        def __init__(self, sources: Mapping[str, PairSource]):
            self.sources = dict(sources)
            self._read: dict[str, tuple[int, str]] = {}
            self._policy = "stop"
            super().__init__(splits=tuple(sources), caching_permitted=False)

        def check(self, split: str, on_bad_input: OnBadInput) -> tuple[int, str]:
            """Reads all files of a split, if not yet read; returns the number of pairs and their hash."""
            if split not in self._read or on_bad_input.policy != self._policy:
                self._policy = on_bad_input.policy
                content = ValuesHash()
                for example in self.sources[split].examples(on_bad_input):
                    content.add(tuple(example[:5]))
                self._read[split] = content.count, content.hex()
            return self._read[split]

        def num_input_examples(self, split: str) -> int:
            return self.check(split, OnBadInput(self._policy))[0]

        def list_shards(self, split: str) -> list[str]:
            return [split]

        def get_dataset(
            self,
            split: str = "train",
            shuffle: bool = True,
            seed: int | None = None,
            shard_info: seqio.ShardInfo | None = None,
            **unused: Any,
        ) -> tf.data.Dataset:
            self.num_input_examples(split)
            shard = shard_info or seqio.ShardInfo(0, 1)

            def read() -> Iterator[dict[str, Any]]:
                examples = self.sources[split].examples(OnBadInput(self._policy))
                for example in itertools.islice(examples, shard.index, None, shard.num_shards):
                    yield _record(example)

            signature = {
                feature: tf.TensorSpec([None] if feature.startswith("negative") else [], tf.string)
                for feature in FEATURES
            }
            return tf.data.Dataset.from_generator(read, output_signature=signature)

    return PairDataSource


def _record(example: PairExample) -> dict[str, Any]:
    ids, texts = [i for i, _ in example.negatives], [text for _, text in example.negatives]
    return dict(zip(FEATURES, (*example[:4], ids, texts), strict=True))
