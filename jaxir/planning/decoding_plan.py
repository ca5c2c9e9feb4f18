"""`python -m jaxir.expand plan`: memory and speed of a generator on TPUs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import jax

from jaxir.core.errors import UserError
from jaxir.costs import step_costs, targets
from jaxir.costs.chips import SLICES
from jaxir.costs.step_costs import StepCosts
from jaxir.costs.targets import TPUS, Target, parse
from jaxir.interop.model import stored
from jaxir.models.decoding import Decoding
from jaxir.models.seq2seq import Seq2SeqConfig
from jaxir.planning import advice, architecture, devices
from jaxir.planning.plan_report import duration, gib, money, si, span
from jaxir.planning.prices import read as read_prices
from jaxir.planning.program import Compiled, bytes_of, compile_step, model_step
from jaxir.planning.typed import Command
from jaxir.runtime.compile_cache import keep_no_more_programs
from jaxir.runtime.partitioning import MeshConfig, Partitioner

FLAGS = {name: (f"--{name}",) for name in ("topology", "batch_tokens", "dtype", "prices")}
# Share of the memory that an advised batch may fill. Memory falls more slowly than the number of texts.
_ROOM = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of texts to read, and how outputs are generated."""

    texts: int  # number of texts over all chips
    length: int  # number of tokens per text
    how: Decoding  # how outputs are generated

    @property
    def tokens(self) -> int:
        """Tokens that are generated if every output has the maximum length."""
        return self.texts * self.how.num_outputs * self.how.max_new_tokens


class DecodingPlan(NamedTuple):
    """Plan of the generation of a batch."""

    target: Target
    model: str  # summary of the model
    dtype: str  # type of the matrix products
    batch: Batch
    parameters: int  # bytes of the model on each chip
    compiled: Compiled  # the program and its memory
    costs: StepCosts | None  # costs on each chip; None if the batch does not fit
    seconds: float  # compile time in seconds


def run(
    topology: str,
    source: str,
    how: Decoding,
    *,
    batch_tokens: int,
    max_length: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    prices: Sequence[str] | None = None,
    words: Sequence[str] = ("python", "-m", "jaxir.expand", "plan"),
) -> int:
    """Prints the plan of generation; returns 0 if it fits, else 1.

    Reads no weights. Must be the first use of JAX in its process. `words` is the user's command line.
    """
    target = targets.parse(topology)
    if target.chip.kind != "tpu":
        raise UserError(f"--topology={topology}: generation can be planned for TPUs only, such as v5e:2x2")
    priced = read_prices(prices, [target])
    found = devices.get(target)
    config, settings = architecture.describe_generator(source)
    config = stored.replace_backbone(config, dtype=dtype)
    keep_no_more_programs()  # later processes could not use these programs
    partitioner = advice.build_mesh(MeshConfig(), found, target)
    length = max_length or settings.passage_max_length
    batch = Batch(texts=target.count * max(1, batch_tokens // length), length=length, how=how)
    plan = make(target, config, batch, partitioner)
    print("\n".join([*_verdict(plan, priced, Command(words, FLAGS)), "", *_lines(plan)]))
    return int(plan.compiled.lacks_on(target) > 0)


def make(target: Target, config: Seq2SeqConfig, batch: Batch, partitioner: Partitioner) -> DecodingPlan:
    """Compiles the program that `jaxir.expand generate` runs, with decoding loops of maximum length."""
    step = model_step(
        config, lambda model, ids: model.generate(ids, batch.how), (batch.texts, batch.length), partitioner
    )
    start = time.monotonic()
    compiled = compile_step(step)
    seconds = time.monotonic() - start
    costs = None
    if compiled.program is not None:
        program = dataclasses.replace(compiled.program, turns=batch.how.max_new_tokens)
        costs = step_costs.of_program(program, target, partitioner.mesh)
    count, dtype = sum(x.size for x in jax.tree.leaves(step.state)), config.backbone.dtype
    model = f"{config.summary}, {count / 1e6:,.0f} M parameters; {dtype}"
    return DecodingPlan(target, model, dtype, batch, bytes_of(step.state), compiled, costs, seconds)


def _verdict(plan: DecodingPlan, prices: Mapping[str, float] | None, command: Command) -> Iterator[str]:
    compiled, limit = plan.compiled, plan.compiled.limit_on(plan.target)
    if lacking := compiled.lacks_on(plan.target):
        yield f"does not fit: {gib(lacking)} GiB are missing on each chip"
        changes = []
        # More chips do not help: each chip holds all parameters and at least one text.
        left = (_ROOM * limit - plan.parameters) / max(compiled.size - plan.parameters, 1)
        if (fewer := int(left * plan.batch.texts / plan.target.count)) > 0:
            changes.append({"batch_tokens": fewer * plan.batch.length})
        if plan.dtype != "bfloat16":
            changes.append({"dtype": "bfloat16"})
        shapes = [parse(f"{name}:{shape}") for name in TPUS for shape in SLICES[name]]
        same = [s for s in shapes if s.count == plan.target.count and _ROOM * s.chip.memory > compiled.size]
        changes += [
            {"topology": s.name, "prices": None} for s in sorted(same, key=lambda s: s.chip.memory)[:1]
        ]
        yield "try one of these:" if changes else "no known chip has enough memory"
        yield from (f"  {command.changed(change)}" for change in changes)
        return
    share = f"{compiled.size / limit:.0%}"
    yield f"fits: {gib(compiled.size)} of {gib(limit)} GiB on each chip ({share})"
    batches, least = 1_000_000 / plan.batch.texts, plan.costs.roofline
    times = [batches * seconds for seconds in (least.overlapped, least.in_turn)]
    costs = "" if prices is None else f", costs {span(*(money(t, plan.target, prices) for t in times))}"
    yield f"a million texts at full speed: {span(*map(duration, times))}{costs}"


def _lines(plan: DecodingPlan) -> list[str]:
    compiled, batch, how = plan.compiled, plan.batch, plan.batch.how
    rows = {
        "parameters, float32": plan.parameters,
        "token ids": compiled.held - plan.parameters,
        "caches, work space": compiled.temporaries,
        "program, padding": compiled.code + compiled.padding,
        "total": compiled.size,
    }
    outputs = f"{how.num_outputs} outputs" if how.num_outputs > 1 else "an output"
    written = f"{outputs} of {how.max_new_tokens} for each"
    compiler = f"the TPU's compiler in {plan.seconds:.0f} s"
    lines = [
        f"plan for {plan.target.name}: {plan.target.count} {plan.target.chip.name} chips",
        f"  model     {plan.model}",
        f"  batch     {batch.texts} texts of {batch.length} tokens, {written}",
        f"  source    generation, compiled by {compiler}; every output has the maximum length",
        "",
        f"memory on each chip, GiB (of {gib(compiled.limit_on(plan.target))})",
        *(f"  {name:<38}{gib(size):>10}" for name, size in rows.items()),
    ]
    if plan.costs is not None:
        done, times = plan.costs.work, plan.costs.roofline
        sent = sum(c.traffic for c in plan.costs.collectives)
        lines += ["", "work in a batch, each chip"]
        lines += [f"  products {si(done.flops)}FLOP, elementwise {si(done.vector)}operations"]
        lines += [f"  HBM traffic {si(done.bytes)}B, sent to other chips {si(sent)}B"]
        lines += ["", "time at full speed (roofline; real runs are slower)"]
        lines += [f"  {name:<22}{duration(seconds):>12} a batch" for name, seconds in times.parts.items()]
        for name, seconds in (("all at once", times.overlapped), ("one after another", times.in_turn)):
            rate = f"{batch.tokens / seconds:,.0f} tokens/s, {batch.texts / seconds:,.0f} texts/s"
            lines += [f"  {name:<22}{duration(seconds):>12} a batch: {rate}"]
        lines += [f"  bound by {times.bound}"]
    return lines
