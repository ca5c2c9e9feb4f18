import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.data.formats.sources import PairExample, stable_keys, text_id
from jaxir.data.text.tokenizer import Tokenizer, pad_batch
from jaxir.data.text.truncation import FLAGS, Truncation, dataset_truncation_note
from jaxir.objectives.pair_batch import pair_features
from tests.dataset_rows import assert_equal, take

LENGTHS = {"query_length": 12, "passage_length": 20}
PAIRS = pair_features(TextFormat(**LENGTHS))
WITH_NEGATIVE = pair_features(TextFormat(num_negatives=1, **LENGTHS))
COUNT = 103


def in_order(dataset, count=None):
    """Returns the first examples in the order of their records, not in the order of an epoch."""
    place = np.argsort(np.random.default_rng([0, 0]).permutation(dataset.num_examples))[:count]
    return {name: x[place] for name, x in dataset.once().items()}


def example(i: int) -> PairExample:
    negatives = tuple((f"n{i}-{j}", f"wrong answer {j} to {i}") for j in range(1 + i % 4))
    answer = f"answer to {i}: " + "really " * i
    return PairExample(f"q{i}", f"question number {i}", f"p{i}", answer, negatives)


def from_examples(examples, tokenizer, **form):
    records = [e.record() for e in examples]
    return ArrayDataset.from_records(records, tokenizer, pair_features(TextFormat(**form)))


EXAMPLES = [example(i) for i in range(COUNT)]


@pytest.fixture(scope="module")
def dataset(minilm):
    return from_examples(EXAMPLES, minilm, num_negatives=2, **LENGTHS)


def numbers(batch):
    """Returns the numbers of a batch's examples, found by their keys."""
    known = {k.tobytes(): i for i, k in enumerate(stable_keys([e.query_id for e in EXAMPLES]))}
    return [known[k.tobytes()] for k in batch["query_key"]]


def test_stable_keys_are_the_same_on_any_machine():
    expected = [[-1518697497, 1753276942], [-818596888, 983258337]]
    np.testing.assert_array_equal(stable_keys(["q1", "日本"]), expected)
    assert text_id("a text") == "706860d9e8c7ee1c65261bc1e5b75631"


def test_a_batch_holds_each_feature_with_its_prompt(minilm):
    prompts = {"query_prompt": "query: ", "passage_prompt": "passage: "}
    # These tokens are part of the text, not padding.
    examples = [*EXAMPLES[:3], EXAMPLES[3]._replace(passage="[PAD] yes [PAD]")]
    dataset = from_examples(examples, minilm, num_negatives=2, **prompts, **LENGTHS)
    batch = in_order(dataset)
    assert {k: v.shape[1:] for k, v in batch.items()} == {k: f.shape for k, f in dataset.features.items()}
    assert {v.dtype for v in batch.values()} == {np.dtype(np.int32)}

    def padded(texts, length):
        return pad_batch(minilm.encode_batch(texts, max_length=length), length)

    np.testing.assert_array_equal(batch["query_ids"], padded([f"query: {e.query}" for e in examples], 12))
    passages = [f"passage: {e.passage}" for e in examples]
    np.testing.assert_array_equal(batch["passage_ids"], padded(passages, 20))
    np.testing.assert_array_equal(batch["passage_key"], stable_keys([e.passage_id for e in examples]))
    for row, e in enumerate(examples):
        known = {key.tobytes(): n for n in e.negatives for key in stable_keys([n[0]])}
        wanted = [known[key.tobytes()] for key in batch["negative_key"][row]]
        assert len(set(wanted)) == min(2, len(known))  # a row's only negative is repeated
        negatives = padded([f"passage: {text}" for _, text in wanted], 20)
        np.testing.assert_array_equal(batch["negative_ids"][row], negatives)


def test_texts_of_one_id_are_stored_once_and_share_a_key(minilm):
    first = PairExample("q", "one query", "p", "one passage", (("p2", "another passage"),))
    second = PairExample("q", "one query", "p2", "another passage", (("p", "one passage"),))
    dataset = from_examples([first, second], minilm, num_negatives=1, **LENGTHS)
    assert [len(table.keys) for table in dataset._tables.values()] == [1, 2]
    batch = in_order(dataset)
    np.testing.assert_array_equal(batch["query_key"][0], batch["query_key"][1])
    np.testing.assert_array_equal(batch["passage_ids"], batch["negative_ids"][::-1, 0])
    np.testing.assert_array_equal(batch["passage_key"], batch["negative_key"][::-1, 0])


def test_an_id_with_two_texts_is_refused_with_both_examples(minilm):
    """Otherwise only an id's first text would be kept, for example if ids are unique only within a page."""
    passage = {"negatives": (("p0", "no answer"),)}
    for changed, what in (({"query_id": "q0"}, "queries the id 'q0'"), (passage, "passages the id 'p0'")):
        examples = [*EXAMPLES[:4], EXAMPLES[4]._replace(**changed)]
        with pytest.raises(UserError, match=f"example 4: among the {what} .* another text in example 0: an"):
            from_examples(examples, minilm, num_negatives=1, **LENGTHS)


def test_an_epoch_is_a_new_order_of_all_whole_batches(dataset):
    steps = COUNT // 8
    epochs = [
        [numbers(b) for b in take(dataset.batches(batch_size=8, seed=3, start_step=e * steps), steps)]
        for e in (0, 1)
    ]
    for epoch in epochs:
        assert len(set(itertools.chain(*epoch))) == steps * 8
    assert epochs[0] != epochs[1]
    assert numbers(next(dataset.batches(batch_size=8, seed=4))) != epochs[0][0]


def test_resuming_gives_the_same_batches(dataset):
    whole = take(dataset.batches(batch_size=8, seed=3), 40)
    for step in (0, 1, 12, 30):  # an epoch has 12 steps
        resumed = take(dataset.batches(batch_size=8, seed=3, start_step=step), 3)
        for a, b in zip(whole[step : step + 3], resumed, strict=True):
            assert_equal(a, b)


def test_shares_of_the_processes_make_the_batch(dataset):
    whole = take(dataset.batches(batch_size=8, seed=3), 15)
    how = {"batch_size": 8, "seed": 3, "process_count": 4}
    shares = [dataset.batches(process_index=process, **how) for process in range(4)]
    for batch in whole:
        parts = [next(share) for share in shares]
        assert_equal(batch, {name: np.concatenate([part[name] for part in parts]) for name in batch})


def test_negatives_are_drawn_anew_each_epoch_without_repeats(minilm):
    negatives = tuple((f"n{j}", f"wrong {j}") for j in range(6))
    pairs = [e._replace(negatives=negatives) for e in EXAMPLES[:8]]
    dataset = from_examples(pairs, minilm, num_negatives=3, **LENGTHS)
    known = {k.tobytes(): j for j, k in enumerate(stable_keys([i for i, _ in negatives]))}
    drawn = [
        [frozenset(known[k.tobytes()] for k in row) for row in batch["negative_key"]]
        for batch in take(dataset.batches(batch_size=8, seed=0), 300)
    ]
    assert all(len(row) == 3 for batch in drawn for row in batch)
    assert len(set(itertools.chain(*drawn))) == 20  # all 20 ways to choose 3 of 6 are drawn
    uses = np.bincount([j for batch in drawn for row in batch for j in row])
    assert uses.min() > 0.9 * uses.mean()  # uniform: each is expected 1,200 times, with a deviation of 25
    assert any(len(set(batch)) > 1 for batch in drawn)  # rows draw independently
    chosen = [
        {n: sorted(keys.tolist()) for n, keys in zip(numbers(batch), batch["negative_key"], strict=True)}
        for batch in (next(dataset.batches(batch_size=8, seed=seed)) for seed in (0, 1))
    ]
    assert chosen[0].keys() == chosen[1].keys() and chosen[0] != chosen[1]


def test_once_has_the_order_of_the_first_epoch(dataset):
    whole = dataset.once()
    assert numbers(whole) != sorted(numbers(whole)) == list(range(COUNT))
    first = next(dataset.batches(batch_size=COUNT, seed=0))
    singles = [name for name in whole if "negative" not in name]  # `once` does not shuffle lists of negatives
    assert_equal({n: whole[n] for n in singles}, {n: first[n] for n in singles})
    assert_equal(dataset.once(7), {name: x[:7] for name, x in whole.items()})


def lengths(dataset):
    return tuple(dataset.features[name].length for name in ("query_ids", "passage_ids"))


def test_shortened_pairs_lose_padding_only(dataset, minilm):
    roomy = from_examples(EXAMPLES, minilm, query_length=64, passage_length=200)
    short = roomy.shortened()
    whole, cut = (d.once() for d in (roomy, short))
    longest = np.count_nonzero(whole["passage_ids"], axis=1).max()
    assert lengths(short) == (16, 16 * -(-longest // 16)) and longest % 16
    for name, length in zip(("query_ids", "passage_ids"), lengths(short), strict=True):
        np.testing.assert_array_equal(cut[name], whole[name][:, :length])
        assert not whole[name][:, length:].any()
    assert lengths(roomy) == (64, 200)
    assert lengths(dataset.shortened()) == (12, 20)


def test_texts_that_are_cut_are_counted(minilm):
    long, form = "a b c d e f g h", TextFormat(query_length=4, passage_length=6)
    queries = ("one two three", "one", "two")
    passages = [("p0", long), ("p1", "a b"), ("p0", long)]
    records = [{"query": (query, query), "passage": p} for query, p in zip(queries, passages, strict=True)]
    data = ArrayDataset.from_records(records, minilm, pair_features(form))
    for found in (data, data.shortened()):
        assert found.truncation == {"queries": Truncation(4, 3, 1), "passages": Truncation(6, 2, 1)}
    assert dataset_truncation_note(data, form, FLAGS) == (
        "truncated: 1 of 3 queries (33.3 %) at 4 tokens, 1 of 2 passages (50.0 %) at 6 tokens;"
        " --query_length and --passage_length set this"
    )


def test_the_fingerprint_covers_every_number(dataset, minilm):
    assert from_examples(EXAMPLES, minilm, num_negatives=2, **LENGTHS).fingerprint == dataset.fingerprint
    seen = {dataset.fingerprint}

    def noting(array):
        array.flat[-1] += 1
        dataset._content = None
        seen.add(dataset.fingerprint)
        array.flat[-1] -= 1

    tables = [array for table in dataset._tables.values() for array in table]
    for array in (*tables, *dataset._columns.values(), dataset._offsets):
        noting(array)
    dataset._content = None
    assert len(seen) == 1 + 10
    for change in ({"num_negatives": 1}, {"query_length": 11}, {"passage_length": 64}):
        seen.add(from_examples(EXAMPLES, minilm, **{"num_negatives": 2, **LENGTHS, **change}).fingerprint)
    seen.add(from_examples(EXAMPLES[::-1], minilm, num_negatives=2, **LENGTHS).fingerprint)
    assert len(seen) == 1 + 10 + 3 + 1


def test_fingerprints_of_older_runs_stay_valid():
    """Older versions printed these fingerprints, so their runs can be resumed."""
    tokenizer = Tokenizer.load(Path(__file__).parent.parent / "golden/bert")
    texts = ((f"the cat number {i}", f"a mat and {i} dogs", ((f"n{i}", f"other {i}"),)) for i in range(5))
    pairs = [PairExample(f"q{i}", query, f"p{i}", *rest) for i, (query, *rest) in enumerate(texts)]
    form = {"query_length": 8, "passage_length": 12}
    plain = from_examples([e._replace(negatives=()) for e in pairs], tokenizer, **form)
    assert plain.fingerprint == "5 pairs of 8 + 12 tokens, hash b35d7fdd045b29d2"
    both = from_examples(pairs, tokenizer, num_negatives=1, **form)
    assert both.fingerprint == "5 pairs of 8 + 12 tokens, negatives 1, hash 29a5a8feddbf5e5c"


def test_unusable_settings_are_refused(dataset, minilm):
    with pytest.raises(UserError, match="batch_size is 104, but there are only 103 pairs"):
        dataset.batches(batch_size=104, seed=0)
    with pytest.raises(UserError, match="positive multiple of the 3 processes"):
        dataset.batches(batch_size=8, seed=0, process_count=3)
    with pytest.raises(UserError, match="seed must be 0 or more"):
        dataset.batches(batch_size=8, seed=-1)
    with pytest.raises(UserError, match="there are no training examples"):
        from_examples([], minilm, **LENGTHS)
    pairs = [EXAMPLES[0], EXAMPLES[1]._replace(negatives=())]
    with pytest.raises(UserError, match="needs 1 negatives per example, but 1 of 2 have none: set"):
        from_examples(pairs, minilm, num_negatives=1, **LENGTHS)
    assert "negative_ids" not in from_examples(pairs, minilm, **LENGTHS).once()


def test_a_negative_that_is_its_positive_once_cut_is_left_out(minilm, capsys):
    end = " river bank" * 40  # far beyond the maximum length
    passages = {"p": "a long story" + end, "twin": "a long story" + end + " that ends well"}
    passages |= {"other": "a short story" + end, "far": "something else"}
    long, short = (PairExample(q, q, "p", passages["p"], ()) for q in ("q0", "q1"))
    lists = [("twin", "other", "twin"), ("far", "twin"), ("twin",)]  # the last list has no other negative
    pairs = [
        e._replace(negatives=tuple((n, passages[n]) for n in names))
        for e, names in zip((long, short, long), lists, strict=True)
    ]
    dataset = from_examples(pairs, minilm, num_negatives=2, **LENGTHS)
    batch = in_order(dataset)
    names = dict(zip((k.tobytes() for k in stable_keys(list(passages))), passages, strict=True))
    drawn = [{names[key.tobytes()] for key in row} for row in batch["negative_key"]]
    assert drawn == [{"other"}, {"far"}, {"p"}]  # a twin gets its passage's key, so losses mask it
    same = (batch["negative_ids"] == batch["passage_ids"][:, None]).all(-1)
    assert same.any(1).tolist() == [False, False, True]
    assert "3 of 6 negatives left out: truncated to" in capsys.readouterr().err
    # At full length the texts differ, so no negative is left out.
    from_examples(pairs, minilm, num_negatives=2, query_length=16, passage_length=200)
    assert capsys.readouterr().err == ""


def test_negatives_that_all_equal_their_positives_are_refused(minilm, capsys):
    end = " river bank" * 40
    texts = [(f"{i}{end}", f"{i}{end} that ends well") for i in range(3)]
    alone = [PairExample(f"q{i}", f"q {i}", f"p{i}", p, ((f"n{i}", n),)) for i, (p, n) in enumerate(texts)]
    message = "all negatives, truncated to 20 tokens, equal the passage of their example: set num_"
    with pytest.raises(UserError, match=message):
        from_examples(alone, minilm, num_negatives=1, **LENGTHS)
    capsys.readouterr()
    from_examples([*alone, example(7)], minilm, num_negatives=1, **LENGTHS)
    assert "warning: 3 of 4 examples have only negatives that, truncated" in capsys.readouterr().err


LETTERS = "ሀለሐመሠረሰሸቀበተቸኀነኘአከኸወዐዘዠየደጀገጠጨጰጸፀፈፐ"  # Ethiopic, which MiniLM does not know
UNKNOWN = [f"{a}{b} {b}{a}" for a, b in itertools.combinations(LETTERS, 2)]


def with_queries(queries):
    return [e._replace(query_id=q, query=q) for e, q in zip(EXAMPLES, queries, strict=False)]


def test_texts_with_equal_tokens_are_warned_of_or_refused(minilm, capsys):
    known = [e.query for e in EXAMPLES]
    first = f"the first: {UNKNOWN[0]!r} and {UNKNOWN[1]!r}"
    with pytest.raises(UserError, match=f"99 of 100 different queries have the same tokens as .*{first}"):
        from_examples(with_queries(UNKNOWN[:100]), minilm, **LENGTHS)
    capsys.readouterr()
    from_examples(with_queries(UNKNOWN[:21] + known[:79]), minilm, **LENGTHS)
    assert "warning: 20 of 100 different queries have the same tokens" in capsys.readouterr().err
    from_examples(with_queries(UNKNOWN[:9] + known[:91]), minilm, **LENGTHS)
    spellings = [text for i in range(20) for text in (f"Text {i}", f"text {i}", f"TEXT  {i}", f" text {i}")]
    from_examples(with_queries(spellings), minilm, **LENGTHS)
    assert capsys.readouterr().err == ""


def test_tokens_of_distinct_texts_are_counted_without_special_tokens(minilm, monkeypatch):
    from jaxir.data.batches import text_table
    from jaxir.data.batches.mixture import MixtureDataset

    monkeypatch.setattr(text_table, "_COUNT_AT_ONCE", 2)  # small, so that texts are counted in several parts
    answers = ["yes yes yes", "no", "", "yes and no", "maybe", "yes and no"]
    examples = [PairExample(f"q{i}", "who?", f"p{answers.index(a)}", a, ()) for i, a in enumerate(answers)]
    data = from_examples(examples, minilm, **LENGTHS)
    found = data.token_counts("passage", minilm.vocab_size)
    words = [minilm.encode_batch([answer], max_length=20)[0][1:-1].tolist() for answer in answers[:5]]
    assert found.texts == 5 and found.occurrences.sum() == 8
    occurrences = Counter(itertools.chain(*words))
    texts_with = Counter(token for text in words for token in set(text))
    for counted, expected in ((found.occurrences, occurrences), (found.texts_with, texts_with)):
        assert {int(t): int(counted[t]) for t in np.flatnonzero(counted)} == expected
    both = MixtureDataset({"one": data, "other": data}, rates=None).token_counts("passage", minilm.vocab_size)
    assert both.texts == 10 and (both.texts_with == 2 * found.texts_with).all()
