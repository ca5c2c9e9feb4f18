"""Chooses the files to download from a repository on the hub: one copy of the weights, and their settings."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from jaxir.core.errors import UserError
from jaxir.data.text import tokenizer
from jaxir.interop.weights.weights import FILES

CONFIG = "config.json"
# A folder of PEFT has these in place of config.json and of weights.
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ST_MODULES = "modules.json"
ST_CONFIG = "config_sentence_transformers.json"
ST_ROUTER = "router_config.json"
# Files with the settings of a Transformer module; old folders name the file after the architecture. The first
# non-empty file is read.
_ARCHITECTURES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
ST_TRANSFORMER = tuple(f"sentence_{name}_config.json" for name in _ARCHITECTURES)

# Weights of BGE-M3's heads for token weights and for token vectors, beside those of its encoder.
HYBRID_HEADS = ("sparse_linear.pt", "colbert_linear.pt")

_STATIC = ("StaticEmbedding", "SparseStaticEmbedding")  # modules with a tokenizer and no transformers model
_READ_TEXTS = ("Transformer", "MLMTransformer", *_STATIC)  # modules with a tokenizer
_HAVE_WEIGHTS = (*_READ_TEXTS, "Dense", "LayerNorm", "WeightedLayerPooling", "SparseAutoEncoder")
TOKEN_WEIGHTS = "idf.json"  # weights by token, in place of a SparseStaticEmbedding's tensors
# Suffixes of all files of weights. An error message lists the found files that jaxir does not read.
_OTHER_WEIGHTS = (".safetensors", ".bin", ".msgpack", ".h5", ".ot", ".onnx", ".gguf", ".pt", ".pth", ".ckpt")


class Wanted(NamedTuple):
    """Paths in a repository: configurations, tokenizer, indices of weights, heads; and the weights."""

    small: list[str]
    weights: list[str]


def wanted(
    names: Collection[str],
    read: Callable[[str], Any],
    what: str,
    *,
    modules: bool = False,
    weights: bool = True,
) -> Wanted:
    """Chooses the files of a repository to download, given the paths of all its files.

    Safetensors are preferred to torch's `.bin`, and `.bin` to Flax's msgpack. Variants in another precision,
    other frameworks' weights and second copies are left out. `read` returns the content of a JSON file. With
    `modules`, the weights of a sentence-transformers folder's modules are chosen, too.
    """
    folders = _folders(names, read, what) if modules else {"": "Transformer"}
    roots = [folder for folder, kind in folders.items() if kind in _READ_TEXTS] or [next(iter(folders))]
    for root in roots:
        described = {root + CONFIG, root + ADAPTER_CONFIG} & {*names}
        if not described and folders[root] not in _STATIC:
            raise UserError(
                f"{what}: it has no {root}{CONFIG}, so it is not a transformers model; give another"
            )
    # A cross-encoder's modules.json is needed, too, because its prompts are used only with that file.
    listed = modules
    if ST_CONFIG in names and not modules:
        about = read(ST_CONFIG)
        listed = isinstance(about, dict) and about.get("model_type") == "CrossEncoder"
    small = [*([ST_MODULES] if listed else []), ST_CONFIG, *HYBRID_HEADS]
    for root in roots:
        small += [root + name for name in (CONFIG, ADAPTER_CONFIG, ST_ROUTER, *ST_TRANSFORMER)]
        in_root = {name: name.removeprefix(root) for name in names if name.startswith(root)}
        small += sorted(
            path
            for path, name in in_root.items()
            if name in tokenizer.FILES or ("/" not in name and name.endswith(".model"))
        )
    by_token = [n for n in names if n.endswith(".json") and n.rpartition("/")[2] == TOKEN_WEIGHTS]
    small += by_token if "SparseStaticEmbedding" in folders.values() else []
    small += [f"{folder}{name}" for folder in folders if folder not in roots for name in (CONFIG, ST_ROUTER)]
    chosen = Wanted([name for name in small if name in names], [])
    for folder, kind in folders.items() if weights else ():
        index, parts = _weights(folder, names, read, what)
        if kind in _HAVE_WEIGHTS and not parts and not (kind == "SparseStaticEmbedding" and by_token):
            others = sorted(n for n in names if n.startswith(folder) and n.endswith(_OTHER_WEIGHTS))
            found = f"; it has {', '.join(others[:4])}{' ...' if len(others) > 4 else ''}" if others else ""
            known = ", ".join(single for single, _ in FILES)
            raise UserError(f"{what}: it has no weights that jaxir reads ({known}){found}")
        chosen.small.extend(index)
        chosen.weights.extend(parts)
    return chosen


def _folders(names: Collection[str], read: Callable[[str], Any], what: str) -> dict[str, str]:
    """Returns the folder of each module ("" or with a slash at its end), and the module's kind."""
    if ST_MODULES not in names:
        raise UserError(
            f"{what}: it has no {ST_MODULES}, so it is not a model of sentence-transformers; write hf:"
            " instead of st: to use its encoder"
        )
    file = ST_MODULES
    try:
        listed = [(m["path"].strip("./"), m["type"].rpartition(".")[2]) for m in read(file)]
        for path, kind in list(listed):
            if kind in ("Router", "Asym"):
                within = f"{path}/" if path else ""
                file = within + ST_ROUTER
                routed = read(file if file in names else within + CONFIG)["types"]
                listed += [
                    ((within + name).strip("./"), full.rpartition(".")[2]) for name, full in routed.items()
                ]
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{what}: its {file} is not a list of modules; give another model") from error
    return {f"{path}/" if path else "": kind for path, kind in listed} or {"": "Transformer"}


def _weights(
    folder: str, names: Collection[str], read: Callable[[str], Any], what: str
) -> tuple[list[str], list[str]]:
    """Returns the index of the weights in a folder, if any, and the files of weights."""
    if folder + ADAPTER_CONFIG in names and folder + CONFIG not in names:
        return [], [name for name in (folder + ADAPTER_WEIGHTS,) if name in names]
    for single, index in FILES:
        if folder + single in names:
            return [], [folder + single]
        if folder + index in names:
            content = read(folder + index)
            weight_map = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(weight_map, dict):
                raise UserError(f"{what}: its {folder}{index} has no weight_map; give another model")
            parts = sorted({folder + str(name) for name in weight_map.values()})
            missing = [name for name in parts if name not in names]
            if missing:
                raise UserError(
                    f"{what}: it lacks {missing[0]}, which its {folder}{index} names; try another revision"
                )
            return [folder + index], parts
    return [], []
