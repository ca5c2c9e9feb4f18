"""Any model to any format: what `jaxir.convert` and `jaxir.export` share."""

import sys
from pathlib import Path
from typing import Literal, get_args

from jaxir.errors import UserError, suggest
from jaxir.files import atomic_directory
from jaxir.interop import hf, model_dir, sentence_transformers

Format = Literal["jaxir", "hf", "sentence_transformers"]


def convert(source: str, output: str | Path, to: Format) -> None:
    """Reads the model `source` and writes it to the directory `output`, which appears only when whole.

    A model with two towers becomes two folders, `query/` and `passage/`, except in jaxir's own format.

    Args:
      source: a model as `model_dir.load` takes it.
      output: a directory that does not exist or is empty.
      to: "jaxir", "sentence_transformers", or "hf": the encoder alone, without pooling or normalisation.

    Raises:
      UserError: the model cannot be read, the format cannot hold it, or `output` is not empty.
    """
    if to not in get_args(Format):
        raise UserError(
            f"no format {to!r}{suggest(to, get_args(Format))}; there are {', '.join(get_args(Format))}"
        )
    model, _ = model_dir.read(source)
    if to == "jaxir":
        model_dir.write(output, model)
        return
    if to == "hf" and model.config.projection is not None:
        raise UserError(
            f"{source} has a projection, which hf folders cannot hold; write sentence_transformers"
        )
    write_tower = hf.write_tower if to == "hf" else sentence_transformers.write
    with atomic_directory(output) as aside:
        if model.config.sharing == "sde":
            write_tower(aside, model, tower="query")
        else:
            for tower in ("query", "passage"):
                (aside / tower).mkdir()
                write_tower(aside / tower, model, tower=tower)
    lengths = {model.settings.query_max_length, model.settings.passage_max_length}
    if to == "sentence_transformers" and model.config.sharing == "sde" and len(lengths) > 1:
        print(
            f"note: sentence-transformers has one maximum length; the folder says {max(lengths)} tokens, but"
            f" here queries are cut at {model.settings.query_max_length} and passages at"
            f" {model.settings.passage_max_length}",
            file=sys.stderr,
        )
