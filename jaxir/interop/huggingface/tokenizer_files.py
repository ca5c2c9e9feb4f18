"""Reads tokenizers of Hugging Face's folders as transformers does, and writes tokenizers for transformers.

Some classes of transformers, BERT's and RoBERTa's, read only the vocabulary of a tokenizer.json. Then
tokenizer_config.json decides how a text is normalised, or whether a space goes before the text. If
tokenizer_config.json names no class, the model's type decides the class.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import FILES, Tokenizer
from jaxir.interop.weights.notes import note
from jaxir.interop.weights.weights import read_json, read_optional_json, write_json
from jaxir.models import backbones
from jaxir.storage.temporary_outputs import temporary_directory

CONFIG = "tokenizer_config.json"
_JSON = "tokenizer.json"
_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
_MORE, _BY_ID = ("additional_special_tokens", "extra_special_tokens"), "added_tokens_decoder"
_SENTINEL = re.compile("\u2581?<extra_id_[0-9]+>")  # T5's sentinel tokens, which occur in no text
_GENERIC_CLASS = "PreTrainedTokenizerFast"  # the class that reads all of tokenizer.json


class _Replaced(NamedTuple):
    """A part of a tokenizer.json that some classes create by tokenizer_config.json instead.

    Attributes:
      part: the name of the part.
      type: the type that the part must have in tokenizer.json.
      classes: the names of the classes that create the part, without "Fast".
      entries: maps an entry of tokenizer_config.json to (entry of the part, default of the classes).
    """

    part: str
    type: str
    classes: tuple[str, ...]
    entries: Mapping[str, tuple[str, Any]]


_REPLACED = (
    _Replaced(
        "normalizer",
        "BertNormalizer",
        classes=("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer"),
        entries={
            "do_lower_case": ("lowercase", True),
            "strip_accents": ("strip_accents", None),
            "tokenize_chinese_chars": ("handle_chinese_chars", True),
        },
    ),
    _Replaced(
        "pre_tokenizer",
        "ByteLevel",
        classes=("RobertaTokenizer",),
        entries={"add_prefix_space": ("add_prefix_space", False)},
    ),
)


def has_one(directory: Path) -> bool:
    """Returns whether a folder has a tokenizer of its own, which a folder of PEFT may lack."""
    return any((directory / name).is_file() for name in FILES) or any(directory.glob("*.model"))


def load(directory: Path, model: Path | None = None) -> Tokenizer:
    """Reads the tokenizer of a folder as transformers does, or refuses it.

    `model` is the folder with config.json, if another one has it.
    """
    tokenizer, config = Tokenizer.load(directory), read_optional_json(directory / CONFIG)
    for name, token in _named(directory, in_json=tokenizer.model_file is None):
        if not (tokenizer.knows(token) or _SENTINEL.fullmatch(token)):
            raise UserError(
                f"{directory}: {name} names the token {token!r:.40}, which {tokenizer.model_file or _JSON}"
                " lacks; write a tokenizer.json that has it by transformers'"
                " AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )
    # Without a tokenizer.json, transformers builds the tokenizer from tokenizer_config.json.
    content = read_optional_json(directory / _JSON)
    side = config.get("truncation_side", (content.get("truncation") or {}).get("direction", "right"))
    if str(side).lower() != "right":
        raise UserError(
            f"{directory}: its tokenizer truncates texts on the {side}, but jaxir only on the right: set"
            " truncation_side to right in tokenizer_config.json"
        )
    _note_end(directory, content, config)
    model = model or directory
    about = read_optional_json(model / "config.json")
    named = config.get("tokenizer_class") or about.get("tokenizer_class")
    by_type, of_type = named is None, ""
    if (model_type := about.get("model_type")) is not None:  # a module of stored weights has no model
        codec = backbones.of_model_type(model_type, where=model / "config.json")[1]
        if not codec.heeds_tokenizer_class:
            return tokenizer
        of_type = codec.tokenizer_class
    for replaced in _REPLACED:
        part = content.get(replaced.part) or {}
        if str(named or of_type).removesuffix("Fast") not in replaced.classes:
            continue
        _check_ends(directory, content, config)
        if part.get("type") != replaced.type:
            continue
        settings = {ours: config[entry] for entry, (ours, _) in replaced.entries.items() if entry in config}
        made = dict(replaced.entries.values()) | settings
        if _effect(made) == _effect(part):
            continue
        if by_type and _effect(made) != _effect(part | settings):
            raise UserError(
                f"{directory}: transformers ignores the {replaced.part} of {_JSON}, because {CONFIG} names no"
                f" tokenizer_class: set tokenizer_class there to {_GENERIC_CLASS} to use {_JSON}, or set"
                f" {', '.join(replaced.entries)}"
            )
        tokenizer = _changed(tokenizer, replaced.part, lambda part, made=made: part | made, directory)
    return tokenizer


def _note_end(directory: Path, content: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Notes that `add_eos_token` has no effect, as in transformers 5.24, unlike in 4."""
    token = config.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if config.get("add_eos_token") and content and token not in str(content.get("post_processor")):
        note(
            f"note: {directory}: {CONFIG} sets add_eos_token, but {_JSON} appends no {token!r}, so texts end"
            " without it, as in transformers 5.24. transformers 4 appended it: if the model was trained so,"
            " add the token to the post_processor"
        )


def lower_cased(tokenizer: Tokenizer, where: Path) -> Tokenizer:
    """Returns the tokenizer of a folder, which now lower-cases texts before its normaliser."""

    def lower(normalizer: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "type": "Sequence",
            "normalizers": [{"type": "Lowercase"}, *([normalizer] if normalizer else [])],
        }

    return _changed(tokenizer, "normalizer", lower, where)


def without_special_tokens(tokenizer: Tokenizer, where: Path | str) -> Tokenizer:
    """Returns the tokenizer of a folder, which now puts no special tokens around a text."""
    return _changed(tokenizer, "post_processor", lambda part: None, where)


def with_whole_tokens(tokenizer: Tokenizer, tokens: Sequence[str], where: Path) -> Tokenizer:
    """Returns the tokenizer of a folder, which now finds `tokens` of its vocabulary in texts as they are."""

    def split(token: str) -> bool:
        (alone,), (empty,) = (tokenizer.encode_batch([text], max_length=1000) for text in (token, ""))
        return len(alone) != len(empty) + 1 or tokenizer.id_of(token) not in alone

    added = [token for token in tokens if split(token)]
    if not added:
        return tokenizer
    ids = {token: int(tokenizer.own_ids([tokenizer.id_of(token)])[0]) for token in added}

    def change(entries: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        kept = [entry for entry in entries or [] if entry["content"] not in ids]
        sides = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        new = [{"id": i, "content": token, **sides, "special": True} for token, i in ids.items()]
        return sorted([*kept, *new], key=lambda entry: entry["id"])

    return _changed(tokenizer, "added_tokens", change, where)


def save(tokenizer: Tokenizer, directory: Path, *, max_length: int, token_types: bool) -> None:
    """Writes a tokenizer, and settings with which transformers gives the same tokens."""
    tokenizer.save(directory)
    config = {k: v for k, v in read_optional_json(directory / CONFIG).items() if v is not None}
    if "tokenizer_class" in config or not (directory / _JSON).is_file():
        return
    pad = tokenizers.Tokenizer.from_file(str(directory / _JSON)).id_to_token(tokenizer.pad_swap or 0)
    inputs = ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"]
    about = {"tokenizer_class": _GENERIC_CLASS, "pad_token": pad}
    about |= {"model_max_length": max_length, "model_input_names": inputs}
    write_json(directory / CONFIG, about | config)


def _named(directory: Path, *, in_json: bool) -> Iterator[tuple[str, str]]:
    """Yields (token, file name) for each token that is named in the files beside a tokenizer."""
    config = read_optional_json(directory / CONFIG)
    found = {CONFIG: [config.get(entry) for entry in (*_MORE, _BY_ID)]}
    if in_json and not config.get(_BY_ID):
        more = read_optional_json(directory / _MAP)
        found[_MAP] = [more.get(entry) for entry in _MORE]
    found[_ADDED] = [list(read_optional_json(directory / _ADDED))]
    for name, groups in found.items():
        for tokens in groups:
            tokens = list(tokens.values()) if isinstance(tokens, dict) else tokens
            for token in tokens if isinstance(tokens, list) else ():
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str):
                    yield name, token


def _check_ends(directory: Path, content: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuses settings whose special tokens differ from those that tokenizer.json puts around a text."""
    part = content.get("post_processor") or {"type": "TemplateProcessing", "single": []}
    if part["type"] == "TemplateProcessing":
        put = [piece["SpecialToken"]["id"] for piece in part["single"] if "SpecialToken" in piece]
    elif part["type"] in ("BertProcessing", "RobertaProcessing"):
        put = [part[name][0] for name in ("cls", "sep")]
    else:
        return
    for entry in ("cls_token", "sep_token") if content else ():
        token = config.get(entry)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and token not in put:
            raise UserError(
                f"{directory}: {CONFIG} names {token!r:.40} as its {entry}, but {_JSON} puts"
                f" {' and '.join(map(repr, put)) or 'nothing'} around a text: correct the file that differs"
                " from the model's training"
            )


def _effect(part: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what a part does; a BertNormalizer that lower-cases also strips accents by default."""
    lower, accents = part.get("lowercase"), part.get("strip_accents")
    accents = lower if accents is None else accents
    return lower, accents, part.get("handle_chinese_chars"), part.get("add_prefix_space")


def _changed(tokenizer: Tokenizer, part: str, change: Callable[[Any], Any], where: Path | str) -> Tokenizer:
    """Returns the tokenizer of a folder with a part of its tokenizer.json changed."""
    with temporary_directory() as directory:
        tokenizer.save(directory)
        if not (directory / _JSON).is_file():
            raise UserError(
                f"{where}: its settings change the {part}, which needs a {_JSON}; write one with transformers"
            )
        content = read_json(directory / _JSON)
        write_json(directory / _JSON, content | {part: change(content.get(part))})
        # If the folder named this class, transformers would replace the changed part again.
        config = read_optional_json(directory / CONFIG)
        if config.pop("tokenizer_class", None):
            write_json(directory / CONFIG, config)
        return Tokenizer.load(directory)
