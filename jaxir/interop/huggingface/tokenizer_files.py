"""Tokenizers of Hugging Face's folders, read as transformers reads them and written so that it reads ours.

Of a tokenizer.json some classes of transformers, BERT's above all, take the vocabulary alone: how a text is
normalised tokenizer_config.json says, and where that names no class the model's type decides which it is.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from jaxir.asides import temporary_directory
from jaxir.data.tokenizer import Tokenizer
from jaxir.errors import UserError
from jaxir.interop.huggingface.weights import read_json, read_optional_json, write_json

CONFIG = "tokenizer_config.json"
_JSON = "tokenizer.json"
_BERTS = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")  # or with "Fast"
_BERT_TYPES = ("bert", "distilbert")
_AS_IT_IS = "PreTrainedTokenizerFast"  # the class that takes all from tokenizer.json
_TYPES_AS_THEY_ARE = ("modernbert",)  # whose folders often name a class that is wrong: it is not heeded
# Entry of tokenizer_config.json -> that of a BertNormalizer, and what those classes do where it is missing.
_NORMALIZER = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),
    "tokenize_chinese_chars": ("handle_chinese_chars", True),
}


def load(directory: Path) -> Tokenizer:
    """Reads the tokenizer of a folder with config.json as transformers does.

    Raises:
      UserError: there is none, it is damaged, cuts texts on the left, or says not enough of what it does.
    """
    tokenizer, config = Tokenizer.load(directory), read_optional_json(directory / CONFIG)
    # Where there is none, transformers itself makes one, by the settings.
    content = read_optional_json(directory / _JSON)
    side = config.get("truncation_side", (content.get("truncation") or {}).get("direction", "right"))
    if str(side).lower() != "right":
        raise UserError(f"{directory}: its tokenizer cuts texts on the {side}, where only right is supported")
    normalizer = content.get("normalizer") or {}
    if normalizer.get("type") != "BertNormalizer":
        return tokenizer
    said = {ours: config[entry] for entry, (ours, _) in _NORMALIZER.items() if entry in config}
    made = dict(_NORMALIZER.values()) | said
    model = read_optional_json(directory / "config.json")
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    if model.get("model_type") in _TYPES_AS_THEY_ARE:
        return tokenizer
    by_type = named is None and model.get("model_type") in _BERT_TYPES
    if _effect(made) == _effect(normalizer) or not (by_type or str(named).removesuffix("Fast") in _BERTS):
        return tokenizer
    if by_type and _effect(made) != _effect(normalizer | said):
        raise UserError(
            f"{directory}: transformers normalises texts otherwise than {_JSON} says, for {CONFIG} names no"
            f" tokenizer_class: write {_AS_IT_IS} there for what {_JSON} says, else {', '.join(_NORMALIZER)}"
        )
    return _changed(tokenizer, lambda normalizer: normalizer | made, directory)


def lower_cased(tokenizer: Tokenizer, where: Path) -> Tokenizer:
    """Returns the tokenizer of a folder with lower-casing put before what it does to a text.

    Raises:
      UserError: it has no tokenizer.json.
    """

    def lower(normalizer: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "type": "Sequence",
            "normalizers": [{"type": "Lowercase"}, *([normalizer] if normalizer else [])],
        }

    return _changed(tokenizer, lower, where)


def save(tokenizer: Tokenizer, directory: Path, *, max_length: int, token_types: bool) -> None:
    """Writes a tokenizer into a folder with config.json, where transformers does what it does here.

    Args:
      tokenizer: it.
      directory: the folder.
      max_length: tokens at which texts are cut, for readers that are told no other number.
      token_types: whether the model reads the types of tokens.
    """
    tokenizer.save(directory)
    config = {k: v for k, v in read_optional_json(directory / CONFIG).items() if v is not None}
    if "tokenizer_class" in config or not (directory / _JSON).is_file():
        return
    pad = tokenizers.Tokenizer.from_file(str(directory / _JSON)).id_to_token(tokenizer.pad_swap or 0)
    inputs = ["input_ids", *(["token_type_ids"] if token_types else []), "attention_mask"]
    about = {"tokenizer_class": _AS_IT_IS, "pad_token": pad}
    about |= {"model_max_length": max_length, "model_input_names": inputs}
    write_json(directory / CONFIG, about | config)


def _effect(normalizer: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what a BertNormalizer does: accents go with upper case where it does not say."""
    lower, accents = normalizer.get("lowercase"), normalizer.get("strip_accents")
    return lower, lower if accents is None else accents, normalizer.get("handle_chinese_chars")


def _changed(
    tokenizer: Tokenizer, change: Callable[[dict[str, Any] | None], dict[str, Any]], where: Path
) -> Tokenizer:
    with temporary_directory() as directory:
        tokenizer.save(directory)
        if not (directory / _JSON).is_file():
            raise UserError(f"{where}: do_lower_case needs a {_JSON}")
        content = read_json(directory / _JSON)
        write_json(directory / _JSON, content | {"normalizer": change(content.get("normalizer"))})
        # A class of BERT's would make a normaliser of its own again, of the folder that this is written to.
        config = read_optional_json(directory / CONFIG)
        if config.pop("tokenizer_class", None):
            write_json(directory / CONFIG, config)
        return Tokenizer.load(directory)
