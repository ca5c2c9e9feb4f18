"""Makes the Markdown page that report.py writes, from the figures of its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def render(found: Mapping[str, Any], *, with_json: bool = True) -> str:
    """Returns the report as Markdown."""
    lines = []
    for part, told in PARTS.items():
        figures = found.get(part, {"failed": "not reached"})
        lines += ["", f"## {part.capitalize()}", ""]
        lines += [f"**{figures['failed']}**"] if "failed" in figures else told(figures)
    kind = found.get("machine", {})
    title = f"{kind.get('devices', '?')} x {kind.get('kind', '?')}"
    about = f"{found['date']}, scale {found.get('scale', '?')}"
    lines = [f"# jaxir on {title}", "", about, *lines, ""]
    if with_json:
        lines += ["## All figures", "", "```json", json.dumps(found, indent=1), "```", ""]
    return "\n".join(lines)


def of_machine(m: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines about the machine."""
    slice_ = f" ({m['topology']})" if m["topology"] else ""
    memory = f", {m['memory_gib']:.2f} GiB each" if m["memory_gib"] else ""
    yield f"- {m['devices']} x {m['kind']}{slice_}{memory}; machines: {m['machines']}, of {m['cores']} cores"
    yield f"- {m['processor']}; {m['system']}"
    versions = ", ".join(f"{name} {version}" for name, version in m["versions"].items())
    yield f"- jaxir {m['jaxir']}, Python {m['python']}, {versions}"
    yield f"- {m['runtime']}"


def of_training(t: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines about training: measured figures beside planned ones."""
    yield (
        f"{t['model']}, {t['parameters'] / 1e6:,.0f} M parameters, {t['dtype']}; {t['pairs']} pairs of"
        f" {t['lengths'][0]} + {t['lengths'][1]} tokens; mean of {t['steps']} steps; compiled in"
        f" {t['compile_seconds']:.0f} s"
    )
    names = ("all at once", "as scheduled", "one after another")
    planned = [t.get(f"planned/{name.replace(' ', '_')}_seconds") for name in names]
    ideal = t["products_at_peak_seconds"]
    rows = [
        ("step, ms", *map(milli, [t["step_seconds"], *planned])),
        ("MFU", share(t["mfu"]), *(share(seconds and ideal / seconds) for seconds in planned)),
    ]
    yield from table(["", "measured", *(f"planned, {name}" for name in names)], rows)
    held, needed = (t.get(name) for name in ("peak_memory_gib", "planned/memory_gib"))
    told = "not counted" if held is None else f"{held:.2f} GiB at most"
    told += "" if needed is None else f", planned {needed:.2f} GiB"
    yield ""
    yield f"Memory of a device: {told}. {t['examples_per_second']:,.0f} pairs/s."


def of_loss(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines about the loss."""
    yield f"SamToNe and its gradient, D = {found['dimension']}, float32, over {found['devices']} devices"
    rows = [
        (
            f"{row['B']:,}",
            f"blockwise, {row['block_size']}" if row["block_size"] else "dense",
            milli(row.get("seconds")) or "does not fit",
            f"{row['tflops']:.3g}" if "tflops" in row else "",
            f"{row['temporary_gib']:.2f}",
        )
        for row in found["rows"]
    ]
    yield from table(["B", "version", "ms", "TFLOP/s", "temporary GiB a device"], rows)


def of_encoding(e: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines about encoding."""
    rate, tokens = e["passages_per_second"], e["tokens"] / e["seconds"]
    yield f"{e['model']}, {e['dtype']}, the {e['devices']} devices of one machine"
    yield ""
    yield (
        f"**{rate:,.0f} passages/s** ({tokens:,.0f} tokens/s, {e['tokens'] / e['texts']:.0f} tokens each,"
        f" padded to {e['padded_tokens'] / e['tokens']:.2f} of that); {e['shapes']} shapes were compiled in"
        f" the first pass, {e['first_pass_seconds']:.0f} s"
    )


def of_sparse_cores(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines about communication by SparseCores."""
    if "skipped" in found:
        yield found["skipped"]
        return
    planned = "planned/as_scheduled_seconds"
    rows = [
        (name, milli(f["step_seconds"]), milli(f.get(planned)), share(f["mfu"]), f"{f['loss']:.4f}")
        for name in ("without", "with")
        for f in (found[name],)
    ]
    yield f"{found['with']['model']}, {found['with']['pairs']} pairs, parameters split over all chips"
    yield from table(["SPARSE_CORES", "step, ms", "planned, as scheduled", "MFU", "loss"], rows)


def table(head: list[str], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yields the lines of a table."""
    yield ""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell or '-' for cell in row)} |"


def milli(seconds: float | None) -> str:
    """Returns seconds as text in milliseconds; "" for None."""
    return "" if seconds is None else f"{seconds * 1000:,.3g}" if seconds < 1 else f"{seconds * 1000:,.0f}"


def share(part: float | None) -> str:
    """Returns a share as text in percent; "" for None."""
    return "" if part is None else f"{part:.0%}"


# The function that writes each part, in the order in which the parts are measured.
PARTS = {
    "machine": of_machine,
    "training": of_training,
    "loss": of_loss,
    "encoding": of_encoding,
    "sparsecores": of_sparse_cores,
}
