import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat, Tokens
from jaxir.data.batches.mixture import Mixture
from jaxir.data.batches.with_prompts import WithPrompts
from jaxir.data.sets.pair_sources import JsonlPairs
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.distillation import Distillation
from jaxir.objectives.pair_batch import pair_features, pair_format
from tests.dataset_rows import take

LONG, SHORT = "instruct: find an answer to the question query: ", "find: "
OWN = {"query_prompt": "query: ", "passage_prompt": "passage: "}
FORM = TextFormat(16, 12, num_negatives=1, **OWN)


@pytest.fixture
def sources(write_jsonl):
    """Two sets of pairs with equal texts, and a query that is cut after a long prompt."""
    rows = [{"query": f"the red cat {i} " + "on a mat " * i, "passage": f"dog {i}"} for i in range(6)]
    rows = [{**row, "negatives": ["a bird", "a fish"]} for row in rows]
    return [JsonlPairs(path=str(write_jsonl(f"{name}.jsonl", rows))) for name in "ab"]


def unpadded(ids):
    """Returns the tokens of each text of [..., L], sorted."""
    return sorted(row[row != 0].tolist() for row in ids.reshape(-1, ids.shape[-1]))


def test_each_set_has_its_own_prompts_in_its_ids(minilm, sources):
    """Prompt and text are tokenised as one text, which is cut at the model's length."""
    data = Mixture(
        sources=[
            WithPrompts(data=sources[0], query_prompt=LONG),
            WithPrompts(data=sources[1], query_prompt=SHORT, passage_prompt=""),
        ]
    )
    built = data.build(minilm, pair_features(FORM))
    rows, expected = [*sources[0].records("stop")], []
    for query, passage in ((LONG, OWN["passage_prompt"]), (SHORT, "")):
        sides = {"query": (query, 16), "passage": (passage, 12)}
        ids = {
            side: minilm.encode_batch([prompt + row[side][1] for row in rows], max_length=length)
            for side, (prompt, length) in sides.items()
        }
        birds = minilm.encode_batch([f"{passage}a bird", f"{passage}a fish"], max_length=12)
        expected.append((*(sorted(x.tolist() for x in ids[side]) for side in sides), [*map(list, birds)]))
    seen = set()
    for batch in take(built.batches(batch_size=6, seed=0), 4):
        found = unpadded(batch["query_ids"]), unpadded(batch["passage_ids"])
        number = [queries for queries, _, _ in expected].index(found[0])
        assert found[1] == expected[number][1]
        assert all(row in expected[number][2] for row in unpadded(batch["negative_ids"]))
        seen.add(number)
    assert seen == {0, 1}
    queries = [prompt + row["query"][1] for prompt in (LONG, SHORT) for row in rows]
    long = [x for x in minilm.encode_batch(queries, max_length=99) if len(x) > 16]
    assert built.own_prompts and built.truncation["queries"].cut == len(long) > 0


def test_prompts_that_are_not_given_are_the_models(minilm, sources):
    plain = sources[0].build(minilm, pair_features(FORM))
    same = WithPrompts(data=sources[0]).build(minilm, pair_features(FORM))
    inner = WithPrompts(data=WithPrompts(data=sources[0], **OWN), query_prompt=LONG)
    assert plain.fingerprint == same.fingerprint == inner.build(minilm, pair_features(FORM)).fingerprint
    other = WithPrompts(data=sources[0], query_prompt=SHORT).build(minilm, pair_features(FORM))
    assert other.fingerprint != plain.fingerprint and not plain.own_prompts


@pytest.mark.parametrize("packed", [False, True])
def test_batches_count_each_sets_prompt_tokens(minilm, sources, packed):
    """Rows of one batch may have prompts of different lengths; of an empty one, nothing is left out."""
    form = TextFormat(16, 12, prompt_tokens=(4, 4), **OWN)
    assert pair_format(pair_features(form)) == form
    given = [LONG, ""]
    data = Mixture(
        sources=[WithPrompts(data=s, query_prompt=p) for s, p in zip(sources, given, strict=True)],
        mix_within_batch=packed,
    )
    built = data.build(minilm, pair_features(form))
    found = set()
    for batch in take(built.batches(batch_size=4, seed=0), 6):
        assert batch["query_prompt_tokens"].dtype == np.int32
        assert batch["passage_prompt_tokens"].tolist() == [4] * 4
        counts = batch["query_prompt_tokens"].tolist()
        assert packed == (len(set(counts)) == 2)
        found |= set(counts)
    words = minilm.encode_batch([LONG], max_length=99)[0]
    assert found == {0, len(words) - 1}  # the prompt's tokens, without [SEP] at the end
    assert set(built.once()["query_prompt_tokens"].tolist()) == found


def test_objectives_on_pairs_take_prompts_and_others_refuse_them(minilm, sources):
    scored = Distillation().features(FORM)
    data = WithPrompts(data=sources[0], query_prompt=LONG)
    # The error is about this field, not about the prompts.
    with pytest.raises(UserError, match="reads the field 'passage_score'"):
        data.build(minilm, scored)
    assert data.build(minilm, Contrastive().features(FORM)).features["query_ids"].prompt == LONG
    with pytest.raises(UserError, match="for queries and passages, but the objective reads the field 'text'"):
        data.build(minilm, {"text_ids": Tokens("text", 8)})
