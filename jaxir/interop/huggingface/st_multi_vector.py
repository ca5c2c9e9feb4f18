"""Reads multi-vector encoders: folders of sentence-transformers' MultiVectorEncoder and of PyLate."""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir.core.errors import UserError
from jaxir.core.features import PADDING_TOKEN
from jaxir.core.values import Count, fits
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop.hub import hub_files
from jaxir.interop.huggingface import hf, peft, st_files, st_modules, tokenizer_files
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.notes import note
from jaxir.interop.weights.weights import read_json, read_optional_json
from jaxir.models.after_pooling import AfterPooling
from jaxir.models.multi_vector import Expansion, MultiVectorConfig
from jaxir.models.token_pooling import TokenPooling

_MASK = "MultiVectorMask"
_POOLING = "HierarchicalTokenPooling"
_SUPPORTED = ("Dense", "Normalize", _MASK)  # modules after the Transformer, in any order
_TOWERS = {"query": "query", "document": "passage"}
_PREFIXES = {"query": "query_prefix", "document": "document_prefix"}
# Entries of config_sentence_transformers.json with which PyLate describes how texts are read.
_OF_PYLATE = (
    *("query_length", "document_length", "query_expansion", "do_query_expansion", "skiplist_words"),
    *("attend_to_expansion_tokens", "attend_to_mask_tokens", *_PREFIXES.values()),
)
_EXPANDED_LENGTH = 32  # PyLate's default number of tokens of a query
# PyLate wrote the similarity of single vectors, or "MaxSim", into folders that always use MaxSim.
_IGNORED_SIMILARITIES = ("cosine", "dot", "MaxSim")


def check(directory: Path) -> None:
    """Checks, before weights are downloaded, that a folder's modules are supported."""
    st_files.read_config(directory, "multi_vector_encoder")
    hf.read_architecture(peft.base_directory(_modules(directory)[0][1]))


def read(directory: Path) -> StoredModel:
    """Reads a folder with a Transformer, and Dense, Normalize and MultiVectorMask modules after it."""
    about = st_files.read_config(directory, "multi_vector_encoder")
    (_, root), *modules = _modules(directory)
    encoder, tokenizer = hf.read(root)
    prefixes = {side: about[name] or "" for side, name in _PREFIXES.items() if name in about}
    known = (_known_prefix(tokenizer, prefix) for prefix in prefixes.values())
    tokenizer = tokenizer_files.with_whole_tokens(tokenizer, [token for token in known if token], root)
    defaults = _of_pylate(about)
    transformer = st_files.read_transformer(root, encoder, "multi_vector_encoder", defaults)
    if transformer.lower_case:
        tokenizer = tokenizer_files.lower_cased(tokenizer, root)
    mask = _read_mask(modules, about, tokenizer)
    token_modules, params = st_modules.read_token_modules(
        [m for m in modules if m[0] not in (_MASK, _POOLING)]
    )
    if about.get("model_type") == "ColBERT":
        token_modules = (*token_modules, AfterPooling(kind="normalize"))
    path, content = st_files.transformer_settings(root)
    expansion, query_length = _expansion(
        {**defaults, **content}.get("query_expansion"), path, tokenizer, transformer.query_max_length
    )
    if mask is None and expansion is not None and not expansion.attend:
        expansion = None  # added tokens would be neither attended nor scored
    try:
        config = MultiVectorConfig(
            backbone=encoder.config,
            token_modules=token_modules,
            similarity=_similarity(about, directory),
            expansion=expansion,
            adapters=encoder.adapters,
            pooling=_pooling(modules),
            **(mask or {}),
        )
    except ValueError as error:
        raise UserError(f"{directory}: {error}") from error
    params = encoder.in_model | params
    stored.check_params(params, stored.model_shapes(config), str(directory))
    named = about["prompts"]
    for side, prefix in prefixes.items():
        named = named | {side: prefix + named.get(side, "").removeprefix(prefix)}
    settings = EncoderSettings(
        query_max_length=query_length,
        passage_max_length=transformer.passage_max_length,
        # A side without its own prompt gets no default prompt, unlike in a dual encoder.
        query_prompt=named.get("query", ""),
        passage_prompt=named.get("document", ""),
        named_prompts=named,
        default_prompt_name=about.get("default_prompt_name"),
    )
    return StoredModel(
        config=config, params=params, tokenizer=tokenizer, settings=settings, base=encoder.base
    )


def _modules(directory: Path) -> list[tuple[str, Path]]:
    modules = st_files.modules(directory)
    first, *rest = [kind for kind, _ in modules] or [""]
    path = directory / hub_files.ST_MODULES
    if rest[-1:] == [_POOLING]:
        rest.pop()
    if pooled := [kind for kind in rest if kind.endswith("TokenPooling")]:
        raise UserError(
            f"{path}: {pooled[0]} is not supported, only a {_POOLING} at the end: remove it to keep the"
            " vectors of all tokens"
        )
    if first != "Transformer" or set(rest) - {*_SUPPORTED} or rest.count(_MASK) > 1:
        raise UserError(
            f"{path}: the modules {', '.join((first, *rest))} are not supported; expected Transformer, then"
            f" any of {', '.join(_SUPPORTED)}, the last at most once, and perhaps {_POOLING}"
        )
    return modules


def _known_prefix(tokenizer: Tokenizer, prefix: str) -> str | None:
    """Returns the token that PyLate put before texts, the whole prefix or its first word, or None."""
    words = prefix.split(None, 1)
    return next((token for token in (prefix, *words[:1]) if words and tokenizer.knows(token)), None)


def _of_pylate(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings of the Transformer that PyLate writes into config_sentence_transformers.json."""
    lengths = ("query_length", "document_length")
    found = {name: about[name] for name in lengths if about.get(name) is not None}
    if "query_expansion" in about:
        return found | {"query_expansion": about["query_expansion"]}
    if not any(name in about for name in _OF_PYLATE):
        return {}
    if about.get("do_query_expansion") is False:
        return found | {"query_expansion": None}
    attend = about.get("attend_to_expansion_tokens", about.get("attend_to_mask_tokens"))
    length = found.pop("query_length", _EXPANDED_LENGTH)
    return found | {"query_expansion": {"strategy": "fixed", "attend": bool(attend), "length": length}}


def _expansion(
    given: Any, path: Path, tokenizer: Tokenizer, query_length: int
) -> tuple[Expansion | None, int]:
    """Returns how queries are expanded, and their maximum number of tokens."""
    if given is None:
        return None, query_length
    strategy, length, token = (given.get(name) for name in ("strategy", "length", "token"))
    if strategy not in ("fixed", "min") or not fits(length, Count) or not fits(token, str | None):
        raise UserError(
            f"{path}: query_expansion {given!r:.80} is not supported; expected the strategy fixed or min, a"
            " length in tokens, and a token or null"
        )
    named = read_optional_json(path.parent / tokenizer_files.CONFIG)
    arguments = read_optional_json(path)
    sides = [named, *(arguments.get(name) or {} for name in ("tokenizer_args", "processor_kwargs"))]
    if any(side.get("padding_side") == "left" for side in sides):
        raise UserError(
            f"{path}: query_expansion with padding on the left is not supported: set padding_side to right"
        )
    end = named.get("eos_token")
    names = [token] if token else [end.get("content") if isinstance(end, dict) else end]
    found = tokenizer.mask_id if token is None else None
    if found == 0:  # 0 is padding; PyLate uses the mask token as padding token
        found = PADDING_TOKEN
    if found is None:
        found = next((tokenizer.id_of(name) for name in names if name), None)
    if found is None:
        raise UserError(
            f"{path}: query_expansion needs a token of the tokenizer, not {names[0]!r:.40}: name one there"
        )
    expansion = Expansion(length=length, token=found, attend=bool(given.get("attend")))
    return expansion, length if strategy == "fixed" else max(query_length, length)


def _read_mask(
    modules: list[tuple[str, Path]], about: Mapping[str, Any], tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """Returns which tokens are scored, as fields of a MultiVectorConfig; None: all that are attended."""
    folder = dict(modules).get(_MASK)
    if about.get("model_type") == "ColBERT":
        words = about.get("skiplist_words")
        content = {"skiplist_words": list(string.punctuation) if words is None else words}
    elif folder is None:
        return None
    else:
        content = read_json(folder / "config.json", dict[str, Any])
    where = hub_files.ST_CONFIG if folder is None else folder / "config.json"
    words, kept = content.get("skiplist_words") or [], content.get("keep_only_token_ids") or []
    tasks = content.get("skiplist_tasks")
    tasks = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    if not fits(words, list[str]) or not fits(kept, list[int]) or not fits(tasks, list[str]):
        raise UserError(
            f"{where}: skiplist_words and skiplist_tasks must be lists of texts, keep_only_token_ids of ids;"
            " correct it"
        )
    ids = {word: tokenizer.id_of(word) for word in words}
    if unknown := [word for word, i in ids.items() if i is None]:
        note(
            f"note: {where}: skiplist_words {', '.join(map(repr, unknown))} are no tokens, and have no effect"
        )
    return {
        "skipped": tuple(i for i in ids.values() if i is not None),
        "skipped_in": tuple(_TOWERS[task] for task in _TOWERS if task in tasks),
        "kept": tuple(int(i) for i in tokenizer.own_ids(kept)),
    }


def _pooling(modules: list[tuple[str, Path]]) -> TokenPooling | None:
    folder = dict(modules).get(_POOLING)
    if folder is None:
        return None
    path = folder / "config.json"
    content = read_json(path, dict[str, Any])
    tasks = content.get("tasks") or ["document"]
    tasks = [tasks] if isinstance(tasks, str) else tasks
    try:
        if "document" not in tasks:
            raise ValueError(f"tasks is {tasks!r:.40}, but must include 'document'")
        return TokenPooling(
            factor=float(content.get("pool_factor", 1.0)),
            protected=content.get("num_protected_tokens", 1),
            normalize=bool(content.get("normalize_embeddings", False)),
            queries="query" in tasks,
        )
    except (TypeError, ValueError, UserError) as error:
        raise UserError(f"{path}: {error}; correct it, or remove the module") from error


def _similarity(about: Mapping[str, Any], directory: Path) -> str:
    name = about.get("similarity_fn_name")
    if name is None or (about.get("model_type") == "ColBERT" and name in _IGNORED_SIMILARITIES):
        return "maxsim"
    if name == "xtr":
        note(f"note: {directory}: similarity_fn_name xtr is for training (XTR_K); MaxSim compares texts")
        return "maxsim"
    if name not in ("maxsim", "meanmaxsim"):
        raise UserError(
            f"{directory / hub_files.ST_CONFIG}: similarity_fn_name {name!r:.40} is not supported, only"
            " maxsim, meanmaxsim and xtr"
        )
    return name
