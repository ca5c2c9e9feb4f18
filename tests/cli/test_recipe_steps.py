import dataclasses
import functools
import itertools
from collections.abc import Mapping
from pathlib import Path

import gin
import jax
import pytest

from jaxir.cli import gin_config
from jaxir.core.features import TextFormat
from jaxir.interop.model_dir import LoadedModel
from jaxir.objectives.pair_batch import pair_features
from jaxir.planning import program
from jaxir.runtime.partitioning import Partitioner
from jaxir.train import train
from jaxir.training.run.recipe import Recipe
from tests.cli.recipe_files import (
    CROSS,
    HYBRID,
    MASKED_LM,
    MODELS,
    MULTI_VECTOR,
    OF_TEXTS,
    PIECES,
    ROOT,
    SEQ2SEQ,
    SPARSE,
)
from tests.cli.recipe_files import recorded_settings as settings
from tests.shallow import first_layers

TRACED = "gin/models/minilm.gin"  # traced with each objective; the other models are traced with one
GOLDEN = {True: ROOT / "tests/golden/t5_1_1", False: ROOT / "tests/golden/bert"}
DPR_DIFFCSE = "gin/objectives/dpr_diffcse.gin"
LATE = {
    "gin/objectives/late_interaction.gin": "in_batch_softmax",
    "gin/objectives/late_distillation.gin": "kl_distillation",
}
SPLADE = {
    "gin/objectives/splade.gin": "in_batch_softmax",
    "gin/objectives/splade_distillation.gin": "margin_mse",
}
HYBRID_LOSSES = {"gin/objectives/hybrid.gin": "self_distillation"}
NOT_OF_PAIRS = (*OF_TEXTS, DPR_DIFFCSE, SEQ2SEQ["objectives"], "gin/objectives/query_reranking.gin")


def small(model: str, folder: Path) -> list[str]:
    """Returns bindings that give a model piece the weights of a small golden model."""
    sizes = ["QUERY_LENGTH=8", "PASSAGE_LENGTH=12", "BATCH_SIZE=8", "DTYPE=float32"]
    sizes += [] if model in (CROSS["models"], HYBRID, MULTI_VECTOR, SPARSE) else ["SHARING=sde"]
    return [*sizes, f"MODEL=hf:{GOLDEN['t5' in model]}", f"DATA={folder}", "STEPS=20"]


@pytest.mark.parametrize("model", [model for model in MODELS if model != SEQ2SEQ["models"]])
def test_pieces_compose_in_any_order(model, folder):
    special = {CROSS["models"]: [CROSS["objectives"]], MULTI_VECTOR: list(LATE), SPARSE: list(SPLADE)}
    special[HYBRID] = list(HYBRID_LOSSES)
    others = [o for some in special.values() for o in some]
    usual = [o for o in PIECES["objectives"] if o not in (*NOT_OF_PAIRS, *others)]
    objectives = special.get(model, usual)
    for number, (objective, run) in enumerate(zip(objectives, itertools.cycle(PIECES["runs"]))):
        loss = {CROSS["objectives"]: "list_softmax", **LATE, **SPLADE, **HYBRID_LOSSES}.get(
            objective, Path(objective).stem
        )
        bindings = [*small(model, folder), "DROPOUT=0.25", "REMAT=products", "CHUNKS=2"]
        bindings += [] if loss in ("triplet", "margin") else ["TEMPERATURE=0.07"]
        bindings += [f"GUIDE=hf:{GOLDEN[False]}"] if loss == "gist" else []
        bindings += ["FSDP=2", "LEARNING_RATE=0.5", "WARMUP_STEPS=3", "SEED=4"]
        recorded, pieces = set(), [model, objective, run]
        for files in itertools.permutations(pieces) if number == 0 else (pieces, pieces[::-1]):
            bound = bind(files, bindings)
            recorded.add(tuple(settings(gin_config.operative_config())))
        assert len(recorded) == 1, "the order of pieces matters"
        assert (bound["steps"], bound["batch_size"], bound["seed"]) == (20, 8, 4)
        assert (bound["optimizer"].learning_rate, bound["optimizer"].warmup_steps) == (0.5, 3)
        assert bound["objective"].chunks == 2 and loss == bound["objective"].loss.__name__
        loaded, partitioner = load(bound["model"], bound["mesh"])
        assert partitioner.mesh.shape["fsdp"] == 2
        if number == 0:
            backbone = loaded.model.config.backbone
            assert (backbone.dropout_rate, backbone.remat, backbone.dtype) == (0.25, "products", "float32")
            pairs = bound["data"].build(loaded.tokenizer, pair_features(TextFormat(8, 12)))
            assert (pairs.num_examples, bound["dev"].split) == (40, "dev")
        if number == 0 or model == TRACED:
            assert "loss" in trace(bound, loaded, partitioner)


def bind(files: list[str], bindings: list[str]) -> dict:
    gin_config.bind(train, files, bindings, {"output_dir": "run"})
    return gin.get_bindings(train)


def traced(files: list[str], bindings: list[str], num_examples: int) -> tuple[dict, LoadedModel, dict]:
    """Checks the number of examples; returns the bound recipe, its model, and its traced step's metrics."""
    bound = bind(files, bindings)
    loaded, partitioner = load(bound["model"], bound["mesh"])
    features = bound["objective"].features(loaded.settings.text_format(0))
    assert bound["data"].build(loaded.tokenizer, features).num_examples == num_examples
    return bound, loaded, trace(bound, loaded, partitioner, num_negatives=0)


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


MULTI_TASK = [f"CONTRASTIVE = @{name}()" for name in ("simcse.SimCSE", "consert.ConSERT")]
MULTI_TASK += [
    f"AUTOENCODER = @{name}()"
    for name in ("clm_autoencoder.CLMAutoencoder", "mlm_autoencoder.MLMAutoencoder", "masked_lm.MaskedLM")
]
OWN_HEAD = f"build.PretrainedMaskedLM.source = '{MASKED_LM}'"
DIFFCSE = [
    ("SENTENCES = True", 'CHANGED_TEXT = "both"', 'CHANGE = "all"', 'PROJECTOR = "tanh"'),
    ('TASK = "mlm"', "HEAD = @build.PretrainedMaskedLM()", OWN_HEAD, "CONTRASTIVE_WEIGHT = 0.5"),
    ('TASK = "corrective"', "DIFFCSE_OF = @consert.ConSERT()"),
    ('USE = "negative"', 'FOLLOW = "code"', "CHUNKS = 2"),
]
CPDAE = ['CONTRAST = "vectors"', "CONTRAST = None", "IDF = True"]
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
        *(("gin/objectives/simcse.gin", f"CONTRASTIVE_LOSS = @{loss}") for loss in LOSSES),
        ("gin/objectives/consert.gin", 'SECOND_VIEW = ["embedding_dropout", "token_cutoff"]'),
        ("gin/objectives/mlm_autoencoder.gin", 'VECTOR = "attention"'),
        *(("gin/objectives/cpdae.gin", binding) for binding in CPDAE),
        *(("gin/objectives/diffcse.gin", bindings) for bindings in DIFFCSE),
    ],
)
def test_objectives_of_texts_are_traced_with_all_their_choices(objective, binding, texts, generator):
    sizes = ["PASSAGE_LENGTH=12", "BATCH_SIZE=8", "DTYPE=float32", f"MODEL=hf:{GOLDEN[False]}", "STEPS=20"]
    sizes += ["SEED=4"]  # the same seed in all rows, so that equal recipes are traced once
    sizes += [f"GENERATOR={generator}"] if "diffcse" in objective else []
    texts = texts.with_name("passages.txt") if "ict" in objective else texts
    sizes += [f"TEXT={texts}", *([binding] if isinstance(binding, str) else binding)]
    bound, _, metrics = traced(["gin/unsupervised.gin", objective], sizes, num_examples=16)
    assert metrics["loss"].shape == ()
    assert bound["model"].dropout_rate == 0.1


@pytest.mark.parametrize("more", ["", "gin/experiments/targets.gin"])
def test_generators_are_traced(more, folder, tmp_path):
    targets = tmp_path / "targets.jsonl"
    targets.write_text('{"source": "a tool", "target": "a word"}\n' * 16)
    sizes = ["QUERY_LENGTH=8", "PASSAGE_LENGTH=12", "BATCH_SIZE=8", "DTYPE=float32", "STEPS=20", "FSDP=2"]
    sizes += [f"MODEL=hf:{ROOT / 'tests/golden/seq2seq_1_1'}"]
    sizes += [f"TARGETS={targets}"] if more else [f"DATA={folder}"]
    files = ["gin/generator.gin", *([more] if more else [])]
    _, _, metrics = traced(files, sizes, num_examples=16 if more else 40)
    assert metrics.keys() >= {"loss", "token_accuracy"}


@pytest.mark.parametrize("kind", ["ri", "rd"])
def test_query_rerankers_are_traced(kind, tmp_path):
    line = '{"_id": "q%d", "question": "a tool?", "outputs": ["a", "b"], "passages": ["p", null],'
    line += ' "ranks": [1, null], "depth": 100}\n'
    (tmp_path / "train.jsonl").write_text("".join(line % n for n in range(16)))
    (tmp_path / "corpus.jsonl").write_text('{"_id": "p", "text": "a passage"}\n')
    bindings = [f"TRAIN_CANDIDATES={tmp_path}/train.jsonl", f"MODEL=hf:{GOLDEN[False]}", "CANDIDATES=3"]
    bindings += ["QUERY_LENGTH=8", "STEPS=20", "FSDP=2", "CHUNKS=2", "RANK_REDUCTION=by_distance"]
    bindings += [f"CORPUS={tmp_path}/corpus.jsonl", "PASSAGE_LENGTH=12"] if kind == "rd" else []
    bound, loaded, metrics = traced([f"gin/ear_{kind}.gin"], bindings, num_examples=16)
    features = bound["objective"].features(loaded.settings.text_format(0))
    assert ("passage_ids" in features) == (kind == "rd") == (loaded.settings.pair_max_length == 20)
    assert metrics.keys() >= {"loss", "chosen_rank"}


def test_reader_is_traced(folder, tmp_path):
    needed = [f"DATA={folder}", f"RUN={tmp_path}/run.trec", "DEV_RUN=dev.trec"]
    needed += [f"ANSWERS={tmp_path}/answers.jsonl"]
    files = ["gin/reader.gin", "gin/evaluators/reading.gin"]
    queries = [f"q{i}" for i in range(8)]
    (tmp_path / "run.trec").write_text("".join(f"{q} Q0 d{i} 1 {i} t\n" for q in queries for i in range(3)))
    (tmp_path / "answers.jsonl").write_text("".join(f'{{"_id": "{q}", "answers": ["a"]}}\n' for q in queries))
    sizes = ["QUERY_LENGTH=8", "PASSAGE_LENGTH=24", "BATCH_SIZE=8", "DTYPE=float32", "STEPS=20", "FSDP=2"]
    sizes += [f"MODEL=hf:{ROOT / 'tests/golden/seq2seq_1_1'}", "PASSAGES=3", "CHUNKS=2", "DEV_ANSWERS=other"]
    bound, _, metrics = traced(files[:1], [*needed, *sizes], num_examples=8)
    assert bound["dev"].answers == "other" and metrics.keys() >= {"loss", "token_accuracy"}
    # Without a split, the reader's data are all questions of the run.
    gin.clear_config()
    bound = bind(files, [*needed, "TRAIN_SPLIT=None", "DEV_SPLIT=None"])
    assert bound["data"].split is bound["dev"].split is None


@pytest.mark.slow
def test_dpr_and_diffcse_are_traced_together(folder, generator):
    bindings = [*small("bert", folder), f"GENERATOR={generator}", "CHUNKS=2"]
    bound = bind(["gin/pairs.gin", DPR_DIFFCSE], bindings)
    loaded, partitioner = load(bound["model"], bound["mesh"])
    assert {"difference_loss", "contrastive_loss"} <= trace(bound, loaded, partitioner).keys()
    assert bound["objective"].projector == "none"


@functools.cache
def load(model, mesh) -> tuple[LoadedModel, Partitioner]:
    """Builds the model of a recipe, once for all recipes with the same model and mesh."""
    partitioner = mesh.build()
    return model.build(seed=0, partitioner=partitioner), partitioner


def of_one_layer(thing):
    """Returns a configuration or an objective with one layer in each stack, also in its parts."""
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
    """Traces the step that `loop.train` compiles, with one layer, and returns its metrics as shapes.

    Recipes with the same recorded configuration are traced once.
    """
    recorded = (gin_config.operative_config(), num_negatives)
    if recorded in TRACES:
        return TRACES[recorded]
    objective, config = of_one_layer(bound["objective"]), of_one_layer(loaded.model.config)
    recipe = Recipe(**bound | {"num_negatives": num_negatives, "objective": objective}).settled()
    planned = program.Planned(recipe=recipe, config=config, settings=loaded.settings, partitioner=partitioner)
    step = program.make_step(planned)
    with partitioner():
        state, metrics = jax.eval_shape(step.function, step.state, step.batch)
    assert jax.tree.map(lambda x: x.shape, state) == jax.tree.map(lambda x: x.shape, step.state)
    TRACES[recorded] = metrics
    return metrics
