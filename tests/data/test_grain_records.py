import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat, Tokens
from jaxir.data.batches import batch_plan
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.batches.grain_records import GrainRecords
from jaxir.data.batches.mixture import Mixture
from jaxir.data.batches.record_files import read_description, write_records
from jaxir.data.batches.with_prompts import WithPrompts
from jaxir.data.formats.sources import PairExample
from jaxir.data.sets.pair_sources import BeirPairs
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.objectives.pair_batch import pair_features
from tests.data import any_fields
from tests.dataset_rows import assert_equal

pytest.importorskip("grain")

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = {"query_length": 12, "passage_length": 20}
COUNT = 103
END = " river bank" * 20  # longer than LENGTHS


def example(i: int) -> PairExample:
    """Each passage is in two pairs; lists have 1 to 5 negatives, some equal to the passage once it is cut."""
    passage = f"answer to {i // 2}: " + ("really " * (i // 2) if (i // 2) % 3 else END)
    negatives = [(f"n{i}-{j}", f"wrong answer {j} to {i}") for j in range(1 + i % 4)]
    negatives += [(f"t{i}", passage + " and so on")] if i % 3 == 0 else []
    return PairExample(f"q{i}", f"question number {i}", f"p{i // 2}", passage, tuple(negatives))


EXAMPLES = [example(i) for i in range(COUNT)]
RECORDS = [e.record() for e in EXAMPLES]
PAIRS = pair_features(TextFormat(num_negatives=2, **LENGTHS))


@pytest.fixture(scope="module")
def written(minilm, tmp_path_factory):
    directory = tmp_path_factory.mktemp("records") / "records"
    write_records(directory, RECORDS, minilm, PAIRS, file_bytes=4000)
    assert len(list(directory.glob("*.array_record"))) > 3
    return directory


@pytest.fixture(scope="module")
def in_memory(minilm):
    return ArrayDataset.from_records(RECORDS, minilm, PAIRS)


def opened(directory, tokenizer, features=PAIRS):
    return GrainRecords(directory=str(directory)).build(tokenizer, features)


def assert_same_batches(ours, theirs, count, **how):
    pairs = zip(ours.batches(**how), theirs.batches(**how), strict=True)
    for one, other in itertools.islice(pairs, count):
        assert_equal(one, other)


def test_batches_equal_those_of_examples_in_memory(written, in_memory, minilm):
    data = opened(written, minilm)
    assert (data.num_examples, data.features) == (COUNT, in_memory.features)
    assert_same_batches(data, in_memory, 40, batch_size=8, seed=3)  # an epoch has 12 whole batches
    for step in (1, 12, 10**6):
        assert_same_batches(data, in_memory, 2, batch_size=8, seed=1, start_step=step)
    share = {"process_index": 2, "process_count": 4}
    assert_same_batches(data, in_memory, 3, batch_size=8, seed=1, start_step=11, **share)
    for count in (None, 7):
        assert_equal(data.once(count), in_memory.once(count))
    fewer = pair_features(TextFormat(**LENGTHS))
    alone = ArrayDataset.from_records(RECORDS, minilm, fewer)
    assert_same_batches(opened(written, minilm, fewer), alone, 3, batch_size=100, seed=0)


def test_a_text_repeated_in_a_later_block_is_written_whole(minilm, tmp_path):
    """Examples are tokenised 1,024 at a time, without the texts of earlier blocks."""
    texts = ((f"q{i % 40}", f"question {i % 40}", f"p{i % 30}", f"answer {i % 30}") for i in range(1030))
    records = [PairExample(*some).record() for some in texts]
    features = pair_features(TextFormat(**LENGTHS))
    write_records(tmp_path / "records", records, minilm, features)
    written = opened(tmp_path / "records", minilm, features)
    assert_equal(written.once(), ArrayDataset.from_records(records, minilm, features).once())


def test_negatives_equal_to_their_passage_are_left_out_as_in_memory(written, minilm, capfd):
    opened(written, minilm)
    ours = capfd.readouterr().err
    ArrayDataset.from_records(RECORDS, minilm, PAIRS)
    assert ours == capfd.readouterr().err != ""


def test_any_fields_are_written(minilm, tmp_path):
    records = list(any_fields.records())
    write_records(tmp_path / "records", records, minilm, any_fields.FEATURES)
    data = opened(tmp_path / "records", minilm, any_fields.FEATURES)
    in_memory = ArrayDataset.from_records(records, minilm, any_fields.FEATURES)
    assert_same_batches(data, in_memory, 4, batch_size=4, seed=5)
    ours, theirs = (d.token_counts("text", minilm.vocab_size) for d in (data, in_memory))
    assert ours.texts < theirs.texts  # in memory, the texts of lists are counted, too


def test_ids_of_a_large_vocabulary_are_kept(minilm, tmp_path):
    class Large:
        vocab_size, fingerprint = 1 << 18, "large"

        def encode_batch(self, texts, **how):
            return [ids + (1 << 17) for ids in minilm.encode_batch(texts, **how)]

    write_records(tmp_path / "records", RECORDS, Large(), PAIRS)
    data = opened(tmp_path / "records", Large())
    assert_same_batches(data, ArrayDataset.from_records(RECORDS, Large(), PAIRS), 13, batch_size=8, seed=5)
    assert data.once()["query_ids"].max() > 1 << 17


def test_tokens_of_distinct_texts_are_counted_once(written, in_memory, minilm, monkeypatch):
    monkeypatch.setattr("jaxir.data.batches.grain_records._COUNT_AT_ONCE", 10)
    ours, theirs = (d.token_counts("query", minilm.vocab_size) for d in (opened(written, minilm), in_memory))
    assert ours.texts == theirs.texts
    np.testing.assert_array_equal(ours.texts_with, theirs.texts_with)
    np.testing.assert_array_equal(ours.occurrences, theirs.occurrences)
    found = opened(written, minilm).token_counts("passage", minilm.vocab_size)
    assert found.texts == len({e.passage_id for e in EXAMPLES}) < COUNT


def test_the_fingerprint_covers_all_records_and_their_order(written, minilm, tmp_path):
    write_records(tmp_path / "again", RECORDS, minilm, PAIRS)
    changed = [*RECORDS[:-1], EXAMPLES[-1]._replace(query="another").record()]
    write_records(tmp_path / "changed", changed, minilm, PAIRS)
    write_records(tmp_path / "turned", RECORDS[::-1], minilm, PAIRS)
    places = (written, *(tmp_path / name for name in ("again", "changed", "turned")))
    first, again, *others = (opened(place, minilm).fingerprint for place in places)
    assert again == first and len({first, *others}) == 3


def test_grain_records_refuse_unfit_tokenizers_and_features(written, minilm, sentencepiece_folder, tmp_path):
    with pytest.raises(UserError, match="another tokenizer"):
        opened(written, Tokenizer.load(sentencepiece_folder))
    with pytest.raises(UserError, match="with length 20 of passage, not 64"):
        opened(written, minilm, pair_features(TextFormat(query_length=12, passage_length=64)))
    with pytest.raises(UserError, match=r"reads the field 'title', but .* has only query, passage, neg"):
        opened(written, minilm, {"title_ids": Tokens("title", 8)})
    with pytest.raises(UserError, match="already exists"):
        write_records(written, RECORDS, minilm, PAIRS)
    with pytest.raises(UserError, match="there are no training examples"):
        write_records(tmp_path / "none", [], minilm, PAIRS)
    with pytest.raises(UserError, match=r"has no records\.json"):
        opened(tmp_path, minilm)
    lacking = [RECORDS[0], EXAMPLES[1]._replace(negatives=()).record()]
    write_records(tmp_path / "lacking", lacking, minilm, PAIRS)
    with pytest.raises(UserError, match="needs 2 negatives per example, but 1 of 2 have none: set"):
        opened(tmp_path / "lacking", minilm)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("truncated", r"examples-00001\.array_record is missing or not 131,072 bytes"),
        ("exchanged", "its record files were renamed"),
        ("of another directory", "it contains a record file of another directory"),
        ("flipped bit", "hash mismatch"),
    ],
)
def test_damaged_files_are_refused(damage, message, written, minilm, tmp_path):
    copy, others = shutil.copytree(written, tmp_path / "copy"), tmp_path / "others"
    write_records(others, RECORDS, minilm, PAIRS, file_bytes=4000)
    first, second = (copy / f"examples-0000{i}.array_record" for i in (1, 2))
    content = bytearray(first.read_bytes())
    if damage == "truncated":
        content = content[:-70_000]
    elif damage == "exchanged":
        content = second.read_bytes()
        first.rename(second)
    elif damage == "of another directory":
        content = (others / first.name).read_bytes()
    else:
        # Damages a byte in the record of example 25.
        content[content.index((25).to_bytes(8, "little")) + 40] ^= 1
    first.write_bytes(content)
    with pytest.raises(UserError, match=rf"^{re.escape(str(copy))} is damaged: .*{message}"):
        list(itertools.islice(opened(copy, minilm).batches(batch_size=8, seed=0), COUNT // 8))


def test_a_computed_order_is_a_random_permutation(monkeypatch):
    for size in (1, 2, 3, 100, 65_537):
        drawn = np.random.default_rng([3, 1]).permutation(size)
        np.testing.assert_array_equal(batch_plan.order_of(size, 3, 1), drawn)
    monkeypatch.setattr(batch_plan, "SHUFFLED_BELOW", 1)
    orders = [batch_plan.order_of(20_000, seed, epoch)[:] for seed, epoch in ((3, 1), (3, 2), (4, 1))]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(20_000))
        assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.03
        assert np.sum(np.diff(order.astype(np.int64)) == 1) < 10  # shuffled: 1 is expected by chance
    assert all(np.mean(a == b) < 0.001 for a, b in itertools.combinations(orders, 2))
    plan = batch_plan.Plan(10**12, batch_plan.Batching(4096, seed=0))
    step = 10**9
    assert len(set(plan(step).examples.tolist())) == 4096
    np.testing.assert_allclose(plan(step).examples.mean(), 5e11, rtol=0.05)


MEMORY = """
import itertools, resource, sys
import grain, numpy as np
from jaxir.data.batches.grain_records import GrainRecords
from jaxir.data.batches.record_files import write_records
from jaxir.core.features import TextFormat
from jaxir.objectives.pair_batch import pair_features

class Long:  # a fast tokenizer with long results
    vocab_size, fingerprint = 30_000, "long"
    def encode_batch(self, texts, *, max_length, truncation=None):
        return [np.arange(max_length, dtype=np.int32) + hash(text) % 1000 for text in texts]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def use(count, directory):
    features = pair_features(TextFormat(query_length=8, passage_length=4096))
    ids = ((f"q{i}", f"p{i}") for i in range(count))
    records = ({"query": (q, q), "passage": (p, p), "negatives": []} for q, p in ids)
    write_records(directory, records, Long(), features)
    data = GrainRecords(directory=directory).build(Long(), features)
    for batch in itertools.islice(data.batches(batch_size=50, seed=0), 200):
        assert batch["passage_ids"].shape == (50, 4096)

use(2_500, sys.argv[1] + "/small")
small = peak()
use(10_000, sys.argv[1] + "/large")
print(small, peak())
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path):
    """Reading an epoch of 82 MB of examples needs no more memory than one of 20 MB."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # otherwise glibc fragments an arena for each thread
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    small, large = map(float, done.stdout.split())
    written = sum(p.stat().st_size for p in (tmp_path / "large").iterdir()) / 2**20
    assert written > 75 and large - small < 20, (small, large, written)


def test_the_command_writes_records_of_a_recipe(folder, tmp_path, capsys):
    flags = ["--gin_file=gin/pairs.gin", f"--gin.DATA={folder}", f"--gin.MODEL=hf:{ROOT}/tests/golden/bert"]
    output = tmp_path / "records"
    assert cli.main("jaxir.prepare:records", [*flags, f"--output={output}"]) == 0
    assert capsys.readouterr().out.startswith(f"{output}: 40 examples in 1 file, 0.1 MB\n")
    flags += ["--gin_file=gin/data/records.gin", f"--gin.RECORDS={output}", f"--output={tmp_path / 'b'}"]
    assert cli.main("jaxir.prepare:records", flags) == 1
    assert "source of records, such as BeirPairs(...), not GrainRecords(" in capsys.readouterr().err


def test_records_of_data_with_prompts_are_read_with_the_same_prompts(folder, tmp_path, capsys):
    """The same holds for one set of a mixture. Without the prompts the records are refused."""
    recipe = tmp_path / "prompts.gin"
    recipe.write_text(
        "from __gin__ import dynamic_registration\n"
        "from jaxir import train\n"
        "from jaxir.data.batches import with_prompts\n"
        "from jaxir.data.sets import pair_sources\n"
        'include "gin/pairs.gin"\n'
        "train.train.data = @with_prompts.WithPrompts()\n"
        "with_prompts.WithPrompts.data = @train/pair_sources.BeirPairs()\n"
        'with_prompts.WithPrompts.query_prompt = "find: "\n'
    )
    flags = [f"--gin_file={recipe}", f"--data={folder}", f"--model=hf:{ROOT}/tests/golden/bert"]
    output = str(tmp_path / "records")
    assert cli.main("jaxir.prepare:records", [*flags, f"--output={output}"]) == 0, capsys.readouterr().err
    assert f"GrainRecords() of {output} in WithPrompts.data" in capsys.readouterr().out
    bert = Tokenizer.load(ROOT / "tests/golden/bert")
    fields = read_description(Path(output)).fields
    features = pair_features(TextFormat(fields["query"].length, fields["passage"].length))
    sources = (GrainRecords(directory=output), BeirPairs(directory=str(folder)))
    batches = []
    for source in sources:
        prompted = WithPrompts(data=source, query_prompt="find: ")
        data = Mixture(sources=[prompted]).build(bert, features)
        batches.append(next(data.batches(batch_size=8, seed=0)))
    assert_equal(*batches)
    with pytest.raises(UserError, match="was made with prompt 'find: ' of query, not ''"):
        sources[0].build(bert, features)
