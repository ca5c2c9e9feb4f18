"""Models for MTEB, the Massive Text Embedding Benchmark; and a command that evaluates one.

import mteb
import jaxir.mteb
mteb.evaluate(jaxir.mteb.load("runs/mine"), mteb.get_tasks(tasks=["NFCorpus"]))
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.core.installation import require
from jaxir.core.values import Count
from jaxir.storage.outputs import writes


def load(
    model: str,
    *,
    prompts: Mapping[str, str] | None = None,
    instruction_template: str | None = None,
    instruct_passages: bool = False,
    name: str | None = None,
    **how: Any,
) -> Any:
    """Opens a model as an encoder that `mteb.evaluate` takes (`mteb.EncoderProtocol`).

    Queries are encoded by the query tower. Documents, and all texts of tasks that do not distinguish queries
    from documents, are encoded by the passage tower. Prompts are chosen by MTEB's rules, among the model's
    own or
    `prompts`: by task and type (`NFCorpus-query`), task, kind of task and type (`Retrieval-query`), kind of
    task, or type alone (`query`, `document`). Without any of these, texts get the prompts of
    `DualEncoder.encode`.

    Args:
      model: a jaxir model or run directory, or hf: or st: and a directory or hub name, or only a hub name.
      prompts: texts by MTEB's keys, instead of the model's own prompts.
      instruction_template: for models that follow instructions, a text with {instruction}, in whose place the
        instruction of each task goes. MTEB has one for each task; `prompts` may replace it by keys as above.
      instruct_passages: whether documents get the instruction, too.
      name: OWNER/NAME in MTEB's results. None: the hub's name, or jaxir/ and the directory's name.
      **how: arguments of `DualEncoder.load`.

    Returns:
      An encoder. `.model` is its `DualEncoder`. The revision in MTEB's results identifies its weights,
      lengths and prompts.

    Raises:
      UserError: MTEB is not installed, or the model cannot be opened.
    """
    require("mteb", "mteb")
    from jaxir.evaluation import mteb_encoder
    from jaxir.retrieval.encoding.text_encoder import DualEncoder

    return mteb_encoder.make(
        DualEncoder.load(model, **how),
        prompts=prompts,
        instruction_template=instruction_template,
        instruct_passages=instruct_passages,
        name=name,
    )


@writes(output="MTEB directory")
def mteb(
    model: str,
    output: str,
    tasks: list[str] | str | None = None,
    benchmark: str | None = None,
    batch_size: Count = 32,
    instruction_template: str | None = None,
) -> None:
    """Evaluates a model on tasks of MTEB.

    Tasks that are in OUTPUT already are not evaluated again. OUTPUT/results has MTEB's files, one for each
    task, and OUTPUT/predictions the ranked documents of each query. `jaxir.evaluate --mteb` compares two
    OUTPUTs.

    Args:
      model: a jaxir model or run directory, or hf: or st: and a directory or hub name, or only a hub name.
      output: the directory to write, or to add tasks to.
      tasks: names of tasks, separated by commas.
      benchmark: instead of tasks, the name of a benchmark: 'MTEB(eng, v2)'.
      batch_size: maximum number of texts per batch on one device.
      instruction_template: for models that follow instructions, a text with {instruction}, in whose place the
        instruction of each task goes.
    """
    if (tasks is None) == (benchmark is None):
        raise UserError("give either --tasks, names of MTEB's tasks, or --benchmark, the name of a benchmark")
    encoder = load(model, instruction_template=instruction_template)
    import mteb as library

    names = [tasks] if isinstance(tasks, str) else tasks
    try:
        found = library.get_tasks(tasks=names) if names else library.get_benchmark(benchmark)
    except KeyError as error:
        raise UserError(f"MTEB has no such task or benchmark: {error.args[0]}") from error
    meta = encoder.mteb_model_meta
    result = library.evaluate(
        encoder,
        found,
        encode_kwargs={"batch_size": batch_size},
        cache=library.ResultCache(output),
        # MTEB appends to a file of predictions even if another model wrote it, so each model gets a folder.
        prediction_folder=Path(output) / "predictions" / meta.model_name_as_path() / meta.revision,
    )
    for of_task in result.task_results:
        print(f"{of_task.task_name}: {of_task.get_score():.4f}")
    print(f"wrote {output}")


if __name__ == "__main__":
    cli.start("jaxir.mteb:mteb", "--model=runs/mine --tasks=NFCorpus,SciFact --output=mteb_results")
