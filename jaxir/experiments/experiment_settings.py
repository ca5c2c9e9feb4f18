"""The settings of `jaxir.grid` and `jaxir.rounds`, which are their flags.

Must not import JAX, so that `--help` stays fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxir.core.values import Count, Natural, Seed, checked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A value of a custom axis: one of several ways to train that are compared.

    Attributes:
      name: name in directories.
      title: title in tables.
      gin_files: gin files, added after the recipe's.
      bindings: gin bindings, NAME=VALUE.
    """

    name: str
    title: str
    gin_files: Sequence[str] = ()
    bindings: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridSettings:
    """The axes of a grid, and the settings that all its cells share.

    Attributes:
      recipe: gin files of every training run, such as gin/runs/samtone_paper.gin.
      datasets: NAME=DIR or DIR, BEIR folders with the splits that the recipe trains on; a column for each.
      steps: optimizer steps of a cell. A method with two stages (PAIR) trains half of the steps in each.
      models: pretrained encoders: files of gin/models without .gin, such as t5_1_1/base, or other gin
        files.
      sharing: what the towers share; ade,ade_spl,sde by default.
      objectives: standard, samtone, samtone_both, pair; without pairs simcse, simcse_nt_xent, simcse_bce,
        consert_1, consert_2, clm_autoencoder, mlm_autoencoder, multi_task, multi_task_mlm, tsdae, diffcse,
        diffcse_tanh, cpdae, cpdae_r, seed, prop, ict; or NAME=FILE.gin with + between the files of stages;
        standard,samtone,pair by default. Each is compared with the first.
      seeds: whole numbers that set the order of the data, dropout and new parameters; 0 by default.
      untrained: NAME=MODEL, models that are tested without training; a row for each.
      judges: further tests of every model: NAME=sts:PATH, rated pairs (Spearman's correlation), or
        NAME=senteval:DIR, transfer tasks (mean accuracy).
      runs: NAME=FILE, run files over the only data set, such as BM25's; a row for each.
      variants: list of Variant(...) of jaxir.experiments.grid_cells, one more axis; only in gin files.
      metrics: metrics separated by spaces, in the notation of ir_measures.
      split: the split to test on.
      bindings: gin bindings of every training run, NAME=VALUE.
    """

    recipe: list[str]
    datasets: list[str]
    steps: Count
    models: list[str]
    sharing: list[str] | None = None
    objectives: list[str] | None = None
    seeds: list[str | int] | None = None
    untrained: list[str] | None = None
    judges: list[str] | None = None
    runs: list[str] | None = None
    variants: Any = None
    metrics: str = "P@1 RR"
    split: str = "test"
    bindings: list[str] | None = None

    def __post_init__(self) -> None:
        _fill(self, sharing=("ade", "ade_spl", "sde"), objectives=("standard", "samtone", "pair"), seeds=(0,))
        _fill(self, untrained=(), judges=(), runs=(), variants=(Variant(name="", title=""),), bindings=())


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class RoundSettings:
    """Settings of every round of training and mining.

    Attributes:
      recipe: gin files of every training run: a model, an objective, a run of gin/runs.
      dataset: beir:DIR with a split train.
      steps: optimizer steps of each round.
      rounds: number of rounds with mined negatives, after round 0.
      start: whether a round starts from the previous model (ANCE) or from the pretrained model.
      first_run: TREC run over the training queries, such as BM25's, to mine negatives for round 0 from.
      negatives: number mined for each query; a batch has NEGATIVES of them per pair (mined.gin).
      mine: other flags of jaxir.mine, NAME=VALUE: first=3,last=100,margin=0.1 or
        cross_encoder=MODEL,max_relevance=0.1. The corpus is searched down to rank `last`.
      backend: the engine that searches the corpus.
      metrics: metrics separated by spaces, in the notation of ir_measures.
      split: the split to test on.
      bindings: gin bindings of every training run, NAME=VALUE.
      seed: seed of training and mining.
    """

    recipe: list[str]
    dataset: str
    steps: Count
    rounds: Natural = 1
    start: Literal["previous", "pretrained"] = "previous"
    first_run: str | None = None
    negatives: Count = 7
    mine: list[str] | None = None
    backend: Literal["scann", "exact"] = "scann"
    metrics: str = "nDCG@10 RR@10 P@1 R@100"
    split: str = "test"
    bindings: list[str] | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        _fill(self, mine=(), bindings=())

    @property
    def mining(self) -> dict[str, Any]:
        """The flags of jaxir.mine in all rounds."""
        given = dict(flag.partition("=")[::2] for flag in self.mine)
        flags = {"negatives": self.negatives, "first": 1, "last": 200}
        if given.get("sampling") != "top":  # "top" needs no seed: it draws no random numbers
            flags["seed"] = self.seed
        return flags | given


def _fill(settings: Any, **defaults: Any) -> None:
    for name, default in defaults.items():
        if getattr(settings, name) is None:
            object.__setattr__(settings, name, default)  # sets a field although the dataclass is frozen
