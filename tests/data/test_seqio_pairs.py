import os
import subprocess
import sys

import numpy as np
import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import TextFormat
from jaxir.core.installation import how_to_install
from jaxir.data.formats.sources import stable_keys
from jaxir.data.seqio import seqio_tasks
from jaxir.data.seqio.seqio_pairs import SeqioPairs
from jaxir.data.sets.pair_sources import JsonlPairs
from jaxir.objectives.pair_batch import pair_features
from jaxir.tasks.local_files import jsonl_pairs
from tests.dataset_rows import assert_equal, rows, take

pytest.importorskip("seqio")
LENGTHS = {"query_length": 12, "passage_length": 24}
PAIRS = pair_features(TextFormat(**LENGTHS))
WITH_NEGATIVE = pair_features(TextFormat(num_negatives=1, **LENGTHS))
COUNT = 67


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    """Makes the shuffle buffer hold several epochs, as the real buffer does for all but large files."""
    monkeypatch.setattr(seqio_tasks, "SHUFFLE_BUFFER", 4 * COUNT)


@pytest.fixture
def pairs_file(write_jsonl):
    records = [
        {"query": f"question number {i} é", "passage": f"answer {i}: " + "really " * i}
        | {"query_id": f"q{i}", "passage_id": f"p{i}"}
        | {"negatives": [f"wrong {i} {j}" for j in range(1 + i % 4)]}
        for i in range(COUNT)
    ]
    records[40]["negatives"] = [records[40]["passage"] + "not"]  # equals the passage once cut
    return write_jsonl("pairs.jsonl", records)


def numbers(batch):
    known = {k.tobytes(): i for i, k in enumerate(stable_keys([f"q{i}" for i in range(COUNT)]))}
    return [known[k.tobytes()] for k in batch["query_key"]]


def test_seqio_and_arrays_have_the_same_examples(minilm, pairs_file):
    prompts = {"query_prompt": "query: ", "passage_prompt": "passage: "}
    features = pair_features(TextFormat(num_negatives=4, **prompts, **LENGTHS))
    arrays = JsonlPairs(path=str(pairs_file)).build(minilm, features)
    seqio_pairs = SeqioPairs(mixture=jsonl_pairs(path=str(pairs_file))).build(minilm, features)
    assert seqio_pairs.num_examples == arrays.num_examples == COUNT
    assert seqio_pairs.features == arrays.features
    a, b = arrays.once(), seqio_pairs.once()
    assert {n: x.dtype for n, x in a.items()} == dict.fromkeys(b, np.dtype(np.int32))
    assert numbers(b) != sorted(numbers(b)) == list(range(COUNT)), "shuffled, without repeats"
    negatives = ["negative_ids", "negative_key"]
    assert rows(a, negatives) == rows(b, negatives)
    # One example's only negative equals its passage; the negative is repeated to fill four places.
    assert (b["negative_key"] == b["passage_key"][:, None]).all(-1).sum() == 4
    assert_equal(seqio_pairs.once(9), {name: x[:9] for name, x in b.items()})
    # SeqIO's buffer holds several epochs of so small a file.
    batch = next(seqio_pairs.batches(batch_size=COUNT, seed=0))
    assert set(map(str, rows(batch, negatives))) <= set(map(str, rows(a, negatives)))


def test_batches_are_repeatable_shuffled_and_resumable(minilm, pairs_file):
    data = SeqioPairs(mixture=jsonl_pairs(path=str(pairs_file)))
    features = pair_features(TextFormat(num_negatives=2, **LENGTHS))
    first, second = (data.build(minilm, features) for _ in range(2))
    whole = take(first.batches(batch_size=8, seed=5), 10)
    for step in (0, 7):
        resumed = second.batches(batch_size=8, seed=5, start_step=step)
        for expected in whole[step : step + 3]:
            assert_equal(next(resumed), expected)
    assert numbers(whole[0]) != list(range(8))
    assert numbers(whole[0]) != numbers(next(first.batches(batch_size=8, seed=6)))


def test_shards_of_two_hosts_are_disjoint_and_complete(minilm, pairs_file):
    dataset = SeqioPairs(mixture=jsonl_pairs(path=str(pairs_file))).build(minilm, PAIRS)
    how = {"batch_size": 8, "seed": 0, "process_count": 2}
    first, second = (take(dataset.batches(process_index=process, **how), 100) for process in (0, 1))
    seen = [{number for batch in batches for number in numbers(batch)} for batches in (first, second)]
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(range(COUNT))
    assert len(first[0]["query_ids"]) == 4


def add_task(name, rows, **how):
    """Registers a SeqIO task that jaxir did not make, with columns of texts or of lists of texts."""
    import seqio
    import tensorflow as tf

    texts = seqio.PassThroughVocabulary(0)

    def read(split, shuffle_files, seed=None):
        return tf.data.Dataset.from_tensor_slices(rows)

    ranks = {column: int(isinstance(x[0], list)) for column, x in rows.items()}
    features = {n: seqio.Feature(texts, add_eos=False, dtype=tf.string, rank=r) for n, r in ranks.items()}
    source = seqio.FunctionDataSource(read, splits=["train"], **how)
    seqio.TaskRegistry.add(name, source=source, preprocessors=[], output_features=features)


def test_any_task_or_mixture_can_be_read(minilm):
    import seqio

    # A task without a recorded number of examples.
    add_task("somebodys", {"query": ["one", "two"], "passage": ["first", "second"]})
    seqio.MixtureRegistry.add("somebodys_mixture", ["somebodys"], default_rate=1)
    for name in ("somebodys", "somebodys_mixture"):
        dataset = SeqioPairs(mixture=name).build(minilm, PAIRS)
        assert dataset.num_examples == 2
        batch = dataset.once()
        assert sorted(batch["query_ids"][:, 1].tolist()) == [2028, 2048]
        assert len(np.unique(batch["passage_key"], axis=0)) == 2  # without ids a text's hash is its key


def test_empty_negatives_are_left_out(minilm):
    columns = {"query": ["one", "two"], "passage": ["first", "second"]}
    columns["negatives"] = [["", "third", "fourth"], ["fifth", "", "sixth"]]
    add_task("with_empty_negatives", columns)
    dataset = SeqioPairs(mixture="with_empty_negatives").build(minilm, WITH_NEGATIVE)
    batches = take(dataset.batches(batch_size=2, seed=0), 16)
    rows = np.concatenate([batch["negative_ids"].reshape(2, -1) for batch in batches])
    assert {minilm.decode(row[row != 0]) for row in rows} == {"third", "fourth", "fifth", "sixth"}


def fingerprint(name, tokenizer, **settings):
    features = pair_features(TextFormat(**LENGTHS | settings))
    return SeqioPairs(mixture=name).build(tokenizer, features).fingerprint


def test_the_fingerprint_covers_every_text_of_a_task(minilm, pairs_file, tmp_path):
    import seqio

    first = fingerprint(jsonl_pairs(path=str(pairs_file), name="before"), minilm)
    assert first == fingerprint("before", minilm) != fingerprint("before", minilm, query_length=13)
    assert first != fingerprint("before", minilm, num_negatives=1)
    lines = pairs_file.read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join([*lines[:-1], lines[-1].replace("really", "barely", 1)]))
    assert first != fingerprint(jsonl_pairs(path=str(tmp_path / "other.jsonl"), name="after"), minilm)
    seqio.MixtureRegistry.add("both", ["before", "after"], default_rate=1)
    seqio.MixtureRegistry.add("both_otherwise", ["before", ("after", 2)], default_rate=1)
    assert len({first, *(fingerprint(name, minilm) for name in ("both", "both_otherwise"))}) == 3


@pytest.mark.parametrize("large", [False, True])
def test_the_fingerprint_covers_the_files_of_a_task(minilm, tmp_path, monkeypatch, large):
    import seqio
    import tensorflow as tf

    monkeypatch.setattr(seqio_tasks, "_FIRST_EXAMPLES", 16)
    if large:
        monkeypatch.setattr(seqio_tasks, "_READ_WHOLE", 100)
        monkeypatch.setattr(seqio_tasks, "_PIECE", 8)
    feature = seqio.Feature(seqio.PassThroughVocabulary(0), add_eos=False, dtype=tf.string, rank=0)
    features = {"query": feature, "passage": feature}

    def both(ds):
        return ds.map(lambda line: {"query": line, "passage": line})

    path = tmp_path / "lines.txt"
    path.write_text("".join(f"line {i:04d}\n" for i in range(200)))
    name = f"lines_{large}"
    source = seqio.TextLineDataSource({"train": str(path)}, num_input_examples={"train": 200})
    seqio.TaskRegistry.add(name, source=source, preprocessors=[both], output_features=features)
    found = {fingerprint(name, minilm)}
    assert {fingerprint(name, minilm)} == found
    content = path.read_bytes()
    for at in (3, len(content) // 2 + 1, len(content) - 2):
        path.write_bytes(content[:at] + b"x" + content[at + 1 :])
        found.add(fingerprint(name, minilm))
    assert len(found) == 4


def test_the_fingerprint_of_a_task_without_files_covers_every_example(minilm, monkeypatch):
    monkeypatch.setattr(seqio_tasks, "_FIRST_EXAMPLES", 16)
    rows = {"query": [f"q {i}" for i in range(50)], "passage": [f"p {i}" for i in range(50)]}
    add_task("rows", rows, num_input_examples={"train": 50})
    first = fingerprint("rows", minilm)
    rows["passage"][-1] = "another"
    assert fingerprint("rows", minilm) != first


def test_bad_input_stops_before_the_first_batch(minilm, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"query": "a", "passage": "b"}\n{"query": "a"}\n')
    name = jsonl_pairs(path=str(path))
    with pytest.raises(BadInputError, match=r"bad.jsonl:2: no field 'passage'"):
        SeqioPairs(mixture=name).build(minilm, PAIRS)
    dataset = SeqioPairs(mixture=name).build(minilm, PAIRS, on_bad_input="skip")
    assert capsys.readouterr().err == f"skipped 1 record: no field 'passage' (first: {path}:2)\n"
    assert dataset.num_examples == 1 and len(dataset.once()["query_ids"]) == 1
    with pytest.raises(UserError, match="batch_size is 2, but there are only 1 pairs"):
        dataset.batches(batch_size=2, seed=0)
    wanting = SeqioPairs(mixture=name).build(minilm, WITH_NEGATIVE, on_bad_input="skip")
    with pytest.raises(UserError, match="a batch needs 1 negatives per example, but an example of the data"):
        next(wanting.batches(batch_size=1, seed=0))


def test_unknown_names_are_suggested(minilm, pairs_file):
    name = jsonl_pairs(path=str(pairs_file), name="my_pairs")
    assert jsonl_pairs(path=str(pairs_file), name="my_pairs") == name == "my_pairs"
    with pytest.raises(UserError, match="another SeqIO task is already named 'my_pairs'"):
        jsonl_pairs(path="elsewhere.jsonl", name="my_pairs")
    with pytest.raises(UserError, match="named 'my_piars'; did you mean 'my_pairs'"):
        SeqioPairs(mixture="my_piars").build(minilm, PAIRS)
    with pytest.raises(UserError, match=r"has no split 'dev' \(has: train\)"):
        SeqioPairs(mixture=name, split="dev").build(minilm, PAIRS)


def test_vocabulary_gives_the_models_ids(minilm, sentencepiece_folder):
    import seqio

    from jaxir.data.seqio.seqio_vocabulary import HuggingFaceVocabulary
    from jaxir.data.text.tokenizer import Tokenizer

    vocabulary = HuggingFaceVocabulary(minilm, max_length=6)
    assert isinstance(vocabulary, seqio.Vocabulary) and vocabulary.vocab_size == 30522
    assert vocabulary.encode("Hello world") == [101, 7592, 2088, 102]
    tokens = [101, 2028, 2048, 2093, 2176, 102]
    assert vocabulary.encode_tf("one two three four five six").numpy().tolist() == tokens
    assert vocabulary.decode([101, 7592, 2088, 102]) == "hello world"
    assert vocabulary.decode_tf(np.array([101, 7592, 2088, 102])).numpy() == b"hello world"
    same, other = (HuggingFaceVocabulary(minilm, max_length=length) for length in (6, 7))
    assert vocabulary == same != other

    tokenizer = Tokenizer.load(sentencepiece_folder)
    theirs = seqio.SentencePieceVocabulary(str(sentencepiece_folder / "spiece.model"))
    text = "hello world this is a test"
    ours = HuggingFaceVocabulary(tokenizer, max_length=64).encode(text)
    assert ours == [*theirs.encode(text), theirs.eos_id]


@pytest.mark.slow
def test_a_process_with_an_open_iterator_ends(minilm_folder, pairs_file):
    code = (
        "from jaxir.core.features import TextFormat\n"
        "from jaxir.data.text.tokenizer import Tokenizer\n"
        "from jaxir.data.seqio.seqio_pairs import SeqioPairs\n"
        "from jaxir.objectives.pair_batch import pair_features\n"
        "from jaxir.tasks.local_files import jsonl_pairs\n"
        f"pairs = SeqioPairs(mixture=jsonl_pairs(path={str(pairs_file)!r}))\n"
        f"tokenizer = Tokenizer.load({str(minilm_folder)!r})\n"
        "batches = pairs.build(tokenizer, pair_features(TextFormat(8, 8))).batches(batch_size=8, seed=0)\n"
        "print(next(batches)['query_ids'].shape)"
    )
    keep = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True, env=keep
    )
    assert (done.stdout, done.stderr) == ("(8, 8)\n", ""), "TensorFlow's log is not for users"


def test_seqio_that_is_not_installed(pairs_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "seqio", None)
    with pytest.raises(UserError, match="SeqIO tasks need SeqIO") as error:
        jsonl_pairs(path=str(pairs_file))
    assert how_to_install("seqio") in str(error.value)
