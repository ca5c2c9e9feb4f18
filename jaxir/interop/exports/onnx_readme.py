"""The README.md of an exported ONNX model."""

from collections.abc import Mapping
from pathlib import Path

from jaxir.interop.exports import exported
from jaxir.interop.exports.exported import TOWERS, Source

_TOKENIZERS = """\
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("{file}")
tokenizer.enable_padding()


def encode(texts, tower, max_length, prompt):
    tokenizer.enable_truncation(max_length)
    rows = tokenizer.encode_batch([prompt + text for text in texts])
    inputs = {{
        "input_ids": np.array([row.ids for row in rows], np.int64),
        "attention_mask": np.array([row.attention_mask for row in rows], np.int64),
    }}
    return onnxruntime.InferenceSession(f"{{tower}}.onnx").run(["sentence_embedding"], inputs)[0]
"""
_SENTENCEPIECE = """\
import numpy as np
import onnxruntime
from sentencepiece import SentencePieceProcessor

tokenizer = SentencePieceProcessor(model_file="{file}")


def encode(texts, tower, max_length, prompt):
    rows = tokenizer.encode([prompt + text for text in texts])
    rows = [[*row[: max_length - 1], tokenizer.eos_id()] for row in rows]
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows], np.int64)
    inputs = {{"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}}
    return onnxruntime.InferenceSession(f"{{tower}}.onnx").run(["sentence_embedding"], inputs)[0]
"""


def write(directory: Path, source: Source, *, opset: int, versions: Mapping[str, str]) -> None:
    """Writes README.md into `directory`.

    Args:
      directory: the export's, with its tokenizer.
      source: what was exported.
      opset: the version of ONNX's operators.
      versions: of the packages that wrote it, by name.
    """
    config = source.model.config
    if (directory / "tokenizer.json").is_file():
        code, package = _TOKENIZERS.format(file="tokenizer.json"), "tokenizers"
    else:
        (file,) = directory.glob("*.model")
        code, package = _SENTENCEPIECE.format(file=file.name), "sentencepiece"
    calls = []
    for tower, text in zip(
        TOWERS, ("where is the treaty kept?", "The treaty is kept in the archive."), strict=True
    ):
        max_length, prompt = source.of_tower(tower)
        calls.append(f'{tower}_vectors = encode(["{text}"], "{tower}", {max_length}, {prompt!r})')
    longest = config.backbone.max_positions
    lines = [
        *exported.describe(source, "an ONNX model"),
        "",
        "`query.onnx` and `passage.onnx` read `weights.bin`: keep them together.",
        "",
        "| | name | type |",
        "|---|---|---|",
        "| input | `input_ids` | int64 [B, L], special tokens included |",
        "| input | `attention_mask` | int64 [B, L], 0 at padding, which is on the right |",
        f"| output | `sentence_embedding` | float32 [B, {config.dimension}] |",
        "",
        "B, the number of rows, is free; so is L, the number of columns"
        + (f", up to {longest}." if longest else "."),
        "An id that the vocabulary lacks"
        + (", or a row that is longer," if longest else "")
        + " gives a vector that is no number (NaN).",
        f"Texts: {exported.how_texts_are_cut(source)}.",
        "",
        "## In Python",
        "",
        f"`pip install numpy onnxruntime {package}`, and in this directory:",
        "",
        "```python",
        code,
        "",
        *calls,
        "```",
        "",
        "(A server keeps the two sessions instead of making one for each call.)",
        "",
        "## Versions",
        "",
        f"Operators are those of ONNX opset {opset}. Compared with the model before it was written, by ONNX"
        f" Runtime {versions['onnxruntime']} on a CPU;",
        f"translated by jax2onnx {versions['jax2onnx']} from JAX {versions['jax']}.",
    ]
    exported.write(directory, source, lines, opset=opset, versions=dict(versions))
