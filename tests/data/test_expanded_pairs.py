import collections
import itertools

import numpy as np
import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import TextFormat, Tokens
from jaxir.data.batches.mixture import Mixture
from jaxir.data.expanded.expanded_pairs import ExpandedPairs
from jaxir.data.expanded.joining import Joiner
from jaxir.data.expanded.rouge import Words, rouge_l
from jaxir.data.expanded.selection import Bottom, Curriculum, First, Gold, Random, Top, selection_of
from jaxir.data.sets.pair_sources import TevatronPairs
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.objectives.pair_batch import pair_features
from tests.beir_folder import write_jsonl
from tests.dataset_rows import assert_equal, take

QUERY = "how old is the oak tree"
# By descending ROUGE-L with QUERY, which has 6 words; the first is the query itself.
GENERATED = [
    "How old is the oak tree?",  # ROUGE-L 1
    "how old is the tree",  # 10 / 11
    "is the oak old",  # 6 / 10
    "what is the price",  # 4 / 10
    "tree of life",  # 2 / 9
    "zebra",  # 0
]
RELEVANCE = [1, 10 / 11, 6 / 10, 4 / 10, 2 / 9, 0]
FORM = TextFormat(12, 24, num_negatives=1)
FEATURES = pair_features(FORM)


def padded(rows: list[np.ndarray]) -> np.ndarray:
    found = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, words in zip(found, rows, strict=True):
        row[: len(words)] = words
    return found


def test_rouge_l_equals_rouge_score():
    from rouge_score import rouge_scorer

    words = Words()
    query = words(QUERY)
    found = rouge_l(padded([query] * 6), padded([words(text) for text in GENERATED]))
    np.testing.assert_allclose(found, RELEVANCE)
    rng = np.random.default_rng(0)
    some = ["a", "b", "c", "d!", "e-f", "é", "G7"]
    texts = [" ".join(rng.choice(some, rng.integers(0, 20))) for _ in range(400)]
    texts[:2] = ["", "?!"]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    scorer = rouge_scorer.RougeScorer(["rougeL"])
    expected = [scorer.score(one, other)["rougeL"].fmeasure for one, other in pairs]
    found = rouge_l(*(padded([words(pair[i]) for pair in pairs]) for i in range(2)))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert 0 < np.mean(found) < 1 and found[0] == 0


@pytest.mark.parametrize(
    ("count", "groups", "bounds"),
    [
        (80, 3, [(53, 80), (26, 53), (0, 26)]),
        (10, 4, [(7, 10), (5, 7), (2, 5), (0, 2)]),
        (2, 3, [(1, 2), (0, 1), (0, 1)]),  # fewer queries than groups: the last two groups are equal
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
        (5, 1, [(0, 5)]),
    ],
)
def test_groups_of_a_curriculum(count, groups, bounds):
    stages = [Curriculum(groups).among(count, step, 7 * groups) for step in range(7 * groups)]
    assert stages == [bound for bound in bounds for _ in range(7)]
    assert Curriculum(groups).among(count, 7 * groups + 5, 7 * groups) == bounds[-1]


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    """Three pairs with one negative each, and a corpus of six documents with their generated queries."""
    folder = tmp_path_factory.mktemp("collection")

    def write(name, records):
        write_jsonl(folder / name, records)

    texts = [f"document number {word}" for word in ("one", "two", "three", "four", "five", "six")]
    texts[3] = "a long document about trees " * 9
    write("corpus.jsonl", [{"_id": f"d{i}", "text": text} for i, text in enumerate(texts)])
    write("queries.jsonl", [{"_id": f"q{i}", "text": QUERY if not i else f"query {i}"} for i in range(3)])
    generated = [GENERATED, ["only one"], [], [f"{t}?" for t in GENERATED], ["c", "a", "c"], ["unused"]]
    write("expansions.jsonl", [{"_id": f"d{i}", "outputs": texts} for i, texts in enumerate(generated)])
    passages = [{"docid": f"d{i}", "title": "", "text": text} for i, text in enumerate(texts)]
    pairs = [
        {
            "query_id": f"q{i}",
            "query": QUERY if not i else f"query {i}",
            "positive_passages": [passages[i]],
            "negative_passages": [passages[3 + (i + 1) % 2]] if i else [passages[3]],
        }
        for i in range(3)
    ]
    write("pairs.jsonl", pairs)
    return folder


def source(folder, **settings) -> ExpandedPairs:
    given = {"expansions": str(folder / "expansions.jsonl"), "corpus": str(folder / "corpus.jsonl")}
    return ExpandedPairs(pairs=TevatronPairs(path=str(folder / "pairs.jsonl")), **(given | settings))


def drawn(data, tokenizer, *, steps, run=None, name="passage_ids"):
    """Returns for each step the query appended to the passage of QUERY's pair, or the negative's text."""
    data = data.scheduled(run or steps)
    own = tokenizer.encode_batch([QUERY], max_length=12)[0]
    found = []
    for batch in itertools.islice(data.batches(batch_size=3, seed=5), steps):
        (row,) = (i for i, ids in enumerate(batch["query_ids"]) if ids[: len(own)].tolist() == own.tolist())
        ids = batch[name][row].reshape(-1)
        text = tokenizer.decode(ids)
        found.append(text.partition("document number one")[2] if name == "passage_ids" else text)
    return [text.strip().replace(" ?", "?") for text in found]


def test_a_curriculum_draws_from_the_group_of_the_stage(collection, minilm):
    data = source(collection).build(minilm, FEATURES)
    assert data.num_examples == 3 and data.features == FEATURES
    found = drawn(data, minilm, steps=90)
    # Without the gold query, five queries are left; the stages draw from 3:5, from 1:3 and from 0:1 of these.
    for stage, queries in enumerate([GENERATED[4:], GENERATED[2:4], GENERATED[1:2]]):
        counts = collections.Counter(found[30 * stage : 30 * (stage + 1)])
        assert counts.keys() == set(queries), (stage, counts)
        assert min(counts.values()) >= 7  # of 30 draws of one query, or about 15 of each of two
    # Queries of hard negatives are chosen by the same rule, compared with the pair's gold query.
    found = drawn(data, minilm, steps=30, run=90, name="negative_ids")
    assert all(any(text.endswith(q) for q in ("tree of life?", "zebra?")) for text in found)
    assert len({text.rpartition("trees")[2] for text in found}) > 1


@pytest.mark.parametrize(
    ("selection", "queries"),
    [
        (Random(), GENERATED[1:]),
        (Top(), GENERATED[1:2]),
        (Top(k=2), GENERATED[1:3]),
        (Top(k=9), GENERATED[1:]),
        (Bottom(k=2), GENERATED[4:]),
        (Bottom(k=9), GENERATED[1:]),
        (First(), [GENERATED[0].lower()]),
        (Gold(), [QUERY]),
    ],
)
def test_each_selection_draws_its_queries(collection, minilm, selection, queries):
    data = source(collection, selection=selection).build(minilm, FEATURES)
    found = drawn(data, minilm, steps=60)
    assert set(found) == set(queries)
    negatives = drawn(data, minilm, steps=3, name="negative_ids")
    if isinstance(selection, Gold):  # negatives, too, get the gold query of their pair
        assert all(text.endswith(QUERY) for text in negatives)


def test_the_gold_query_can_be_appended_once(collection, minilm, capsys):
    assert selection_of("random", groups=3, k=1) == Random() and selection_of("bottom", k=5) == Bottom(5)
    with pytest.raises(UserError, match="appended is 3, but Gold"):
        source(collection, selection=Gold(), appended=3).build(minilm, FEATURES)
    capsys.readouterr()
    source(collection, selection=Gold()).build(minilm, FEATURES)
    assert "not expanded" not in capsys.readouterr().err, "every document has the gold query"


@pytest.mark.parametrize("selection", [Top(), Curriculum(3), Bottom(k=2)])
def test_a_document_with_only_the_gold_query_is_expanded_with_it(collection, minilm, tmp_path, selection):
    lines = [{"_id": f"d{i}", "outputs": [GENERATED[0], QUERY] if not i else ["other"]} for i in range(6)]
    gold = write_jsonl(tmp_path / "gold.jsonl", lines)
    data = source(collection, expansions=str(gold), selection=selection)
    found = drawn(data.build(minilm, FEATURES), minilm, steps=6)
    assert {text.rstrip("?") for text in found} == {QUERY}


def test_the_gold_query_is_recognised_in_any_script(tmp_path, write_jsonl, minilm):
    """ROUGE-L compares words of a to z, so it is 0 for the same question in Chinese, and 1 for C and C#."""
    golds = {"什么是注意力": ["什么是注意力？", "注意力"], "what is C?": ["What is C", "what is C#?"]}
    for i, (gold, generated) in enumerate(golds.items()):
        passage = {"docid": f"d{i}", "text": f"document {i}"}
        write_jsonl("corpus.jsonl", [{"_id": f"d{i}", "text": f"document {i}"}])
        write_jsonl("expansions.jsonl", [{"_id": f"d{i}", "outputs": generated}])
        write_jsonl("pairs.jsonl", [{"query_id": f"q{i}", "query": gold, "positive_passages": [passage]}])
    data = source(tmp_path, selection=Top()).build(minilm, pair_features(TextFormat(12, 24)))
    batch = next(data.batches(batch_size=2, seed=0))
    read = sorted(minilm.decode(ids) for ids in batch["passage_ids"])
    assert [text.removeprefix(f"document {i}").strip() for i, text in enumerate(read)] == [
        minilm.decode(minilm.encode_batch([q], max_length=12)[0]) for q in ("注意力", "what is C#?")
    ]


def test_passages_are_read_with_their_chosen_query(collection, minilm):
    data = source(collection, selection=Top()).build(minilm, FEATURES)
    plain = TevatronPairs(path=str(collection / "pairs.jsonl")).build(minilm, FEATURES)
    ours, theirs = (next(d.batches(batch_size=3, seed=1)) for d in (data.scheduled(1), plain))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].shape == array.shape and ours[name].dtype == array.dtype
        if name not in ("passage_ids", "negative_ids"):
            assert np.array_equal(ours[name], array)
    cls, sep = minilm.encode_batch([""], max_length=8)[0]
    for before, after in zip(theirs["passage_ids"], ours["passage_ids"], strict=True):
        document, text = before[before != 0], after[after != 0]
        assert text[0] == cls and text[-1] == sep and np.array_equal(text[: len(document)], document)
        if "three" in minilm.decode(document):  # this document has no generated query
            assert np.array_equal(text, document)
        else:
            assert len(text) > len(document) and cls not in text[1:]
    # The long document is cut, not its query.
    (long,) = (ids[0] for ids in ours["negative_ids"] if "old is the tree" in minilm.decode(ids[0]))
    assert (long != 0).all() and long[-1] == sep and (long == sep).sum() == 2
    assert minilm.decode(long).endswith("how old is the tree?")


def test_several_queries_are_appended_while_they_fit(collection, minilm):
    form = TextFormat(12, 40)
    data = source(collection, selection=First(), appended=3).build(minilm, pair_features(form))
    (text,) = set(drawn(data, minilm, steps=2))
    assert text == "how old is the oak tree? how old is the tree is the oak old"
    joiner = Joiner(minilm, 14, 8)
    document, (short, long) = np.array([101, 7, 8, 102]), joiner.queries(["a", "one two three four five six"])
    assert short.tolist() == [1037, 102], "a [SEP] behind it, and no [CLS] in the middle of a text"
    cut = joiner.join(np.array([101, *range(7, 19), 102]), [short])
    assert cut.tolist() == [101, *range(7, 17), 102, 1037, 102]
    assert joiner.join(document, []).tolist() == document.tolist()
    assert joiner.join(document, [long, long, short]).tolist() == [*document, *long, *short]


def test_documents_are_joined_with_a_tokenizer_without_a_first_token(sentencepiece_folder):
    tokenizer = Tokenizer.load(sentencepiece_folder)
    joiner = Joiner(tokenizer, 32, 8)
    document, query = tokenizer.encode_batch(["this is a test", "of this"], max_length=32)
    (appended,) = joiner.queries(["of this"])
    assert joiner.join(document, [appended]).tolist() == [*document, *query]


def test_evaluation_expands_documents_with_their_first_query(collection, minilm):
    selections = (Curriculum(3), Gold(), First())
    datasets = [source(collection, selection=s).build(minilm, FEATURES) for s in selections]
    batches = [data.once() for data in datasets]
    assert len(batches[0]["query_ids"]) == 3
    for batch in batches[1:]:
        assert all(np.array_equal(batch[name], batches[0][name]) for name in batch)
    texts = {minilm.decode(ids).replace(" ?", "?") for ids in batches[0]["passage_ids"]}
    ends = ("one how old is the oak tree?", "two only one", "three")
    assert texts == {f"document number {end}" for end in ends}
    assert len(datasets[0].once(2)["query_ids"]) == 2


def test_batches_are_a_function_of_seed_and_step(collection, minilm):
    data = source(collection).build(minilm, FEATURES).scheduled(60)
    whole = take(data.batches(batch_size=2, seed=3), 60)
    for one, other in zip(whole[40:], data.batches(batch_size=2, seed=3, start_step=40), strict=False):
        assert_equal(one, other)
    parts = [data.batches(batch_size=2, seed=3, process_index=p, process_count=2) for p in range(2)]
    for batch in whole[:20]:
        halves = [next(part) for part in parts]
        assert_equal(batch, {name: np.concatenate([half[name] for half in halves]) for name in batch})
    others = take(data.batches(batch_size=2, seed=4), 60)
    assert any((a["passage_ids"] != b["passage_ids"]).any() for a, b in zip(whole, others, strict=True))
    plain = TevatronPairs(path=str(collection / "pairs.jsonl")).build(minilm, FEATURES)
    for one, other in zip(whole, plain.batches(batch_size=2, seed=3), strict=False):
        np.testing.assert_array_equal(one["passage_key"], other["passage_key"])


def test_the_fingerprint_covers_the_queries_and_their_selection(collection, minilm):
    settings = ({}, {"selection": Curriculum(2)}, {"most": 2}, {"appended": 2})
    prints = {source(collection, **given).build(minilm, FEATURES).fingerprint for given in settings}
    assert len(prints) == 4


def test_unusable_expansions_are_refused(collection, minilm, tmp_path, capsys):
    lines = (collection / "expansions.jsonl").read_text().splitlines()
    (tmp_path / "short.jsonl").write_text("\n".join(lines[1:]) + "\n")
    (tmp_path / "blank.jsonl").write_text('{"_id": "d0", "outputs": [" "]}\n' + "\n".join(lines[1:]))
    with pytest.raises(BadInputError, match=r"blank.jsonl:1: an item of 'outputs' is empty"):
        source(collection, expansions=str(tmp_path / "blank.jsonl")).build(minilm, FEATURES)
    (tmp_path / "none.jsonl").write_text("".join(f'{{"_id": "d{i}", "outputs": []}}\n' for i in range(6)))
    with pytest.raises(UserError, match=r"none\.jsonl has no query for any of the pairs' documents"):
        source(collection, expansions=str(tmp_path / "none.jsonl")).build(minilm, FEATURES)
    corpus = (collection / "corpus.jsonl").read_text().splitlines()
    (tmp_path / "corpus.jsonl").write_text("\n".join(corpus[1:]))
    with pytest.raises(UserError, match="lacks 1 of the 5 documents of the pairs"):
        given = {"expansions": str(tmp_path / "short.jsonl"), "corpus": str(tmp_path / "corpus.jsonl")}
        source(collection, **given).build(minilm, FEATURES)
    with pytest.raises(UserError, match="needs an objective that reads queries and passages"):
        source(collection).build(minilm, {"text_ids": Tokens("text", 8)})
    capsys.readouterr()
    data = source(collection).build(minilm, FEATURES)
    assert "1 of 5 documents have no generated query and are not expanded" in capsys.readouterr().err
    mixture = Mixture(sources=[source(collection)]).build(minilm, FEATURES)
    for unscheduled in (data, mixture):
        with pytest.raises(UserError, match=r"Curriculum\(groups=3\) depends on the step of the training"):
            unscheduled.batches(batch_size=1, seed=0)
    skipped = source(collection, expansions=str(tmp_path / "blank.jsonl"))
    assert skipped.build(minilm, FEATURES, on_bad_input="skip").num_examples == 3
