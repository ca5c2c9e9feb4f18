"""Command: converts a model from one format to another."""

from typing import Literal

from jaxir import cli
from jaxir.core.choices import Rules
from jaxir.storage.outputs import writes

# The same as `models.dual_encoder.Pooling`, which is not imported because it would import JAX.
_Pooling = Literal[
    "mean", "cls", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens", "first_last", "embeddings_last"
]


@Rules(also_called={"source": "model", "to": "format"})
@writes(output="model")
def convert(
    source: str,
    output: str,
    to: Literal["jaxir", "hf", "st", "t5x", "sentence_transformers", "peft"] = "jaxir",
    tokenizer: str | None = None,
    pooling: _Pooling | None = None,
    similarity: Literal["cosine", "dot"] | None = None,
    kind: Literal["dual_encoder", "cross_encoder", "seq2seq", "sparse_encoder"] | None = None,
) -> None:
    """Converts a model from one format to another.

    Two towers become two folders in format hf, query/ and passage/, and one with a Router in format st.
    Parameters are read and written one by one, so a model may be larger than memory. To train a large model
    on a pod, write it to a bucket (--output=gs://BUCKET/MODEL) and start from there
    (--model=gs://BUCKET/MODEL): each host then reads only its part.

    Args:
      source: hf:DIR_OR_NAME, st:DIR_OR_NAME (sentence-transformers), t5x:DIR (a T5X checkpoint or run, local
        or gs://), w2v:FILE (word vectors of word2vec or GloVe), or a jaxir model or run directory, local or
        gs://. A name on the hub may be followed by @ and a branch, tag, commit or refs/pr/N.
      output: the directory to write, which must be missing or empty: local, or gs://BUCKET/PATH for formats
        jaxir and t5x.
      to: the format to write; hf holds only the encoder, without pooling and normalisation. Adapters (LoRA)
        are merged into the weights, except by peft, which writes only them.
      tokenizer: for a T5X checkpoint, a SentencePiece model (a file, local or gs://) or a directory with a
        tokenizer (default: beside the checkpoint, or named by the run's config.gin).
      pooling: how a dual encoder pools the vectors of a text's tokens: their mean, the first token's, or the
        last real token's; for the BERT family also the mean of the first block's and the last block's output,
        or of the embeddings and the last block's output (default: the model's own pooling).
      similarity: how a dual encoder's vectors are compared: by cosine, which scales them to length 1, or by
        dot product (default: the model's own similarity).
      kind: the kind of model to read (default: what the folder says; a T5 folder holds a generator, seq2seq,
        and the encoder of a dual encoder, which is the default; a masked language model begins a
        sparse_encoder).
    """
    from jaxir.interop import formats

    formats.convert(
        source, output, to, tokenizer=tokenizer, pooling=pooling, similarity=similarity, kind=kind
    )
    print(f"wrote {output}")


if __name__ == "__main__":
    cli.start("jaxir.convert:convert", "--source=st:all-MiniLM-L6-v2 --output=models/minilm")
