"""Command: whitens a model's vectors over a corpus."""

from __future__ import annotations

from typing import Literal

from jaxir import cli
from jaxir.core.values import Count
from jaxir.storage.outputs import writes


@writes(output="model")
def whiten(
    *,
    model: str,
    input: str,
    output: str,
    dimensions: Count | None = None,
    on_bad_input: Literal["stop", "skip"] = "stop",
) -> None:
    """Whitens a model (Su et al. 2021): over the given texts, its vectors get mean 0 and covariance 1.

    The result is an ordinary model, with the linear map as its projection.

    Args:
      model: a jaxir model or run directory, or st:, hf: or w2v: and a directory or name; only with one tower.
      input: the texts to which the linear map is fitted: a text on each line, a .jsonl[.gz] of documents
        (_id, text, optionally title), or a BEIR folder.
      output: the directory of the model, which must be missing or empty, local or gs://BUCKET/PATH.
      dimensions: number of dimensions to keep, those with the most variance (default: as many as the texts'
        vectors span; for BERT, whose vectors a LayerNorm normalises, one less than the vectors have).
      on_bad_input: stop at the first malformed line, or skip and count them.
    """
    from jaxir.data.formats.lines import OnBadInput
    from jaxir.data.sets.texts import Texts
    from jaxir.interop import model_dir
    from jaxir.interop.model.stored import StoredModel
    from jaxir.retrieval.encoding import whitening

    model_dir.check_output(output)

    def build(found: StoredModel, _: str | None) -> whitening.Whitened:
        collector = OnBadInput(on_bad_input)
        texts = (record["text"][1] for record in Texts(path=input).records(collector))
        made = whitening.whiten(found, texts, dimensions=dimensions, where=model)
        collector.report()
        model_dir.write(output, made.model)
        return made

    made = model_dir.read_with(build, model)
    summary = made.model.config.summary
    print(f"wrote {output}: {summary}, {made.kept:.1%} of the variance of {made.texts:,} texts")


if __name__ == "__main__":
    cli.start(
        "jaxir.whiten:whiten", "--model=hf:google-bert/bert-base-uncased --input=texts.txt --output=whitened"
    )
