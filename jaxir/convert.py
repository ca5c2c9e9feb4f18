"""`python -m jaxir.convert`: weights in, and out again."""

from typing import Literal

from jaxir import cli
from jaxir.storage.outputs import writes


@cli.also_called(source="model", to="format")
@writes(output="model")
def convert(
    source: str,
    output: str,
    to: Literal["jaxir", "hf", "st", "t5x", "sentence_transformers"] = "jaxir",
    tokenizer: str | None = None,
    pooling: Literal["mean", "cls", "lasttoken", "first_last", "embeddings_last"] | None = None,
    similarity: Literal["cosine", "dot"] | None = None,
    kind: Literal["dual_encoder", "cross_encoder", "seq2seq"] | None = None,
) -> None:
    """Converts a model from one format to another.

    A model with two towers becomes two folders, query/ and passage/, in formats hf and sentence_transformers.
    Parameters are read and written one by one, and what a bucket holds is a model only when it is whole: so a
    large model is put where every host of a pod reads its own part of it (--output=gs://BUCKET/MODEL, then
    --model=gs://BUCKET/MODEL).

    Args:
      source: hf:DIR_OR_NAME, st:DIR_OR_NAME (sentence-transformers), t5x:DIR (a T5X checkpoint or run, local
        or gs://), w2v:FILE (word vectors of word2vec or GloVe), or a jaxir model or run directory, local or
        gs://. A name on the hub may be followed by @ and a branch, tag, commit or refs/pr/N.
      output: the directory to write, local or (formats jaxir and t5x) gs://BUCKET/PATH; it must not exist or
        be empty.
      to: the format to write; hf holds the encoder alone, without pooling and normalisation.
      tokenizer: the SentencePiece model of a T5X checkpoint (a file, local or gs://), or a directory with a
        tokenizer; by default what lies beside the checkpoint or what the run's config.gin names.
      pooling: how a dual encoder makes one vector of a text's tokens, instead of its own way: the mean, the
        first token or the last real one; of the BERT family also the mean of the first block's output and the
        last's, or of what the first block reads and the last's output.
      similarity: how a dual encoder's vectors are compared, instead of its own way: with cosine they have
        length 1, with dot the length they come out with.
      kind: the kind of model to read (default: as the folder says; T5's hold a generator, seq2seq, and the
        encoder of a dual encoder, which is the default there).
    """
    from jaxir.interop import formats

    formats.convert(
        source, output, to, tokenizer=tokenizer, pooling=pooling, similarity=similarity, kind=kind
    )
    print(f"wrote {output}")


if __name__ == "__main__":
    cli.end(
        cli.main(
            "jaxir.convert:convert",
            example="python -m jaxir.convert --source=st:all-MiniLM-L6-v2 --output=models/minilm",
        )
    )
