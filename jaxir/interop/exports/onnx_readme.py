"""The README.md of an exported ONNX model."""

from collections.abc import Mapping
from pathlib import Path

from jaxir.interop.exports import exported
from jaxir.interop.exports.exported import ExportedFunction, ExportedModel

# Graphs name their outputs as sentence-transformers and transformers do.
OUTPUTS = {"vectors": "sentence_embedding", "scores": "logits"}
_TOKENIZERS = """\
import numpy as np
import onnxruntime
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("tokenizer.json")
tokenizer.enable_padding()


def tokens(texts, max_length):
    tokenizer.enable_truncation(max_length)
    rows = tokenizer.encode_batch(texts)
    return {{
        "input_ids": np.array([row.ids for row in rows], np.int64),
        "attention_mask": np.array([row.attention_mask for row in rows], np.int64),{types}
    }}
"""
_TYPES = """
        "token_type_ids": np.array([row.type_ids for row in rows], np.int64),"""
_SENTENCEPIECE = """\
import numpy as np
import onnxruntime
from sentencepiece import SentencePieceProcessor

tokenizer = SentencePieceProcessor(model_file="{file}")


def tokens(texts, max_length):
    rows = tokenizer.encode(texts)
    rows = [[*row[: max_length - 1], tokenizer.eos_id()] for row in rows]
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows], np.int64)
    return {{"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}}
"""
_FUNCTION = """

def {name}({texts}):
    inputs = tokens({given}, {max_length})
    return onnxruntime.InferenceSession("{name}.onnx").run(["{output}"], inputs)[0]{column}
"""
_TEXTS = {"query": "where is the treaty kept?", "passage": "The treaty is kept in the archive."}
_OF_PAIRS = dict(zip(("queries", "passages"), _TEXTS.values(), strict=True))


def inputs_of(program: ExportedFunction) -> list[str]:
    """Returns the names of the inputs of a program's graph."""
    return ["input_ids", "attention_mask", *(["token_type_ids"] if "token_types" in program.inputs else [])]


def _function(program: ExportedFunction) -> tuple[str, str]:
    """Returns the code of a function of texts, and a line that calls it."""
    names, pairs = list(program.texts), len(program.texts) == 2
    prompted = [f"{prompt!r} + {name[0]}" if prompt else name[0] for name, prompt in program.texts.items()]
    if pairs:
        given = f"[({', '.join(prompted)}) for {', '.join(n[0] for n in names)} in zip({', '.join(names)})]"
    else:
        given = f"[{prompted[0]} for {names[0][0]} in {names[0]}]"
    code = _FUNCTION.format(
        name=program.name,
        texts=", ".join(names),
        given=given,
        max_length=program.max_length,
        output=OUTPUTS[program.output],
        column="[:, 0]" if pairs else "",
    )
    texts = [_OF_PAIRS[n] for n in names] if pairs else [_TEXTS[program.name]]
    arguments = ", ".join(f'["{text}"]' for text in texts)
    return code, f"{program.name}_{program.output} = {program.name}({arguments})"


def write(directory: Path, source: ExportedModel, *, opset: int, versions: Mapping[str, str]) -> None:
    """Writes README.md; `opset` is ONNX's version of operators, `versions` the packages' versions."""
    form = exported.form_of(source)
    names = inputs_of(form.programs[0])
    if source.tokenizer.model_file is None:
        code, package = _TOKENIZERS.format(types=_TYPES if "token_type_ids" in names else ""), "tokenizers"
    else:
        code, package = _SENTENCEPIECE.format(file=source.tokenizer.model_file), "sentencepiece"
    functions, calls = zip(*map(_function, form.programs), strict=True)
    longest = source.model.config.backbone.max_positions
    files = " and ".join(f"`{program.name}.onnx`" for program in form.programs)
    what, shape = form.programs[0].output, form.programs[0].shape
    about = {
        "input_ids": "int64 [B, L], special tokens included",
        "attention_mask": "int64 [B, L], 0 at padding, which is on the right",
        "token_type_ids": "int64 [B, L], 0 for the query's tokens and 1 for the passage's",
    }
    lines = [
        *exported.describe(source, "an ONNX model"),
        "",
        f"{files} read `weights.bin`: keep them together.",
        "",
        "| | name | type |",
        "|---|---|---|",
        *(f"| input | `{name}` | {about[name]} |" for name in names),
        f"| output | `{OUTPUTS[what]}` | float32 {'[B, 1]' if shape == '[B]' else shape} |",
        "",
        "B, the number of rows, can be any number; so can L, the number of columns"
        + (f", up to {longest}." if longest else "."),
        "An id that the vocabulary lacks"
        + (", or a row that is longer," if longest else "")
        + f" gives {what} that are not numbers (NaN).",
        f"Texts: {form.limits_note}.",
        "",
        "## In Python",
        "",
        f"`pip install numpy onnxruntime {package}`, and in this directory:",
        "",
        "```python",
        code + "".join(functions),
        "",
        *calls,
        "```",
        "",
        "(A server keeps the sessions instead of making one for each call.)",
        "",
        "## Versions",
        "",
        f"Operators are those of ONNX opset {opset}. Compared with the model before it was written, by ONNX"
        f" Runtime {versions['onnxruntime']} on a CPU;",
        f"translated by jax2onnx {versions['jax2onnx']} from JAX {versions['jax']}.",
    ]
    exported.write(directory, source, lines, opset=opset, versions=dict(versions))
