"""The commands `python -m jaxir.expand generate`: texts that a model writes for texts; and `plan`."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

from jaxir import cli
from jaxir.outputs import writes
from jaxir.simple_types import Count, Positive, Seed, Within

EXAMPLE = (
    "python -m jaxir.expand generate --model=hf:castorini/doc2query-t5-base-msmarco --input=corpus.jsonl"
    " --output=queries.jsonl --num_outputs=10 --top_k=10"
)
PLAN = "python -m jaxir.expand plan --model=hf:t5-base --topology=v5e:2x2 --num_outputs=10 --top_k=10"


@writes(output="shared outputs file")
def generate(
    *,
    model: str,
    input: str,
    output: str,
    max_new_tokens: Count = 64,
    num_outputs: Count = 1,
    num_beams: Count = 1,
    temperature: Positive | None = None,
    top_k: Count | None = None,
    top_p: Annotated[float, Within(0, 1, without="low")] | None = None,
    seed: Seed = 0,
    batch_tokens: Count | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    on_bad_input: Literal["stop", "skip"] = "stop",
) -> None:
    """Writes texts for texts with a generator: queries for documents, say.

    Greedily, unless there are beams, or a temperature, top_k or top_p to sample with. Run again after an
    interruption, the same command continues where it stopped. Outputs of a text that say the same are one.
    Several machines that see the same files share the work, started as for training (docs/sharding.md).

    Args:
      model: the generator: a run or a model directory of ours, or hf: and a directory or hub name of a T5.
      input: .jsonl[.gz] of _id, text and maybe title; as corpus.jsonl and queries.jsonl.
      output: the .jsonl to write, of _id and outputs.
      max_new_tokens: most tokens of an output.
      num_outputs: outputs of a text: samples, or the best beams.
      num_beams: beams of a text; 1: no beam search.
      temperature: sample, from logits divided by this.
      top_k: sample, from this many most likely tokens.
      top_p: sample, from the fewest of the most likely tokens that have this probability together.
      seed: of sampling.
      batch_tokens: tokens of the texts of a batch on one device; lower it where memory is short (default:
        suits the platform).
      dtype: type of the matrix products.
      on_bad_input: stop at the first malformed line, or skip and count them.
    """
    from jaxir import distributed
    from jaxir.files import local_path
    from jaxir.models.decoding import Decoding
    from jaxir.retrieval.encoding.generator import Generator
    from jaxir.retrieval.encoding.outputs_file import write_outputs

    local_path(output, "written to")
    how = Decoding(
        max_new_tokens=max_new_tokens,
        num_outputs=num_outputs,
        num_beams=num_beams,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    distributed.maybe_initialize_distributed()
    with distributed.together():
        generator = Generator.load(model, dtype=dtype, batch_tokens=batch_tokens)
        report = write_outputs(generator, input, output, how, on_bad_input=on_bad_input)
        distributed.say(f"{output}: {report}, by {model}")


def plan(
    *,
    model: str,
    topology: str,
    max_new_tokens: Count = 64,
    num_outputs: Count = 1,
    num_beams: Count = 1,
    temperature: Positive | None = None,
    top_k: Count | None = None,
    top_p: Annotated[float, Within(0, 1, without="low")] | None = None,
    max_length: Count | None = None,
    batch_tokens: Count | None = None,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
) -> int:
    """Plans generation: compiles it for TPUs that are not there, and says what it needs and how fast it is.

    Reads no weights. Prints memory, work, and tokens a second by roofline; the exit status is 1 if the chips
    lack the memory.

    Args:
      model: the generator: as `generate` takes it, or t5x: and a checkpoint.
      topology: the chips, such as v5e:2x2.
      max_new_tokens: tokens of an output.
      num_outputs: outputs of a text.
      num_beams: beams of a text; 1: no beam search.
      temperature: sample, from logits divided by this.
      top_k: sample, from this many most likely tokens.
      top_p: sample, from the fewest of the most likely tokens that have this probability together.
      max_length: tokens of each text (default: as many as the model keeps).
      batch_tokens: tokens of the texts of a batch on one device (default: as `generate` has on accelerators).
      dtype: type of the matrix products.
    """
    from jaxir.models.decoding import Decoding
    from jaxir.planning import decoding
    from jaxir.retrieval.encoding.runner import ACCELERATOR_BATCH_TOKENS

    how = Decoding(
        max_new_tokens=max_new_tokens,
        num_outputs=num_outputs,
        num_beams=num_beams,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    batch_tokens = batch_tokens or ACCELERATOR_BATCH_TOKENS
    return decoding.run(topology, model, how, batch_tokens=batch_tokens, max_length=max_length, dtype=dtype)


def main(arguments: list[str]) -> int:
    """Does what the first argument says."""
    if arguments[:1] == ["generate"]:
        return cli.main("jaxir.expand:generate", arguments[1:], example=EXAMPLE)
    if arguments[:1] == ["plan"]:
        return cli.main("jaxir.expand:plan", arguments[1:], example=PLAN)
    if arguments[:1] in (["--help"], ["-h"]):
        return cli.main("jaxir.expand:generate", ["--help"], example=EXAMPLE)
    print(f"error: say what to do, generate or plan: {EXAMPLE}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    cli.end(main(sys.argv[1:]))
