"""Every shipped recipe resolves to the objects it promises; the paper's carry the paper's numbers."""

import dataclasses
import functools
import inspect
import itertools
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxir.cli import gin_config
from jaxir.cli.gin_bindings import REQUIRED, Bindings
from jaxir.cli.gin_files import Reader
from jaxir.cli.short_names import OTHERWISE, short_name
from jaxir.cli.short_names import settings as short_settings
from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.data.expanded.expanded_pairs import ExpandedPairs
from jaxir.data.expanded.selection import Bottom, Curriculum, First, Gold, Random, Top
from jaxir.data.sets.pair_sources import TevatronPairs
from jaxir.interop.build import Pretrained, PretrainedCrossEncoder, PretrainedSeq2Seq, outline_of
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model_dir import LoadedModel
from jaxir.objectives.pair_batch import pair_features
from jaxir.planning import program
from jaxir.runtime.partitioning import Partitioner
from jaxir.train import train
from jaxir.training.run.recipe import Recipe
from jaxir.training.step.length import check_length
from jaxir.training.step.optimizers import Adafactor, AdamW
from tests.shallow import first_layers

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "gin").glob("*.gin"))
PAPER = [r for r in RECIPES if "samtone" in r]
OPEN = [
    *PAPER,
    "gin/pairs.gin",
    "gin/reranker.gin",
    "gin/generator.gin",
    "gin/curriculum.gin",
    "gin/reader.gin",
]
INCLUDED = ("encoder", "settings")  # the common parts of others
FILES = [f.relative_to(ROOT).as_posix() for f in (ROOT / "gin").rglob("*.gin") if f.stem not in INCLUDED]
PIECES = {
    kind: sorted(f for f in FILES if f.startswith(f"gin/{kind}/"))
    for kind in ("models", "objectives", "runs")
}


@pytest.fixture(autouse=True)
def forget_gin():
    yield
    gin.clear_config()


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
        ({}, ("train.epochs=0.5",), 1),
        ({"epochs": 0.5}, ("MIN_STEPS=7",), 7),
        ({"epochs": 0.5, "min_steps": 7}, (), 7),
        ({"steps": 3, "min_steps": 7}, (), "min_steps counts with epochs only, and steps is given"),
    ],
)
def test_typed_epochs_are_not_made_longer_by_the_min_steps_of_a_recipe(flags, bindings, min_steps):
    given = flags | {"output_dir": "run"}
    if isinstance(min_steps, str):
        with pytest.raises(UserError, match=min_steps):
            gin_config.bind(train, ["gin/pairs.gin"], ["DATA=somewhere", *bindings], given)
        return
    gin_config.bind(train, ["gin/pairs.gin"], ["DATA=somewhere", *bindings], given)
    assert gin.get_bindings(train)["min_steps"] == min_steps


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_resolves(recipe):
    bound = resolve(recipe)
    kinds = dict.fromkeys(["gin/reranker.gin", "gin/ear_ri.gin", "gin/ear_rd.gin"], PretrainedCrossEncoder)
    kinds |= dict.fromkeys(["gin/generator.gin", "gin/reader.gin"], PretrainedSeq2Seq)
    assert isinstance(bound["model"], kinds.get(recipe, Pretrained))
    assert callable(bound["objective"])
    assert callable(bound["data"].build)
    check_length(bound["steps"], bound["epochs"])
    assert bound["batch_size"] > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_head_says_how_to_run_it(recipe):
    head = (ROOT / recipe).read_text().split("\n\n")[0]
    assert f"--gin_file={recipe}" in head
    assert "Commonly overridden:" in head
    assert ("Must be set: DATA" in head) == (recipe in OPEN)


@pytest.mark.parametrize("file", FILES)
def test_a_head_names_what_must_be_set_and_only_macros_that_there_are(file):
    lines = (ROOT / file).read_text().splitlines()
    head = "\n".join(itertools.takewhile(lambda line: line.startswith("#"), lines))
    found = Bindings(train)
    Reader(found).files([file])
    there_are = short_settings(found)
    opened = {name.upper() for name, (value, _) in there_are.items() if value == REQUIRED}
    assert set(re.findall(r"Must be set: ([A-Z_]+)", head)) == opened
    known = {name.upper() for name in there_are} | {short_name(key).upper() for key in found.values}
    listed = f"{head}\n".partition("Commonly overridden: ")[2].partition(".\n")[0]
    named = set(re.findall(r"(?<![\w-])[A-Z][A-Z_]{3,}(?![\w-])", re.sub(r'"[^"]*"', "", listed)))
    assert named and named <= known | {"BEIR", "BERT"}


def test_every_other_short_name_is_of_a_parameter_that_there_is():
    found = Bindings(train)
    Reader(found).files([file for file in FILES if not file.endswith("_grid.gin")])
    there_are = {"num_negatives"}
    for selector, made in found.objects.items():
        parameters = inspect.signature(made).parameters
        there_are |= {*parameters, *(f"{selector.rpartition('.')[2]}.{name}" for name in parameters)}
    assert {name.rpartition("/")[2] for name in OTHERWISE} <= there_are


def test_the_papers_recipes_have_the_papers_numbers():
    assert {Path(r).stem for r in PAPER} == {"samtone_base", "samtone_large", "samtone_xxl"}
    for recipe in PAPER:
        bound = resolve(recipe)
        assert (bound["steps"], bound["batch_size"]) == (20_000, 512)
        assert isinstance(bound["optimizer"], Adafactor)
        assert (bound["optimizer"].learning_rate, bound["optimizer"].warmup_steps) == (1e-3, 0)
        assert bound["model"].source == f"hf:google/t5-v1_1-{Path(recipe).stem.removeprefix('samtone_')}"
        assert (bound["model"].sharing, bound["model"].projection) == ("sde", 768)
        assert gin.query_parameter("samtone.temperature") == 0.01
        assert gin.query_parameter("samtone.same_tower") == "query"


def test_macros_reach_the_objects():
    bound = resolve(
        "gin/samtone_large.gin", "SHARING=ade_spl", "LEARNING_RATE=5e-4", "FSDP=2", "MODEL=hf:mine"
    )
    assert bound["model"].sharing == "ade_spl"
    assert bound["model"].source == "hf:mine"
    assert bound["model"].scan_layers
    assert bound["model"].remat
    assert bound["optimizer"].learning_rate == 5e-4
    assert bound["mesh"].fsdp == 2


def test_the_quickstart_trains_only_on_training_packages():
    bound = resolve("gin/quickstart.gin")
    assert bound["data"].split == "train"
    assert isinstance(bound["optimizer"], AdamW)


SEQ2SEQ = {kind: f"gin/{kind}/seq2seq.gin" for kind in ("models", "objectives")}
EAR = "gin/objectives/query_reranking.gin"
CROSS = {kind: f"gin/{kind}/cross_encoder.gin" for kind in ("models", "objectives")}
MODELS = [*PIECES["models"], "gin/experiments/minilm.gin"]
TRACED = ("gin/models/minilm.gin", "gin/models/t5_1_1/base.gin")
GOLDEN = {True: ROOT / "tests/golden/t5_1_1", False: ROOT / "tests/golden/bert"}
# Every macro of every shipped piece of a kind: what a user may set whichever piece it is.
COMMON = {
    "models": "MODEL TOKENIZER SHARING QUERY_LENGTH PASSAGE_LENGTH DROPOUT DTYPE SCAN REMAT",
    "objectives": "TEMPERATURE CHUNKS",
    "runs": "DATA TRAIN_SPLIT DEV_SPLIT DEV_DISTRACTORS DEV_METRIC STEPS EPOCHS MIN_STEPS BATCH_SIZE"
    " LEARNING_RATE WARMUP_STEPS EVAL_EVERY CHECKPOINT_EVERY LOG_EVERY KEEP_LAST SEED"
    " SLICES MESH_DATA FSDP TENSOR FUSED_ATTENTION SPARSE_CORES",
}
AUTOENCODERS = [f"gin/objectives/{name}.gin" for name in ("tsdae", "clm_autoencoder", "mlm_autoencoder")]
OF_TEXTS = [
    *AUTOENCODERS,
    *(
        f"gin/objectives/{name}.gin"
        for name in ("simcse", "consert", "multi_task", "diffcse", "cpdae", "seed", "prop", "ict")
    ),
]
DPR_DIFFCSE = "gin/objectives/dpr_diffcse.gin"
LACKING = {kind["models"]: {"TOKENIZER", "SHARING"} for kind in (CROSS, SEQ2SEQ)} | {
    SEQ2SEQ["objectives"]: {"TEMPERATURE", "CHUNKS"},
    **{o: {"TEMPERATURE"} for o in AUTOENCODERS},
}
LACKING |= {
    f"gin/objectives/{name}.gin": {"TEMPERATURE"}
    for name in ("triplet", "margin", "seed", "prop", "query_reranking")
}


def small(model: str, folder: Path) -> list[str]:
    """Bindings with which a model piece has a golden model's weights, and trains on `folder` in no time."""
    sizes = ["QUERY_LENGTH=8", "PASSAGE_LENGTH=12", "BATCH_SIZE=8", "DTYPE=float32"]
    sizes += [] if model == CROSS["models"] else ["SHARING=sde"]
    return [*sizes, f"MODEL=hf:{GOLDEN['t5' in model]}", f"DATA={folder}", "STEPS=20"]


def settings(text: str) -> list[str]:
    """Returns the statements of a recorded configuration in one order."""
    return sorted(line for line in text.splitlines() if line and line[0] not in "#")


@pytest.mark.parametrize("kind", COMMON)
def test_pieces_of_a_kind_know_the_same_macros(kind):
    for piece in MODELS if kind == "models" else PIECES[kind]:
        found = Bindings(train)
        Reader(found).files([piece])
        known = {name.upper() for name in short_settings(found)}
        assert set(COMMON[kind].split()) - LACKING.get(piece, set()) <= known, piece
        for others in set(COMMON) - {kind}:
            assert not known & set(COMMON[others].split()), f"{piece} sets what belongs to {others}"


@pytest.mark.parametrize("model", [model for model in MODELS if model != SEQ2SEQ["models"]])
def test_pieces_compose_in_any_order(model, folder):
    """Every objective and every run: weights and data are read, and steps traced to their last array."""
    loaded, cross = None, model == CROSS["models"]
    objectives = [
        o
        for o in PIECES["objectives"]
        if (o == CROSS["objectives"]) == cross
        and o not in (*OF_TEXTS, DPR_DIFFCSE, SEQ2SEQ["objectives"], EAR)
    ]
    for number, (objective, run) in enumerate(itertools.product(objectives, PIECES["runs"])):
        bindings = [*small(model, folder), "DROPOUT=0.25", "REMAT=products", "CHUNKS=2"]
        bindings += [] if "TEMPERATURE" in LACKING.get(objective, ()) else ["TEMPERATURE=0.07"]
        bindings += ["FSDP=2", "LEARNING_RATE=0.5", "WARMUP_STEPS=3", "SEED=4"]
        recorded = set()
        pieces = [model, objective, run]
        for files in itertools.permutations(pieces) if number == 0 else (pieces, pieces[::-1]):
            gin_config.bind(train, files, bindings, {"output_dir": "run"})
            recorded.add(tuple(settings(gin_config.operative_config())))
        assert len(recorded) == 1, "the order of pieces matters"
        bound = gin.get_bindings(train)
        assert (bound["steps"], bound["batch_size"], bound["seed"]) == (20, 8, 4)
        assert (bound["optimizer"].learning_rate, bound["optimizer"].warmup_steps) == (0.5, 3)
        loss = "list_softmax" if cross else Path(objective).stem
        assert bound["objective"].chunks == 2 and loss == bound["objective"].loss.__name__
        before, (loaded, partitioner) = loaded, load(bound["model"], bound["mesh"])
        assert partitioner.mesh.shape["fsdp"] == 2
        if before is None:
            backbone = loaded.model.config.backbone
            assert (backbone.dropout_rate, backbone.remat, backbone.dtype) == (0.25, "products", "float32")
            pairs = bound["data"].build(loaded.tokenizer, pair_features(TextFormat(8, 12)))
            assert (pairs.num_examples, bound["dev"].split) == (40, "dev")
        # Each objective and each optimizer with a BERT and a T5; other models differ by what is bound alone.
        if number % 4 == 0 if model in TRACED else number == 0:
            assert "loss" in trace(bound, loaded, partitioner)


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("".join(f"a tool for letter {letter} and more\n" for letter in "abcdefghijklmnop"))
    passages = (f"A tool. It is for letter {letter}.\n" for letter in "abcdefghijklmnop")
    path.with_name("passages.txt").write_text("".join(passages))
    return path


@pytest.fixture(scope="module")
def generator(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("generator") / "mlm_bert"
    first_layers(folder, "mlm_bert", ("num_hidden_layers",), r"layer\.1\.")
    return f"hf:{folder}"


MULTI_TASK = [
    f"{part} = {value}"
    for part, values in {
        "CONTRASTIVE": ("@simcse.SimCSE()", "@consert.ConSERT()"),
        "AUTOENCODER": (
            "@clm_autoencoder.CLMAutoencoder()",
            "@mlm_autoencoder.MLMAutoencoder()",
            "@masked_lm.MaskedLM()",
        ),
    }.items()
    for value in values
]
MASKED_LM = f"hf:{ROOT}/tests/golden/mlm_bert"
OWN_HEAD = f"build.PretrainedMaskedLM.source = '{MASKED_LM}'"
DIFFCSE = [
    ("SENTENCES = True", 'CHANGED_TEXT = "both"'),
    ('CHANGE = "all"', 'PROJECTOR = "tanh"'),
    ('TASK = "mlm"', "HEAD = @build.PretrainedMaskedLM()", OWN_HEAD),
    ('TASK = "corrective"', "DIFFCSE_OF = @consert.ConSERT()"),
    ('USE = "negative"', 'FOLLOW = "code"', "CHUNKS = 2"),
    ("LAMBDA = 0", "CONTRASTIVE_WEIGHT = 0.5"),
]
LOSSES = ["in_batch.in_batch_softmax", "nt_xent.nt_xent", "bce.bce", "hinges.triplet", "hinges.margin"]


@pytest.mark.parametrize(
    ("objective", "binding"),
    [
        *((objective, ()) for objective in OF_TEXTS),
        *(("gin/objectives/multi_task.gin", binding) for binding in MULTI_TASK),
        (
            "gin/objectives/multi_task.gin",
            ("AUTOENCODER = @masked_lm.MaskedLM()", "MLM_HEAD = @build.PretrainedMaskedLM()", OWN_HEAD),
        ),
        *(
            (f"gin/objectives/{name}.gin", f"CONTRASTIVE_LOSS = @{loss}")
            for name in ("simcse", "consert")
            for loss in LOSSES
        ),
        ("gin/objectives/consert.gin", 'SECOND_VIEW = ["embedding_dropout", "token_cutoff"]'),
        ("gin/objectives/mlm_autoencoder.gin", 'VECTOR = "attention"'),
        *(
            ("gin/objectives/cpdae.gin", binding)
            for binding in ('CONTRAST = "vectors"', "CONTRAST = None", "IDF = True")
        ),
        *(("gin/objectives/diffcse.gin", bindings) for bindings in DIFFCSE),
    ],
)
def test_objectives_of_texts_are_traced_with_all_that_they_name(objective, binding, texts, generator):
    sizes = ["PASSAGE_LENGTH=12", "BATCH_SIZE=8", "DTYPE=float32", f"MODEL=hf:{GOLDEN[False]}", "STEPS=20"]
    sizes += ["SEED=4"]  # for all: recipes that are the same are traced once
    sizes += [f"GENERATOR={generator}"] if "diffcse" in objective else []
    texts = texts.with_name("passages.txt") if "ict" in objective else texts
    sizes += [f"TEXT={texts}", *([binding] if isinstance(binding, str) else binding)]
    gin_config.bind(train, ["gin/unsupervised.gin", objective], sizes, {"output_dir": "run"})
    bound = gin.get_bindings(train)
    loaded, partitioner = load(bound["model"], bound["mesh"])
    features = bound["objective"].features(loaded.settings.text_format(0))
    assert bound["data"].build(loaded.tokenizer, features).num_examples == 16
    metrics = trace(bound, loaded, partitioner, num_negatives=0)
    assert metrics["loss"].shape == ()
    assert bound["model"].dropout_rate == 0.1


@pytest.mark.parametrize("objective", OF_TEXTS)
def test_chunks_reach_all_parts_of_an_objective_of_texts(objective):
    for autoencoder in MULTI_TASK if "multi_task" in objective else [()]:
        bindings = ["TEXT=x", "CHUNKS=2", *([autoencoder] if autoencoder else [])]
        gin_config.bind(train, ["gin/unsupervised.gin", objective], bindings, {"output_dir": "run"})
        found = gin.get_bindings(train)["objective"]
        assert {part.chunks for part in getattr(found, "parts", {"": found}).values()} == {2}


def test_consert_has_its_own_loss_wherever_it_takes_part():
    """SimCSE's, one direction of the in-batch softmax, is the default of the same macro."""
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
                assert gin.query_parameter("in_batch_softmax.bidirectional") is False  # equation 3.1


@pytest.mark.parametrize("more", ["", "gin/experiments/targets.gin"])
def test_generators_are_traced(more, folder, tmp_path):
    targets = tmp_path / "targets.jsonl"
    targets.write_text('{"source": "a tool", "target": "a word"}\n' * 16)
    sizes = ["QUERY_LENGTH=8", "PASSAGE_LENGTH=12", "BATCH_SIZE=8", "DTYPE=float32", "STEPS=20", "FSDP=2"]
    sizes += [f"MODEL=hf:{ROOT / 'tests/golden/seq2seq_1_1'}"]
    sizes += [f"TARGETS={targets}"] if more else [f"DATA={folder}"]
    gin_config.bind(train, ["gin/generator.gin", *([more] if more else [])], sizes, {"output_dir": "run"})
    bound = gin.get_bindings(train)
    loaded, partitioner = load(bound["model"], bound["mesh"])
    features = bound["objective"].features(loaded.settings.text_format(0))
    assert bound["data"].build(loaded.tokenizer, features).num_examples == (16 if more else 40)
    assert trace(bound, loaded, partitioner, num_negatives=0).keys() >= {"loss", "token_accuracy"}


@pytest.mark.parametrize("loss", ["list_softmax", "binary_cross_entropy", "margin_ranking"])
def test_every_ranking_loss_can_be_named(loss):
    bound = resolve("gin/reranker.gin", f"RANKING_LOSS=@ranking.{loss}")
    assert bound["objective"].loss.__name__ == loss


@pytest.mark.parametrize("kind", ["ri", "rd"])
def test_rerankers_of_queries_are_traced(kind, tmp_path):
    line = '{"_id": "q%d", "question": "a tool?", "outputs": ["a", "b"], "passages": ["p", null],'
    line += ' "ranks": [1, null], "depth": 100}\n'
    (tmp_path / "train.jsonl").write_text("".join(line % n for n in range(16)))
    (tmp_path / "corpus.jsonl").write_text('{"_id": "p", "text": "a passage"}\n')
    bindings = [f"TRAIN_CANDIDATES={tmp_path}/train.jsonl", f"MODEL=hf:{GOLDEN[False]}", "CANDIDATES=3"]
    bindings += ["QUERY_LENGTH=8", "STEPS=20", "FSDP=2", "CHUNKS=2", "RANK_REDUCTION=by_distance"]
    bindings += [f"CORPUS={tmp_path}/corpus.jsonl", "PASSAGE_LENGTH=12"] if kind == "rd" else []
    gin_config.bind(train, [f"gin/ear_{kind}.gin"], bindings, {"output_dir": "run"})
    bound = gin.get_bindings(train)
    loaded, partitioner = load(bound["model"], bound["mesh"])
    features = bound["objective"].features(loaded.settings.text_format(0))
    assert bound["data"].build(loaded.tokenizer, features).num_examples == 16
    assert ("passage_ids" in features) == (kind == "rd") == (loaded.settings.pair_max_length == 20)
    assert trace(bound, loaded, partitioner, num_negatives=0).keys() >= {"loss", "chosen_rank"}


def test_a_miss_counts_the_same_on_dev_whatever_training_has(tmp_path):
    bindings = [f"TRAIN_CANDIDATES={tmp_path}/t.jsonl", f"DEV_CANDIDATES={tmp_path}/d.jsonl", "MAX_RANK=250"]
    files = ["gin/ear_ri.gin", "gin/evaluators/query_reranking.gin"]
    gin_config.bind(train, files, bindings, {"output_dir": "run"})
    bound = gin.get_bindings(train)
    assert (bound["data"].max_rank, bound["evaluators"][0].data.max_rank) == (250, 101)


def test_a_reader_is_traced_and_has_the_papers_settings(folder, tmp_path):
    needed = [
        f"DATA={folder}",
        f"RUN={tmp_path}/run.trec",
        f"ANSWERS={tmp_path}/answers.jsonl",
        "DEV_RUN=dev.trec",
    ]
    files = ["gin/reader.gin", "gin/evaluators/reading.gin"]
    gin_config.bind(train, files, needed, {"output_dir": "run"})
    bound = gin.get_bindings(train)
    assert (bound["steps"], bound["batch_size"], bound["eval_every"]) == (10_000, 64, 500)
    assert (bound["optimizer"].learning_rate, bound["optimizer"].warmup_steps) == (1e-4, 0)
    model = bound["model"]
    assert (model.source, model.passage_max_length, model.dropout_rate) == ("hf:google-t5/t5-base", 250, 0.1)
    assert (bound["objective"].passages, bound["dev_metric"]) == (100, "EM")
    (evaluator,) = bound["evaluators"]
    assert evaluator.data == bound["dev"] and bound["dev"].run == "dev.trec"
    assert bound["dev"].answers == bound["data"].answers == f"{tmp_path}/answers.jsonl"
    queries = [f"q{i}" for i in range(8)]
    (tmp_path / "run.trec").write_text("".join(f"{q} Q0 d{i} 1 {i} t\n" for q in queries for i in range(3)))
    (tmp_path / "answers.jsonl").write_text("".join(f'{{"_id": "{q}", "answers": ["a"]}}\n' for q in queries))
    sizes = ["QUERY_LENGTH=8", "PASSAGE_LENGTH=24", "BATCH_SIZE=8", "DTYPE=float32", "STEPS=20", "FSDP=2"]
    sizes += [f"MODEL=hf:{ROOT / 'tests/golden/seq2seq_1_1'}", "PASSAGES=3", "CHUNKS=2", "DEV_ANSWERS=other"]
    gin.clear_config()
    gin_config.bind(train, files[:1], [*needed, *sizes], {"output_dir": "run"})
    bound = gin.get_bindings(train)
    assert bound["dev"].answers == "other"
    loaded, partitioner = load(bound["model"], bound["mesh"])
    features = bound["objective"].features(loaded.settings.text_format(0))
    assert bound["data"].build(loaded.tokenizer, features).num_examples == 8
    assert trace(bound, loaded, partitioner, num_negatives=0).keys() >= {"loss", "token_accuracy"}
    # The piece's source of pairs needs a split; the reader's, in its place, takes the whole run without one.
    gin.clear_config()
    whole = [*needed, "TRAIN_SPLIT=None", "DEV_SPLIT=None"]
    gin_config.bind(train, files, whole, {"output_dir": "run"})
    bound = gin.get_bindings(train)
    assert bound["data"].split is bound["dev"].split is None


@pytest.mark.parametrize("loss", ["margin", "triplet"])
def test_a_loss_in_anothers_place_has_its_own_settings(folder, loss):
    """SamToNe's same_tower is a choice of towers, theirs True or False."""
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
def test_lengths_are_those_of_the_model_unless_they_are_typed(recipe, bindings, lengths):
    gin_config.bind(train, [f"gin/{recipe}.gin"], ["DATA=x", *bindings], {"output_dir": "run"})
    _, found, _ = outline_of(gin.get_bindings(train)["model"])
    assert (found.query_max_length, found.passage_max_length) == lengths


def test_lengths_are_bounded_for_plain_folders_only():
    settings = EncoderSettings(query_max_length=40, passage_max_length=8192)
    assert Pretrained(source="hf:x").cut(settings) == EncoderSettings(
        query_max_length=40, passage_max_length=512
    )
    assert Pretrained(source="hf:x", passage_max_length=1024).cut(settings).passage_max_length == 1024
    assert Pretrained(source="run").cut(settings) == settings


def test_dpr_and_diffcse_are_traced_together(folder, generator):
    bindings = [*small("bert", folder), f"GENERATOR={generator}", "CHUNKS=2"]
    gin_config.bind(train, ["gin/pairs.gin", DPR_DIFFCSE], bindings, {"output_dir": "run"})
    bound = gin.get_bindings(train)
    loaded, partitioner = load(bound["model"], bound["mesh"])
    assert {"difference_loss", "contrastive_loss"} <= trace(bound, loaded, partitioner).keys()
    assert bound["objective"].projector == "none"


def test_the_settings_of_he_2022():
    files = ["gin/curriculum.gin", "gin/experiments/he2022.gin"]
    needed = ["DATA=corpus", "MINED=pairs.jsonl", "EXPANSIONS=queries"]
    gin_config.bind(train, files, needed, {"output_dir": "run"})
    bound = gin.get_bindings(train)
    assert (bound["epochs"], bound["batch_size"], bound["num_negatives"]) == (3, 64, 31)
    assert bound["data"] == ExpandedPairs(
        pairs=TevatronPairs(path="pairs.jsonl"), expansions="queries", corpus="corpus"
    )
    assert isinstance(bound["dev"].selection, First) and bound["dev"].pairs.split == "dev"
    assert (bound["optimizer"].learning_rate, bound["optimizer"].warmup_steps) == (5e-6, 0.1)
    model = bound["model"]
    assert (model.query_max_length, model.passage_max_length) == (32, 144)
    assert (model.pooling, model.similarity) == ("cls", "dot")
    loss = bound["objective"].loss
    assert gin.query_parameter("in_batch_softmax.temperature") == 1 and loss.__name__ == "in_batch_softmax"
    two = jnp.eye(2)
    value, metrics = loss(two, two, passage_key=jnp.arange(4, dtype=jnp.int32).reshape(2, 2))
    np.testing.assert_allclose(value, np.log(1 + np.exp(-1)), rtol=1e-6)  # in one direction, by dot products
    assert "loss_passage_to_query" not in metrics


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
def test_strategies_of_selection(binding, selection):
    bindings = [binding] if isinstance(binding, str) else binding
    bound = resolve("gin/curriculum.gin", *bindings, "APPENDED=2", "MOST=80", "DEV_SPLIT=None")
    data = bound["data"]
    assert (data.selection, data.appended, data.most) == (selection, 2, 80)
    assert bound["dev"] is None


def test_short_name_means_what_the_recipe_sets_before_what_has_its_default():
    """AdamW, nearer to the command, has `groups` too."""
    with pytest.raises(UserError, match=r"^GROUPS must be a whole number, not None$"):
        resolve("gin/curriculum.gin", "GROUPS=None")


def test_the_settings_of_chuang_2024():
    files = ["gin/unsupervised.gin", "gin/objectives/diffcse.gin", "gin/experiments/chuang2024.gin"]
    gin_config.bind(train, files, ["TEXT=x", "STS=y", f"GENERATOR={MASKED_LM}"], {"output_dir": "run"})
    bound = gin.get_bindings(train)
    assert (bound["batch_size"], bound["epochs"], bound["eval_every"]) == (64, 2, 125)
    assert (bound["optimizer"].learning_rate, bound["optimizer"].weight_decay) == (7e-6, 0.0)
    assert (bound["model"].pooling, bound["model"].passage_max_length) == ("cls", 32)
    objective = bound["objective"]
    assert (objective.weight, objective.masking, objective.projector) == (0.005, 0.3, "batch_norm")
    assert gin.query_parameter("in_batch_softmax.temperature") == 0.05
    assert (bound["dev_metric"], len(bound["evaluators"])) == ("spearman", 1)


@functools.cache
def load(model, mesh) -> tuple[LoadedModel, Partitioner]:
    """Builds what a recipe starts from, once for all recipes that start from the same."""
    partitioner = mesh.build()
    return model.build(seed=0, partitioner=partitioner), partitioner


def of_one_layer(thing):
    """Returns a model's configuration or an objective with stacks of one layer, those of its parts too."""
    if isinstance(thing, Mapping):
        return {name: of_one_layer(part) for name, part in thing.items()}
    if not dataclasses.is_dataclass(thing):
        return thing
    fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    parts = {n: of_one_layer(part) for n, part in fields.items() if n in ("backbone", "parts", "contrastive")}
    return dataclasses.replace(thing, **parts, **{n: 1 for n in fields if n in LAYERS})


LAYERS = ("num_layers", "num_decoder_layers", "decoder_layers")
TRACES: dict[tuple[str, int], dict] = {}


def trace(bound: dict, loaded, partitioner, num_negatives: int = 1) -> dict:
    """Traces the step that `loop.train` compiles, of one layer, and returns its metrics as shapes.

    Of several recipes that gin says the same of, a default by its name among them, it traces one.
    """
    said = (gin_config.operative_config(), num_negatives)
    if said in TRACES:
        return TRACES[said]
    objective, config = of_one_layer(bound["objective"]), of_one_layer(loaded.model.config)
    recipe = Recipe(**bound | {"num_negatives": num_negatives, "objective": objective})
    planned = program.Planned(recipe=recipe, config=config, settings=loaded.settings, partitioner=partitioner)
    step = program.make_step(planned)
    with partitioner():
        state, metrics = jax.eval_shape(step.function, step.state, step.batch)
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, step.state)
    TRACES[said] = metrics
    return metrics


def test_no_dev_split_evaluates_nothing():
    for run in PIECES["runs"]:
        gin_config.bind(train, [run], ["DATA=x", "DEV_SPLIT=None"], {})
        assert gin.get_bindings(train)["dev"] is None


@pytest.mark.parametrize("objective", ["in_batch_softmax", "pair", "samtone"])
def test_another_objective_keeps_what_a_recipe_sets(objective):
    files = ["gin/pairs.gin", f"gin/objectives/{objective}.gin"]
    gin_config.bind(train, files, ["DATA=somewhere"], {})
    loss = gin.get_bindings(train)["objective"].loss
    assert loss.__name__ == objective
    assert gin.query_parameter(f"{objective}.temperature") == 0.05
    assert gin.get_bindings(train)["model"].dropout_rate == 0.0


@pytest.mark.parametrize("typed", ["STEPS", "train.steps", "train.train.steps"])
@pytest.mark.parametrize("recipe", ["gin/quickstart.gin", "gin/pairs.gin", "gin/samtone_base.gin"])
def test_a_flag_is_the_macro_of_every_recipe_and_never_says_it_twice(recipe, typed):
    gin_config.bind(train, [recipe], ["DATA=x"], {"steps": 30})
    assert (gin.get_bindings(train)["steps"], gin.get_bindings(train)["epochs"]) == (30, None)
    assert "train.train.steps = 30" in settings(gin_config.operative_config())
    with pytest.raises(UserError, match="steps is given twice, by --steps and by --gin"):
        gin_config.bind(train, [recipe], ["DATA=x", f"{typed}=40"], {"steps": 30})


def test_the_command_finds_recipes_from_any_directory_and_names_a_misspelling(tmp_path):
    command = [sys.executable, "-m", "jaxir.train", "--gin_file=gin/samtone_base.gin", "--output_dir=run"]
    done = subprocess.run(
        [*command, "--gin.DATAA=x"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "error: DATAA is set but nothing uses it; did you mean 'DATA'?"
    assert not list(tmp_path.iterdir())
