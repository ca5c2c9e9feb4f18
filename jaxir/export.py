"""Command: writes a trained model for other toolkits and for servers."""

from typing import Literal

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.core.values import Count
from jaxir.interop.hub import push
from jaxir.storage.outputs import writes


@writes(output="model")
def export(
    model: str,
    output: str,
    format: Literal["st", "hf", "t5x", "saved_model", "onnx", "sentence_transformers"],
    optimizer_state: bool = False,
    signatures: Literal["ids", "text"] | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    index: str | None = None,
    k: Count | None = None,
    operators: Literal["onnx", "onnxruntime"] | None = None,
    push_to_hub: str | None = None,
    private: bool = False,
) -> None:
    """Writes a model in a format of another toolkit or of a model server.

    A model with two towers becomes two folders, query/ and passage/, in format hf. Format t5x writes
    OUTPUT/checkpoint_STEP, which T5X and T5X Retrieval restore, and OUTPUT/tokenizer. Format saved_model
    writes a TensorFlow SavedModel that maps token ids or texts to vectors, or with --index to documents.
    Format onnx writes a graph for each tower, from a tokenizer's output to vectors, with the tokenizer. A
    cross-encoder becomes a function from pairs to scores. The README.md of an export says how to use it; in
    formats st and hf it is a model card for the hub, of a run with its data, recipe and figures.

    Args:
      model: a jaxir model or run directory, or hf: or st: and a directory or hub name.
      output: the directory to write, which must be missing or empty. For t5x it may be gs://BUCKET/PATH.
      format: the format to write; hf holds only the encoder, without pooling and normalisation; st is short
        for sentence_transformers.
      optimizer_state: also write the state of Adafactor; only applies to a training run and format t5x.
      signatures: for saved_model: text takes texts and token ids, ids takes only token ids (default: text).
      dtype: for saved_model, the type of matrix products and of their weights (default: float32).
      index: for saved_model, an index of the scann engine for it to search.
      k: for --index, documents that a search returns per query (default: 10).
      operators: for onnx: onnx uses only standard operators, onnxruntime also ONNX Runtime's attention, which
        is faster there and unknown elsewhere (default: onnx).
      push_to_hub: OWNER/NAME of a repository on the Hugging Face hub, which gets the files, too; it is
        created if there is none. The token is that of `hf auth login`, or HF_TOKEN.
      private: for --push_to_hub, whether a new repository is private.
    """
    if optimizer_state and format in ("saved_model", "onnx"):
        raise UserError(f"--optimizer_state only applies to --format=t5x, not to {format}: leave it out")
    if format != "saved_model" and (signatures, dtype, index, k) != (None, None, None, None):
        raise UserError(
            "--signatures, --dtype, --index and --k only apply to --format=saved_model: leave them out"
        )
    if format != "onnx" and operators is not None:
        raise UserError("--operators only applies to --format=onnx: leave it out")
    if k is not None and index is None:
        raise UserError("--k only applies to --index, the index that a SavedModel searches: leave it out")
    if private and push_to_hub is None:
        raise UserError("--private only applies to --push_to_hub=OWNER/NAME: leave it out")
    if push_to_hub is not None:
        push.check_name(push_to_hub)
    if format in ("saved_model", "onnx"):
        kept = {
            "signatures": signatures or "text",
            "dtype": dtype or "float32",
            "operators": operators or "onnx",
        }
        _graph(model, output, format, index=index, k=10 if k is None else k, **kept)
    else:
        from jaxir.interop import formats

        formats.convert(model, output, format, optimizer_state=optimizer_state, repo=push_to_hub)
    print(f"wrote {output}")
    if push_to_hub is not None:
        print(f"pushed to {push.push(output, push_to_hub, private=private)}")


def _graph(
    model: str,
    output: str,
    format: Literal["saved_model", "onnx"],
    *,
    signatures: Literal["ids", "text"],
    dtype: Literal["float32", "bfloat16"],
    operators: Literal["onnx", "onnxruntime"],
    index: str | None,
    k: Count,
) -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")  # the programs are only lowered, not run
    from jaxir.interop import formats, model_dir
    from jaxir.interop.exports import onnx_model, saved_model
    from jaxir.interop.exports.exported import ExportedModel
    from jaxir.retrieval.indexes import saved_search

    loaded = model_dir.load(model, kind=None, dtype=dtype)
    formats.note_unused_prompts(loaded.settings, format)
    source = ExportedModel.of(model, loaded)
    if format == "onnx":
        onnx_model.write(output, source, operators=operators)
        return
    search = None
    if index is not None:
        search = lambda: saved_search.SavedSearch(index, k=k, fingerprint=loaded.fingerprint, name=model)  # noqa: E731
    saved_model.write(output, source, signatures=signatures, search=search)


if __name__ == "__main__":
    cli.start(
        "jaxir.export:export",
        "--model=runs/mine --format=st --output=out\n"
        "--model=runs/mine --format=st --output=out --push_to_hub=me/mine --private",
    )
