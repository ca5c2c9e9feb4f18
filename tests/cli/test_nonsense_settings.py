"""Values that make no sense, bound to pieces of gin/: each costs a sentence before anything is made."""

import dataclasses
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import gin
import jax
import jax.numpy as jnp
import pytest

import jaxir
from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.core.values import fits, hints_of
from jaxir.losses import bce, distillation, hinges, in_batch, matryoshka, nt_xent, pair, ranking, samtone
from jaxir.objectives.consert import ConSERT, drop_numbers
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.diffcse import DiffCSE
from jaxir.objectives.ict import ICT
from jaxir.objectives.simcse import SimCSE
from jaxir.objectives.weighted_sum import WeightedSum

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NUMBER = ["1e999", "-1", "'text'", "[1]", "None", "@partitioning.MeshConfig()"]
COUNT = [*NUMBER, "0", "1.5"]
SHARE = [*NUMBER, "1.5"]
CHOICE = ["'text'", "''", "3", "None", "['paper']", "@partitioning.MeshConfig()"]
OBJECT = ["'text'", "1", "[1]", "@partitioning.MeshConfig()"]
LOSS = [*OBJECT, "None", "@ranking.list_softmax", "@distillation.margin_mse", "@simcse.SimCSE()"]
TEXTS = ["TEXT=texts.txt"]
SETTINGS = {
    "bce": {
        "TEMPERATURE": [*NUMBER, "0", "True", "{}", "@in_batch.in_batch_softmax"],
        "CHUNKS": [*COUNT, f"{10**30}"],
        "bce.g": CHOICE,
    },
    "in_batch_softmax": {"BLOCK_SIZE": set(COUNT) - {"None"}, "Contrastive.loss": LOSS},
    "margin": {"ALPHA": set(NUMBER) - {"-1"}, "CHOICE": CHOICE, "SAME_TOWER": ["1", "'both'", "None"]},
    "matryoshka": {
        "DIMENSIONS": ["[0]", "[8, 'a']", "8", "[1.5]", "'text'", "[-8]"],
        "WEIGHTS": ["[-1.0]", "['a']", "1.0", "[1e999]", "'text'"],
        "NESTED_LOSS": [*OBJECT, "None"],
    },
    "pair": {"ALPHA": SHARE},
    "samtone": {"SAME_TOWER": CHOICE},
    "triplet": {"EPSILON": [*NUMBER, "0"]},
    "kl_distillation": {"TEACHER_TEMPERATURE": [*NUMBER, "0"], "Distillation.loss": LOSS[:-2]},
    "clm_autoencoder": {
        "DECODER_LAYERS": [*COUNT, "1000000"],
        "CLMAutoencoder.decoder_dropout": [*SHARE, "1"],
        "CLMAutoencoder.mean_over": CHOICE,
    },
    "tsdae": {"DELETION": [*SHARE, "1"], "DECODER_LAYERS": [*COUNT, "1000000"]},
    "mlm_autoencoder": {"MASKING": [*SHARE, "0", "1"], "VECTOR": CHOICE},
    "consert": {
        "FIRST_VIEW": ["'token_cutoff'", "['words']", "None", "[1]"],
        "TOKEN_CUTOFF": SHARE,
        "EMBEDDING_DROPOUT": [*SHARE, "1"],
        "CONTRASTIVE_LOSS": LOSS,
    },
    "simcse": {"CONTRASTIVE_LOSS": LOSS},
    "cpdae": {
        "WEIGHT": NUMBER,
        "CONTRAST": CHOICE[:3],
        "IDF": ["1", "'text'", "None"],
        "MLM_MASKING": [*SHARE, "0"],
        "MLM_HEAD": OBJECT,
    },
    "diffcse": {
        "LAMBDA": NUMBER,
        "CONTRASTIVE_WEIGHT": NUMBER,
        "MASKING_RATIO": [*SHARE, "0"],
        "CHANGE": CHOICE,
        "TASK": CHOICE,
        "DIFFCSE_OF": OBJECT,
        "HEAD": OBJECT,
        "GENERATOR": ["1", "[1]"],
    },
    "multi_task": {"WEIGHT": NUMBER, "CONTRASTIVE": OBJECT, "AUTOENCODER": OBJECT},
    "prop": {"MARGIN": [*NUMBER, "0"], "MEAN_WORDS": [*NUMBER, "0"], "SUBSAMPLING": ["0", "-1", "'text'"]},
    "seed": {"SPAN": COUNT},
    "ict": {"KEEP": SHARE, "PASSAGE_SENTENCES": ["1", *NUMBER]},
    "cross_encoder": {
        "RANKING_LOSS": [*OBJECT, "None"],
        "TEMPERATURE": [*NUMBER, "0"],
        "RANKING_MARGIN": [*NUMBER, "0"],
    },
    "reader": {"PASSAGES": COUNT, "CHUNKS": COUNT},
    "query_reranking": {
        "ALPHA": NUMBER,
        "RANK_REDUCTION": CHOICE,
        "CANDIDATES": COUNT,
        "MAX_RANK": COUNT,
        "READS": ["'text'", "3"],
        "objectives.query_reranking.QueryReranking.loss": OBJECT,
        "QueryReranking.loss": ["@ranking.rank_margin"],  # an evaluator has the name too
    },
}
EVALUATORS = {
    "reading": {"DEV_NEW_TOKENS": COUNT, "DEV_BEAMS": COUNT, "READING_EVERY": ["0", "-1", "'text'"]},
    "generation": {"DEV_NEW_TOKENS": COUNT, "DEV_BEAMS": COUNT, "GENERATION_EVERY": ["0", "-1", "'text'"]},
    "loss": {"LOSS_EVERY": ["0", "-1", "'text'"]},
    "reranking": {"DEV_RUN_DEPTH": [*COUNT, "9"], "DEV_RUN_SPLIT": ["1", "None"]},
    "search": {"DEV_METRICS": ["1", "''", "None", "'R@2000'"], "SEARCH_EVERY": ["0", "'text'"]},
    "senteval": {"SENTEVAL_FOLDS": [*COUNT, "1"], "SENTEVAL": ["1", "None"]},
    "sts": {"STS_SETTING": CHOICE, "STS_EVERY": ["0", "[1]"]},
}
NEEDED = {
    "generation": ["DEV_METRIC=rougeL"],
    "kl_distillation": ["NEGATIVES=2"],
    "loss": ["DEV_TEXT=texts.txt", "DEV_METRIC=loss"],
    "reranking": ["DEV_RUN=run.trec"],
    "search": ["DEV_COLLECTION=beir:corpus", "DEV_METRIC='R@10'"],
    "senteval": ["SENTEVAL=folder", "DEV_METRIC=transfer"],
    "sts": ["STS=file.tsv", "DEV_METRIC=spearman"],
}
OF_PAIRS = {"bce", "in_batch_softmax", "margin", "matryoshka", "pair", "samtone", "triplet"}


@pytest.fixture(autouse=True)
def forget_gin():
    yield
    gin.clear_config()


def recipe(piece: str) -> tuple[list[str], list[str]]:
    """Returns gin files with a piece in them, and what must be set."""
    needed = [f"MODEL=hf:{GOLDEN / 'bert'}", "STEPS=2", "BATCH_SIZE=4", *NEEDED.get(piece, [])]
    if piece == "kl_distillation":
        files, needed = (
            ["gin/pairs.gin", "gin/experiments/mined.gin"],
            [*needed, "DATA=x", "MINED=mined.jsonl"],
        )
    elif piece == "query_reranking":
        files, needed = ["gin/ear_ri.gin"], [*needed, "TRAIN_CANDIDATES=mined.jsonl"]
    elif piece in ("cross_encoder", "reranking"):
        files, needed = ["gin/reranker.gin"], [*needed, "DATA=corpus", "MINED=mined.jsonl"]
    elif piece in ("reader", "reading"):
        needed = [*needed[1:], f"MODEL=hf:{GOLDEN / 'seq2seq_1_1'}", "DATA=corpus", "RUN=x", "ANSWERS=y"]
        return ["gin/reader.gin", *(["gin/evaluators/reading.gin"] if piece == "reading" else [])], needed
    elif piece == "generation":
        files, needed = (
            ["gin/generator.gin"],
            [*needed[1:], "DATA=corpus", f"MODEL=hf:{GOLDEN / 'seq2seq_1_1'}"],
        )
    elif piece in OF_PAIRS:
        files, needed = ["gin/pairs.gin"], [*needed, "DATA=corpus"]
    else:
        files, needed = ["gin/unsupervised.gin"], [*needed, *TEXTS]
    kind = "evaluators" if piece in EVALUATORS else "objectives"
    return [*files, f"gin/{kind}/{piece}.gin"], needed


@pytest.mark.parametrize("piece", [*SETTINGS, *EVALUATORS])
def test_nonsense_costs_a_sentence_before_anything_is_made(piece, tmp_path, capsys, monkeypatch):
    """The data and the run's directory are never looked at: neither is there."""
    monkeypatch.chdir(tmp_path)
    files, needed = recipe(piece)
    settings = SETTINGS.get(piece) or EVALUATORS[piece]
    extra = tmp_path / "more.gin"
    modules = ("losses import distillation", "losses import ranking", "losses import in_batch")
    modules += ("objectives import simcse", "objectives import contrastive")
    lines = ["from __gin__ import dynamic_registration", "from jaxir.runtime import partitioning"]
    extra.write_text("\n".join([*lines, *(f"from jaxir.{module}" for module in modules)]) + "\n")
    typed = [*(f"--gin_file={file}" for file in [*files, str(extra)]), "--output_dir=run"]
    left = []
    for name, value in [(n, v) for n, values in settings.items() for v in values]:
        kept = [f"--gin.{binding}" for binding in needed if not binding.startswith(f"{name}=")]
        status = cli.main("jaxir.train:train", [*typed, *kept, f"--gin.{name}={value}"])
        said = capsys.readouterr().err.strip().splitlines()
        if status != 1 or len(said) != 1 or "texts.txt" in said[0] or "corpus" in said[0]:
            left.append((name, value, status, said[-1:]))
        gin.clear_config()
    assert not left and not (tmp_path / "run").exists()
    # Without it the data are missed.
    assert cli.main("jaxir.train:train", [*typed, *(f"--gin.{binding}" for binding in needed)]) == 1
    assert re.search(r"texts\.txt|corpus|mined\.jsonl", capsys.readouterr().err)
    gin.clear_config()


LOSSES = [bce.bce, hinges.margin, hinges.triplet, in_batch.in_batch_softmax, matryoshka.matryoshka]
LOSSES += [nt_xent.nt_xent, pair.pair, samtone.samtone]
OF_LISTS = [ranking.binary_cross_entropy, ranking.list_softmax, ranking.margin_ranking]
OF_TEACHERS = [distillation.margin_mse, distillation.kl_distillation]


@pytest.mark.parametrize("loss", [*LOSSES, *OF_LISTS, *OF_TEACHERS], ids=lambda loss: loss.__name__)
def test_a_setting_that_may_be_a_number_may_be_a_whole_one(loss):
    """0 and 1 in a gin file are whole numbers."""
    vectors = jnp.eye(4, 8)
    given = [vectors, vectors, jnp.ones((4, 2, 8)) / 8**0.5]
    if loss in OF_LISTS:
        given = [vectors[:, 0], vectors[:, :2], jnp.ones((4, 2), bool)]
    more = {}
    if loss in OF_TEACHERS:
        more = {"passage_score": jnp.ones(4), "negative_scores": jnp.zeros((4, 2))}
    tried = 0
    settings = {name for name, p in inspect.signature(loss).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for name in settings:
        hint = hints_of(loss)[name]
        for value in (1, [1]):
            if fits(value, hint) and fits(0.5 if value == 1 else [0.5], hint):
                how = {name: value} | ({"dimensions": [8]} if name == "weights" else {})
                assert jax.eval_shape(functools.partial(loss, **how), *given, **more)[0].shape == ()
                tried += 1
    assert tried


def test_settings_of_our_classes_have_resolvable_type_hints():
    """Else they would be accepted whatever they are."""
    found = []
    for room in ("data", "evaluators", "losses", "objectives", "training", "interop", "models"):
        for module in pkgutil.walk_packages(jaxir.__path__, "jaxir."):
            if not module.name.startswith(f"jaxir.{room}.") or "exports" in module.name:
                continue
            for name, thing in vars(importlib.import_module(module.name)).items():
                own = getattr(thing, "__module__", None) == module.name
                if own and dataclasses.is_dataclass(thing) and "__post_init__" in vars(thing):
                    fields = {field.name for field in dataclasses.fields(thing)}
                    found.append(f"{module.name}.{name}")
                    assert fields <= hints_of(thing).keys(), found[-1]
    assert len(found) > 40 and "jaxir.training.evaluators.corpus_search.Search" in found


def test_objects_and_losses_of_another_kind_in_python():
    with pytest.raises(UserError, match="loss must be a function, @NAME in gin files, not 'text'"):
        SimCSE(loss="text")
    with pytest.raises(UserError, match="list_softmax is not a loss for this objective: got an unexpected"):
        Contrastive(loss=ranking.list_softmax)
    with pytest.raises(UserError, match="same_tower of samtone must be 'query' or 'passage' or 'both', not"):
        Contrastive(loss=functools.partial(samtone.samtone, same_tower="bth"))
    for wrong, sentence in (
        ({"temperature": "x"}, "temperature of in_batch_softmax must be a number above 0, not 'x'"),
        ({"temperatur": 1.0}, r"in_batch_softmax\(temperatur=1.0\) cannot be called: got an unexpected"),
    ):
        loss = functools.partial(in_batch.in_batch_softmax, **wrong)
        for given in (loss, functools.partial(matryoshka.matryoshka, loss=loss)):
            with pytest.raises(UserError, match=f"^{sentence}"):
                Contrastive(loss=given)
    with pytest.raises(UserError, match="generator must be an object, MaskedLMSource or None, not 'hf:x'"):
        DiffCSE(generator="hf:x")
    with pytest.raises(UserError, match="two views of a text are equal"):
        ConSERT(first=["feature_cutoff"], second=[], feature_cutoff=0)
    with pytest.raises(UserError, match="all weights of a sum of objectives are 0"):
        WeightedSum(parts={"a": SimCSE()}, weights={"a": 0})
    with pytest.raises(UserError, match="contrastive_weight is 0 and there is no discriminator"):
        DiffCSE(weight=0, contrastive_weight=0)


def test_shares_of_0_and_1_may_be_whole_numbers():
    x, key = jnp.ones((2, 3, 4)), jax.random.key(0)
    assert (drop_numbers(x, jnp.ones((2, 3), bool), key=key, rate=0) == x).all()

    class Sums:
        def encode_together(self, texts):
            return [ids.sum(1, dtype=jnp.float32)[:, None] for ids, _, _ in texts]

    ids = jnp.arange(24, dtype=jnp.int32).reshape(4, 1, 6)
    batch = {"sentence_ids": ids, "context_ids": ids + 1, "whole_ids": ids[:, 0] + 9}
    for keep, shown in ((0, ids + 1), (1, ids + 9)):
        found = ICT(keep=keep).embed(Sums(), batch, key)
        assert found.passage[:, 0].tolist() == shown.sum((1, 2)).tolist()


def test_an_object_that_would_be_made_of_itself(tmp_path, capsys):
    flags = ["--gin_file=gin/unsupervised.gin", "--gin_file=gin/objectives/simcse.gin", "--gin.TEXT=x"]
    flags += [f"--output_dir={tmp_path / 'run'}", "--gin.CONTRASTIVE_LOSS=@simcse.SimCSE()"]
    assert cli.main("jaxir.train:train", flags) == 1
    assert capsys.readouterr().err == "error: SimCSE would be made of itself (SimCSE -> SimCSE)\n"
