"""Short names: `--learning_rate=1e-4` sets the parameter `learning_rate` of whatever object a recipe has.

In a gin file `LEARNING_RATE = 1e-4` does the same after all files are read, and `--gin.LEARNING_RATE=1e-4`
is another spelling of the flag. A macro of the same name that the recipe uses comes first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from jaxir.cli.gin_bindings import Bindings, Key, Macro, Reference, given_twice, has_reference
from jaxir.core.errors import UsageError, UserError, suggest
from jaxir.core.installation import RECIPES
from jaxir.core.values import fits, simple

MISSPELT = 0.8  # so like another name that it was meant to be that one
# Short names that are not the parameter's own, and their parameters: several objects of a recipe have one of
# that name, or the name says too little without its object. A name without a dot is any object's.
_OTHERWISE = """
changed_text: DiffCSE.texts
contrastive_loss: ConSERT.loss SimCSE.loss
data: BeirPairs.directory DuplicateRich.directory Reranking.directory dev_pairs.directory
dev_answers: dev_questions.answers
dev_beams: Generation.num_beams Reading.num_beams
dev_candidates: dev/QueryCandidates.path
dev_collection: Search.dataset
dev_judgements: Search.split
dev_max_rank: dev/QueryCandidates.max_rank
dev_metrics: Search.wanted
dev_most_candidates: dev/QueryCandidates.limit
dev_new_tokens: Generation.max_new_tokens Reading.max_new_tokens
dev_run: Reranking.run dev_questions.run
dev_run_depth: Reranking.depth
dev_run_split: Reranking.split
dev_split: dev_pairs.split dev_questions.split
dev_targets: dev_targets.path
dev_text: held_out/Texts.path
diffcse_of: DiffCSE.contrastive
dropout: dropout_rate
first_view: ConSERT.first
generation_every: Generation.every
generator: generator/PretrainedMaskedLM.source
generator_dtype: generator/PretrainedMaskedLM.dtype
head_dtype: PretrainedMaskedLM.dtype
lambda: DiffCSE.weight
loss_every: Loss.every
masking_ratio: DiffCSE.masking
mesh_data: MeshConfig.data
mined: TevatronPairs.path
mlm_head: CPDAE.head MaskedLM.head PROP.head Seed.head
mlm_masking: CPDAE.masking MaskedLM.masking PROP.masking Seed.masking
model: Pretrained.source PretrainedCrossEncoder.source PretrainedSeq2Seq.source UnderIdentityProjection.source
most_candidates: train/QueryCandidates.limit
negatives: num_negatives
nested_loss: matryoshka.loss
passage_length: passage_max_length
pooler: pooler_of.source
pretrained: start_from.default
query_length: query_max_length
rank_reduction: rank_margin.reduction
ranking_loss: Reranking.loss
ranking_margin: margin_ranking.margin
reading_every: Reading.every
records: GrainRecords.directory
scan: scan_layers
search_every: Search.every
second_view: ConSERT.second
selection: selection_of.name
senteval: SentEval.directory
senteval_every: SentEval.every
senteval_folds: SentEval.folds
smoothing: PROP.mu
sts: STS.path
sts_every: STS.every
sts_setting: STS.setting
targets: SourcesAndTargets.path
text: Texts.path Clozes.path
top: selection_of.k
train_candidates: train/QueryCandidates.path
train_split: AnsweredQuestions.split BeirPairs.split DuplicateRich.split
"""
OTHERWISE = {
    parameter: line.partition(":")[0]
    for line in _OTHERWISE.strip().splitlines()
    for parameter in line.partition(":")[2].split()
}


class UnknownFlagError(UsageError):
    """A flag that names no parameter of the recipe's.

    Attributes:
      flag: as it was typed, without its value.
      known: flags of the recipe's parameters and of all shipped recipes'.
    """

    def __init__(self, flag: str, known: Iterable[str]) -> None:
        self.flag, self.known = flag, [f"--{name}" for name in known]
        super().__init__(f"there is no flag {flag:.80}{suggest(flag, self.known)}")


def short_name(key: Key) -> str:
    """Returns the short name of a parameter, or the name of a macro, in small letters."""
    if key.is_macro:
        return key.scope.lower()
    name = f"{key.owner}.{key.parameter}"
    return OTHERWISE.get(str(key)) or OTHERWISE.get(name) or OTHERWISE.get(key.parameter, key.parameter)


def flags_of(name: str, parameter: str) -> list[str]:
    """Returns the flags that set a parameter of the class or function of this name, the best one first."""
    short = short_name(Key("", name, parameter))
    return [f"--{short}", f"--gin.{short.upper()}", f"--gin.{name}.{parameter}"]


def settings(bindings: Bindings) -> dict[str, tuple[Any, list[Key]]]:
    """Returns value and parameters of each short name that gin files set; a name in capitals comes last."""
    found: dict[str, tuple[Any, list[Key]]] = {}
    macros = [Macro(key.scope) for key in bindings.values if key.is_macro]
    for key, value in sorted(bindings.values.items(), key=lambda item: item[0].is_macro):
        name = short_name(key)
        if key.is_macro:
            found[name] = (value, found.get(name, (value, []))[1])
        elif not has_reference(value) and (value not in macros or value == Macro(name.upper())):
            found.setdefault(name, (value, []))[1].append(key)
    return found


def known_names(bindings: Bindings) -> set[str]:
    """Returns the short names of a recipe's parameters, and the macros that it uses."""
    keys = [Key(*made, name) for made in bindings.made() for name in bindings.parameters_of(made[1])]
    read = bindings.read()
    return {short_name(key) for key in [*keys, *read]} | {m.lower() for m in bindings.macros_behind(read)}


def shipped_names() -> set[str]:
    """Returns the short names that jaxir's own gin files set, which are no misspellings."""
    files = (RECIPES / "gin").rglob("*.gin")
    found = (re.findall(r"^(?:[\w/]+\.)*(?:default/)?(\w+) *=", file.read_text(), re.M) for file in files)
    return {name.lower() for names in found for name in names} | set(OTHERWISE.values())


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments that no flag takes into settings of recipes, such as --learning_rate, and others.

    Args:
      arguments: as they were typed: `--name=value`, or `--name` and `value`.

    Returns:
      `--name=value` of each, just `--name` where no value follows; the other arguments.
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
    """Refuses flags without a value: by that, or as flags that there are not."""
    for flag in typed:
        if "=" in flag:
            continue
        known = known_names(bindings)
        if flag.removeprefix("--").replace("-", "_") in known:
            raise UsageError(f"{flag} has no value; write {flag}=...")
        raise UnknownFlagError(flag, known | shipped_names())


def apply(bindings: Bindings) -> None:
    """Has each name in capitals that nothing uses set the parameter of that short name.

    Raises:
      UserError: a name is that of several parameters, or a typed or misspelt one is that of none.
    """
    names = [key for key in bindings.values if key.is_macro]
    # Objects first: their parameters are then there to be set.
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
            there_are = ", ".join(map(str, found))
            said = spelled or f"{key} ="
            raise UserError(f"{said} may be any of {there_are}: write --gin.{target}=...")
        if spelled and target in bindings.typed:
            raise given_twice(target, bindings.typed[target], spelled)
        if spelled or target not in bindings.typed:
            bindings.values[target] = value
        if spelled:
            bindings.typed[target] = bindings.typed.pop(key)


def _parameters(bindings: Bindings, name: str, value: Any) -> list[Key]:
    """Returns the parameters of a short name that may have a value: of those, the nearest to the command."""
    found: dict[Key, int] = {}
    for (scope, selector), depth in bindings.made().items():
        bound = bindings.innermost(scope, selector)
        for parameter in bindings.parameters_of(selector):
            own = Key(scope, selector, parameter)
            key = bound.get(parameter, own)
            if name in (short_name(own), short_name(key)) and _may_be(bindings, key, value):
                found[key] = min(depth, found.get(key, depth))
    return [key for key, depth in found.items() if depth == min(found.values())]


def _may_be(bindings: Bindings, key: Key, value: Any) -> bool:
    """Whether a parameter is meant by a short name: not where it has an object and the value is none."""
    if isinstance(bindings.values.get(key), Reference) and not has_reference(value):
        return False
    hint = bindings.hint(key)
    return simple(hint) is not None or fits(bindings.resolved(value), hint)


def _check_known(bindings: Bindings, key: Key) -> None:
    """Refuses a name that sets nothing where it was typed or is misspelt, warns where it is unknown."""
    if holders(bindings, key):
        return  # `gin_checks.check_read` refuses it where it was typed
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
    """Returns the bound parameters of a short name or macro, also those that the command does not make."""
    keys = [key for key in bindings.values if not key.is_macro]
    name = macro.scope.lower()
    return [key for key in keys if short_name(key) == name or macro.scope in bindings.macros_behind([key])]
