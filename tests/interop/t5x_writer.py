"""Writes T5X checkpoints byte by byte from the description of the format, without jaxir.

msgpack packs the index, gzip the chunks. T5X wrote version 2 until 2021, and has written version 3 since.
"""

import gzip
import json
from pathlib import Path

import ml_dtypes
import msgpack
import numpy as np
import safetensors.numpy

ATTENTION = {"q": "query", "k": "key", "v": "value", "o": "out"}
SUBLAYERS = {  # the parts of a layer: T5X's norm and module -> transformers' module
    "encoder": [("attention", "attention", "SelfAttention")],
    "decoder": [
        ("self_attention", "self_attention", "SelfAttention"),
        ("cross_attention", "encoder_decoder_attention", "EncDecAttention"),
    ],
}


def golden_t5(directory: Path) -> dict[str, np.ndarray]:
    """The encoder of a Hugging Face T5 folder under T5X's names, and the kernel of its projection."""
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    params = {"token_embedder/embedding": tensors["shared.weight"], **_stack(tensors, "encoder")}
    if (directory / "2_Dense").is_dir():
        dense = safetensors.numpy.load_file(directory / "2_Dense" / "model.safetensors")
        params["projection_layer/kernel"] = dense["linear.weight"].T
    return {name: np.ascontiguousarray(value) for name, value in params.items()}


def golden_generator(directory: Path) -> dict[str, np.ndarray]:
    """A Hugging Face T5 with its decoder, and the table of its logits if it has one, under T5X's names."""
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    params = golden_t5(directory) | _stack(tensors, "decoder")
    if "lm_head.weight" in tensors:
        params["decoder/logits_dense/kernel"] = tensors["lm_head.weight"].T
    return {name: np.ascontiguousarray(value) for name, value in params.items()}


def _stack(tensors: dict[str, np.ndarray], stack: str) -> dict[str, np.ndarray]:
    bias = tensors[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    params = {f"{stack}/{stack}_norm/scale": tensors[f"{stack}.final_layer_norm.weight"]}
    params[f"{stack}/relpos_bias/rel_embedding"] = bias.T
    for i in {name.split(".")[2] for name in tensors if name.startswith(f"{stack}.block.")}:
        ours, theirs = f"{stack}/layers_{i}", f"{stack}.block.{i}.layer"
        for number, (norm, name, module) in enumerate(SUBLAYERS[stack]):
            params[f"{ours}/pre_{norm}_layer_norm/scale"] = tensors[f"{theirs}.{number}.layer_norm.weight"]
            for letter, part in ATTENTION.items():
                kernel = tensors[f"{theirs}.{number}.{module}.{letter}.weight"]
                params[f"{ours}/{name}/{part}/kernel"] = kernel.T
        last = f"{theirs}.{len(SUBLAYERS[stack])}"
        params[f"{ours}/pre_mlp_layer_norm/scale"] = tensors[f"{last}.layer_norm.weight"]
        for name in ("wi", "wi_0", "wi_1", "wo"):
            if (key := f"{last}.DenseReluDense.{name}.weight") in tensors:
                params[f"{ours}/mlp/{name}/kernel"] = tensors[key].T
    return params


def write(
    directory: Path,
    params: dict[str, np.ndarray],
    *,
    version: int = 2,
    inlined: tuple[str, ...] = ("scale", "rel_embedding", "projection_layer/kernel"),
    chunks: tuple[int, int] = (29, 23),
    path_on_top: bool = False,
    in_bucket: bool = False,
    optimizer: bool = True,
    step: int = 1000,
) -> Path:
    """Writes `directory`/checkpoint_STEP of {path: array}, in the types that the version stores.

    Arrays whose path ends with one of `inlined` are stored in the index. With `in_bucket`, specifications
    name a bucket, as version 3 writes them there. With `path_on_top`, they have the path at the top, as old
    TensorStores wrote it.
    """
    checkpoint = directory / f"checkpoint_{step}"
    checkpoint.mkdir(parents=True)
    target, states = {}, {}
    for path, value in params.items():
        name = f"target.{path.replace('/', '.')}"
        if path.endswith(inlined):
            leaf = inline(value)
        else:
            leaf = _zarr(checkpoint / name, value, version, chunks)
            if in_bucket:
                leaf["kvstore"] |= {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
            if path_on_top and version == 2:
                leaf["path"] = leaf["kvstore"].pop("path")
        put(target, path, leaf)
        for slot in ("m", "v", "v_row", "v_col"):
            put(states, f"{path}/{slot}", inline(np.zeros((1,), np.float32)))
    state = {"step": inline(np.array(step, np.int32))}
    if optimizer:
        state["param_states"] = states
    content = {"version": version, "optimizer": {"target": target, "state": state}}
    (checkpoint / "checkpoint").write_bytes(msgpack.packb(content))
    return checkpoint


def put(tree: dict, path: str, leaf) -> None:
    *above, last = path.split("/")
    for name in above:
        tree = tree.setdefault(name, {})
    tree[last] = leaf


def inline(value: np.ndarray) -> msgpack.ExtType:
    return msgpack.ExtType(1, msgpack.packb((list(value.shape), value.dtype.name, value.tobytes())))


def _zarr(directory: Path, value: np.ndarray, version: int, chunks: tuple[int, int]) -> dict:
    directory.mkdir()
    shape = list(value.shape)
    brain = value.dtype == ml_dtypes.bfloat16
    if brain and version == 2:
        value = value.view(np.uint16)
    code = "bfloat16" if brain and version == 3 else value.dtype.str
    metadata = {"chunks": list(chunks), "compressor": {"id": "gzip", "level": 1}, "shape": shape}
    described = {"dtype": code, "fill_value": None, "filters": None, "order": "C", "zarr_format": 2}
    (directory / ".zarray").write_text(json.dumps(metadata | described))
    rows, columns = chunks
    for i in range(-(-shape[0] // rows)):
        for j in range(-(-shape[1] // columns)):
            full = np.zeros(chunks, value.dtype)
            part = value[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            full[: part.shape[0], : part.shape[1]] = part
            (directory / f"{i}.{j}").write_bytes(gzip.compress(full.tobytes(), 1))
    if version == 2:
        store = {"driver": "gfile", "path": directory.name}
        return {"driver": "zarr", "kvstore": store, "metadata": metadata | {"dtype": code}}
    store = {"driver": "file", "path": f"{directory.name}/"}
    return {"driver": "zarr", "dtype": value.dtype.name, "kvstore": store, "metadata": metadata}


def nest(params: dict[str, np.ndarray]) -> dict:
    tree: dict = {}
    for path, value in params.items():
        put(tree, path, value)
    return tree


def map_specs(tree: dict, change) -> dict:
    """Returns nested dicts with each specification of an array replaced by change(specification)."""

    def mapped(value):
        if not isinstance(value, dict):
            return value
        return change(value) if "kvstore" in value else map_specs(value, change)

    return {name: mapped(value) for name, value in tree.items()}
