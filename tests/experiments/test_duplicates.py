import json
from pathlib import Path

import numpy as np
import pytest

from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import TextFormat
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import PairExample
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.experiments.duplicates import DuplicateRich, merge_passages
from jaxir.objectives.pair_batch import pair_features

REAL_DATA = Path(__file__).parents[3] / "shared" / "data" / "beir" / "debpkgs"


def pairs(count):
    return [PairExample(f"q{i}", f"query {i}", f"d{i}", f"text {i}") for i in range(count)]


def test_largest_groups_share_their_first_passage():
    groups = ["b", "a", "a", "c", "b", "a", "a", "d"]
    merged = merge_passages(pairs(8), groups, unique=1 / 3)
    assert [(p.query_id, p.query, p.passage_id, p.passage) for p in merged] == [
        ("q0", "query 0", "d0", "text 0"),
        ("q1", "query 1", "d1", "text 1"),
        ("q2", "query 2", "d1", "text 1"),
        ("q4", "query 4", "d0", "text 0"),
        ("q5", "query 5", "d1", "text 1"),
        ("q6", "query 6", "d1", "text 1"),
    ]
    assert len(merge_passages(pairs(8), groups, unique=0.3)) == 4
    assert len(merge_passages(pairs(8), groups, unique=0.5)) == 8
    assert merge_passages(pairs(8), list("abcdefgh"), unique=1) == pairs(8)


def test_impossible_share_of_unique_passages_is_refused():
    with pytest.raises(UserError, match=r"the largest group has 4 pairs, so unique=0.2"):
        merge_passages(pairs(8), ["b", "a", "a", "c", "b", "a", "a", "d"], unique=0.2)


@pytest.mark.parametrize("mask", [True, False])
def test_duplicates_share_keys_only_if_masked(folder, model, mask):
    source = DuplicateRich(directory=str(folder), unique=0.34, mask_duplicates=mask)
    tokenizer = Tokenizer.load(Path(model.removeprefix("hf:")))
    dataset = source.build(tokenizer, pair_features(TextFormat(query_length=8, passage_length=12)))
    batch = next(dataset.batches(batch_size=12, seed=0))  # 12 pairs in groups of 5, 3, 2 and 2: 4 passages
    assert dataset.num_examples == 12
    assert len(np.unique(batch["passage_ids"], axis=0)) == 4
    assert len(np.unique(batch["query_ids"], axis=0)) == 12
    assert len(np.unique(batch["passage_key"], axis=0)) == (4 if mask else 12)


def test_document_without_group_is_refused(folder):
    corpus = folder / "corpus.jsonl"
    lines = corpus.read_text().splitlines()
    lines[2] = json.dumps({"_id": "d2", "text": "no group", "metadata": {}})
    corpus.write_text("\n".join(lines) + "\n")
    with pytest.raises(BadInputError, match=r"corpus.jsonl:3: its metadata has no text in 'source'"):
        DuplicateRich(directory=str(folder)).examples(OnBadInput())


@pytest.mark.slow
@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="the package descriptions are not here")
def test_package_descriptions_reach_the_share_of_triviaqa():
    found = list(DuplicateRich(directory=str(REAL_DATA)).examples(OnBadInput()))
    passages = {pair.passage_id for pair in found}
    assert (len(found), len(passages)) == (22_301, 3_791)
    assert 0.1699 < len(passages) / len(found) <= 0.17
