"""Reads the files of sentence-transformers beside a model: modules, prompts and maximum lengths."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxir.core.errors import UserError
from jaxir.core.values import Count, fits
from jaxir.interop.hub.hub_files import ST_CONFIG, ST_MODULES, ST_ROUTER, ST_TRANSFORMER
from jaxir.interop.huggingface import hf, peft
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.kinds import KINDS
from jaxir.interop.weights.notes import note
from jaxir.interop.weights.weights import read_json, read_optional_json, require
from jaxir.storage.files import inside

_CLASSES = {
    "SentenceTransformer": "dual_encoder",
    "CrossEncoder": "cross_encoder",
    "SparseEncoder": "sparse_encoder",
    "MultiVectorEncoder": "multi_vector_encoder",
    "ColBERT": "multi_vector_encoder",  # the name that PyLate writes
}
_TASKS = {
    "dual_encoder": "feature-extraction",
    "cross_encoder": "sequence-classification",
    "sparse_encoder": "fill-mask",
    "multi_vector_encoder": "feature-extraction",
}
ROUTES = ("query", "document")  # sentence-transformers' names of the two sides
_PYLATE_DENSE = "pylate.models.Dense.Dense"
# Arguments of from_pretrained that a folder may set.
_TOKENIZER_ARGUMENTS = ("tokenizer_args", "processor_kwargs")
_ARGUMENTS = (*_TOKENIZER_ARGUMENTS, "model_args", "model_kwargs", "config_args", "config_kwargs")
# Arguments that only change how a model is fetched and computed; jaxir computes in float32 by default.
_IGNORED = {
    *("torch_dtype", "dtype", "attn_implementation", "device_map", "low_cpu_mem_usage", "use_cache"),
    *("add_pooling_layer", "use_safetensors", "use_fast", "clean_up_tokenization_spaces"),
    *("trust_remote_code", "local_files_only", "cache_dir", "revision", "token"),
}
# Names of the prompts of a side, in order of preference.
_QUERY_PROMPTS = ("query",)
_PASSAGE_PROMPTS = ("document", "passage", "corpus")
# The only supported values of tokenizer settings.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "padding_side": ("right", "left"),  # padding on either side changes no vector
    "truncation_side": ("right",),
    "truncation": (True, "longest_first"),
    "padding": (True, "longest"),
    "output_hidden_states": (True, False),
}


class Transformer(NamedTuple):
    """How a Transformer reads texts: maximum numbers of tokens, and whether texts are lower-cased first.

    `shows_layers` says whether it outputs all layers, without which WeightedLayerPooling has no effect.
    """

    max_length: int
    query_max_length: int
    passage_max_length: int
    lower_case: bool
    shows_layers: bool = False


def kind_of(directory: Path) -> str | None:
    """Returns the kind of model in a folder with modules.json, as in `kinds.KINDS`, or None."""
    return _CLASSES.get(read_optional_json(directory / ST_CONFIG).get("model_type") or "SentenceTransformer")


def read_config(directory: Path, kind: str) -> dict[str, Any]:
    """Reads config_sentence_transformers.json, which is optional, for a model of this kind."""
    path = directory / ST_CONFIG
    content = read_optional_json(path)
    model_type = content.get("model_type")
    if model_type is not None and (found := _CLASSES.get(str(model_type))) != kind:
        what = KINDS[found].what if found else f"a {model_type!s:.40}"
        raise UserError(f"{path}: the folder holds {what}; expected {KINDS[kind].what}")
    prompts, default = content.get("prompts") or {}, content.get("default_prompt_name")
    if not fits(prompts, dict[str, str | None]) or not fits(default, str | None):
        raise UserError(f"{path}: prompts must be an object of texts by name; correct it")
    if default is not None and default not in prompts:
        raise UserError(f"{path}: default_prompt_name {default!r:.40} is not in prompts: correct it")
    return content | {"prompts": {name: text or "" for name, text in prompts.items()}}


def prompts_of_sides(named: Mapping[str, str], default_name: str | None) -> tuple[str, str]:
    """Returns the prompts that a dual encoder's queries and passages get.

    Empty prompts are ignored: since version 5, sentence-transformers adds an empty `query` and `document` to
    every folder it saves. The default prompt, unless it is named for one side, is used for each side without
    its own prompt, as `encode` does in every version of sentence-transformers.
    """
    given = {name: text for name, text in named.items() if text}
    sides = (_QUERY_PROMPTS, _PASSAGE_PROMPTS)
    default = "" if any(default_name in side for side in sides) else given.get(default_name, "")
    query, passage = (next((given[name] for name in side if name in given), default) for side in sides)
    return query, passage


def folder_prompts(settings: EncoderSettings) -> tuple[dict[str, str], str | None]:
    """Returns (prompts by name, name of the default) for a new folder: the original's if unchanged."""
    sides = (settings.query_prompt, settings.passage_prompt)
    if prompts_of_sides(settings.named_prompts, settings.default_prompt_name) == sides:
        return dict(settings.named_prompts), settings.default_prompt_name
    others = {
        n: t for n, t in settings.named_prompts.items() if n not in (*_QUERY_PROMPTS, *_PASSAGE_PROMPTS)
    }
    of_sides = zip((_QUERY_PROMPTS[0], _PASSAGE_PROMPTS[0]), sides, strict=True)
    return {name: text for name, text in of_sides if text} | others, None


def modules(directory: Path) -> list[tuple[str, Path]]:
    """Returns the kind and the folder of each module that modules.json lists."""
    path = directory / ST_MODULES
    if not path.is_file():
        hint = "; for a Hugging Face folder write hf:" if (directory / "config.json").is_file() else ""
        raise UserError(f"{path}: no such file, so this is not a sentence-transformers folder{hint}")
    content = read_json(path)
    if not isinstance(content, list):
        raise UserError(f"{path}: not a list of modules; correct it, or give another model")
    found = []
    for module in content:
        full, place = require(module, "type", path), require(module, "path", path)
        folder = directory if place in ("", ".") else Path(inside(directory, place, said_by=path))
        found.append((_kind(full, path), folder))
    return found


def routes(directory: Path) -> dict[str, list[tuple[str, Path]]]:
    """Returns the modules of the routes "query" and "document" of the Router in a directory.

    Raises:
      UserError: queries or documents have no route.
    """
    path = directory / ST_ROUTER
    path = path if path.is_file() else directory / "config.json"
    content = read_json(path, dict[str, Any])
    found = _all_routes(directory, content, path)
    mapped = _object(content, "parameters", path).get("route_mappings") or {}
    if not fits(mapped, dict[str, str]):
        raise UserError(f"{path}: route_mappings must map texts to names of routes; copy it again")
    chosen = {}
    for side in ROUTES:
        keys = ((side, "text"), (side, None), (None, "text"), (None, None))
        named = [mapped[str(key)] for key in keys if str(key) in mapped]
        named = named or [name for name in (side, "text") if name in found]
        if not named or named[0] not in found:
            raise UserError(
                f"{path}: no route for {side} texts among {', '.join(map(repr, found))}; name the routes"
                " 'query' and 'document'"
            )
        chosen[side] = found[named[0]]
    return chosen


def _all_routes(directory: Path, content: dict[str, Any], path: Path) -> dict[str, list[tuple[str, Path]]]:
    """Returns the modules of each route of a Router, by the route's name."""
    types, structure = (require(content, name, path) for name in ("types", "structure"))
    if not fits(types, dict[str, str]) or not fits(structure, dict[str, list[str]]):
        raise UserError(
            f"{path}: types must map names to classes, and structure routes to lists of names; copy it again"
        )
    found: dict[str, list[tuple[str, Path]]] = {}
    for route, names in structure.items():
        for name in names:
            kind = _kind(require(types, name, path), path)
            folder = directory if name in ("", ".") else Path(inside(directory, name, said_by=path))
            found.setdefault(route, []).append((kind, folder))
    return found


def _kind(full: Any, path: Path) -> str:
    if full != _PYLATE_DENSE and not str(full).startswith("sentence_transformers."):
        raise UserError(
            f"{path}: the module {full!r:.80} is not one of sentence-transformers' own; give another model"
        )
    return str(full).rpartition(".")[2]


def transformer_settings(directory: Path) -> tuple[Path, dict[str, Any]]:
    """Returns the file with the settings of the Transformer in `directory`, and its content."""
    files = ((directory / name, read_optional_json(directory / name)) for name in ST_TRANSFORMER)
    return next((found for found in files if found[1]), (directory / ST_TRANSFORMER[0], {}))


def read_transformer(
    directory: Path, encoder: hf.Encoder, kind: str, defaults: Mapping[str, Any] | None = None
) -> Transformer:
    """Returns how the Transformer in `directory`, which holds `encoder`, reads texts.

    `defaults` are entries that its file of settings may leave out.
    """
    path, content = transformer_settings(directory)
    content = {**(defaults or {}), **content}
    _check_use(content, path, kind)
    given, called = _created_length(content, path), _called_length(content, path)

    def length(name: str) -> int | None:
        return _length(content.get(name), name, path)

    whole = called or given or length("max_seq_length") or hf.max_length(directory, encoder)
    query, passage = (called or length(name) or whole for name in ("query_length", "document_length"))
    limit = encoder.config.max_positions or max(whole, query, passage)
    if max(whole, query, passage) > limit:
        note(
            f"note: {path} says {max(whole, query, passage)} tokens, but the model has {limit} positions:"
            " texts are truncated to these"
        )
    lengths = (min(length, limit) for length in (whole, query, passage))
    given = [_object(content, group, path) for group in (*_ARGUMENTS, "forward_kwargs")]
    shown = [group.get("output_hidden_states") for group in (encoder_config(directory), *given)]
    return Transformer(*lengths, bool(content.get("do_lower_case")), any(shown))


def encoder_config(directory: Path) -> dict[str, Any]:
    return read_json(peft.base_directory(directory) / "config.json", dict[str, Any])


def _check_use(content: dict[str, Any], path: Path, kind: str) -> None:
    task = content.get("transformer_task", _TASKS[kind])
    if task != _TASKS[kind]:
        raise UserError(
            f"{path}: transformer_task {task!r:.40} is not supported, only {_TASKS[kind]}; give another model"
        )
    if kind != "multi_vector_encoder" and content.get("query_expansion"):
        raise UserError(f"{path}: query_expansion is not supported; give another model")
    if (
        kind != "cross_encoder"
        and content.get("module_output_name", "token_embeddings") != "token_embeddings"
    ):
        raise UserError(
            f"{path}: module_output_name {content['module_output_name']!r:.40} is not supported, only"
            " token_embeddings; give another model"
        )


def _created_length(content: dict[str, Any], path: Path) -> int | None:
    """Returns the maximum number of tokens that the folder sets when it creates the tokenizer."""
    found = None
    for group in _ARGUMENTS:
        for name, value in _object(content, group, path).items():
            if name == "model_max_length" and group in _TOKENIZER_ARGUMENTS:
                found = _length(value, f"{group}.{name}", path)
            elif name not in _IGNORED:
                _check_supported(group, name, value, path)
    return found


def _called_length(content: dict[str, Any], path: Path) -> int | None:
    """Returns the maximum number of tokens that the folder sets in each call of the tokenizer."""
    found, calls = None, _object(content, "processing_kwargs", path)
    for group in ("common", "text"):  # the other groups of settings are for images and chats
        for name, value in _object(calls, group, path).items():
            if name == "max_length":
                found = _length(value, f"processing_kwargs.{group}.{name}", path)
            else:
                _check_supported(f"processing_kwargs.{group}", name, value, path)
    return found


def _check_supported(group: str, name: str, value: Any, path: Path) -> None:
    if name not in _SUPPORTED or value not in _SUPPORTED[name]:
        raise UserError(f"{path}: {group} sets {name} to {value!r:.40}, which is not supported; remove it")


def _object(content: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    value = content.get(name) or {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: {name} must be a JSON object")
    return value


def _length(value: Any, name: str, path: Path) -> int | None:
    if not fits(value, Count | None):
        raise UserError(f"{path}: {name} is {value!r:.40}, but must be a number of tokens")
    return value
