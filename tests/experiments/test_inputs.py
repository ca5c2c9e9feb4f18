"""What an experiment reads is told by hashes: they change with what decides its results, and with no more."""

import json

import pytest

from jaxir.data.formats.sources import BeirFolder
from jaxir.experiments import inputs


def appended(path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("bindings", "splits"),
    [
        ([], ["train", "dev"]),
        (["DEV_SPLIT = 'test'"], ["train", "test"]),
        (['TRAIN_SPLIT="test"', "TRAIN_SPLIT='dev'"], ["dev"]),
        (["DEV_SPLIT='other'"], ["train"]),
    ],
)
def test_the_splits_that_runs_train_on_and_choose_by_are_those_that_bindings_name(folder, bindings, splits):
    told = inputs.of_training_splits(BeirFolder(folder), "toy", bindings)
    paths = {f"split {split} of toy": folder / "qrels" / f"{split}.tsv" for split in splits}
    assert told == {name: inputs.of_file(path) for name, path in paths.items()}


def test_a_folder_is_the_names_and_sizes_of_its_files(tmp_path):
    """As that of a judge's tasks."""
    (tmp_path / "tasks" / "MR").mkdir(parents=True)
    file = tmp_path / "tasks" / "MR" / "train.tsv"
    seen = [inputs.of_file(tmp_path / "tasks")]
    for content in ("a", "ab"):
        file.write_text(content)
        seen.append(inputs.of_file(tmp_path / "tasks"))
    file.rename(file.with_name("test.tsv"))
    seen.append(inputs.of_file(tmp_path / "tasks"))
    assert len(set(seen)) == 4


def test_recipes_of_jaxirs_own_do_not_count_and_those_that_include_each_other_end(tmp_path):
    for one, other in ("ab", "ba"):
        (tmp_path / f"{one}.gin").write_text(f"include '{tmp_path}/{other}.gin'\ninclude 'gin/pairs.gin'\n")
    told = inputs.of_gin_files([tmp_path / "a.gin", "gin/pairs.gin", "no such file"])
    assert list(told) == [f"{tmp_path}/a.gin", f"{tmp_path}/b.gin"]


@pytest.mark.parametrize("scheme", ["hf:", "st:", "w2v:", "t5x:"])
def test_a_model_of_others_is_whatever_its_folder_holds(tmp_path, scheme):
    place = tmp_path / "model"
    place.mkdir()
    seen = [inputs.of_model(f"{scheme}{place}")]
    for name in ("weights", "other", "weights"):
        appended(place / name, "1")
        seen.append(inputs.of_model(f"{scheme}{place}"))
    (place / "weights").rename(place / "renamed")
    seen.append(inputs.of_model(f"{scheme}{place}"))
    assert None not in seen and len(set(seen)) == len(seen)
    (place / ".cache").mkdir()
    (place / ".cache" / "file").touch()
    (place / "README.md").touch()
    assert inputs.of_model(f"{scheme}{place}") == seen[-1]


def test_paths_that_are_no_local_model_have_no_hash(tmp_path):
    (tmp_path / "train").mkdir()  # as a split is called
    (tmp_path / "train" / "rows").touch()
    for spec in (str(tmp_path / "train"), "hf:someone/model", "x" * 5000, "hf:" + "x" * 300):
        assert inputs.of_model(spec) is None


def test_a_run_is_its_description_and_its_best_checkpoint(tmp_path):
    run = tmp_path / "run"
    for step in (1, 2):
        (run / "checkpoints" / str(step) / "run").mkdir(parents=True)
        record = {"step": step, "dev_value": step / 10, "settings": {}}
        (run / "checkpoints" / str(step) / "run" / "metadata").write_text(json.dumps(record))
    best = run / "checkpoints" / "best.json"
    best.write_text('{"step": 2, "value": 0.2}')
    (run / "jaxir.json").write_text("{}")
    seen = [inputs.of_model(str(run))]
    (run / "log.jsonl").touch()
    assert inputs.of_model(str(run)) == seen[0]
    (run / "jaxir.json").write_text("{ }")
    seen.append(inputs.of_model(str(run)))
    best.write_text('{"step": 1, "value": 0.1}')
    seen.append(inputs.of_model(str(run)))
    assert None not in seen and len(set(seen)) == 3
