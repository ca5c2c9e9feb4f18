"""A dual encoder learns a teacher's scores, which come with the data."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jaxir import fit
from jaxir.core.errors import BadInputError, UserError
from jaxir.core.features import TextFormat
from jaxir.data.sets.own_pairs import Pairs
from jaxir.data.sets.pair_sources import TevatronPairs
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.losses.distillation import kl_distillation, margin_mse
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.distillation import Distillation
from jaxir.objectives.weighted_sum import WeightedSum
from jaxir.training.evaluators.loss import Loss
from jaxir.training.step.optimizers import AdamW
from tests.training.saved_run import log

GOLDEN = Path(__file__).resolve().parent.parent / "golden/bert"
BERT = f"st:{GOLDEN}"
SYLLABLES = [f"{a}{b}" for a in "dhlmnrst" for b in "aeio"]


def write(path, count=32, scored=True):
    """Writes queries with a positive and four negatives each; a teacher's score counts shared syllables."""
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for i in range(count):
            words = rng.choice(SYLLABLES, 4, replace=False)
            passages = []
            for shared in (4, 3, 2, 1, 0):
                others = rng.choice([s for s in SYLLABLES if s not in words], 4 - shared, replace=False)
                text = " ".join(rng.permutation([*words[:shared], *others]))
                score = {"score": float(shared)} if scored else {}
                passages.append({"docid": f"d{i}-{shared}", "title": "", "text": text} | score)
            record = {"query_id": f"q{i}", "query": " ".join(words)}
            record |= {"positive_passages": passages[:1], "negative_passages": passages[1:]}
            file.write(json.dumps(record) + "\n")
    return TevatronPairs(path=str(path))


def of_batches(source, objective, tokenizer, count):
    data = source.build(tokenizer, objective.features(TextFormat(16, 24, num_negatives=count)))
    return next(data.batches(batch_size=8, seed=0))


def test_a_batch_has_the_score_of_each_passage_that_was_drawn(tmp_path):
    tokenizer = Tokenizer.load(GOLDEN)
    batch = of_batches(write(tmp_path / "mined.jsonl"), Distillation(), tokenizer, 3)
    assert batch["passage_score"].tolist() == [4.0] * 8 and batch["passage_score"].dtype == np.float32
    assert batch["negative_scores"].shape == (8, 3)
    texts = {
        tuple(tokenizer.encode_batch([p["text"]], max_length=24)[0].tolist()): p["score"]
        for line in (tmp_path / "mined.jsonl").read_text().splitlines()
        for p in json.loads(line)["negative_passages"]
    }
    drawn = np.array([[texts[tuple(x[x != 0].tolist())] for x in row] for row in batch["negative_ids"]])
    np.testing.assert_array_equal(batch["negative_scores"], drawn)
    assert len({tuple(row) for row in drawn.tolist()}) > 2  # rows draw different negatives


@pytest.mark.slow
@pytest.mark.parametrize("loss", [margin_mse, kl_distillation])
def test_distillation_learns_the_teachers_ranking(tmp_path, loss):
    objective = Distillation(loss=partial(loss, temperature=0.25))
    settings = {"steps": 60, "batch_size": 16, "num_negatives": 4, "optimizer": AdamW(learning_rate=2e-3)}
    settings |= {"output_dir": tmp_path / "run", "log_every": 1}
    fit(BERT, write(tmp_path / "mined.jsonl"), objective=objective, **settings)
    first, *_, last = [line for line in log(tmp_path / "run") if "loss" in line]
    assert last["loss"] < 0.5 * first["loss"]
    assert last["agreement"] > 0.9 > first["agreement"]


@pytest.mark.slow
def test_loss_is_measured_on_dev_data_that_have_scores_alone(tmp_path):
    """Only the evaluator's data have scores, not the dev pairs; distillation is one part of the objective."""
    parts = {"labels": Contrastive(), "teacher": Distillation()}
    objective, data = WeightedSum(parts=parts, weights={"teacher": 0.1}), write(tmp_path / "m.jsonl")
    dev = Pairs(["da de di", "ha he hi", "la le li", "ma me mi"], ["da de", "ha he", "la le", "ma me"])
    scored = Loss(name="scored", data=data, num_negatives=2, every=1)
    settings = {"steps": 2, "batch_size": 8, "num_negatives": 2, "dev": dev, "evaluators": [scored]}
    fit(BERT, data, objective=objective, **settings, dev_metric="scored/loss", output_dir=tmp_path / "run")
    lines = log(tmp_path / "run")
    assert any("teacher/margin" in line and "labels/accuracy" in line for line in lines)
    assert any("dev/nDCG@10" in line for line in lines) and not any("dev/loss" in line for line in lines)
    first, second = [line["dev/scored/loss"] for line in lines if "dev/scored/teacher/teacher_margin" in line]
    assert first != second


def test_incomplete_scores_are_refused_only_if_they_are_read(tmp_path):
    tokenizer, source = Tokenizer.load(GOLDEN), write(tmp_path / "mined.jsonl")
    lines = (tmp_path / "mined.jsonl").read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace(', "score": 2.0', "")
    (tmp_path / "mined.jsonl").write_text("".join(lines))
    form = TextFormat(16, 24, num_negatives=3)
    with pytest.raises(UserError, match="reads the field 'passage_score', but example 4 has only"):
        source.build(tokenizer, Distillation().features(form))
    assert source.build(tokenizer, Contrastive().features(form)).num_examples == 32


def test_distillation_refuses_unsuitable_data_and_settings(tmp_path):
    tokenizer = Tokenizer.load(GOLDEN)
    plain = write(tmp_path / "plain.jsonl", scored=False)
    with pytest.raises(UserError, match="reads the field 'passage_score', but the data have only query, "):
        of_batches(plain, Distillation(), tokenizer, 2)
    with pytest.raises(UserError, match="compares a passage with hard negatives: set num_negatives"):
        of_batches(plain, Distillation(), tokenizer, 0)
    data, settings = write(tmp_path / "m.jsonl"), {"steps": 2, "batch_size": 8, "num_negatives": 2}
    settings |= {"dev": Pairs(["da de"], ["ha he"]), "dev_metric": "loss"}
    with pytest.raises(UserError, match=r"dev_metric is 'loss', but only nDCG@10, RR@10 are measured$"):
        fit(BERT, data, objective=Distillation(), **settings)
    text = (tmp_path / "m.jsonl").read_text().replace('"score": 3.0', '"score": "high"', 1)
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(BadInputError, match=r"bad\.jsonl:1: .* has a score that is not a number"):
        of_batches(TevatronPairs(path=str(tmp_path / "bad.jsonl")), Distillation(), tokenizer, 2)
