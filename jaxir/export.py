"""`python -m jaxir.export`: a trained model for other toolkits."""

from typing import Literal

from jaxir import cli


def export(
    model: str,
    output: str,
    format: Literal["sentence_transformers", "hf", "t5x"],
    optimizer_state: bool = False,
) -> None:
    """Writes a model for another toolkit.

    A model with two towers becomes two folders, query/ and passage/, in formats hf and sentence_transformers.
    t5x makes OUTPUT/checkpoint_STEP, which T5X and T5X Retrieval restore, and OUTPUT/tokenizer.

    Args:
      model: a jaxir model or run directory, or hf: or st: and a directory or hub name.
      output: the directory to write; it must not exist or be empty. For t5x it may be gs://BUCKET/PATH.
      format: the format to write; hf holds the encoder alone, without pooling and normalisation.
      optimizer_state: write the state of Adafactor too, from a training run to t5x.
    """
    from jaxir.interop import formats

    formats.convert(model, output, format, optimizer_state=optimizer_state)
    print(f"wrote {output}")


if __name__ == "__main__":
    raise SystemExit(
        cli.main(
            "jaxir.export:export",
            example="python -m jaxir.export --model=runs/mine --format=sentence_transformers --output=out",
        )
    )
