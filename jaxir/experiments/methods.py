"""The training methods that grids compare, which are the values of the axis `objectives`."""

from __future__ import annotations

import dataclasses
import re

from jaxir.core.errors import UserError, suggest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One training run of a method."""

    gin_file: str  # the gin file of the objective
    bindings: tuple[str, ...] = ()  # gin bindings, NAME=VALUE, that define the method
    defaults: tuple[str, ...] = ()  # bindings that a grid may override


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A training method."""

    name: str  # name in commands and directories
    title: str  # title in tables
    # Each stage starts from the result of the previous stage and has an equal part of the steps.
    stages: tuple[Stage, ...]


def _of_texts(
    name: str, title: str, *bindings: str, piece: str | None = None, defaults: tuple[str, ...] = ()
) -> Method:
    stage = Stage(gin_file=f"gin/objectives/{piece or name}.gin", bindings=bindings, defaults=defaults)
    return Method(name=name, title=title, stages=(stage,))


def _views(first: str, second: str) -> tuple[str, str]:
    return f'FIRST_VIEW=["{first}"]', f'SECOND_VIEW=["{second}"]'


SOFTMAX = Stage(gin_file="gin/objectives/in_batch_softmax.gin")
MLM_PART = "AUTOENCODER=@mlm_autoencoder.MLMAutoencoder()"
SAMTONE = "gin/objectives/samtone.gin"
METHODS = {
    method.name: method
    for method in (
        Method(name="standard", title="Standard", stages=(SOFTMAX,)),
        Method(name="samtone", title="SamToNe", stages=(Stage(gin_file=SAMTONE),)),
        Method(
            name="samtone_both",
            title="SamToNe, both towers",
            stages=(Stage(gin_file=SAMTONE, bindings=("SAME_TOWER=both",)),),
        ),
        # Ren et al. 2021 train in two stages, PAIR first.
        Method(name="pair", title="PAIR", stages=(Stage(gin_file="gin/objectives/pair.gin"), SOFTMAX)),
        # Methods that train on texts without pairs, with the names of Wang 2022.
        _of_texts("simcse", "SimCSE"),
        _of_texts("simcse_nt_xent", "SimCSE, NT-Xent", "CONTRASTIVE_LOSS=@nt_xent.nt_xent", piece="simcse"),
        _of_texts("simcse_bce", "SimCSE, BCE", "CONTRASTIVE_LOSS=@bce.bce", piece="simcse"),
        _of_texts("consert_1", "ConSERT_1", *_views("token_shuffling", "feature_cutoff"), piece="consert"),
        _of_texts("consert_2", "ConSERT_2", *_views("token_shuffling", "embedding_dropout"), piece="consert"),
        _of_texts("clm_autoencoder", "CLM autoencoder"),
        _of_texts("mlm_autoencoder", "MLM autoencoder"),
        _of_texts("multi_task", "SimCSE + CLM autoencoder"),
        _of_texts("multi_task_mlm", "SimCSE + MLM autoencoder", MLM_PART, piece="multi_task"),
        _of_texts("tsdae", "TSDAE"),
        _of_texts("diffcse", "DiffCSE"),
        _of_texts("diffcse_tanh", "DiffCSE w/o BatchNorm", 'PROJECTOR="tanh"', piece="diffcse"),
        # Grids compare models by cosine, with which CPDAE needs a temperature (docs/cpdae.md).
        _of_texts("cpdae", "CPDAE"),
        _of_texts("cpdae_r", "CPDAE_R", 'CONTRAST="vectors"', piece="cpdae", defaults=("TEMPERATURE=0.05",)),
        _of_texts("seed", "SEED"),
        _of_texts("prop", "PROP"),
        _of_texts("ict", "ICT"),
    )
}


def parse_method(text: str) -> Method:
    """Returns the method of a value of the objectives axis."""
    if text in METHODS:
        return METHODS[text]
    name, equals, files = text.partition("=")
    if not equals or not re.fullmatch(r"\w+", name) or not files:
        raise UserError(
            f"unknown objective {text!r}; give one of {', '.join(METHODS)}, or NAME=FILE.gin with + between"
            f" stages{suggest(text, METHODS)}"
        )
    return Method(name=name, title=name, stages=tuple(Stage(gin_file=f) for f in files.split("+")))
