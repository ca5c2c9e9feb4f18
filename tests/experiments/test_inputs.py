import json

import pytest

from jaxir.data.formats.beir_folder import BeirFolder
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
def test_training_splits_follow_bindings(folder, bindings, splits):
    hashes = inputs.of_training_splits(BeirFolder(folder), "toy", bindings)
    paths = {f"split {split} of toy": folder / "qrels" / f"{split}.tsv" for split in splits}
    assert hashes == {name: inputs.of_file(path) for name, path in paths.items()}


def test_hash_of_a_folder_covers_names_and_sizes(tmp_path):
    (tmp_path / "tasks" / "MR").mkdir(parents=True)
    file = tmp_path / "tasks" / "MR" / "train.tsv"
    seen = [inputs.of_file(tmp_path / "tasks")]
    for content in ("a", "ab"):
        file.write_text(content)
        seen.append(inputs.of_file(tmp_path / "tasks"))
    file.rename(file.with_name("test.tsv"))
    seen.append(inputs.of_file(tmp_path / "tasks"))
    assert len(set(seen)) == 4


def test_shipped_recipes_are_not_hashed_and_cycles_end(tmp_path):
    for one, other in ("ab", "ba"):
        (tmp_path / f"{one}.gin").write_text(f"include '{tmp_path}/{other}.gin'\ninclude 'gin/pairs.gin'\n")
    hashes = inputs.of_gin_files([tmp_path / "a.gin", "gin/pairs.gin", "no such file"])
    assert list(hashes) == [f"{tmp_path}/a.gin", f"{tmp_path}/b.gin"]


def test_hash_of_a_foreign_model_covers_its_files(tmp_path):
    place = tmp_path / "model"
    place.mkdir()
    seen = [inputs.of_model(f"hf:{place}")]
    for name in ("weights", "other", "weights"):
        appended(place / name, "1")
        seen.append(inputs.of_model(f"hf:{place}"))
    (place / "weights").rename(place / "renamed")
    seen.append(inputs.of_model(f"hf:{place}"))
    assert None not in seen and len(set(seen)) == len(seen)
    (place / ".cache").mkdir()
    (place / ".cache" / "file").touch()
    (place / "README.md").touch()
    assert inputs.of_model(f"hf:{place}") == seen[-1]


def test_paths_without_a_local_model_have_no_hash(tmp_path):
    (tmp_path / "train").mkdir()  # a directory with the name of a split
    (tmp_path / "train" / "rows").touch()
    for spec in (str(tmp_path / "train"), "hf:someone/model", "x" * 5000, "hf:" + "x" * 300):
        assert inputs.of_model(spec) is None


def test_hash_of_a_run_covers_its_config_and_best_checkpoint(tmp_path):
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
