import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.core.features import Key, Numbers, TextFormat, Tokens, fields_of
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.mixture import Mixture
from jaxir.data.batches.text_data import RecordSource
from jaxir.data.formats.sources import stable_keys
from jaxir.data.seqio.seqio_pairs import SeqioPairs
from jaxir.data.sets.pair_sources import PairSource
from jaxir.objectives.pair_batch import pair_features
from jaxir.training.evaluators.evaluation_context import Bench
from tests.data.any_fields import FEATURES, records
from tests.dataset_rows import rows


class Records(RecordSource):
    def records(self, on_bad_input):
        return records()


def test_any_records_become_batches(minilm):
    data = Records().build(minilm, FEATURES)
    batch = next(data.batches(batch_size=9, seed=3))
    shapes = {name: (9, *feature.shape) for name, feature in FEATURES.items()}
    assert {name: x.shape for name, x in batch.items()} == shapes
    known = {k.tobytes(): i for i, k in enumerate(stable_keys([f"t{i}" for i in range(9)]))}
    numbers = [known[key.tobytes()] for key in batch["key"]]
    np.testing.assert_array_equal(batch["weight"], np.float32([i / 4 for i in numbers]))
    for at, i in enumerate(numbers):
        for j in range(2):  # all lists of an example are drawn in the same order
            chosen = round(float(batch["other_scores"][at, j])) - 10 * i
            np.testing.assert_array_equal(batch["other_key"][at, j], stable_keys([f"o{i}-{chosen}"])[0])
            (tokens,) = minilm.encode_batch([f"say another {i} {chosen}"], max_length=8)
            np.testing.assert_array_equal(batch["other_ids"][at, j, : len(tokens)], tokens)
    assert len({tuple(np.argsort(x)) for x in batch["other_scores"]}) == 2


def test_fewer_list_items_are_the_first_of_the_draw(minilm):
    data = Records().build(minilm, FEATURES)
    fewer = FEATURES | {"other_ids": Tokens("others", 8, prompt="say ", count=1, among="text")}
    fewer |= {"other_key": Key("others", 1), "other_scores": Numbers("scores", 1)}
    one, two = (next(Records().build(minilm, f).batches(batch_size=4, seed=0)) for f in (fewer, FEATURES))
    np.testing.assert_array_equal(one["other_scores"], two["other_scores"][:, :1])
    mixed = Mixture(sources=[Records(), Records()]).build(minilm, FEATURES)
    assert mixed.features == data.features and mixed.num_examples == 18


def test_an_evaluation_reads_whole_lists_in_the_order_of_the_record(minilm):
    nothing = dict.fromkeys(("objective", "training_data", "partitioner"))
    bench = Bench(tokenizer=minilm, form=TextFormat(8, 8), batch_size=4, **nothing)
    data, scores = Records(), {"weight": Numbers("weight"), "scores": Numbers("scores", 3)}
    for _ in range(2):  # the second time, examples come from the cache
        with pytest.raises(UserError, match="reads 3 items of each list 'scores', but some lists have 2, 4"):
            bench.examples(data, scores)
        drawn = bench.examples(data, scores, drawn=True).arrays
    order = np.argsort(drawn["weight"])
    for i, some in enumerate(drawn["scores"][order] - 10 * np.arange(9)[:, None]):
        every = list(range(2 + i % 3))
        assert sorted(set(some)) == every[:3] or (len(every) == 4 and list(some) == sorted(set(some)))
        assert list(some[: len(every)]) == sorted(some[: len(every)])

    class Whole(RecordSource):
        def records(self, on_bad_input):
            return (record for record in records(30) if len(record["scores"]) == 3)

    for row in bench.examples(Whole(), scores).rows:
        np.testing.assert_array_equal(row["scores"], 40 * row["weight"] + np.arange(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"others": ("o", "a single one")}, r"reads a list of texts in the field 'others', but found \('o'"),
        ({"scores": [1.0]}, "example 5: the lists must have equal lengths, got 4 others, 1 scores"),
        ({"weight": None}, "example 5: the objective reads a finite number in the field 'weight', but found"),
        ({"weight": float("nan")}, "example 5: .* a finite number in the field 'weight', but found nan"),
        ({"weight": 1e39}, r"example 5: .* a finite number in the field 'weight', but found 1e\+39"),
        ({"weight": "1.5"}, "example 5: .* a finite number in the field 'weight', but found '1.5'"),
        ({"text": "ab"}, r"found 'ab', a string; a text is a tuple of two strings, \(id, text\)$"),
        ({"text": ["t", "a"]}, "found \\['t', 'a'\\], a list of a string and a string; a text is a tuple"),
        ({"others": [("o", "x"), "yz"]}, "texts in the field 'others', but found 'yz', a string in the list"),
        ({"scores": [1.0, None]}, "a list of finite numbers in the field 'scores', but found None in the li"),
    ],
)
def test_every_record_is_checked(minilm, change, message):
    wrong = [record | (change if i == 5 else {}) for i, record in enumerate(records())]
    with pytest.raises(UserError, match=message):
        ArrayDataset.from_records(wrong, minilm, FEATURES)
    del (lacking := list(records()))[7]["weight"]
    with pytest.raises(UserError, match="reads the field 'weight', but example 7 has only text, others, sco"):
        ArrayDataset.from_records(lacking, minilm, FEATURES)


def test_examples_of_another_type_are_refused(minilm):
    with pytest.raises(UserError, match=r"example 0 must be a dict of fields, such as {'text': ...}"):
        ArrayDataset.from_records([("t", "a text")], minilm, FEATURES)

    class Plain(PairSource):
        def examples(self, on_bad_input):
            yield {"query": ("q", "who?"), "passage": ("p", "me")}

    with pytest.raises(UserError, match=r"0: Plain.examples must yield PairExample\(query_id, "):
        Plain().build(minilm, pair_features(TextFormat(8, 8)))


def test_contradicting_features_are_refused():
    with pytest.raises(ValueError, match="read the same field differently"):
        fields_of({"a": Tokens("text", 8), "b": Tokens("text", 9)})
    with pytest.raises(UserError, match=r"feature 'b' must be a Tokens, Numbers, Key .* not str"):
        fields_of({"a": Tokens("text", 8), "b": "passage"})
    with pytest.raises(ValueError, match="needs a `Tokens` feature with the same field and count"):
        fields_of({"a": Tokens("text", 8), "b": Key("text", 2)})


def test_seqio_tasks_can_have_numbers(minilm):
    seqio = pytest.importorskip("seqio")
    import tensorflow as tf

    texts = seqio.PassThroughVocabulary(0)
    kinds = {"text": (tf.string, 0), "weight": (tf.float32, 0)}
    kinds |= {"others": (tf.string, 1), "scores": (tf.float32, 1)}

    def read(split, shuffle_files, seed=None):
        def rows():
            for r in records():
                others = [text for _, text in r["others"]]
                yield {"text": r["text"][1], "weight": r["weight"], "others": others, "scores": r["scores"]}

        signature = {n: tf.TensorSpec([None] * rank, kind) for n, (kind, rank) in kinds.items()}
        return tf.data.Dataset.from_generator(rows, output_signature=signature)

    made = {n: seqio.Feature(texts, False, dtype=kind, rank=rank) for n, (kind, rank) in kinds.items()}
    source = seqio.FunctionDataSource(read, splits=["train"], num_input_examples={"train": 9})
    seqio.TaskRegistry.add("with_numbers", source=source, preprocessors=[], output_features=made)
    lists = {"other_ids": Tokens("others", 8, prompt="say ", count=4, among="text")}
    # `count` equals the length of the lists.
    lists |= {"other_key": Key("others", 4), "other_scores": Numbers("scores", 4)}
    batch = SeqioPairs(mixture="with_numbers").build(minilm, FEATURES | lists).once()
    expected = Records().build(minilm, FEATURES | lists).once()
    assert {n: x.dtype for n, x in batch.items()} == {n: x.dtype for n, x in expected.items()}
    for keys in ("key", "other_key"):  # the SeqIO task has no ids, so its keys differ
        assert batch.pop(keys).shape == expected.pop(keys).shape
    of_lists = ["other_ids", "other_scores"]
    assert rows(batch, of_lists) == rows(expected, of_lists)
    with pytest.raises(UserError, match="reads the field 'title', but SeqIO task with_numbers has only"):
        SeqioPairs(mixture="with_numbers").build(minilm, {"a": Tokens("title", 8)}).once()
