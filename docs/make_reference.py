"""Writes the generated pages of docs/reference/: commands, recipes and the Python interface.

`make docs-reference` runs it. It replaces everything below the line `<!-- generated: NAME ... -->` of a page.
A test fails if a page is stale.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docstring_parser

from jaxir import cli
from jaxir.cli.gin_bindings import Bindings, Key, Macro, has_reference
from jaxir.cli.gin_files import Reader
from jaxir.cli.short_names import short_name

ROOT = Path(__file__).resolve().parent.parent
_METHODS = ("method", "class method", "static method")
_MARKER = re.compile(r"^<!-- generated: (\w+), by `make docs-reference` -->\n", re.MULTILINE)
_LINE = 100  # characters of a signature; a longer one has a line for each argument

# Documented besides the names of `from jaxir import ...`: functions for scripts, and classes that gin binds.
INTERFACE = (
    "jaxir.interop.model_dir:load",
    "jaxir.interop.build:Pretrained",
    "jaxir.interop.build:FromScratch",
    "jaxir.data.batches.text_data:TextData",
    "jaxir.data.sets.pair_sources:JsonlPairs",
    "jaxir.data.sets.pair_sources:BeirPairs",
    "jaxir.data.batches.mixture:Mixture",
    "jaxir.data.batches.with_prompts:WithPrompts",
    "jaxir.training.run.recipe:Recipe",
    "jaxir.training.trainer:train",
    "jaxir.training.step.optimizers:AdamW",
    "jaxir.training.step.optimizers:Adafactor",
    "jaxir.runtime.partitioning:MeshConfig",
    "jaxir.evaluation.retrieval_metrics:evaluate_run",
    "jaxir.retrieval.ranking.fusion:reciprocal_rank_fusion",
    "jaxir.retrieval.indexes.updating:update_index",
    "jaxir.serving.limits:Limits",
)


def main() -> None:
    """Writes the pages that are stale, and prints their names."""
    for path in generated_pages():
        old, new = path.read_text(encoding="utf-8"), rendered(path)
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


def generated_pages() -> list[Path]:
    """Returns the pages that have a generated part."""
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    return [path for path in pages if _MARKER.search(path.read_text(encoding="utf-8"))]


def rendered(path: Path) -> str:
    """Returns the text that a page with a generated part should have."""
    text = path.read_text(encoding="utf-8")
    marker = _MARKER.search(text)
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(PAGES[marker[1]]()))
    return f"{text[: marker.end()]}\n{body.strip()}\n"


def commands() -> Iterator[str]:
    """Yields a section for each command, by its function's docstring and its parser."""
    for name, example in sorted(found_commands().items()):
        module, function_name = name.split(":")
        function = getattr(importlib.import_module(module), function_name)
        doc = _parsed(function)
        parser = cli.build_parser(function, prog=f"python -m {module}", example=example)
        flags = {a.dest: a for a in parser._actions if a.dest not in ("help", "gin_file")}
        words = module.removeprefix("jaxir.").split(".")
        words += [] if words[-1] == function_name else [function_name]  # a module of several commands
        yield from (f"## {' '.join(words)}", "", *_prose(doc), "")
        if example:
            yield from ("```sh", example, "```", "")
        if flags:
            yield from ("| flag | value | |", "|---|---|---|")
            yield from (f"| {_spelt(a)} | {_value(a)} | {_cell(a.help or '')} |" for a in flags.values())
            yield ""
        if objects := [p for p in doc.params if p.arg_name not in flags]:
            yield from ("Bound by gin files only:", "", "| parameter | |", "|---|---|")
            yield from (f"| `{p.arg_name}` | {_cell(p.description or '')} |" for p in objects)
            yield ""


def recipes() -> Iterator[str]:
    """Yields a section for each file of gin/: its head, and its settings."""
    for path in sorted((ROOT / "gin").rglob("*.gin"), key=lambda p: (len(p.relative_to(ROOT).parts), p)):
        name = path.relative_to(ROOT).as_posix()
        head = [line.removeprefix("#") for line in path.read_text().split("\n\n")[0].splitlines()]
        head = [line for line in head if line == "" or line.startswith(" ")]
        yield from (f"## {name}", "", *_head(head), "")
        yield from ("| flag | value | parameter |", "|---|---|---|")
        yield from (f"| `--{short}` | `{value}` | {of} |" for short, value, of in _settings(name))
        yield ""


def python() -> Iterator[str]:
    """Yields a section for each public function and class."""
    import jaxir
    from jaxir import losses

    public = [f"{jaxir._HOME[name]}:{name}" for name in jaxir.__all__ if name in jaxir._HOME]
    of_losses = [f"jaxir.losses:{name}" for name in losses.__all__ if name not in jaxir.__all__]
    for place in dict.fromkeys((*public, *of_losses, *INTERFACE)):
        module, name = place.split(":")
        thing = getattr(importlib.import_module(module), name)
        source = "jaxir" if place in public else module
        title = name if place in public or inspect.isclass(thing) else f"{module.split('.')[-1]}.{name}"
        yield from (f"## {title}", "", "```python", f"from {source} import {name}", "```", "")
        yield from _described(name, thing)
        if not inspect.isclass(thing):
            continue
        for method_name, kind, home, _ in inspect.classify_class_attrs(thing):
            is_field = method_name in getattr(thing, "__dataclass_fields__", {})
            if method_name.startswith("_") or is_field or home is not thing or kind not in _METHODS:
                continue
            yield from (f"### {name}.{method_name}", "")
            yield from _described(f"{name}.{method_name}", getattr(thing, method_name))


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "commands": commands,
    "recipes": recipes,
    "python": python,
}


def found_commands() -> dict[str, str]:
    """Returns {"package.module:function": examples} of all commands, from the sources."""
    found = {}
    for path in (*(ROOT / "jaxir").glob("*.py"), *(ROOT / "jaxir").glob("*/__main__.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        texts = {ast.unparse(n.targets[0]): n.value for n in nodes if isinstance(n, ast.Assign)}
        if "EXAMPLES" in texts:  # a module of several commands
            module = f"jaxir.{path.stem}"
            for action, lines in ast.literal_eval(texts["EXAMPLES"]).items():
                found[f"{module}:{action}"] = cli.command_lines(module, lines)
            continue
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            if ast.unparse(call.func) == "cli.start":
                name, lines = map(ast.literal_eval, call.args)
                found[name] = cli.command_lines(name.partition(":")[0], lines)
            elif ast.unparse(call.func) == "cli.main" and call.keywords:  # jaxir.sidecar
                found[ast.literal_eval(call.args[0])] = ast.literal_eval(texts["EXAMPLE"])
    return found


def _settings(name: str) -> Iterator[tuple[str, str, str]]:
    """Yields short name, value and parameters of all settings of a gin file and its includes."""
    found = Bindings(lambda: None)
    Reader(found).files([name])
    for short, (value, keys) in sorted(short_settings(found).items()):
        parameters = ", ".join(sorted({f"`{key}`" for key in keys}))
        yield short, repr(value).replace("|", "\\|"), parameters


def short_settings(bindings: Bindings) -> dict[str, tuple[Any, list[Key]]]:
    """Returns {short name: (value, parameters)} for the short names that gin files set."""
    found: dict[str, tuple[Any, list[Key]]] = {}
    macros = [Macro(key.scope) for key in bindings.values if key.is_macro]
    for key, value in sorted(bindings.values.items(), key=lambda item: item[0].is_macro):
        name = short_name(key)
        if key.is_macro:
            found[name] = (value, found.get(name, (value, []))[1])
        elif not has_reference(value) and (value not in macros or value == Macro(name.upper())):
            found.setdefault(name, (value, []))[1].append(key)
    return found


def _head(lines: list[str]) -> Iterator[str]:
    """Yields the head of a gin file as prose and, where it is indented, as blocks."""
    inside = False
    for line in lines:
        if line.startswith("   ") != inside:
            yield from ("```", "") if inside else ("", "```text")
            inside = not inside
        yield line.removeprefix("   ") if inside else _escaped(line.strip())
    if inside:
        yield "```"


def _described(name: str, thing: Any) -> Iterator[str]:
    doc = _parsed(thing)
    yield from ("```text", f"{name}{_signature(thing, len(name))}", "```", "", *_prose(doc), "")
    if doc.params:
        yield from ("| argument | |", "|---|---|")
        yield from (f"| `{p.arg_name}` | {_cell(p.description or '')} |" for p in doc.params)
        yield ""
    if doc.returns and doc.returns.description:
        yield from (*_wrapped(f"Returns: {_cell(doc.returns.description)}"), "")
    for error in doc.raises:
        yield from (*_wrapped(f"Raises `{error.type_name}`: {_cell(error.description or '')}"), "")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 158, break_long_words=False, break_on_hyphens=False)


def _signature(thing: Any, before: int) -> str:
    """Returns (parameters) -> result as in the source, to follow a name of `before` characters."""
    result = ""
    if dataclasses.is_dataclass(thing):
        written = _fields_of(thing)
        arguments = [written[f.name] for f in dataclasses.fields(thing) if f.init]
    else:
        thing = thing.__init__ if inspect.isclass(thing) else thing
        thing = inspect.unwrap(getattr(thing, "__func__", thing))
        if not inspect.isfunction(thing):
            return "()"  # a class without an own constructor
        function = _source_of(thing)
        arguments = _arguments(function.args)
        if function.returns and ast.unparse(function.returns) != "None":
            result = f" -> {ast.unparse(function.returns)}"
    line = f"({', '.join(arguments)}){result}"
    if before + len(line) <= _LINE:
        return line
    return "\n".join(["(", *(f"    {argument}," for argument in arguments), f"){result}"])


def _fields_of(kind: type) -> dict[str, str]:
    """Returns {name: "name: type = default"} of a dataclass, with inherited fields."""
    found = {}
    for base in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        for node in _source_of(base).body:
            if isinstance(node, ast.AnnAssign):
                name = ast.unparse(node.target)
                found[name] = _spelt_out(f"{name}: {ast.unparse(node.annotation)}", _default(node.value))
    return found


def _default(value: ast.expr | None) -> ast.expr | None:
    """Returns the default of a field, or the call of its factory."""
    factories = [k.value for k in getattr(value, "keywords", ()) if k.arg == "default_factory"]
    return ast.Call(factories[0], [], []) if factories else value


def _arguments(given: ast.arguments) -> list[str]:
    """Returns the parameters of a function as in the source, without `self` and `cls`."""
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    parts = [_spelt_out(ast.unparse(a), d) for a, d in zip(positional, defaults, strict=True)]
    parts = [part for part in parts if part not in ("self", "cls")]
    if given.vararg or given.kwonlyargs:
        parts.append(f"*{ast.unparse(given.vararg) if given.vararg else ''}")
    keywords = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    parts += [_spelt_out(ast.unparse(argument), default) for argument, default in keywords]
    return parts + ([f"**{ast.unparse(given.kwarg)}"] if given.kwarg else [])


def _spelt_out(parameter: str, default: ast.expr | None) -> str:
    return parameter if default is None else f"{parameter} = {ast.unparse(default)}"


def _source_of(thing: Any) -> Any:
    """Returns the syntax tree of a function or class."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def _parsed(thing: Any) -> docstring_parser.Docstring:
    return docstring_parser.parse(inspect.getdoc(thing) or "", docstring_parser.DocstringStyle.GOOGLE)


def _prose(doc: docstring_parser.Docstring) -> Iterator[str]:
    for part in filter(None, (doc.short_description, doc.long_description)):
        lines = part.split("\n")  # indented lines are equations and examples
        yield from (*(line if line.startswith("    ") else _escaped(line) for line in lines), "")


def _spelt(action: Any) -> str:
    return ", ".join(f"`{spelling}`" for spelling in action.option_strings)


def _value(action: Any) -> str:
    if action.choices:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    return f"`{action.metavar}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return _escaped(" ".join(text.replace("%%", "%").split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Returns text in which Markdown but for backquotes is escaped."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"([*_<\[\]])", r"\\\1", p) for p in parts)


if __name__ == "__main__":
    main()
