"""Reads records of data sets that TensorFlow Datasets has already prepared. Downloads nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxir.core.errors import UserError, suggest
from jaxir.core.installation import how_to_install
from jaxir.data.formats.lines import OnBadInput, Policy, parsed
from jaxir.runtime.lean_tensorflow import import_tensorflow

T = TypeVar("T")


def read_tfds(
    name: str,
    split: str,
    data_dir: str | None,
    parse: Callable[[dict[str, Any], int], T | None],
    on_bad_input: OnBadInput | Policy = "stop",
) -> Iterator[T]:
    """Yields the results of `parse(record, number)` that are not None, in the stored order of the records.

    Args:
      name: TFDS's name of the data set, such as "beir/scifact" or "mrqa/squad".
      split: a split of the data set.
      data_dir: TFDS's data directory; None: TFDS's default (~/tensorflow_datasets).
      parse: takes a record, made of str, int, float, bool, lists and dicts, and the record's 1-based number.
      on_bad_input: what to do if `parse` raises MalformedRecord.
    """
    try:
        import_tensorflow()
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UserError(f"TensorFlow Datasets is not installed: {how_to_install('seqio')}") from error
    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except tfds.core.registered.DatasetNotFoundError as error:
        known = tfds.list_builders(with_community_datasets=False)
        raise UserError(f"TFDS has no data set {name!r}{suggest(name.partition('/')[0], known)}") from error
    except (ValueError, AssertionError) as error:  # raised for an unknown configuration or version
        dataset, _, config = name.partition("/")
        known = tfds.builder_cls(dataset).builder_configs
        if re.fullmatch(r"\w+", config) and config not in known:
            raise UserError(f"TFDS has no {name!r}{suggest(config, known)}") from error
        raise UserError(f"TFDS: {str(error).splitlines()[0]}") from error
    if not builder.is_prepared():
        raise UserError(
            f"{name} is not prepared in {builder.data_dir}: run `tfds build {name}` first"
            " (with --data_dir, unless this is TFDS's default directory)"
        )
    if split not in builder.info.splits:
        known = list(builder.info.splits)
        raise UserError(f"{name} has no split {split!r} (has: {', '.join(known)}){suggest(split, known)}")
    in_order = tfds.ReadConfig(interleave_cycle_length=1)
    stored = builder.as_dataset(split=split, shuffle_files=False, read_config=in_order)
    records = enumerate(map(_plain, tfds.as_numpy(stored)), 1)
    return parsed(f"{name}:{split}", records, parse, on_bad_input)


def _plain(value: Any) -> Any:
    """Converts bytes to strings, and arrays and ragged arrays to lists, recursively."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "to_list"):  # true for ragged arrays
        return _plain(value.to_list())
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [_plain(item) for item in value] if isinstance(value, list) else value
