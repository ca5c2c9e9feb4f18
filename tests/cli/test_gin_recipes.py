import itertools
import re

import gin
import pytest

from jaxir import cli
from jaxir.cli import gin_config
from jaxir.cli.gin_bindings import REQUIRED, Bindings
from jaxir.cli.gin_files import Reader
from jaxir.cli.short_names import short_name
from jaxir.core.errors import UserError
from jaxir.data.expanded.selection import Bottom, Curriculum, First, Gold, Random, Top
from jaxir.interop.build import (
    Pretrained,
    PretrainedCrossEncoder,
    PretrainedHybrid,
    PretrainedMultiVector,
    PretrainedSeq2Seq,
    PretrainedSparse,
    outline_of,
)
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.train import train
from jaxir.training.step.length import check_length
from tests.cli.recipe_files import (
    AUTOENCODERS,
    CROSS,
    FILES,
    HYBRID,
    MODELS,
    MULTI_VECTOR,
    OF_TEXTS,
    PIECES,
    ROOT,
    SEQ2SEQ,
    SPARSE,
)
from tests.documentation import make_reference

RECIPES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "gin").glob("*.gin"))
PAPER = [r for r in RECIPES if "samtone" in r]
LORA = [f"gin/{name}_lora.gin" for name in ("qwen3_embedding", "embedding_gemma2")]
PAIRS = [f"gin/{name}.gin" for name in ("pairs", "reranker", "generator", "curriculum", "reader")]
LATE, SPLADE, OF_HEADS = "gin/late_interaction.gin", "gin/splade.gin", "gin/hybrid.gin"
OPEN = [*PAPER, *PAIRS, LATE, SPLADE, OF_HEADS, *LORA]
# Short names (macros) that every shipped gin file of a kind has.
COMMON = {
    "models": "MODEL TOKENIZER SHARING QUERY_LENGTH PASSAGE_LENGTH DROPOUT DTYPE SCAN REMAT",
    "objectives": "TEMPERATURE CHUNKS",
    "runs": "DATA TRAIN_SPLIT DEV_SPLIT DEV_DISTRACTORS DEV_METRIC STEPS EPOCHS MIN_STEPS BATCH_SIZE"
    " LEARNING_RATE WARMUP_STEPS EVAL_EVERY CHECKPOINT_EVERY LOG_EVERY KEEP_LAST SEED"
    " SLICES MESH_DATA FSDP TENSOR FUSED_ATTENTION SPARSE_CORES",
}
NO_TEMPERATURE = ("triplet", "margin", "seed", "prop", "query_reranking")
LACKING = {
    **{
        piece: {"TOKENIZER", "SHARING"}
        for piece in (CROSS["models"], SEQ2SEQ["models"], HYBRID, MULTI_VECTOR, SPARSE)
    },
    SEQ2SEQ["objectives"]: {"TEMPERATURE", "CHUNKS"},
    **{
        o: {"TEMPERATURE"}
        for o in (*AUTOENCODERS, *(f"gin/objectives/{name}.gin" for name in NO_TEMPERATURE))
    },
}


def resolve(recipe: str, *bindings: str) -> dict:
    needed = ["DATA=somewhere"] if recipe in OPEN else []
    needed += ["MINED=some.jsonl"] if "reranker" in recipe else []
    needed += ["TEXT=some.txt"] if "unsupervised" in recipe else []
    needed += ["EXPANSIONS=some.jsonl"] if "curriculum" in recipe else []
    needed += ["TRAIN_CANDIDATES=some.jsonl"] if "ear_" in recipe else []
    needed += ["CORPUS=corpus.jsonl"] if "ear_rd" in recipe else []
    needed += ["RUN=some.trec", "ANSWERS=some.jsonl"] if "reader" in recipe else []
    gin_config.bind(train, [recipe], [*needed, *bindings], {"output_dir": "run"})
    return gin.get_bindings(train)


@pytest.mark.parametrize(
    ("flags", "bindings", "min_steps"),
    [
        ({}, (), 100),
        ({"epochs": 0.5}, (), 1),
        ({}, ("EPOCHS=0.5",), 1),
        ({"epochs": 0.5}, ("MIN_STEPS=7",), 7),
        ({"epochs": 0.5, "min_steps": 7}, (), 7),
    ],
)
def test_typed_epochs_override_the_min_steps_of_a_recipe(flags, bindings, min_steps):
    gin_config.bind(train, ["gin/pairs.gin"], ["DATA=somewhere", *bindings], flags | {"output_dir": "run"})
    assert gin.get_bindings(train)["min_steps"] == min_steps


def test_min_steps_without_epochs_are_refused():
    given = {"steps": 3, "min_steps": 7, "output_dir": "run"}
    with pytest.raises(UserError, match="min_steps only applies with epochs, not with steps"):
        gin_config.bind(train, ["gin/pairs.gin"], ["DATA=somewhere"], given)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_binds_all_that_training_requires(recipe):
    bound = resolve(recipe)
    kinds = dict.fromkeys(["gin/reranker.gin", "gin/ear_ri.gin", "gin/ear_rd.gin"], PretrainedCrossEncoder)
    kinds |= dict.fromkeys(["gin/generator.gin", "gin/reader.gin"], PretrainedSeq2Seq)
    kinds[LATE] = PretrainedMultiVector
    kinds[OF_HEADS] = PretrainedHybrid
    kinds[SPLADE] = PretrainedSparse
    assert isinstance(bound["model"], kinds.get(recipe, Pretrained))
    assert callable(bound["objective"])
    assert callable(bound["data"].build)
    check_length(bound["steps"], bound["epochs"])
    assert bound["batch_size"] > 0


@pytest.mark.parametrize("file", FILES)
def test_head_names_what_must_be_set_and_only_existing_macros(file):
    lines = (ROOT / file).read_text().splitlines()
    head = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    found = Bindings(train)
    Reader(found).files([file])
    there_are = make_reference.short_settings(found)
    opened = {name.upper() for name, (value, _) in there_are.items() if value == REQUIRED}
    assert set(re.findall(r"Must be set: ([A-Z_]+)", head)) == opened
    known = {name.upper() for name in there_are} | {short_name(key).upper() for key in found.values}
    listed = f"{head}\n".partition("Commonly overridden: ")[2].partition(".\n")[0]
    named = set(re.findall(r"(?<![\w-])[A-Z][A-Z_]{3,}(?![\w-])", re.sub(r'"[^"]*"', "", listed)))
    assert named and named <= known | {"BEIR", "BERT"}


@pytest.mark.parametrize("kind", COMMON)
def test_pieces_of_a_kind_have_the_same_short_names(kind):
    for piece in MODELS if kind == "models" else PIECES[kind]:
        found = Bindings(train)
        Reader(found).files([piece])
        known = {name.upper() for name in make_reference.short_settings(found)}
        assert set(COMMON[kind].split()) - LACKING.get(piece, set()) <= known, piece
        for others in set(COMMON) - {kind}:
            assert not known & set(COMMON[others].split()), f"{piece} sets what belongs to {others}"


@pytest.mark.parametrize("objective", OF_TEXTS)
def test_chunks_reach_all_parts_of_an_objective(objective):
    gin_config.bind(train, ["gin/unsupervised.gin", objective], ["TEXT=x", "CHUNKS=2"], {"output_dir": "run"})
    found = gin.get_bindings(train)["objective"]
    assert {part.chunks for part in getattr(found, "parts", {"": found}).values()} == {2}


def test_consert_keeps_its_own_loss_in_every_sum():
    """Both objectives use one macro for the loss; its default is the loss of SimCSE, not ConSERT's."""
    sums = ["gin/unsupervised.gin", "gin/objectives/diffcse.gin", "gin/objectives/multi_task.gin"]
    consert = "@consert.ConSERT()"
    for files, bindings in {
        (sums[0], "gin/objectives/consert.gin"): [],
        (sums[0], sums[1]): [f"DIFFCSE_OF={consert}"],
        (sums[0], sums[2]): [f"CONTRASTIVE={consert}"],
        tuple(sums): ["CONTRASTIVE=@diffcse.DiffCSE()", f"DIFFCSE_OF={consert}"],
    }.items():
        for chosen, expected in (("", "nt_xent"), ("CONTRASTIVE_LOSS=@in_batch.in_batch_softmax", None)):
            given = ["TEXT=x", *bindings, *filter(None, [chosen])]
            gin_config.bind(train, files, given, {"output_dir": "run"})
            found = gin.get_bindings(train)["objective"]
            found = getattr(found, "parts", {"contrastive": found})["contrastive"]
            loss = getattr(found, "contrastive", found).loss
            assert loss.__name__ == (expected or "in_batch_softmax")
            if expected is None:
                assert gin.query_parameter("in_batch_softmax.bidirectional") is False  # as in equation 3.1


@pytest.mark.parametrize("loss", ["list_softmax", "binary_cross_entropy", "margin_ranking"])
def test_every_ranking_loss_can_be_named(loss):
    bound = resolve("gin/reranker.gin", f"RANKING_LOSS=@ranking.{loss}")
    assert bound["objective"].loss.__name__ == loss


def test_max_rank_of_training_does_not_change_dev(tmp_path):
    bindings = [f"TRAIN_CANDIDATES={tmp_path}/t.jsonl", f"DEV_CANDIDATES={tmp_path}/d.jsonl", "MAX_RANK=250"]
    files = ["gin/ear_ri.gin", "gin/evaluators/query_reranking.gin"]
    gin_config.bind(train, files, bindings, {"output_dir": "run"})
    bound = gin.get_bindings(train)
    assert (bound["data"].max_rank, bound["evaluators"][0].data.max_rank) == (250, 101)


@pytest.mark.parametrize("loss", ["margin", "triplet"])
def test_loss_that_replaces_another_has_its_own_settings(folder, loss):
    """`same_tower` names towers in SamToNe's loss; in these losses it is True or False."""
    files = ["gin/samtone_base.gin", f"gin/objectives/{loss}.gin"]
    gin_config.bind(train, files, [f"DATA={folder}"], {"output_dir": "run"})
    bound = gin.get_bindings(train)
    assert bound["objective"].loss.__name__ == loss


@pytest.mark.parametrize(
    ("recipe", "bindings", "lengths"),
    [
        ("pairs", [], (256, 256)),
        ("pairs", ["PASSAGE_LENGTH=300"], (256, 300)),
        ("reranker", ["MINED=x"], (64, 192)),
        ("quickstart", [], (32, 96)),
    ],
)
def test_lengths_are_those_of_the_model_unless_typed(recipe, bindings, lengths):
    gin_config.bind(train, [f"gin/{recipe}.gin"], ["DATA=x", *bindings], {"output_dir": "run"})
    _, found, _ = outline_of(gin.get_bindings(train)["model"])
    assert (found.query_max_length, found.passage_max_length) == lengths


def test_lengths_are_bounded_for_plain_folders_only():
    settings = EncoderSettings(query_max_length=40, passage_max_length=8192)
    cut = Pretrained(source="hf:x").cut(settings)
    assert (cut.query_max_length, cut.passage_max_length) == (40, 512)
    assert Pretrained(source="hf:x", passage_max_length=1024).cut(settings).passage_max_length == 1024
    assert Pretrained(source="run").cut(settings) == settings


@pytest.mark.parametrize(
    ("binding", "selection"),
    [
        ("GROUPS=4", Curriculum(4)),
        ("SELECTION=gold", Gold()),
        ("SELECTION=random", Random()),
        ("SELECTION=first", First()),
        (("SELECTION=top", "TOP=5"), Top(5)),
        (("SELECTION=bottom", "TOP=2"), Bottom(2)),
    ],
)
def test_selection_strategies_can_be_named(binding, selection):
    bindings = [binding] if isinstance(binding, str) else binding
    bound = resolve("gin/curriculum.gin", *bindings, "APPENDED=2", "MOST=80", "DEV_SPLIT=None")
    data = bound["data"]
    assert (data.selection, data.appended, data.most) == (selection, 2, 80)
    assert bound["dev"] is None


def test_short_name_prefers_bound_parameters():
    """AdamW's parameter `groups` is nearer to the command than the curriculum's, but no file binds it."""
    with pytest.raises(UserError, match=r"^GROUPS must be a whole number, not None$"):
        resolve("gin/curriculum.gin", "GROUPS=None")


def test_runs_without_a_dev_split_have_no_dev_data():
    for run in PIECES["runs"]:
        gin_config.bind(train, [run], ["DATA=x", "DEV_SPLIT=None"], {})
        assert gin.get_bindings(train)["dev"] is None


@pytest.mark.parametrize("objective", ["in_batch_softmax", "pair", "samtone"])
def test_other_objective_keeps_the_settings_of_the_recipe(objective):
    files = ["gin/pairs.gin", f"gin/objectives/{objective}.gin"]
    gin_config.bind(train, files, ["DATA=somewhere"], {})
    loss = gin.get_bindings(train)["objective"].loss
    assert loss.__name__ == objective
    assert gin.query_parameter(f"{objective}.temperature") == 0.05
    assert gin.get_bindings(train)["model"].dropout_rate == 0.0


def test_recipes_are_found_from_any_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--gin_file=gin/samtone_base.gin", "--output_dir=run", "--gin.DATAA=x"]
    assert cli.main("jaxir.train:train", flags) == 1
    assert "error: DATAA is set but nothing uses it; did you mean 'DATA'?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
