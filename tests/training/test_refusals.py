"""Settings that make no sense: one sentence, and nothing is written."""

import pytest

from jaxir.core.errors import UserError
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.weighted_sum import WeightedSum
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.evaluators.loss import Loss
from jaxir.training.evaluators.retrieval import Retrieval
from jaxir.training.step.optimizers import AdamW
from tests.training.beside import Sigmoid
from tests.training.tiny_run import pairs, run


def groups(**groups) -> dict:
    return {"objective": Sigmoid(), "optimizer": AdamW(groups=groups)}


def by(evaluator) -> dict:
    return {"evaluators": [evaluator]}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"steps": None, "epochs": 0.0}, "^epochs must be a number above 0 or None, not 0.0"),
        ({"steps": None, "epochs": 1.0, "min_steps": 0}, "^min_steps must be a whole number from 1 to"),
        ({"steps": 0}, "^steps must be a whole number from 1 to 2147483647 or None, not 0"),
        ({"batch_size": -8}, "^batch_size must be a whole number from 1 to 16777216, not -8"),
        ({"batch_size": 9}, "^batch_size must be a multiple of the 2 devices that share it, not 9"),
        ({"batch_size": 80}, "^batch_size is 80, but there are only 64 pairs: give a smaller batch_size"),
        ({"log_every": 0}, "^log_every must be a whole number of at least 1, not 0"),
        ({"profile_steps": "5:9"}, "^profile_steps must be the first and the last step .* 5 steps"),
        ({"dev_metric": "ndcg@10"}, "^dev_metric is 'ndcg@10', but only nDCG@10, RR@10, loss, accuracy"),
        ({"dev": pairs(1)}, "evaluator Loss: 1 dev pairs are too few for 2 devices: give more"),
        ({"data": MeshConfig()}, r"data must be training data, such as Pairs\(.*, not MeshConfig\("),
        (by(Loss(data=MeshConfig(), name="x")), "Loss 'x': the evaluator's data must be training data, "),
        (
            {"num_negatives": 2},
            "^the dataset was built with query_ids, .* also needs negative_ids, negative_",
        ),
        (by(Loss(data=pairs(8), name="x", num_negatives=2)), "^evaluator Loss 'x': .* needs .*negative_key"),
        (
            by(Retrieval(data=pairs(8), name="x", dimensions=[8, 99])),
            "dimensions has 99, but the vectors have only 32",
        ),
        ({"frozen": ["tabel"]}, "frozen: no parameter matches 'tabel'"),
        ({"frozen": ["*"]}, "frozen matches all parameters"),
        (groups(**{"auxilary.*": {"learning_rate": 0.1}}), r"'auxilary\.\*' matches no parameter"),
        (groups(**{"t*": {}, "table": {}}), r"'table': all of its .* to an earlier group, .* table to 't\*'"),
        (groups(table={"learning_rat": 0.1}), "group 'table': no setting 'learning_rat'; did you mean"),
        (groups(table={"learning_rate": -1}), "group 'table': learning_rate must be"),
        (groups(table={"warmup_steps": 9}), "group 'table': warmup_steps must be .* less than the 5 steps"),
    ],
)
def test_settings_are_refused_before_anything_is_written(tmp_path, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        run(tmp_path / "run", **{"steps": 5} | settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"parts": {}}, "needs at least one"),
        ({"parts": {"a": Contrastive()}, "weights": {"b": 1.0}}, "names 'b', but the sum only has a"),
        ({"parts": {"a": Contrastive(chunks="auto")}}, "give a number"),
    ],
)
def test_impossible_sums_are_refused(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        WeightedSum(**settings)


def test_data_of_an_evaluator_must_be_an_object():
    with pytest.raises(UserError, match="data must be an object"):
        Loss(data="texts.txt")
