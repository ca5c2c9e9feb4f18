"""Which files of a repository on the hub are read here: one copy of the weights and what describes them."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from jaxir.core.errors import UserError
from jaxir.data.text import tokenizer
from jaxir.interop.hub import st_names
from jaxir.interop.weights.weights import FILES

_CONFIGS = ("config.json", *st_names.TRANSFORMER_CONFIGS)
_OTHER_WEIGHTS = (".safetensors", ".bin", ".msgpack", ".h5", ".ot", ".onnx", ".gguf", ".pt", ".pth", ".ckpt")


class Wanted(NamedTuple):
    """Paths in a repository.

    Attributes:
      small: configurations and tokenizer.
      weights: one copy of them, module by module.
    """

    small: list[str]
    weights: list[str]


def describing(names: Collection[str], read: Callable[[str], Any], what: str, *, modules: bool) -> list[str]:
    """Returns the files that describe a model, its tokenizer among them; `wanted` says what the others are.

    Raises:
      UserError: as `wanted`, but for weights.
    """
    folders = _folders(names, read, what, modules)
    root = next(iter(folders))
    # Without modules.json a cross-encoder has no prompts.
    listed = modules or (st_names.MODULES in names and _is_cross_encoder(names, read))
    found = [st_names.MODULES] if listed else []
    found += [name for name in (st_names.CONFIG,) if name in names]
    found += [root + name for name in _CONFIGS if root + name in names]
    if root + "config.json" not in found:
        raise UserError(f"{what}: it has no config.json, so it is no model of transformers")
    found += sorted(n for n in names if n.startswith(root) and _of_tokenizer(n.removeprefix(root)))
    return found + [f"{f}config.json" for f in list(folders)[1:] if f"{f}config.json" in names]


def _is_cross_encoder(names: Collection[str], read: Callable[[str], Any]) -> bool:
    """Whether sentence-transformers saved the repository as a cross-encoder."""
    about = read(st_names.CONFIG) if st_names.CONFIG in names else None
    return isinstance(about, dict) and about.get("model_type") == "CrossEncoder"


def wanted(names: Collection[str], read: Callable[[str], Any], what: str, *, modules: bool) -> Wanted:
    """Chooses the files of a repository that are read.

    Safetensors are preferred to a `.bin` file of torch, and that to Flax's msgpack. Of variants in another
    precision, of other frameworks' weights and of a second copy nothing is taken.

    Args:
      names: the paths of all its files.
      read: returns the content of one of them, which is JSON: an index of weights, or modules.json.
      what: what messages call it.
      modules: whether it is read as a sentence-transformers folder, whose modules may have weights too.

    Raises:
      UserError: it is no model of that kind, or has no weights that can be read here.
    """
    small = describing(names, read, what, modules=modules)
    weights: list[str] = []
    for folder, needed in _folders(names, read, what, modules).items():
        found = _weights(folder, names, read, what)
        if found is None and needed:
            raise UserError(f"{what}: {_no_weights(folder, names)}")
        weights += found or []
    indices = [w for w in weights if w.endswith(".json")]
    return Wanted(small + indices, [w for w in weights if w not in indices])


def _folders(names: Collection[str], read: Callable[[str], Any], what: str, modules: bool) -> dict[str, bool]:
    """Returns the folder of each module ("" or with a slash at its end), and whether it must have weights."""
    if not modules:
        return {"": True}
    if st_names.MODULES not in names:
        raise UserError(
            f"{what}: it is no sentence-transformers model (no {st_names.MODULES}); for its encoder alone"
            " write hf:"
        )
    try:
        listed = [(m["path"].strip("/"), m["type"].rpartition(".")[2]) for m in read(st_names.MODULES)]
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{what}: its {st_names.MODULES} is not a list of modules") from error
    folders = {f"{path}/" if path else "": kind in ("Transformer", "Dense") for path, kind in listed}
    return folders or {"": True}


def _weights(folder: str, names: Collection[str], read: Callable[[str], Any], what: str) -> list[str] | None:
    for single, index in FILES:
        if folder + single in names:
            return [folder + single]
        if folder + index in names:
            content = read(folder + index)
            parts = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(parts, dict):
                raise UserError(f"{what}: its {folder}{index} names no files")
            parts = sorted({folder + str(name) for name in parts.values()})
            missing = [name for name in parts if name not in names]
            if missing:
                raise UserError(f"{what}: it lacks {missing[0]}, which its {folder}{index} names")
            return [folder + index, *parts]
    return None


def _no_weights(folder: str, names: Collection[str]) -> str:
    others = sorted(n for n in names if n.startswith(folder) and n.endswith(_OTHER_WEIGHTS))
    known = [single for single, _ in FILES]
    there = f"; there are {', '.join(others[:4])}{' ...' if len(others) > 4 else ''}" if others else ""
    return f"it has no weights that can be read here ({', '.join(known[:-1])} or {known[-1]}){there}"


def _of_tokenizer(name: str) -> bool:
    return name in tokenizer.FILES or ("/" not in name and name.endswith(".model"))
