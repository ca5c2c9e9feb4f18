"""A cross-encoder's scores, and mining that drops passages which a cross-encoder finds relevant."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.data.formats.beir_folder import BeirFolder
from jaxir.data.sets.pair_sources import TevatronPairs
from jaxir.interop import model_dir
from jaxir.retrieval.encoding.pair_scorer import CrossEncoder
from jaxir.retrieval.mining import hard_negatives
from jaxir.retrieval.mining.mining_settings import MiningSettings, RelevanceSettings
from jaxir.retrieval.ranking.runs import write_run

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
WORDS = ["cat", "dog", "mat", "mice", "cheese", "table", "night", "sat", "chase", "eat"]
QUERIES = {f"q{i}": f"a {word} and the {WORDS[i - 3]}" for i, word in enumerate(WORDS)}
rng = np.random.default_rng(0)
DOCUMENTS = {f"d{i}": " ".join(rng.choice(WORDS, rng.integers(1, 40))) for i in range(80)}
# d0 is relevant to q0, d1 to q1, ...; d10 is also relevant to q0.
QRELS = [(f"q{i}", f"d{i}") for i in range(10)] + [("q0", "d10")]
# Every query finds 40 documents and its own one.
RUN = {q: [f"d{(7 * i + n) % 80}" for n in range(40)] + [f"d{i}"] for i, q in enumerate(QUERIES)}


@pytest.fixture(scope="module")
def judge():
    return CrossEncoder.load(f"hf:{GOLDEN / 'cross_bert'}", batch_tokens=256)


@pytest.fixture(scope="module")
def relevance(judge) -> dict[tuple[str, str], float]:
    pairs = [(q, d) for q in QUERIES for d in DOCUMENTS]
    return dict(zip(pairs, judge.relevance([(QUERIES[q], DOCUMENTS[d]) for q, d in pairs]), strict=True))


def write_judged(folder, pairs) -> None:
    lines = ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t1" for q, d in pairs)]
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / "train.tsv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path, toy):
    toy.write_jsonl(tmp_path / "corpus.jsonl", [{"_id": i, "text": t} for i, t in DOCUMENTS.items()])
    toy.write_jsonl(tmp_path / "queries.jsonl", [{"_id": i, "text": t} for i, t in QUERIES.items()])
    write_judged(tmp_path, QRELS)
    run = {q: dict.fromkeys(found) for q, found in RUN.items()}
    scores = {q: {d: 1 / (n + 1) for n, d in enumerate(found)} for q, found in run.items()}
    write_run(tmp_path / "run.trec", scores)
    return tmp_path


def candidates(query: str) -> list[str]:
    """The run's documents that are not judged relevant, best first."""
    return [d for d in dict.fromkeys(RUN[query]) if (query, d) not in QRELS]


def mine(folder, judge, name="out", *, max_relevance=None, relevance_margin=None, **settings):
    report = hard_negatives.mine(
        folder / "run.trec",
        BeirFolder(folder),
        folder / name,
        split="train",
        settings=MiningSettings(**settings),
        judge=judge,
        relevance=RelevanceSettings(max_relevance=max_relevance, relevance_margin=relevance_margin),
    )
    pairs = TevatronPairs(path=str(folder / name / "train.jsonl")).examples("stop")
    return {pair.query_id: [d for d, _ in pair.negatives] for pair in pairs}, report


def test_scores_do_not_depend_on_the_batch(judge):
    pairs = [(q, d) for q in list(QUERIES.values())[:2] for d in [*DOCUMENTS.values(), "", "cheese " * 200]]
    scores = judge.score(pairs)
    assert scores.dtype == np.float32 and np.ptp(scores) > 0.1
    np.testing.assert_array_equal(judge.score(pairs), scores)
    np.testing.assert_allclose(judge.score(pairs[::-1])[::-1], scores, atol=1e-5)
    loaded = model_dir.load(judge.spec, kind="cross_encoder")
    one = nnx.jit(lambda m, x, t: m.score(x, t))
    for row in judge.tokenizer.encode(pairs[::40], max_length=judge.max_length):
        alone = one(loaded.model, *(jnp.asarray(np.pad(x, (0, 40 - len(x))))[None] for x in row))
        assert np.abs(alone - scores[::40]).min() < 1e-5
    assert judge.score([]).shape == (0,)


@pytest.mark.parametrize("sampling", ["top", "random"])
def test_negatives_are_at_most_max_relevance(folder, judge, relevance, sampling):
    limit = float(np.quantile(list(relevance.values()), 0.4))
    passing = {q: [d for d in candidates(q) if relevance[q, d] <= limit] for q in QUERIES}
    found, report = mine(folder, judge, max_relevance=limit, sampling=sampling, negatives=5, last=41)
    assert found.keys() == {q for q, some in passing.items() if some} and len(found) > 5
    for query, some in found.items():
        assert some == [d for d in passing[query] if d in some], "in the order of the run"
        assert len(some) == min(5, len(passing[query]))
        assert sampling == "random" or some == passing[query][:5]
    everything, whole = mine(folder, judge, "whole", max_relevance=limit, negatives=100, last=41)
    assert everything == {q: some for q, some in passing.items() if some}
    assert whole.judged == sum(map(len, map(candidates, QUERIES))) > report.judged
    assert whole.false_negatives == {"max_relevance": whole.judged - sum(map(len, passing.values()))}
    assert whole.dropped == {"positive": sum(d in RUN[q] for q, d in QRELS)}


@pytest.mark.parametrize("judged", [QRELS, QRELS[::-1]], ids=["in order", "reversed"])
def test_relevance_margin_is_below_the_least_relevant_positive(folder, judge, relevance, judged):
    write_judged(folder, judged)
    ceilings = {q: min(relevance[p] for p in QRELS if p[0] == q) - 0.01 for q in QUERIES}
    passing = {q: [d for d in candidates(q) if relevance[q, d] <= ceilings[q]] for q in QUERIES}
    found, report = mine(folder, judge, relevance_margin=0.01, negatives=100, last=41)
    assert found == {q: some for q, some in passing.items() if some}
    assert found and report.left_out.get("relevant", 0) == len(QUERIES) - len(found)
    assert set(report.false_negatives) == {"relevance_margin"}


class CountedWords:
    """A judge without a model: passages of more than `limit` words are relevant."""

    spec, fingerprint = "words", "0"

    def __init__(self, limit: int):
        self.limit, self.calls = limit, []

    def relevance(self, pairs):
        self.calls.append(len(pairs))
        return np.array([0.9 if len(passage.split()) > self.limit else 0.1 for _, passage in pairs])


def test_candidates_are_judged_in_small_rounds(folder):
    judge = CountedWords(5)
    found, report = mine(folder, judge, max_relevance=0.5, negatives=2, last=41)
    assert len(judge.calls) > 2 and max(judge.calls) <= 2 * len(QUERIES)
    assert report.judged == sum(judge.calls) and found
    words = {d: len(text.split()) for d, text in DOCUMENTS.items()}
    for query, some in found.items():
        assert len(some) == min(2, sum(words[d] <= 5 for d in candidates(query)))
        assert all(words[d] <= 5 for d in some)
    with pytest.raises(UserError, match="10 whose candidates the cross-encoder all dropped"):
        mine(folder, CountedWords(0), "none", max_relevance=0.5)
    assert not (folder / "none").exists()


def test_command_records_and_prints_what_was_dropped(folder, judge, relevance, capsys):
    limit = round(float(np.median(list(relevance.values()))), 4)
    flags = [f"--run={folder}/run.trec", f"--dataset=beir:{folder}", f"--cross_encoder={judge.spec}"]
    flags += [f"--output={folder}/out", "--negatives=3", f"--max_relevance={limit}", "--relevance_margin=0"]
    assert cli.main("jaxir.mine:mine", flags) == 0
    printed, recorded = capsys.readouterr().out, json.loads((folder / "out" / "mining.json").read_text())
    above, near = (recorded["false_negatives"][name] for name in ("max_relevance", "relevance_margin"))
    assert f"of {recorded['judged']} candidates the cross-encoder found {above + near} relevant" in printed
    assert f"({above} above the maximum, {near} too close to a positive)" in printed
    assert f"dropped: {recorded['dropped']['positive']} known positives" in printed
    named = {"name": judge.spec, "fingerprint": judge.fingerprint}
    assert recorded["cross_encoder"] == named | {"max_relevance": limit, "relevance_margin": 0.0}


def test_mining_writes_a_teachers_scores(folder, judge):
    """For distillation: the cross-encoder's score of each positive and negative with its query."""
    flags = [f"--run={folder / 'run.trec'}", f"--dataset=beir:{folder}", f"--output={folder / 'out'}"]
    flags += ["--negatives=3", f"--teacher=hf:{GOLDEN / 'cross_bert'}"]
    assert cli.main("jaxir.mine:mine", flags) == 0
    pairs = list(TevatronPairs(path=str(folder / "out" / "train.jsonl")).examples("stop"))
    assert len(pairs) == len(QRELS)
    for pair in pairs:
        texts = [(pair.query, text) for text in (pair.passage, *(text for _, text in pair.negatives))]
        scores = [pair.passage_score, *pair.negative_scores]
        assert len(scores) == 4
        np.testing.assert_allclose(scores, judge.score(texts), atol=1e-5)
    assert len({pair.passage_score for pair in pairs}) > 5
    written = json.loads((folder / "out" / "mining.json").read_text())
    assert written["teacher"]["fingerprint"] == judge.fingerprint
