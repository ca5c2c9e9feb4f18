"""`python -m jaxir.convert`: weights in, and out again."""

from typing import Literal

from jaxir import cli


@cli.also_called(source="model", to="format")
def convert(
    source: str,
    output: str,
    to: Literal["jaxir", "hf", "st", "t5x", "sentence_transformers"] = "jaxir",
    tokenizer: str | None = None,
) -> None:
    """Converts a model from one format to another.

    A model with two towers becomes two folders, query/ and passage/, in formats hf and sentence_transformers.

    Args:
      source: hf:DIR_OR_NAME, st:DIR_OR_NAME (sentence-transformers), t5x:DIR (a T5X checkpoint or run, local
        or gs://), or a jaxir model or run directory.
      output: the directory to write; it must not exist or be empty.
      to: the format to write; hf holds the encoder alone, without pooling and normalisation.
      tokenizer: the SentencePiece model of a T5X checkpoint (a file, local or gs://), or a directory with a
        tokenizer; by default what lies beside the checkpoint or what the run's config.gin names.
    """
    from jaxir.interop import formats

    formats.convert(source, output, to, tokenizer=tokenizer)
    print(f"wrote {output}")


if __name__ == "__main__":
    raise SystemExit(
        cli.main(
            "jaxir.convert:convert",
            example="python -m jaxir.convert --source=st:all-MiniLM-L6-v2 --output=models/minilm",
        )
    )
