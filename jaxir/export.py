"""`python -m jaxir.export`: a trained model for other toolkits."""

from typing import Literal

from jaxir import cli


def export(model: str, output: str, format: Literal["sentence_transformers", "hf"]) -> None:
    """Writes a model as a folder that another toolkit loads.

    A model with two towers becomes two folders, query/ and passage/.

    Args:
      model: a jaxir model or run directory, or hf: or st: and a directory or hub name.
      output: the directory to write; it must not exist or be empty.
      format: the format to write; hf holds the encoder alone, without pooling and normalisation.
    """
    from jaxir.interop import formats

    formats.convert(model, output, format)
    print(f"wrote {output}")


if __name__ == "__main__":
    raise SystemExit(
        cli.main(
            "jaxir.export:export",
            example="python -m jaxir.export --model=runs/mine --format=sentence_transformers --output=out",
        )
    )
