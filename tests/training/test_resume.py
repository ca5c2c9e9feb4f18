"""A resume refuses other data, settings or weights, and a directory that run.json does not mark as a run."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.data.batches.array_dataset import ArrayDataset
from jaxir.interop.model.stored_run import sealed
from jaxir.models.dual_encoder import DualEncoderModel
from jaxir.training.run.marker import check_run_dir, mark
from jaxir.training.run.run_settings import disagreement, model_fingerprint
from tests.training import tiny_run
from tests.training.saved_run import log, saved_steps
from tests.training.tiny_run import STOPPED, Bag, Hooked, ToOne, pairs, run, stop_at


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
    # Change all passages after the first batch, then a single one.
    for changed in (np.array(rows), np.array(rows[-1:])):
        other = with_other_passages(data, changed)
        batches = (next(d.batches(batch_size=8, seed=0)).values() for d in (data, other))
        assert all(map(np.array_equal, *batches))
        with pytest.raises(UserError, match=r"on other data: 64 pairs .* with other content; .*another outp"):
            run(tmp_path / "run", data=other, **STOPPED)
    assert run(tmp_path / "run", data=pairs(64), **STOPPED).step == 12
    with pytest.raises(UserError, match="was trained on other data"):  # not "is complete"
        run(tmp_path / "run", data=other, **STOPPED)


SAVED = {"auxiliary": "2 arrays a", "model": "9 parameters a", "objective": "TSDAE()", "seed": 0}
OTHER = {"auxiliary": "2 arrays b", "model": "9 parameters b"}
ARRAYS = {"auxiliary": {"hash": "1 arrays a", "arrays": {"bias": "[] float32"}}}
NDCG = "nDCG@10 on 21"
WRITTEN = {"dev": "EM on 8 questions, hash a, written with max_new_tokens=4, num_beams=1"}


@pytest.mark.parametrize(
    ("saved", "now", "said"),
    [
        # A setting that the user changed is named before settings that follow from it.
        (SAVED, SAVED | OTHER | {"seed": 1}, "was trained with seed=0, not 1;"),
        (SAVED, SAVED | OTHER | {"objective": "C()"}, "was trained with objective=TSDAE(), not C();"),
        (SAVED, SAVED | OTHER, "was trained with auxiliary modules that started with other values"),
        ({}, ARRAYS, "was trained with auxiliary.bias=nothing, not [] float32;"),
        (ARRAYS, {}, "was trained with auxiliary.bias=[] float32, not nothing;"),
        # Earlier versions recorded only a hash of the auxiliary.
        ({"auxiliary": "1 arrays a"}, ARRAYS, None),
        ({"auxiliary": "1 arrays b"}, ARRAYS, "was trained with auxiliary modules that started with other"),
        ({"auxiliary": "1 arrays b"}, {}, "was trained with auxiliary modules, but now the objective has"),
        # Earlier versions recorded only the first batch of the data.
        ({"data": "64 examples 0123456789abcdef"}, {"data": "64 pairs"}, "was started by an earlier jaxir,"),
        ({"dev": f"{NDCG} examples 0123456789abcdef"}, {"dev": f"{NDCG} pairs"}, "was started by an earlier"),
        # Earlier versions recorded distractors with a dev loss.
        ({"dev": "loss on 21 pairs, 40 distractors"}, {"dev": "loss on 21 pairs"}, None),
        ({"dev": "loss on 20 pairs, 40 distractors"}, {"dev": "loss on 21 pairs"}, "was trained with dev="),
        # Earlier versions did not record how texts were written.
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


def test_run_without_its_checkpoints_is_refused(tmp_path, stopped):
    shutil.copytree(stopped, tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone" / "checkpoints")
    with pytest.raises(UserError, match=r"the checkpoints of .* are gone"):
        run(tmp_path / "gone", **STOPPED)


def resumed(run_dir: Path, capsys) -> None:
    """Resumes a run to its end, without a warning."""
    newest = saved_steps(run_dir)[-1]
    capsys.readouterr()
    result = run(run_dir, **STOPPED)
    assert (result.started_at, result.step) == (newest, 12)
    assert "warning" not in capsys.readouterr().err


def test_damaged_or_foreign_run_json_is_replaced(tmp_path, stopped):
    whole = (stopped / "run.json").read_bytes()
    content, path = json.loads(whole), tmp_path / "run.json"
    of_another_run = json.dumps({"settings": content["settings"], "run": "f" * 16}).encode()
    changed = whole.replace(b'"seed": 0', b'"seed": 7')
    for damage in (None, b"", b"\xff\xfe\x00", b"null", changed, of_another_run, whole):
        path.write_bytes(damage) if damage is not None else path.unlink(missing_ok=True)
        assert mark(tmp_path, content["settings"], content["run"]) == content["run"]
        assert path.read_bytes() == whole


def test_run_resumes_without_run_json_and_with_a_damaged_best_json(tmp_path, stopped, capsys):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    before = (run_dir / "run.json").read_bytes()
    (run_dir / "run.json").unlink()
    (run_dir / "checkpoints" / "best.json").write_bytes(b"\xff\xfe")
    resumed(run_dir, capsys)
    assert (run_dir / "run.json").read_bytes() == before
    assert json.loads((run_dir / "checkpoints" / "best.json").read_text())["step"] > 0


def test_run_of_an_earlier_version_resumes(tmp_path, stopped, capsys):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    settings = json.loads((run_dir / "run.json").read_text())["settings"]
    (run_dir / "run.json").write_text(json.dumps({"settings": settings}, indent=2))
    unnamed = [json.dumps({k: v for k, v in x.items() if k != "run"}) + "\n" for x in log(run_dir)]
    (run_dir / "log.jsonl").write_text("".join(unnamed))
    for step in (run_dir / "checkpoints").glob("*/run/metadata"):
        record = json.loads(step.read_text())
        kept = {k: v for k, v in record.items() if k in ("step", "dev_value", "settings")}
        step.write_text(json.dumps(kept))
    stop_at(run_dir, 10)
    resumed(run_dir, capsys)
    assert not (run_dir / "broken").exists()
    lines = log(run_dir)
    assert [x["step"] for x in lines if "loss" in x] == list(range(1, 13))
    assert {x["run"] for x in lines if "run" in x} == {json.loads((run_dir / "run.json").read_text())["run"]}


def test_directories_of_other_programs_are_refused(tmp_path):
    for number, content in enumerate(('{"name": "my sweep"}', "", '{"settings": {"a": 1}, "sha256": ""}')):
        place = tmp_path / str(number)
        place.mkdir()
        (place / "run.json").write_text(content)
        with pytest.raises(UserError, match=rf"^{place}/run.json is damaged or was not written by"):
            check_run_dir(place)
    (place := tmp_path / "model" / "checkpoints" / "3").mkdir(parents=True)
    (place / "model.pt").touch()
    with pytest.raises(UserError, match=r"is not empty and is not a training run \(it has no run\.json\)"):
        check_run_dir(tmp_path / "model")
    (tmp_path / "model" / "checkpoints" / "4" / "run").mkdir(parents=True)
    record = {"step": 4, "dev_value": None, "settings": {}}
    (tmp_path / "model" / "checkpoints" / "4" / "run" / "metadata").write_text(json.dumps(record))
    check_run_dir(tmp_path / "model")  # the newest checkpoint is one of jaxir's


def test_run_killed_before_its_first_checkpoint_keeps_its_name(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)  # killed before run.json was written
    with pytest.raises(ZeroDivisionError):
        run(run_dir, data=Hooked(pairs(64), lambda step: step == 2 and 1 / 0), **STOPPED)
    name = json.loads((run_dir / "run.json").read_text())["run"]
    assert name in (run_dir / "log.jsonl").read_text()
    run(run_dir, **STOPPED)
    assert json.loads((run_dir / "run.json").read_text())["run"] == name
