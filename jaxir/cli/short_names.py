"""Short names: `--learning_rate=1e-4` sets the parameter `learning_rate` of any object of a recipe.

`LEARNING_RATE = 1e-4` in a gin file and `--gin.LEARNING_RATE=1e-4` do the same, after all files are read. A
macro of that name that the recipe uses has priority.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jaxir.cli.gin_bindings import Bindings, Key, Reference, given_twice, has_reference
from jaxir.core.errors import UsageError, UserError, suggest
from jaxir.core.installation import RECIPES
from jaxir.core.values import fits, simple

MISSPELT = 0.8  # difflib ratio from which a name is a misspelling of another
# Short names that differ from the parameter's name, because several objects of a recipe have a parameter of
# that name, or because it is unclear without its object.
_OTHERWISE = """
object: dropout_rate=dropout num_negatives=negatives scan_layers=scan
object: passage_max_length=passage_length query_max_length=query_length
AnsweredQuestions: split=train_split
BeirPairs DuplicateRich: directory=data split=train_split
Clozes Texts: path=text
ConSERT: first=first_view loss=contrastive_loss second=second_view
CPDAE MaskedLM Seed: head=mlm_head masking=mlm_masking
dev/QueryCandidates: limit=dev_most_candidates max_rank=dev_max_rank path=dev_candidates
dev_pairs: directory=data split=dev_split
dev_questions: answers=dev_answers run=dev_run split=dev_split
dev_targets: path=dev_targets
DiffCSE: contrastive=diffcse_of masking=masking_ratio texts=changed_text weight=lambda
Generation: every=generation_every max_new_tokens=dev_new_tokens num_beams=dev_beams
generator/PretrainedMaskedLM: dtype=generator_dtype source=generator
GrainRecords: directory=records
Guided: margin=guide_margin
held_out/Texts: path=dev_text
Loss: every=loss_every
margin_ranking: margin=ranking_margin
matryoshka: loss=nested_loss
MeshConfig: data=mesh_data
Mixture: temperature=mixture_temperature
pooler_of: source=pooler
Pretrained PretrainedCrossEncoder PretrainedSeq2Seq UnderIdentityProjection: source=model
PretrainedGuide: dtype=guide_dtype source=guide
PretrainedHybrid: source=model
PretrainedMaskedLM: dtype=head_dtype
PretrainedMultiVector: source=model
PROP: head=mlm_head masking=mlm_masking mu=smoothing
PretrainedSparse: source=model
rank_margin: reduction=rank_reduction
Reading: every=reading_every max_new_tokens=dev_new_tokens num_beams=dev_beams
Reranking: depth=dev_run_depth directory=data loss=ranking_loss run=dev_run split=dev_run_split
Search: dataset=dev_collection every=search_every split=dev_judgements wanted=dev_metrics
selection_of: k=top name=selection
NanoBEIR: every=nanobeir_every place=nanobeir sets=nanobeir_sets
ScoredIds: collection=data path=scores
SentEval: directory=senteval every=senteval_every folds=senteval_folds
SimCSE: loss=contrastive_loss
SourcesAndTargets: path=targets
start_from: default=pretrained
STS: every=sts_every path=sts setting=sts_setting
TevatronPairs: path=mined
train/QueryCandidates: limit=most_candidates path=train_candidates
"""
OTHERWISE = {
    parameter if owner == "object" else f"{owner}.{parameter}": short
    for owners, _, names in (line.partition(":") for line in _OTHERWISE.strip().splitlines())
    for owner in owners.split()
    for parameter, _, short in (name.partition("=") for name in names.split())
}


class UnknownFlagError(UsageError):
    """The recipe has no parameter with a flag's name.

    `known` are existing flags; `short` is the short name of the parameter that the flag names, if it has one.
    """

    def __init__(self, flag: str, known: Iterable[str]) -> None:
        self.short = OTHERWISE.get(flag.partition("=")[0].removeprefix("--").replace("-", "_"))
        self.flag, self.known = flag, [f"--{name}" for name in known]
        meant = f"; did you mean '--{self.short}'?" if self.short else suggest(flag, self.known)
        super().__init__(f"there is no flag {flag:.80}{meant}")


def short_name(key: Key) -> str:
    """Returns the short name of a parameter, or the name of a macro in lower case."""
    if key.is_macro:
        return key.scope.lower()
    name = f"{key.owner}.{key.parameter}"
    return OTHERWISE.get(str(key)) or OTHERWISE.get(name) or OTHERWISE.get(key.parameter, key.parameter)


def flags_of(name: str, parameter: str) -> list[str]:
    """Returns the flags that set a parameter of the class or function `name`, the best one first."""
    short = short_name(Key("", name, parameter))
    return [f"--{short}", f"--gin.{short.upper()}", f"--gin.{name}.{parameter}"]


def known_names(bindings: Bindings) -> set[str]:
    """Returns the short names of a recipe's parameters and the macros that it uses, in lower case."""
    keys = [Key(*made, name) for made in bindings.made() for name in bindings.parameters_of(made[1])]
    read = bindings.read()
    return {short_name(key) for key in [*keys, *read]} | {m.lower() for m in bindings.macros_behind(read)}


def shipped_names() -> set[str]:
    """Returns the short names (as in --learning_rate) of all settings in jaxir's own gin files."""
    files = (RECIPES / "gin").rglob("*.gin")
    found = (re.findall(r"^(?:[\w/]+\.)*(?:default/)?(\w+) *=", file.read_text(), re.M) for file in files)
    return {name.lower() for names in found for name in names} | set(OTHERWISE.values())


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments that no flag takes into `--name=value` settings of recipes, and others.

    A value may also be the next argument. A name without a value stays `--name`.
    """
    short, others, left = {}, [], list(arguments)
    while left:
        flag, has_value, value = left.pop(0).partition("=")
        if not re.fullmatch(r"--[a-z0-9][a-z0-9_-]*", flag):
            others.append(f"{flag}{has_value}{value}")
            continue
        if flag in short:
            raise UsageError(f"{flag} is given twice; keep one of them")
        if not has_value and left and not left[0].startswith("--"):
            has_value, value = "=", left.pop(0)
        short[flag] = f"{flag}{has_value}{value}"
    return list(short.values()), others


def check_have_values(bindings: Bindings, typed: Sequence[str]) -> None:
    """Raises a UsageError for flags without a value; an unknown flag is reported as unknown."""
    for flag in typed:
        if "=" in flag:
            continue
        known = known_names(bindings)
        if flag.removeprefix("--").replace("-", "_") in known:
            raise UsageError(f"{flag} has no value; write {flag}=...")
        raise UnknownFlagError(flag, known | shipped_names())


def apply(bindings: Bindings) -> None:
    """Treats each macro that nothing uses as a short name: sets the parameter with that name.

    Refuses a name that several parameters have. Refuses a name that no parameter has, if it is misspelt or
    comes from the command line.
    """
    names = [key for key in bindings.values if key.is_macro]
    # Set objects first, because later names may set the objects' parameters.
    for key in sorted(names, key=lambda key: not has_reference(bindings.values[key])):
        users = bindings.read() if key in bindings.typed else bindings.values
        if key.scope in bindings.macros_behind(users):
            continue
        value = bindings.values[key]
        found = _parameters(bindings, key.scope.lower(), value)
        if not found:
            _check_known(bindings, key)
            continue
        target, *others = found
        spelled = bindings.typed.get(key)
        if others:
            candidates = ", ".join(map(str, found))
            raise UserError(f"{spelled or f'{key} ='} may mean any of {candidates}: write --gin.{target}=...")
        if spelled and target in bindings.typed:
            raise given_twice(target, bindings.typed[target], spelled)
        if spelled or target not in bindings.typed:
            bindings.values[target] = value
        if spelled:
            bindings.typed[target] = bindings.typed.pop(key)


def _parameters(bindings: Bindings, name: str, value: Any) -> list[Key]:
    """Returns the parameters with a short name, nearest to the command: bound ones if any, else others."""
    found: dict[Key, tuple[bool, int]] = {}
    for (scope, selector), depth in bindings.made().items():
        bound = bindings.innermost(scope, selector)
        for parameter in bindings.parameters_of(selector):
            own = Key(scope, selector, parameter)
            key = bound.get(parameter, own)
            if name in (short_name(own), short_name(key)) and _may_be(bindings, key, value):
                place = (key not in bindings.values, depth)
                found[key] = min(place, found.get(key, place))
    return [key for key, place in found.items() if place == min(found.values())]


def _may_be(bindings: Bindings, key: Key, value: Any) -> bool:
    """Whether a short name may set a parameter to this value: a plain value does not replace an object."""
    if isinstance(bindings.values.get(key), Reference) and not has_reference(value):
        return False
    hint = bindings.hint(key)
    return simple(hint) is not None or fits(bindings.resolved(value), hint)


def _check_known(bindings: Bindings, key: Key) -> None:
    """Refuses a name that sets nothing if the command line gives it or it is misspelt; else warns."""
    if holders(bindings, key):
        return  # `gin_config.bind` refuses an unused name that the command line sets
    known, shipped = known_names(bindings), shipped_names()
    spelled = bindings.typed.get(key)
    if spelled and not spelled.startswith("--gin."):
        raise UnknownFlagError(spelled, known | shipped)
    what, capitals = f"{key} is set but nothing uses it", [name.upper() for name in known]
    if spelled:
        raise UserError(what + suggest(str(key), capitals))
    alike = [*capitals, *(name.upper() for name in shipped)]
    if key.scope.lower() not in shipped and (meant := suggest(str(key), alike, likeness=MISSPELT)):
        raise UserError(what + meant)
    print(f"warning: {what}{suggest(str(key), capitals)}", file=sys.stderr)


def holders(bindings: Bindings, macro: Key) -> list[Key]:
    """Returns the bound parameters of a short name or macro, also of objects that are not made."""
    keys = [key for key in bindings.values if not key.is_macro]
    name = macro.scope.lower()
    return [key for key in keys if short_name(key) == name or macro.scope in bindings.macros_behind([key])]
