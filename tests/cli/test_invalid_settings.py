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
from jaxir import cli, losses
from jaxir.core.errors import UserError
from jaxir.core.values import fits, hints_of
from jaxir.objectives.consert import ConSERT, drop_numbers
from jaxir.objectives.contrastive import Contrastive
from jaxir.objectives.diffcse import DiffCSE
from jaxir.objectives.ict import ICT
from jaxir.objectives.simcse import SimCSE
from jaxir.objectives.weighted_sum import WeightedSum

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
# For each piece of gin/: its settings, each with a value that is out of range or of a wrong type.
OBJECTIVES = {
    "bce": "TEMPERATURE=0 TEMPERATURE=True TEMPERATURE={} CHUNKS=0 CHUNKS=1.5 bce.g='text'",
    "in_batch_softmax": "BLOCK_SIZE=0 Contrastive.loss='text' Contrastive.loss=@ranking.list_softmax"
    " Contrastive.loss=@distillation.margin_mse Contrastive.loss=@simcse.SimCSE()",
    "gist": "GUIDE=1 GUIDE_MARGIN=-1 MARGIN_STRATEGY='text' SAME_TOWER=None LOSS=@ranking.list_softmax",
    "margin": "ALPHA='text' CHOICE='text' SAME_TOWER='both'",
    "matryoshka": "DIMENSIONS=[0] DIMENSIONS=8 DIMENSIONS=[1.5] WEIGHTS=[-1.0] WEIGHTS=1.0 NESTED_LOSS=None",
    "pair": "ALPHA=1.5",
    "samtone": "SAME_TOWER='text'",
    "triplet": "EPSILON=0",
    "kl_distillation": "TEACHER_TEMPERATURE=0 Distillation.loss=1",
    "clm_autoencoder": "DECODER_LAYERS=0 DECODER_LAYERS=1000000 CLMAutoencoder.decoder_dropout=1"
    " CLMAutoencoder.mean_over='text'",
    "tsdae": "DELETION=1 DECODER_LAYERS=0",
    "mlm_autoencoder": "MASKING=0 MASKING=1 VECTOR='text'",
    "consert": "FIRST_VIEW='token_cutoff' FIRST_VIEW=['words'] TOKEN_CUTOFF=1.5 EMBEDDING_DROPOUT=1"
    " CONTRASTIVE_LOSS=@ranking.list_softmax",
    "simcse": "CONTRASTIVE_LOSS=@partitioning.MeshConfig()",
    "cpdae": "WEIGHT=-1 CONTRAST='text' IDF=1 MLM_MASKING=0 MLM_HEAD='text'",
    "diffcse": "LAMBDA=-1 CONTRASTIVE_WEIGHT=1e999 MASKING_RATIO=0 CHANGE='text' TASK=3 DIFFCSE_OF='text'"
    " HEAD=[1] GENERATOR=1",
    "multi_task": "WEIGHT=None CONTRASTIVE='text' AUTOENCODER=@partitioning.MeshConfig()",
    "prop": "MARGIN=0 MEAN_WORDS=0 SUBSAMPLING=0",
    "seed": "SPAN=0",
    "ict": "KEEP=1.5 PASSAGE_SENTENCES=1",
    "cross_encoder": "RANKING_LOSS=None TEMPERATURE=0 RANKING_MARGIN=0",
    "reader": "PASSAGES=0 CHUNKS=[1]",
    "query_reranking": "ALPHA=-1 RANK_REDUCTION='text' CANDIDATES=0 MAX_RANK=0 READS='text'"
    " objectives.query_reranking.QueryReranking.loss='text'"
    " QueryReranking.loss=@ranking.rank_margin",  # an evaluator is also called QueryReranking
}
EVALUATORS = {
    "reading": "DEV_NEW_TOKENS=0 DEV_BEAMS=0 READING_EVERY=0",
    "generation": "DEV_NEW_TOKENS=1.5 DEV_BEAMS=None GENERATION_EVERY=-1",
    "loss": "LOSS_EVERY=0",
    "reranking": "DEV_RUN_DEPTH=9 DEV_RUN_SPLIT=1",
    "search": "DEV_METRICS='' DEV_METRICS='R@2000' SEARCH_EVERY=0",
    "senteval": "SENTEVAL_FOLDS=1 SENTEVAL=None",
    "sts": "STS_SETTING='text' STS_EVERY=[1]",
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
UNSUPERVISED = ["unsupervised", "TEXT=texts.txt"]
BASES = {  # names of pieces: the recipe that they are added to, and the bindings that the recipe requires
    "kl_distillation": ["pairs", "DATA=x", "MINED=mined.jsonl"],
    "query_reranking": ["ear_ri", "TRAIN_CANDIDATES=mined.jsonl"],
    "cross_encoder reranking": ["reranker", "DATA=corpus", "MINED=mined.jsonl"],
    "reader reading": ["reader", "DATA=corpus", "RUN=x", "ANSWERS=y"],
    "generation": ["generator", "DATA=corpus"],
    "bce gist in_batch_softmax margin matryoshka pair samtone triplet": ["pairs", "DATA=corpus"],
}


def recipe(piece: str) -> tuple[list[str], list[str]]:
    """Returns the gin files of a recipe with this piece, and the bindings that they require."""
    base, *needed = next((base for pieces, base in BASES.items() if piece in pieces.split()), UNSUPERVISED)
    model = "seq2seq_1_1" if base in ("reader", "generator") else "bert"
    files = [f"gin/{base}.gin"]
    files += ["gin/experiments/mined.gin"] if piece == "kl_distillation" else []
    kind = "evaluators" if piece in EVALUATORS else "objectives"
    files += [f"gin/{kind}/{piece}.gin"] if piece != "reader" else []
    needed += [f"MODEL=hf:{GOLDEN / model}", "STEPS=2", "BATCH_SIZE=4", *NEEDED.get(piece, [])]
    return files, needed


@pytest.mark.parametrize("piece", [*OBJECTIVES, *EVALUATORS])
def test_invalid_setting_is_refused_before_data_or_output_are_touched(piece, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files, needed = recipe(piece)
    modules = ("losses import distillation", "losses import ranking", "objectives import simcse")
    modules += ("objectives import contrastive", "runtime import partitioning")
    lines = ["from __gin__ import dynamic_registration", *(f"from jaxir.{module}" for module in modules)]
    (tmp_path / "more.gin").write_text("\n".join(lines) + "\n")
    typed = [*(f"--gin_file={file}" for file in [*files, "more.gin"]), "--output_dir=run"]
    accepted = []
    for setting in (OBJECTIVES | EVALUATORS)[piece].split():
        kept = [f"--gin.{other}" for other in needed if other.split("=")[0] != setting.split("=")[0]]
        status = cli.main("jaxir.train:train", [*typed, *kept, f"--gin.{setting}"])
        said = capsys.readouterr().err.strip().splitlines()
        if status != 1 or len(said) != 1 or "texts.txt" in said[0] or "corpus" in said[0]:
            accepted.append((setting, status, said[-1:]))
        gin.clear_config()
    assert not accepted and not (tmp_path / "run").exists()
    # Without an invalid setting, the error is that the data are missing.
    assert cli.main("jaxir.train:train", [*typed, *(f"--gin.{binding}" for binding in needed)]) == 1
    assert re.search(r"texts\.txt|corpus|mined\.jsonl", capsys.readouterr().err)


LOSSES = [losses.bce, losses.margin, losses.triplet, losses.in_batch_softmax, losses.matryoshka]
LOSSES += [losses.nt_xent, losses.pair, losses.samtone]
OF_LISTS = [losses.binary_cross_entropy, losses.list_softmax, losses.margin_ranking]
OF_TEACHERS = [losses.margin_mse, losses.kl_distillation]


@pytest.mark.parametrize("loss", [*LOSSES, *OF_LISTS, *OF_TEACHERS], ids=lambda loss: loss.__name__)
def test_setting_of_a_loss_may_be_a_whole_number(loss):
    """gin reads 0 and 1 as int where a loss expects a float."""
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
    """Settings without a hint would accept any value."""
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


def test_python_objects_refuse_losses_and_objects_of_other_kinds():
    with pytest.raises(UserError, match="loss must be a function, @NAME in gin files, not 'text'"):
        SimCSE(loss="text")
    with pytest.raises(UserError, match="list_softmax is not a loss for this objective: got an unexpected"):
        Contrastive(loss=losses.list_softmax)
    with pytest.raises(UserError, match="same_tower of samtone must be 'query' or 'passage' or 'both', not"):
        Contrastive(loss=functools.partial(losses.samtone, same_tower="bth"))
    for wrong, sentence in (
        ({"temperature": "x"}, "temperature of in_batch_softmax must be a number above 0, not 'x'"),
        ({"temperatur": 1.0}, r"in_batch_softmax\(temperatur=1.0\) cannot be called: got an unexpected"),
    ):
        loss = functools.partial(losses.in_batch_softmax, **wrong)
        for given in (loss, functools.partial(losses.matryoshka, loss=loss)):
            with pytest.raises(UserError, match=f"^{sentence}"):
                Contrastive(loss=given)
    with pytest.raises(UserError, match="generator must be an object, MaskedLMSource or None, not 'hf:x'"):
        DiffCSE(generator="hf:x")
    with pytest.raises(UserError, match="two views of a text are equal"):
        ConSERT(first=["feature_cutoff"], second=[], feature_cutoff=0)
    with pytest.raises(UserError, match="all weights of a sum of objectives are 0"):
        WeightedSum(parts={"a": SimCSE()}, weights={"a": 0})
    with pytest.raises(UserError, match="contrastive_weight is 0, and there is no discriminator"):
        DiffCSE(weight=0, contrastive_weight=0)


def test_shares_may_be_whole_numbers():
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


def test_object_made_of_itself_is_refused(tmp_path, capsys):
    flags = ["--gin_file=gin/unsupervised.gin", "--gin_file=gin/objectives/simcse.gin", "--gin.TEXT=x"]
    flags += [f"--output_dir={tmp_path / 'run'}", "--gin.CONTRASTIVE_LOSS=@simcse.SimCSE()"]
    assert cli.main("jaxir.train:train", flags) == 1
    assert (
        capsys.readouterr().err == "error: an object refers to itself (SimCSE -> SimCSE): remove one of these"
        " references\n"
    )
