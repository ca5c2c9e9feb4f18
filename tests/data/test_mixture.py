import numpy as np
import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import TextFormat
from jaxir.data.batches import mixture as mixture_module
from jaxir.data.batches.mixture import Mixture, MixtureDataset
from jaxir.data.formats.sources import stable_keys
from jaxir.data.sets.pair_sources import JsonlPairs
from jaxir.objectives.pair_batch import pair_features
from tests.dataset_rows import assert_equal, take

LENGTHS = {"query_length": 8, "passage_length": 8}
PAIRS = pair_features(TextFormat(**LENGTHS))
SIZES = {"a": 40, "b": 24, "c": 9}


@pytest.fixture
def sources(write_jsonl):
    def source(name, size):
        ids = [f"{name}{i}" for i in range(size)]
        rows = [{"query": f"question {i}", "passage": f"passage {i}", "query_id": i} for i in ids]
        return JsonlPairs(path=str(write_jsonl(f"{name}.jsonl", rows)))

    return [source(name, size) for name, size in SIZES.items()]


KNOWN = {
    key.tobytes(): f"{name}{i}"
    for name, size in SIZES.items()
    for i, key in zip(range(size), stable_keys([f"{name}{i}" for i in range(size)]), strict=True)
}


def names(batch):
    return [KNOWN[key.tobytes()] for key in batch["query_key"]]


RATES = [{}, {"rates": [3, 1, 1]}, {"temperature": 2.0}]


def course(batches, count):
    """Returns the source of each of the first `count` batches, as text."""
    tasks = [{name[0] for name in names(batch)} for batch in take(batches, count)]
    assert all(len(task) == 1 for task in tasks)
    return "".join(task.pop() for task in tasks)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.3, 1e9])
def test_a_temperature_gives_each_source_its_share_exactly(minilm, sources, temperature):
    """mT5's formula gives each source's number of batches; its batches have the pairs of its own epochs."""
    dataset = Mixture(sources=sources, temperature=temperature).build(minilm, PAIRS)
    powers = [size ** (1 / temperature) for size in SIZES.values()]
    order = course(dataset.batches(batch_size=4, seed=3), 1000)
    for blocks in range(1, 11):
        counts = [order[: 100 * blocks].count(name) for name in SIZES]
        for count, power in zip(counts, powers, strict=True):
            assert abs(count - 100 * blocks * power / sum(powers)) < 1
    assert len({order[at : at + 100] for at in range(0, 1000, 100)}) == 10, "each block has its own order"
    batches = take(dataset.batches(batch_size=4, seed=3), 400)
    of_a = [names(batch) for batch in batches if names(batch)[0][0] == "a"]
    assert {name for batch in of_a[:10] for name in batch} == {f"a{i}" for i in range(40)}
    assert of_a[:10] != of_a[10:20]


def test_rare_sources_get_their_share_in_long_blocks(minilm, sources):
    dataset = Mixture(sources=sources, rates=[1, 1, 0.005]).build(minilm, PAIRS)
    order = course(dataset.batches(batch_size=4, seed=0), 1203)
    assert [order[:402].count("c"), order[:804].count("c"), order.count("c")] in ([1, 2, 3], [1, 2, 4])
    assert "c 9 (0.25%)" in repr(dataset).replace("source 3 of the mixture", "c")
    with pytest.raises(UserError, match=r"source 3 of the mixture: its share of the batches is 5e-08, less"):
        Mixture(sources=sources, rates=[1, 1, 1e-7]).build(minilm, PAIRS).batches(batch_size=4, seed=0)


def test_packed_batches_follow_the_temperature(minilm, sources):
    packed = Mixture(sources=sources, temperature=1e9, mix_within_batch=True).build(minilm, PAIRS)
    assert sorted(n[0] for n in names(next(packed.batches(batch_size=9, seed=0)))) == list("aaabbbccc")


@pytest.mark.parametrize("rates", [None, [3, 1, 1]])
def test_each_batch_comes_from_one_source(minilm, sources, rates):
    dataset = Mixture(sources=sources, rates=rates).build(minilm, PAIRS)
    assert dataset.num_examples == sum(SIZES.values())
    batches = take(dataset.batches(batch_size=4, seed=3), 400)
    tasks = [{name[0] for name in names(batch)} for batch in batches]
    assert all(len(task) == 1 for task in tasks)
    order = "".join(task.pop() for task in tasks)
    counts = {name: order.count(name) for name in SIZES}
    if rates is None:  # each epoch has 10, 6 and 2 batches of the sources, in a new order
        assert all(abs(counts[n] - 400 * s / 18) < 8 for n, s in zip("abc", (10, 6, 2), strict=True))
        assert sorted(order[:18]) == sorted("a" * 10 + "b" * 6 + "c" * 2)
        assert order[:18] != order[18:36] and order[:18] != "".join(sorted(order[:18]))
        assert len({n for batch in batches[:18] for n in names(batch)}) == 40 + 24 + 8
    else:
        assert [counts[name] for name in "abc"] == [240, 80, 80]
        assert "aaa" in order and "ab" in order and "ba" in order
    assert order != "".join(names(b)[0][0] for b in take(dataset.batches(batch_size=4, seed=4), 400))


def test_a_shortened_mixture_has_one_length_that_cuts_no_text(minilm, sources):
    roomy = TextFormat(query_length=64, passage_length=200)
    whole = Mixture(sources=[Mixture(sources=sources[:1]), *sources[1:]]).build(minilm, pair_features(roomy))
    short = whole.shortened()
    (batch,), (padded,) = (take(d.batches(batch_size=8, seed=0), 1) for d in (short, whole))
    length = short.features["passage_ids"].length
    assert batch["passage_ids"].shape[1] == length < 200 and length % 16 == 0
    np.testing.assert_array_equal(batch["passage_ids"], padded["passage_ids"][:, :length])
    assert not padded["passage_ids"][:, length:].any()
    assert short.fingerprint != whole.fingerprint, "a run records the fingerprint of the whole"
    queries = whole.truncation["queries"]
    assert (queries.length, queries.cut, queries.texts) == (64, 0, sum(SIZES.values()))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rates", RATES)
def test_batches_are_a_function_of_seed_and_step(minilm, sources, rates, packed, monkeypatch):
    monkeypatch.setattr(mixture_module, "_STEPS_AT_ONCE", 16)  # small, so that a resume counts several blocks
    monkeypatch.setattr(mixture_module, "_SMALLEST_BLOCK", 16)
    mixture = Mixture(sources=sources, mix_within_batch=packed, **rates)
    first, second = (mixture.build(minilm, PAIRS) for _ in range(2))
    whole = take(first.batches(batch_size=8, seed=5), 60)
    for a, b in zip(whole, take(second.batches(batch_size=8, seed=5), 60), strict=True):
        assert_equal(a, b)
    for step in (1, 17, 41):
        for a, b in zip(whole[step:], second.batches(batch_size=8, seed=5, start_step=step), strict=False):
            assert_equal(a, b)
    halves = [first.batches(batch_size=8, seed=5, process_index=i, process_count=2) for i in (0, 1)]
    for batch, *parts in zip(whole[:20], *halves, strict=False):
        assert_equal(batch, {name: np.concatenate([p[name] for p in parts]) for name in batch})


def test_packed_batches_hold_all_sources_in_proportion(minilm, sources):
    packed = Mixture(sources=sources, rates=[2, 1, 1], mix_within_batch=True).build(minilm, PAIRS)
    batches = take(packed.batches(batch_size=8, seed=0), 10)
    assert [sorted(n[0] for n in names(b)) for b in batches] == [list("aaaabbcc")] * 10
    assert {n for b in batches for n in names(b) if n[0] == "a"} == {f"a{i}" for i in range(40)}
    by_size = Mixture(sources=sources, mix_within_batch=True).build(minilm, PAIRS)
    assert sorted(n[0] for n in names(next(by_size.batches(batch_size=7, seed=0)))) == list("aaaabbc")
    with pytest.raises(UserError, match=r"source 3 of the mixture: its share of a batch of 2 is 0\.25 pairs"):
        by_size.batches(batch_size=2, seed=0)


def test_once_reads_each_pair_of_all_sources(minilm, sources):
    """`once` ignores rates, because dev evaluation and distractors read all pairs of any data."""
    for settings in ({}, {"mix_within_batch": True}, {"rates": [9, 1, 1]}):
        dataset = Mixture(sources=sources, **settings).build(minilm, PAIRS)
        read = names(dataset.once())
        assert read != sorted(read) == sorted(KNOWN.values())
        assert len({n[0] for n in read[:20]}) > 1, "the sources are mixed"
        some = names(dataset.once(30))
        assert len(some) == len(set(some)) == 30 and {n[0] for n in some} == set("abc")


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([1, 1], "the mixture's 3 sources have 2 rates"),
        ([1, 0, 1], "source 2 of the mixture: the rate must be a positive number, got 0"),
        ([1, 1, float("inf")], "source 3 of the mixture: the rate must be a positive number, got inf"),
    ],
)
def test_bad_rates_are_refused_before_anything_is_read(minilm, sources, rates, message):
    with pytest.raises(UserError, match=message):
        Mixture(sources=sources, rates=rates).build(minilm, PAIRS)
    with pytest.raises(UserError, match="temperature must be a number above 0 or None, not 0"):
        Mixture(sources=sources, temperature=0).build(minilm, PAIRS)
    with pytest.raises(UserError, match="a mixture has rates or a temperature, not both"):
        Mixture(sources=sources, temperature=2.0, rates=[1, 1, 1]).build(minilm, PAIRS)
    with pytest.raises(UserError, match="a mixture needs at least one source"):
        Mixture(sources=[]).build(minilm, PAIRS)


def test_the_fingerprint_covers_all_sources_and_how_they_are_mixed(minilm, sources, write_jsonl):
    def fingerprint(sources=sources, **how):
        return Mixture(sources=sources, **how).build(minilm, PAIRS).fingerprint

    changed = JsonlPairs(path=str(write_jsonl("other.jsonl", [{"query": "b", "passage": "b"}])))
    hows = ({}, {"rates": [3, 1, 1]}, {"rates": [3, 1, 2]}, {"mix_within_batch": True})
    hows += ({"temperature": 2.0},)
    found = [*(fingerprint(**how) for how in hows), fingerprint([sources[0], changed, sources[2]])]
    assert len(set(found)) == len(found)
    assert fingerprint(rates=[6, 2, 2]) == found[1]


def test_a_mixture_depends_on_the_number_of_processes_if_a_source_does(minilm, sources):
    plain, other = (s.build(minilm, PAIRS) for s in sources[:2])
    other.order_depends_on_parts = True  # pretends to be a SeqIO task, whose order depends on the processes
    assert not MixtureDataset({"a": plain}, rates=None).order_depends_on_parts
    assert MixtureDataset({"a": plain, "b": other}, rates=None).order_depends_on_parts


def test_faults_of_a_source_are_named(minilm, sources, tmp_path, capsys):
    dataset = Mixture(sources=sources).build(minilm, PAIRS)
    with pytest.raises(UserError, match="source 3 of the mixture: batch_size is 16, but there are only 9"):
        dataset.batches(batch_size=16, seed=0)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"query": "x"}\n{"query": "x", "passage": "y"}\n')
    mixture = Mixture(sources=[*sources, JsonlPairs(path=str(bad))])
    with pytest.raises(BadInputError, match=r"bad\.jsonl:1: no field 'passage'"):
        mixture.build(minilm, PAIRS)
    assert mixture.build(minilm, PAIRS, on_bad_input="skip").num_examples == 74
    assert capsys.readouterr().err == f"skipped 1 record: no field 'passage' (first: {bad}:1)\n"
