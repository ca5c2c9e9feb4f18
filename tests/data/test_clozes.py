import collections

import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.sets.clozes import Clozes
from jaxir.objectives.ict import ICT


def read(path, **settings):
    return list(Clozes(path=str(path), **settings).records(OnBadInput("stop")))


def test_each_sentence_has_its_passage_without_it(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("A one. B two! C three? D four.\nAlone.\nE five. F six. G seven. H eight. I nine.\n")
    found = read(path, passage_sentences=3)
    assert [record["passage"][1] for record in found] == [
        "A one. B two! C three? D four.",  # D four. is alone, so it joins the passage before it
        "E five. F six. G seven.",
        "H eight. I nine.",
    ]
    assert [text for _, text in found[1]["sentences"]] == ["E five.", "F six.", "G seven."]
    contexts = [text for _, text in found[1]["contexts"]]
    assert contexts == ["F six. G seven.", "E five. G seven.", "E five. F six."]
    identifiers = [i for r in found for i, _ in (r["passage"], *r["sentences"])]
    assert len(set(identifiers)) == len(identifiers)
    path.write_text("Alone.\nAlone again.\n")
    with pytest.raises(UserError, match=r"texts\.txt: no text has two sentences"):
        read(path)
    with pytest.raises(UserError, match="passage_sentences"):
        Clozes(path=str(path), passage_sentences=1)


def test_each_epoch_draws_a_sentence_with_its_own_context(tmp_path, minilm):
    path = tmp_path / "texts.txt"
    sentences = [["Red apples.", "Green pears.", "Blue plums.", "Old trees."], ["New cars.", "Big towns."]]
    path.write_text("".join(" ".join(s) + "\n" for s in sentences))
    data = Clozes(path=str(path)).build(minilm, ICT().features(TextFormat(12, 24)))
    seen = collections.Counter()
    batches = data.batches(batch_size=2, seed=1)
    for _, batch in zip(range(60), batches, strict=False):
        for sentence, context, whole in zip(
            *(batch[f"{name}_ids"] for name in ("sentence", "context", "whole")), strict=True
        ):
            own, rest, everything = (x[x > 0][1:-1].tolist() for x in (sentence[0], context[0], whole))
            seen[tuple(own)] += 1
            at = next(n for n in range(len(everything)) if everything[n : n + len(own)] == own)
            assert rest == everything[:at] + everything[at + len(own) :]
    assert len(seen) == 6 and min(seen.values()) > 5
    again = data.batches(batch_size=2, seed=1, start_step=7)
    expected = [b for _, b in zip(range(8), data.batches(batch_size=2, seed=1), strict=False)][-1]
    assert all(np.array_equal(x, expected[name]) for name, x in next(again).items())
