import re
import shlex
from pathlib import Path

import gin
import pytest

from jaxir.cli import gin_config
from jaxir.experiments import grid_cells
from jaxir.experiments.experiment_settings import GridSettings, Variant
from jaxir.experiments.towers import UnderIdentityProjection
from jaxir.grid import grid
from jaxir.train import train

GRIDS = {"table1": 9, "minilm_grid": 18, "minilm_duplicates_grid": 48}


def bound_grid(name: str, **given):
    """Returns a function that runs a shipped grid with the flags `given` here and the flags of each call."""

    def bound(**flags):
        return gin_config.bind(grid, [f"gin/experiments/{name}.gin"], [], given | flags)[0]()

    return bound


def resolve(words):
    """Returns gin's bindings of `train` in a training command."""
    files = [w.removeprefix("--gin_file=") for w in words if w.startswith("--gin_file=")]
    bindings = [w.removeprefix("--gin.") for w in words if w.startswith("--gin.")]
    gin_config.bind(train, files, bindings, {"output_dir": "run", "seed": 0})
    return gin.get_bindings(train)


@pytest.mark.parametrize("name", GRIDS)
def test_shipped_grid_has_its_cells(name, folder, tmp_path, capsys):
    output = tmp_path / "grid"
    assert bound_grid(name)(output_dir=str(output), datasets=[f"data={folder}"], dry_run=True) == 0
    cells = [cell.splitlines() for cell in capsys.readouterr().out.strip().split("\n\n")]
    assert len(cells) == GRIDS[name] and not output.exists()
    for *training, testing in cells:
        words = shlex.split(testing)
        model = next(w for w in words if w.startswith("--model=")).removeprefix("--model=")
        assert f"--output_dir={model}" in shlex.split(training[-1]) and f"--dataset=beir:{folder}" in words
        assert sum(int(re.search(r"--gin.STEPS=(\d+)", line)[1]) for line in training) in (400, 20_000)


def test_axes_of_a_grid_override_a_whole_recipe(folder):
    chosen = {"models": ["gin/experiments/minilm.gin"], "objectives": ["samtone"], "sharing": ["ade"]}
    (cell,) = planned(folder, recipe=["gin/pairs.gin"], **chosen)
    ((_, words),) = cell.commands.training
    bound = resolve(words)
    assert isinstance(bound["model"], UnderIdentityProjection) and bound["model"].sharing == "ade"
    assert bound["objective"].loss.__name__ == "samtone"
    assert (bound["steps"], bound["epochs"], bound["dev"].split) == (7, None, "dev")
    assert gin.query_parameter("samtone.temperature") == 0.05


OF_TEXTS = {
    "simcse": ("SimCSE", "in_batch_softmax"),
    "simcse_nt_xent": ("SimCSE", "nt_xent"),
    "simcse_bce": ("SimCSE", "bce"),
    "consert_1": ("ConSERT", ["feature_cutoff"]),
    "consert_2": ("ConSERT", ["embedding_dropout"]),
    "clm_autoencoder": ("CLMAutoencoder", None),
    "mlm_autoencoder": ("MLMAutoencoder", None),
    "multi_task": ("WeightedSum", "CLMAutoencoder"),
    "multi_task_mlm": ("WeightedSum", "MLMAutoencoder"),
    "tsdae": ("TSDAE", None),
    "diffcse": ("DiffCSE", "batch_norm"),
    "diffcse_tanh": ("DiffCSE", "tanh"),
    "cpdae": ("CPDAE", "words"),
    "cpdae_r": ("CPDAE", "vectors"),
    "seed": ("Seed", None),
    "prop": ("PROP", None),
    "ict": ("ICT", None),
}


DETAILS = {
    "SimCSE": lambda found: found.loss.__name__,
    "ConSERT": lambda found: found.second,
    "WeightedSum": lambda found: type(found.parts["autoencoder"]).__name__,
    "DiffCSE": lambda found: found.projector,
    "CPDAE": lambda found: found.contrast,
}


def test_grid_of_objectives_on_texts(folder, tmp_path, capsys):
    grid_bound = bound_grid("texts_grid", judges=["x"], bindings=["x"], untrained=["x"])
    pairs = tmp_path / "pairs.tsv"
    pairs.touch()
    chosen = {"datasets": [f"data={folder}"], "judges": [f"rated=sts:{pairs}"]}
    chosen |= {"bindings": [f"STS={pairs}"], "untrained": ["GloVe=w2v:glove.txt"]}
    chosen |= {"objectives": list(OF_TEXTS), "runs": [f"BM25={pairs}"]}
    assert grid_bound(output_dir=str(tmp_path / "grid"), dry_run=True, **chosen) == 0
    *cells, last, run = capsys.readouterr().out.strip().split("\n\n")
    assert len(cells) == 3 * len(OF_TEXTS)
    for number, cell in enumerate(cells):
        training, *tests = (shlex.split(line) for line in cell.splitlines())
        seed = (1, 7, 42)[number // len(OF_TEXTS)]
        name, (objective, detail) = list(OF_TEXTS.items())[number % len(OF_TEXTS)]
        directory = f"{tmp_path}/grid/cells/data-minilm-sde-{name}-seed{seed}"
        assert training[-2:] == [f"--seed={seed}", f"--output_dir={directory}/model"]
        assert [[w for w in words if w.startswith(("--model", "--dataset"))] for words in tests] == [
            [f"--model={directory}/model", f"--dataset=beir:{folder}"],
            [f"--model={directory}/model", f"--dataset=sts:{pairs}"],
        ]
        if seed != 1:
            continue  # other seeds have the recipes of seed 1
        bound = resolve(training)
        found = bound["objective"]
        assert type(found).__name__ == objective
        if objective in DETAILS:
            assert DETAILS[objective](found) == detail
        assert (bound["data"].path, bound["steps"], bound["batch_size"]) == (str(folder), 900, 64)
        assert bound["dev_metric"] == "spearman" and bound["evaluators"][0].path == str(pairs)
    assert [shlex.split(line)[3:5] for line in last.splitlines()] == [
        ["--model=w2v:glove.txt", f"--dataset=beir:{folder}"],
        ["--model=w2v:glove.txt", f"--dataset=sts:{pairs}"],
    ]
    (words,) = map(shlex.split, run.splitlines())
    assert words[3:5] == [f"--run={pairs}", f"--qrels={folder}/qrels/test.tsv"]


def test_grid_of_autoencoder_weights(folder, tmp_path, capsys):
    pairs = tmp_path / "pairs.tsv"
    pairs.touch()
    bound = bound_grid("texts_weights_grid", bindings=["x"])
    assert bound(output_dir="grid", datasets=[f"data={folder}"], bindings=[f"STS={pairs}"], dry_run=True) == 0
    cells = [cell.splitlines() for cell in capsys.readouterr().out.strip().split("\n\n")]
    assert len(cells) == 3 * 4 * 2
    found = [resolve(shlex.split(training))["objective"] for training, _ in cells[:8]]
    assert [sums.weights["autoencoder"] for sums in found] == [0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3, 1e-4, 1e-4]


def planned(folder, output_dir=Path("grid"), **changes) -> list[grid_cells.Cell]:
    given = {"recipe": ["gin/runs/few_steps.gin"], "steps": 7, "metrics": "P@1", "models": ["minilm"]}
    given |= {"sharing": ["sde"], "objectives": ["standard"], "datasets": [str(folder)]}
    return grid_cells.plan_cells(GridSettings(**given | changes), output_dir)


def variant(name: str, *bindings: str, title: str = "") -> Variant:
    return Variant(name=name, title=title or name, bindings=bindings)


def test_given_temperature_overrides_a_methods_default(folder):
    changes = {"objectives": ["cpdae_r"], "bindings": ["TEXT=texts.txt"]}
    changes["variants"] = [Variant(name="", title=""), variant("cold", "TEMPERATURE=0.01")]
    cells = planned(folder, recipe=["gin/unsupervised.gin"], **changes)
    found = [resolve(cell.commands.training[0][1])["objective"] for cell in cells]
    assert [(made.contrast, made.temperature) for made in found] == [("vectors", 0.05), ("vectors", 0.01)]


def test_stages_share_the_steps_and_start_from_the_one_before(folder):
    own = "mine=gin/objectives/pair.gin+gin/objectives/samtone.gin+gin/objectives/pair.gin"
    (cell,) = planned(folder, objectives=[own])
    assert cell.name == "pairs-minilm-sde-mine-seed0"
    runs = [run for run, _ in cell.commands.training]
    assert [run.name for run in runs] == ["stage1", "stage2", "model"]
    steps = [w for _, words in cell.commands.training for w in words if w.startswith("--gin.STEPS")]
    assert steps == ["--gin.STEPS=2", "--gin.STEPS=2", "--gin.STEPS=3"]
    starts = [[w for w in words if w.startswith("--gin.MODEL")] for _, words in cell.commands.training]
    assert starts == [[], [f"--gin.MODEL={runs[0]}"], [f"--gin.MODEL={runs[1]}"]]


def test_only_the_first_stage_starts_from_the_given_checkpoint(folder):
    bindings = ["INITIAL_CHECKPOINT_PATH=t5/checkpoint_1", "TOKENIZER=t5/sp.model", "PROJECTION=8"]
    chosen = {"models": ["t5_1_1/base"], "objectives": ["pair"], "bindings": bindings}
    (cell,) = planned(folder, recipe=["gin/runs/samtone_paper.gin"], **chosen)
    first, second = (words for _, words in cell.commands.training)
    assert resolve(first)["model"].source == "t5x:t5/checkpoint_1"
    found = resolve(second)["model"]
    assert (found.source, found.tokenizer, found.projection) == (f"grid/cells/{cell.name}/stage1", None, 8)


def test_identity_of_a_cell_is_independent_of_directories(folder, tmp_path):
    (here,) = planned(folder, tmp_path / "here")
    moved = folder.rename(tmp_path / "moved")
    (there,) = planned(moved, tmp_path / "there", datasets=[f"pairs=beir:{moved}"])
    assert here.identity == there.identity
    assert here.commands != there.commands
    assert here.inputs == there.inputs
