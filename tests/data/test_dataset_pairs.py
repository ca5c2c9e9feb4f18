"""Pairs of the package `datasets`: in memory, and streamed."""

import itertools

import numpy as np
import pytest

from jaxir import Pairs, fit
from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import TextFormat
from jaxir.objectives.pair_batch import pair_features

datasets = pytest.importorskip("datasets")

ROWS = [
    {"anchor": f"question {n}", "positive": f"answer {n}", "negative": f"no {n}", "extra": n}
    for n in range(10)
]


def table(rows=ROWS):
    return datasets.Dataset.from_list(rows)


def stream(rows=ROWS, **how):
    return datasets.Dataset.from_list(rows).to_iterable_dataset(**how)


def built(data, parts, **how):
    return Pairs.of_dataset(data, **how).build(*parts)


@pytest.fixture
def parts(minilm):
    """A tokenizer, and the features of pairs with a negative."""
    return minilm, pair_features(TextFormat(num_negatives=1, query_length=8, passage_length=8))


def rows_of(batches, count):
    """Returns the arrays of the first batches, one after the other."""
    found = list(itertools.islice(batches, count))
    return {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}


def test_a_dataset_equals_the_same_pairs_in_memory(parts):
    columns = [[row[name] for row in ROWS] for name in ("anchor", "positive", "negative")]
    ours = Pairs(*columns[:2], negatives=[[text] for text in columns[2]]).build(*parts)
    theirs = built(datasets.Dataset.from_list(ROWS), parts)
    assert theirs.fingerprint == ours.fingerprint and theirs.num_examples == 10


def test_a_stream_has_the_rows_in_its_order_and_resumes_by_position(parts):
    how = {"batch_size": 4, "seed": 0}
    whole = built(stream(), parts, examples=10)
    epoch = rows_of(whole.batches(**how), 2)
    in_order = built(datasets.Dataset.from_list(ROWS), parts)._batch(np.arange(8), (0, 0))
    for name in ("query_ids", "passage_ids", "negative_ids", "query_key"):
        np.testing.assert_array_equal(epoch[name], in_order[name])
    again = rows_of(whole.batches(**how), 6)
    for step in range(6):
        resumed = next(built(stream(), parts, examples=10).batches(**how, start_step=step))
        for name, array in resumed.items():
            np.testing.assert_array_equal(array, again[name][4 * step : 4 * step + 4])
    shares = [
        next(whole.batches(**how, process_index=i, process_count=2, start_step=1))["query_ids"]
        for i in range(2)
    ]
    np.testing.assert_array_equal(np.concatenate(shares), epoch["query_ids"][4:])


def test_a_shuffled_stream_has_another_order_in_each_epoch(parts):
    shuffled = stream(num_shards=2).shuffle(seed=3, buffer_size=10)
    found = built(shuffled, parts, examples=10)
    epochs = rows_of(found.batches(batch_size=10, seed=0), 2)["query_key"].reshape(2, 10, 2)
    keys = [{tuple(key) for key in epoch} for epoch in epochs]
    assert keys[0] == keys[1] and len(keys[0]) == 10 and not np.array_equal(*epochs)
    resumed = next(built(shuffled, parts, examples=10).batches(batch_size=10, seed=0, start_step=1))
    np.testing.assert_array_equal(resumed["query_key"], epochs[1])


def test_a_run_on_a_stream_refuses_another_stream(one_layer, tmp_path):
    how = {"batch_size": 4, "steps": 2, "output_dir": tmp_path / "run"}
    words = ["cat", "dog", "bird", "fish", "horn", "milk", "corn", "salt"]
    rows = [{"question": f"a {word}", "answer": f"the {word}"} for word in words]
    fit(f"st:{one_layer}", Pairs.of_dataset(stream(rows), examples=8), **how)
    fit(f"st:{one_layer}", Pairs.of_dataset(stream(rows), examples=8), **how)
    with pytest.raises(UserError, match=r"was trained on other data: .* of a stream with"):
        fit(f"st:{one_layer}", Pairs.of_dataset(stream(rows[::-1]), examples=8), **how)


@pytest.mark.parametrize(
    ("make", "how", "message"),
    [
        (lambda: datasets.DatasetDict(train=table()), {}, r"give one, such as data\['train'\]"),
        (lambda: [1, 2], {}, "data must be a datasets.Dataset or IterableDataset with columns, not"),
        (lambda: table(), {"query": "ancor"}, "no column 'ancor', which query names"),
        (lambda: table(), {"examples": 3}, "examples only applies to a stream"),
        (stream, {}, "the stream has no length: give examples=N"),
        (lambda: table([{"x": "a", "y": "b"}]), {}, "no column has a usual name for the query"),
    ],
)
def test_unusable_datasets_are_refused(make, how, message):
    with pytest.raises(UserError, match=message):
        Pairs.of_dataset(make(), **how)


def test_bad_rows_and_short_streams_are_reported(parts):
    rows = [*ROWS[:3], {**ROWS[3], "positive": None}]
    with pytest.raises(BadInputError, match="row 3 of the dataset: column 'positive' is not a text: None"):
        built(datasets.Dataset.from_list(rows), parts)
    with pytest.raises(UserError, match="the stream ended after 10 of 12 records: give examples=10"):
        rows_of(built(stream(), parts, examples=12).batches(batch_size=4, seed=0), 3)
    without = [{**row, "negative": None} for row in ROWS]
    empty = table([{**without[0], "negative": "no"}, *without[1:]])
    with pytest.raises(UserError, match="record 1 of the stream has no negatives, of which a batch needs 1"):
        next(built(empty.to_iterable_dataset(), parts, examples=10).batches(batch_size=4, seed=0))
