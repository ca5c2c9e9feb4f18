"""A resume refuses other data, settings or weights, and directories that are not runs."""

import copy
import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.interop.model.run_dir import sealed
from jaxir.models.dual_encoder import DualEncoderModel
from jaxir.training.run.run_settings import disagreement, model_fingerprint
from tests.training import tiny_run
from tests.training.saved_run import saved_steps
from tests.training.tiny_run import STOPPED, Bag, ToOne, pairs, run


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"batch_size": 16}, "batch_size=8, not 16"),
        ({"seed": 1}, "seed=0, not 1"),
        ({"steps": 13}, "(optimizer|steps)="),
        ({"learning_rate": 1.0}, r"optimizer\.learning_rate=0.0003, not 1.0;"),
        ({"objective": ToOne()}, "objective="),
        ({"dev": pairs(21, seed=2)}, "dev=nDCG@10 on 21 pairs"),
        ({"dev_metric": "loss"}, "dev="),
        ({"model": tiny_run.bert()}, "model="),
    ],
)
def test_resuming_with_other_settings_is_refused(tmp_path, stopped, change, name):
    shutil.copytree(stopped, tmp_path / "run")
    with pytest.raises(UserError, match=rf"was trained with {name}.*another output_dir"):
        run(tmp_path / "run", **STOPPED | change)
    assert saved_steps(tmp_path / "run") == saved_steps(stopped)


def with_other_passages(data: ArrayDataset, rows: np.ndarray) -> ArrayDataset:
    """The same pairs, with some of the passages replaced."""
    found = copy.copy(data)
    passages = data._tables["passages"]
    flat = passages.flat.reshape(len(passages.keys), -1).copy()
    flat[rows] += 1
    found._tables = data._tables | {"passages": passages._replace(flat=flat.ravel())}
    return found


def test_resuming_on_other_data_is_refused_though_the_first_batch_is_the_same(tmp_path, stopped):
    shutil.copytree(stopped, tmp_path / "run")
    data = pairs(64)
    first = {row.tobytes() for row in next(data.batches(batch_size=8, seed=0))["passage_key"]}
    rows = [i for i, key in enumerate(data._tables["passages"].keys) if key.tobytes() not in first]
    for changed in (np.array(rows), np.array(rows[-1:])):  # all the others, and a single one
        other = with_other_passages(data, changed)
        for a, b in zip(
            *(next(d.batches(batch_size=8, seed=0)).values() for d in (data, other)), strict=True
        ):
            assert np.array_equal(a, b)
        with pytest.raises(
            UserError, match=r"was trained on other data: 64 pairs .* with other content; .*another output"
        ):
            run(tmp_path / "run", data=other, **STOPPED)
    assert run(tmp_path / "run", data=pairs(64), **STOPPED).step == 12
    with pytest.raises(UserError, match="was trained on other data"):  # not "is complete"
        run(tmp_path / "run", data=other, **STOPPED)


SAVED = {"auxiliary": "2 arrays a", "model": "9 parameters a", "objective": "TSDAE()", "seed": 0}
OTHER = {"auxiliary": "2 arrays b", "model": "9 parameters b"}
ARRAYS = {"auxiliary": {"hash": "1 arrays a", "arrays": {"bias": "[] float32"}}}
WRITTEN = {"dev": "EM on 8 questions, hash a, written with max_new_tokens=4, num_beams=1"}


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        # The setting that was chosen is named before its consequences.
        (SAVED, SAVED | OTHER | {"seed": 1}, "was trained with seed=0, not 1;"),
        (SAVED, SAVED | OTHER | {"objective": "C()"}, "was trained with objective=TSDAE(), not C();"),
        (SAVED, SAVED | OTHER, "was trained with auxiliary modules that started with other values"),
        ({}, ARRAYS, "was trained with auxiliary.bias=nothing, not [] float32;"),
        (ARRAYS, {}, "was trained with auxiliary.bias=[] float32, not nothing;"),
        # Earlier versions recorded only a hash of the auxiliary,
        ({"auxiliary": "1 arrays a"}, ARRAYS, None),
        ({"auxiliary": "1 arrays b"}, ARRAYS, "was trained with auxiliary modules that started with other"),
        (
            {"auxiliary": "1 arrays b"},
            {},
            "was trained with auxiliary modules, but now the objective has none",
        ),
        # only the first batch of the data,
        (
            {"data": "64 examples 0123456789abcdef"},
            {"data": "64 pairs"},
            "was started by an earlier jaxir, which",
        ),
        (
            {"dev": "nDCG@10 on 21 examples 0123456789abcdef"},
            {"dev": "nDCG@10 on 21 pairs"},
            "was started by",
        ),
        # distractors with a dev loss,
        ({"dev": "loss on 21 pairs, 40 distractors"}, {"dev": "loss on 21 pairs"}, None),
        ({"dev": "loss on 20 pairs, 40 distractors"}, {"dev": "loss on 21 pairs"}, "was trained with dev="),
        # and not how texts were written.
        ({"dev": "EM on 8 questions, hash a"}, WRITTEN, None),
        ({"dev": "EM on 8 questions, hash b"}, WRITTEN, "was trained with dev="),
        ({"dev": None}, WRITTEN, "was trained with dev="),
        ({"dev": "EM on 8 questions, hash a"}, {"dev": None}, "was trained with dev="),
    ],
)
def test_compared_settings(saved, now, said):
    found = disagreement(saved, now)
    assert found is None if said is None else found.startswith(said)


def test_a_model_is_known_by_its_config_and_by_the_names_shapes_and_types_of_its_parameters():
    config = tiny_run.bert().config
    other = dataclasses.replace(config, pooling="cls")
    kinds = [
        *(DualEncoderModel(c, rngs=nnx.Rngs(0)) for c in (config, other)),
        nnx.Dict(a=nnx.Param(jnp.zeros((2, 3)))),
        nnx.Dict(b=nnx.Param(jnp.zeros((2, 3)))),
        nnx.Dict(a=nnx.Param(jnp.zeros((3, 2)))),
        nnx.Dict(a=nnx.Param(jnp.zeros((2, 3), jnp.bfloat16))),
    ]
    assert len(set(map(model_fingerprint, kinds))) == len(kinds)
    assert model_fingerprint(tiny_run.bert(seed=1)) == model_fingerprint(kinds[0])


def test_resuming_from_other_weights_is_refused(tmp_path, stopped):
    shutil.copytree(stopped, tmp_path / "run")
    refused = r"was started from other weights than the model has now; give the model .*another output_dir"
    with pytest.raises(UserError, match=refused):
        run(tmp_path / "run", model=Bag(seed=1), **STOPPED)
    assert saved_steps(tmp_path / "run") == saved_steps(stopped)
    assert run(tmp_path / "run", **STOPPED).step == 12
    with pytest.raises(UserError, match=refused):  # not "is complete"
        run(tmp_path / "run", model=Bag(seed=1), **STOPPED)


@pytest.mark.parametrize("told", [None, "damaged", {"hash": "0" * 16, "on": "tpu"}])
def test_a_run_whose_first_weights_cannot_be_compared_is_resumed(tmp_path, stopped, told):
    """Earlier versions did not record weights; other devices may round random ones differently."""
    shutil.copytree(stopped, tmp_path / "run")
    for path in [tmp_path / "run/run.json", *(tmp_path / "run/checkpoints").glob("*/run/metadata")]:
        record = json.loads(path.read_text())
        assert record["settings"].pop("weights")["on"].startswith("cpu {")
        record["settings"] |= {"weights": told} if told else {}
        path.write_text(json.dumps(sealed(record) if "sha256" in record else record))
    assert run(tmp_path / "run", **STOPPED).step == 12


def test_directory_of_something_else_is_never_written_to(tmp_path, stopped):
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("the only copy")
    with pytest.raises(UserError, match=r"not empty and is not a training run"):
        run(other)
    assert [p.name for p in other.iterdir()] == ["thesis.txt"]
    gone = tmp_path / "gone"
    shutil.copytree(stopped, gone)
    shutil.rmtree(gone / "checkpoints")
    with pytest.raises(UserError, match=r"the checkpoints of .* are gone"):
        run(gone, **STOPPED)
