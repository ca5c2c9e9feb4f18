"""The code in README.md and docs/: Python blocks are run, command lines are parsed and bound.

A block that cannot run here has a comment before it, such as `<!-- needs a TPU -->`. One that takes long has
`<!-- slow -->`, and `make test-slow` runs it.
"""

import contextlib
import functools
import importlib
import inspect
import io
import re
import shlex
import shutil
import textwrap
from pathlib import Path
from typing import NamedTuple

import gin
import pytest

from jaxir import cli
from jaxir.cli import gin_config
from jaxir.core.choices import rules_of
from tests.documentation import EXAMPLES
from tests.shallow import first_layers

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden"
PAGES = {
    str(path.relative_to(ROOT)): path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "<!-- generated: " not in path.read_text(encoding="utf-8")
}
SCRIPTS = {f"benchmarks/{path.name}": path for path in sorted((ROOT / "benchmarks").glob("*.sh"))}
# `make test` replaces MiniLM by a small model and leaves out slow blocks; `make test-slow` runs all.
MINILM = "st:sentence-transformers/all-MiniLM-L6-v2"
BLOCK = re.compile(
    r"(?:^<!-- (slow|needs [^\n]+) -->\n+)?^( *)```(\w+)\n(.*?)^\2```$", re.MULTILINE | re.DOTALL
)
NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


class Block(NamedTuple):
    """A fenced block of a page."""

    line: int
    language: str
    code: str
    mark: str  # "", "slow" or "needs ..."


def blocks(page: str, *languages: str) -> list[Block]:
    text = PAGES[page].read_text(encoding="utf-8")
    found = (
        Block(text[: m.start(4)].count("\n") + 1, m[3], textwrap.dedent(m[4]), m[1] or "")
        for m in BLOCK.finditer(text)
    )
    return [block for block in found if block.language in languages]


def expected_lines(page: str) -> list[str]:
    """Returns what a page says its Python prints: comments after print(...), or the text block after it."""
    lines = []
    for block in blocks(page, "python", "text"):
        if block.language == "python":
            if block.mark.startswith("needs"):
                continue
            comments = re.findall(r"^print\(.*\)  # (.*)$", block.code, re.MULTILINE)
            prints = re.findall(r"^print\(", block.code, re.MULTILINE)
            lines += comments if comments else [None] * len(prints)
        elif None in lines:
            at, count = lines.index(None), lines.count(None)
            lines[at:] = block.code.splitlines()[-count:]
    return lines


def run_python(page: str, folder: Path, monkeypatch, *, instead: str = "") -> list[str]:
    """Runs the page's Python blocks and returns the lines that they print.

    With a model `instead` of MiniLM, slow blocks are left out.
    """
    monkeypatch.chdir(folder)
    printed, names = io.StringIO(), {"__name__": "__main__"}
    for block in blocks(page, "python"):
        if block.mark == "" or (block.mark == "slow" and not instead):
            text = block.code.replace(MINILM, instead or MINILM)
            code = compile("\n" * (block.line - 1) + text, page, "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, names)
    return printed.getvalue().splitlines()


WITH_PYTHON = [page for page in PAGES if any(not block.mark for block in blocks(page, "python"))]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> str:
    """A T5 of one layer, which compiles in half the time, with BERT's tokenizer, for pairs of texts."""
    folder = tmp_path_factory.mktemp("small_model") / "t5"
    first_layers(folder, "t5_1_1", ("num_layers",), r"block\.[12]\.")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "bert" / name, folder)
    return f"st:{folder}"


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(page, tmp_path, monkeypatch, small_model):
    printed = run_python(page, tmp_path, monkeypatch, instead=small_model)
    assert len(printed) <= len(expected_lines(page))


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_prints_what_the_page_says(page, tmp_path, monkeypatch):
    printed, expected = run_python(page, tmp_path, monkeypatch), expected_lines(page)
    words = [[NUMBER.sub("N", line).split() for line in lines] for lines in (printed, expected)]
    assert words[0] == words[1]
    numbers = [[float(n) for line in lines for n in NUMBER.findall(line)] for lines in (printed, expected)]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02)


class Command(NamedTuple):
    """A command line of jaxir on a page."""

    page: str
    line: int
    module: str
    arguments: list[str]


def commands(page: str) -> list[Command]:
    found = []
    whole = [Block(1, "sh", SCRIPTS[page].read_text(encoding="utf-8"), "")] if page in SCRIPTS else None
    for block in whole or blocks(page, "sh"):
        if block.mark.startswith("needs"):
            continue
        text = block.code.replace("\\\n", " " * 2)
        for name, value in re.findall(r'^(\w+)="(.*)"$', text, re.MULTILINE):
            text = text.replace(f"${name}", value)
        for number, line in enumerate(text.splitlines(), block.line):
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>()")
            lexer.whitespace_split, lexer.commenters = True, "#"
            part: list[str] = []
            for token in [*lexer, ";"]:
                if token[0] not in "|&;<>()":
                    part.append(token)
                    continue
                if (module := module_of(part)) is not None:
                    found.append(Command(page, number, *module))
                part = []
    return found


def module_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Returns module and arguments of a command line: python -m jaxir.x ..., or jaxir x ..."""
    for at, word in enumerate(words):
        if word == "-m" and words[at + 1].split(".")[0] == "jaxir":
            return words[at + 1], words[at + 2 :]
        if Path(word).name == "jaxir" and at + 1 < len(words):
            return f"jaxir.{words[at + 1]}", words[at + 2 :]
    return None


def files_to_write(page: str) -> dict[str, str]:
    """Returns the files that a page's readers write: blocks after a name such as `my_run.gin`."""
    lines, found = PAGES[page].read_text(encoding="utf-8").splitlines(), {}
    for block in blocks(page, "gin", "python"):
        before = "\n".join(lines[: block.line - 2]).rstrip().rpartition("\n\n")[2]
        found |= dict.fromkeys(re.findall(r"`(\w+\.(?:gin|py))`", before)[-1:], block.code)
    return found


COMMANDS = [command for page in [*PAGES, *SCRIPTS] for command in commands(page)]


@pytest.mark.parametrize("command", COMMANDS, ids=[f"{c.page}:{c.line} {c.module}" for c in COMMANDS])
def test_command_lines_parse_and_bind(command, tmp_path, monkeypatch, capsys):
    """The command exists, its flags parse, its gin files bind, and no required parameter is missing."""
    assert importlib.util.find_spec(command.module) is not None, f"there is no command {command.module}"
    mains = [name for name in EXAMPLES if name.startswith(f"{command.module}:")]
    if not mains:  # jaxir.sidecar, jaxir
        return
    # The first argument chooses one of several functions (jaxir.expand generate).
    main = next((main for main in mains if command.arguments[:1] == [main.partition(":")[2]]), mains[0])
    module_name, function_name = main.split(":")
    module = importlib.import_module(module_name)
    function, calls = getattr(module, function_name), []

    @functools.wraps(function)
    def instead(**settings):
        calls.append(settings)

    arguments, bind = command.arguments, gin_config.bind
    arguments = arguments[1:] if arguments[:1] == [function_name] else arguments
    by_gin = any(argument.startswith("--gin") for argument in arguments)

    def bind_only(configured, *args, **only):
        _, bound = bind(configured, *args, **only)
        gin.get_bindings(configured)  # makes the objects that the bindings name
        return instead, bound

    monkeypatch.setattr(gin_config, "bind", bind_only)
    if not by_gin:
        monkeypatch.setattr(module, function_name, instead)
        for name in rules_of(function).hands_over.values():
            other = getattr(importlib.import_module(name.partition(":")[0]), name.partition(":")[2])
            monkeypatch.setattr(name.replace(":", "."), functools.wraps(other)(lambda **s: calls.append(s)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, content in files_to_write(command.page).items() if command.page in PAGES else ():
        (tmp_path / name).write_text(content)
    try:
        status = cli.main(main, arguments)
    except SystemExit as error:  # argparse exits
        status = error.code
    assert status == 0 and (calls or "--help" in arguments), capsys.readouterr().err


BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_have_the_flags_that_pages_use(name):
    pages = [*PAGES.values(), ROOT / "benchmarks/README.md"]
    text = "".join(path.read_text().replace("\\\n", "") for path in pages)
    flags = set(re.findall(r" (--\w+)", "\n".join(re.findall(rf"benchmarks/{name}(.*)", text))))
    known = re.findall(r'add_argument\(\s*"(--\w+)"', (ROOT / "benchmarks" / name).read_text())
    assert flags <= set(known)


def test_class_settings_named_in_docs_exist():
    modules: dict[str, list[str]] = {}
    for path in (ROOT / "jaxir").rglob("*.py"):
        modules.setdefault(path.stem, []).append(".".join(path.relative_to(ROOT).with_suffix("").parts))
    named = re.compile(r"\b([a-z_0-9]+)\.([A-Z]\w*)\.([a-z_]+)\b")
    found = {(page, *m) for page, path in PAGES.items() for m in named.findall(path.read_text())}
    lacking = []
    for page, module, kind, name in sorted(found):
        kinds = [getattr(importlib.import_module(m), kind, None) for m in modules.get(module, ())]
        kinds = [k for k in kinds if k is not None]
        if kinds and not any(name in inspect.signature(k).parameters or hasattr(k, name) for k in kinds):
            lacking.append(f"{page}: {module}.{kind}.{name}")
    assert found and not lacking
