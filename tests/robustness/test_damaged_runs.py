import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax import nnx

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored_run import checkpoint_of
from jaxir.interop.weights import stores
from jaxir.training.run import checkpoints
from tests.training import tiny_run
from tests.training.saved_run import losses, saved_steps
from tests.training.tiny_run import STOPPED, ToOne, run

pytestmark = pytest.mark.slow
TOKENIZER = Path(__file__).resolve().parent.parent / "golden" / "bert"


def test_half_removed_older_checkpoint_is_set_aside(tmp_path, stopped, capsys):
    lost_content = (lambda path: (path / "run" / "metadata").write_text("null"), shutil.rmtree)
    for number, damaged in enumerate(lost_content):
        run_dir = Path(shutil.copytree(stopped, tmp_path / str(number)))
        older, *_, newest = saved_steps(run_dir)
        path = run_dir / "checkpoints" / str(older)
        damaged(path)
        path.mkdir(exist_ok=True)
        # An earlier damaged checkpoint of the same step left this directory.
        (run_dir / "broken" / str(older)).mkdir(parents=True)
        result = run(run_dir, **STOPPED)
        assert (result.started_at, result.step) == (newest, 12)
        said = capsys.readouterr().err
        assert f"warning: checkpoint {older} is damaged (" in said
        assert f"moved to {run_dir}/broken/{older}-2\n" in said and (run_dir / f"broken/{older}-2").is_dir()
        assert json.loads((run_dir / "checkpoints" / "best.json").read_text())["step"] != older


def test_transient_errors_set_no_checkpoint_aside(tmp_path, stopped):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    older, *_, newest = saved_steps(run_dir)
    for step, name in ((newest, "opt_state/_METADATA"), (older, "run/metadata")):
        path = run_dir / "checkpoints" / str(step) / name
        aside = path.rename(tmp_path / "aside")
        path.symlink_to("/proc/self/mem")  # reading this file fails with EIO
        before = sorted(run_dir.rglob("*"))
        said = rf"checkpoints/{step} could not be read \(input/output error\); nothing was changed: run the"
        with pytest.raises(UserError, match=said):
            run(run_dir, **STOPPED)
        assert sorted(run_dir.rglob("*")) == before
        path.unlink()
        aside.rename(path)
    assert run(run_dir, **STOPPED).started_at == newest


def test_kill_while_removing_a_checkpoint_leaves_no_half(tmp_path, stopped, monkeypatch):
    shutil.copytree(stopped, run_dir := tmp_path / "run")
    oldest = saved_steps(run_dir)[0]

    class Killed(BaseException):
        pass

    def dies(path):
        shutil.rmtree(path / "params")
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpoints, "remove_tree", dies)
        checkpoints.Checkpoints(run_dir, {}, keep_last=1, metric=None)._remove(oldest)
    assert oldest not in saved_steps(run_dir)
    assert run(run_dir, **STOPPED).step == 12
    assert not (run_dir / "broken").exists()
    assert not [p for p in (run_dir / "checkpoints").iterdir() if p.name.startswith(".")]


@pytest.fixture(scope="module")
def resumed_run(tmp_path_factory, stopped):
    run_dir = shutil.copytree(stopped, tmp_path_factory.mktemp("resumed") / "run")
    return run_dir, run(run_dir, **STOPPED).best_value


def damage(path, how):
    if how == "remove":
        path.unlink()
        return
    content = bytearray(path.read_bytes())
    if how == "truncate":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("item", "how"),
    [("params", "truncate"), ("opt_state", "flip"), ("params", "remove")],
)
def test_a_broken_checkpoint_is_reported_and_an_older_one_used(
    tmp_path, stopped, resumed_run, capsys, item, how
):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    *_, older, newest = saved_steps(run_dir)
    data = max((run_dir / "checkpoints" / str(newest) / item).rglob("d/*"), key=lambda p: p.stat().st_size)
    damage(data, how)
    result = run(run_dir, **STOPPED)
    errors = capsys.readouterr().err
    assert f"checkpoint {newest} is damaged" in errors and f"resuming {run_dir} at step {older}" in errors
    assert (run_dir / "broken" / str(newest)).is_dir()
    whole, best_value = resumed_run
    assert best_value == result.best_value
    assert losses(whole) == losses(run_dir)


def test_without_a_whole_checkpoint_the_run_stops(tmp_path, stopped):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    for step in saved_steps(run_dir):
        (run_dir / "checkpoints" / str(step) / "params" / "manifest.ocdbt").write_bytes(b"no")
    with pytest.raises(UserError, match=r"no checkpoint of .* is intact"):
        run(run_dir, **STOPPED)
    assert not (run_dir / "broken").exists()


# ------------------------------------------------------------------------------------------ parameters


@pytest.fixture(scope="module", params=["saved", "scanned run"])
def model(request, tmp_path_factory) -> tuple[Path, Path]:
    bert = tiny_run.bert(num_layers=2, scan_layers="scanned" in request.param)
    settings, tokenizer = EncoderSettings(query_max_length=8, passage_max_length=8), Tokenizer.load(TOKENIZER)
    directory = tmp_path_factory.mktemp("model") / "m"
    if request.param == "saved":
        model_dir.save(directory, bert, tokenizer, settings)
        return directory, Path("params")
    run(directory, model=bert, objective=ToOne(), steps=4, dev=None)
    model_dir.write_description(directory, bert.config, tokenizer, settings)
    return directory, Path("checkpoints/4/params")


def values_of(directory: Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in model_dir.read(str(directory))[0].params.items()}


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


def test_a_flipped_bit_in_any_file_of_the_parameters_is_noticed_or_changes_nothing(model, tmp_path):
    directory, params = model
    expected, refused = values_of(directory), 0
    shutil.copytree(directory, tmp_path / "m")
    files = [p for p in (tmp_path / "m" / params).rglob("*") if p.is_file() and p.stat().st_size]
    for path in files:
        whole = path.read_bytes()
        content = bytearray(whole)
        content[len(whole) // 2] ^= 0x10
        path.write_bytes(content)
        try:
            assert same(values_of(tmp_path / "m"), expected), path
        except UserError as error:
            assert str(tmp_path) in str(error) and "\n" not in str(error)
            refused += 1
        path.write_bytes(whole)
    assert refused >= 2
    assert same(values_of(tmp_path / "m"), expected)


def test_one_changed_number_is_refused_by_load_and_encode(model, tmp_path, capsys):
    directory, params = model
    shutil.copytree(directory, tmp_path / "m")
    where = tmp_path / "m" / params
    specs = stores.orbax_specs(where)
    name, spec = next((".".join(k), s) for k, s in specs.items() if k[-2:] == ("wo", "kernel"))
    array = tensorstore.open(spec, open=True).result()
    first = (0,) * array.ndim
    array[first] = np.nextafter(array[first].read().result(), np.float32(9))
    with pytest.raises(UserError, match=rf"{where} .*{name} is damaged"):
        model_dir.load(str(tmp_path / "m"))
    (tmp_path / "corpus.jsonl").write_text('{"_id": "1", "text": "one"}\n')
    flags = [f"--model={tmp_path}/m", f"--input={tmp_path}/corpus.jsonl", f"--output={tmp_path}/out"]
    assert cli.main("jaxir.encode:encode", flags) == 1
    assert f"{name} is damaged" in capsys.readouterr().err


def test_parameters_of_another_model_and_another_tokenizer_are_refused(model, tmp_path):
    directory, params = model
    shutil.copytree(directory, tmp_path / "m")
    tokenizer = tmp_path / "m" / "tokenizer" / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.write_text(text.replace('"Whitespace"', '"WhitespaceSplit"') + "\n")
    with pytest.raises(UserError, match="m/tokenizer is damaged: it has changed"):
        model_dir.load(str(tmp_path / "m"))
    tokenizer.write_text(text)
    shutil.rmtree(tmp_path / "m" / params)
    other = tiny_run.bert(seed=9, num_layers=2, scan_layers=params != Path("params"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "m" / params, nnx.to_pure_dict(nnx.state(other, nnx.Param)))
    with pytest.raises(UserError, match="is damaged"):
        model_dir.load(str(tmp_path / "m"))


def test_directories_of_earlier_versions_load_without_checksums(model, tmp_path):
    directory, params = model
    shutil.copytree(directory, tmp_path / "m")
    about = tmp_path / "m" / "jaxir.json"
    new = ("tokenizer", "checksums", "sha256")
    old = {k: v for k, v in json.loads(about.read_text()).items() if k not in new}
    about.write_text(json.dumps(old))
    if params.parts[0] == "checkpoints":
        record = tmp_path / "m" / params.parent / "run" / "metadata"
        kept = {k: v for k, v in json.loads(record.read_text()).items() if k not in ("checksums", "sha256")}
        record.write_text(json.dumps(kept | {"checksum": 1}))
    assert same(values_of(tmp_path / "m"), values_of(directory))


def test_a_run_without_best_json_is_opened_by_its_newest_checkpoint_with_one_warning(
    tmp_path, stopped, capfd
):
    run_dir = Path(shutil.copytree(stopped, tmp_path / "run"))
    (run_dir / "jaxir.json").write_text("{}")  # the command `train` writes this file, the loop does not
    best = run_dir / "checkpoints" / "best.json"
    assert checkpoint_of(run_dir).name == str(json.loads(best.read_text())["step"])
    best.unlink()
    *older, newest = saved_steps(run_dir)
    for _ in range(2):
        assert checkpoint_of(run_dir).name == str(newest)
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"warning: {best} is missing: the newest checkpoint, {run_dir}/checkpoints/")
    for step in older:
        shutil.rmtree(run_dir / "checkpoints" / str(step))
    assert checkpoint_of(run_dir).name == str(newest)
    run(run_dir, **STOPPED)
    assert best.exists() and "warning" not in capfd.readouterr().err
