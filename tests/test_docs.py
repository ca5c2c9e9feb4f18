"""The pages of docs/: links, the nav, generated parts, quoted messages, and the length of sentences."""

import ast
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from jaxir.core import error_report
from jaxir.runtime import distributed
from tests.documentation import make_reference

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
LONGEST_LINE = 160


GENERATED = make_reference.generated_pages()


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors(page: Path) -> set[str]:
    """Returns the headings of a page as GitHub and MkDocs write them in links."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page.read_text()), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {re.sub(r" +", "-", heading.strip()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_exist(page):
    text = re.sub(r"`[^`]*`", "", without_blocks(page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("page", [page for page in PAGES if page not in GENERATED], ids=name)
def test_lines_are_short(page):
    lines = [line for line in page.read_text().splitlines() if not line.startswith("|")]
    long = [line for line in lines if len(line) > LONGEST_LINE]
    assert not long


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_name_their_language(page):
    fences = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)
    assert all(fences[::2])
    assert not any(fences[1::2])


def test_no_page_installs_jaxir_from_an_index():
    assert not [name(p) for p in PAGES if re.search(r"pip install '?jaxir\b", p.read_text())]


def test_every_page_is_in_the_nav():
    def pages_of(nav):
        for entry in nav:
            if isinstance(entry, str):
                yield entry
            else:
                for value in entry.values():
                    yield from [value] if isinstance(value, str) else pages_of(value)

    nav = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(nav) == sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md"))


def test_pages_that_the_code_names_exist():
    files = [
        p
        for folder in ("jaxir", "gin", "tasks", "tpu_scripts", "benchmarks")
        for p in (ROOT / folder).rglob("*")
    ]
    files = [p for p in files if p.suffix in (".py", ".gin", ".sh", ".html") and p.is_file()]
    named = {page for p in files for page in re.findall(r"\bdocs/[\w/]+\.md", p.read_text())}
    assert named
    assert not [page for page in named if not (ROOT / page).is_file()]


@pytest.mark.parametrize("page", GENERATED, ids=name)
def test_generated_reference_is_up_to_date(page):
    assert make_reference.rendered(page) == page.read_text(), "stale: run `make docs-reference`"


def test_reference_has_every_command_and_every_recipe():
    commands = anchors(DOCS / "reference/commands.md")
    assert commands >= {"train", "encode", "index", "search", "evaluate", "serve", "sidecar-install"}
    assert "| `--batch_size` |" in (DOCS / "reference/commands.md").read_text()
    recipes = (DOCS / "reference/recipes.md").read_text()
    for path in (ROOT / "gin").rglob("*.gin"):
        assert f"## {name(path)}\n" in recipes
    assert "| `--temperature` | `0.05` | `samtone.temperature` |" in recipes


def test_both_pages_list_the_exit_statuses():
    text = " ".join((DOCS / "reference/commands.md").read_text().split())
    sentence = re.search(r"[^.]*\b130 after Ctrl-C[^.]*\.", text)[0]
    _, table = (DOCS / "troubleshooting.md").read_text().split("| exit status |")
    cells = re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE)
    signals = {128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)}
    for numbers in (sentence, " ".join(cells)):
        listed = {int(number) for number in re.findall(r"\b\d+\b", numbers)}
        assert listed == {0, 1, 2, error_report.INTERNAL, distributed.TRY_AGAIN, *signals}


@cache
def sentences_of_the_code() -> str:
    """Returns all string literals of jaxir, with … for replacement fields."""
    texts = []
    for path in (ROOT / "jaxir").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append("…".join(v.value for v in node.values if isinstance(v, ast.Constant)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_in_troubleshooting_are_those_of_the_code():
    page = (DOCS / "troubleshooting.md").read_text()
    sentences = [
        s for block in re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S) for s in block.splitlines()
    ]
    assert len(sentences) > 15
    for sentence in sentences:
        for part in filter(None, (part.strip(" ();,:'?.") for part in sentence.split("…"))):
            assert part in sentences_of_the_code(), f"{part!r} of {sentence!r}"


def test_responses_in_serve_match_their_schemas():
    """Each JSON block has exactly the fields of its response."""
    schemas = pytest.importorskip("jaxir.serving.schemas")
    page = (DOCS / "serve.md").read_text()
    answers = re.findall(r"^```json\n(.*?)^```$", page, re.M | re.S)
    kinds = [schemas.SearchResponse, schemas.Problem]
    for kind, answer in zip(kinds, map(json.loads, answers), strict=True):
        assert kind.model_validate(answer).model_dump(exclude_unset=True, mode="json") == answer


@pytest.mark.skipif(not importlib.util.find_spec("mkdocs"), reason="MkDocs is not installed")
def test_mkdocs_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    paths = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [*command, tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        assert not re.search(r'<(?:script|link|img)[^>]*="https?:', page.read_text()), page


def test_durability_page_names_existing_tests():
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "durability.md").read_text())
    assert named and not [path for path in named if not (ROOT / path).is_file()]


MOST_WORDS = 30  # maximum number of words in a sentence


def sentences(page: Path) -> list[str]:
    """Returns the sentences of a page outside code, tables and headings; `code` counts as one word."""
    text = re.sub(r"<!--.*?-->", "", without_blocks(page.read_text()), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    lines = ["" if re.match(r"\||#|    |:?---", line) else line for line in text.splitlines()]
    items = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines))
    return [
        s for item in items for s in re.split(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z(\"*\[]|code)", item.strip()) if s
    ]


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.glob("*.md"))], ids=name)
def test_sentences_are_short(page):
    long = [s for s in sentences(page) if len(s.split()) > MOST_WORDS]
    assert not long, "\n\n".join(long)


def test_no_comment_or_sentence_opens_without_a_subject():
    opening = re.compile(r'(?:#|"""|^- |^) *(?:Of|Who|Said) ', re.MULTILINE)
    files = [p for folder in ("jaxir", "tests", "docs", ".ci") for p in (ROOT / folder).rglob("*")]
    files = [p for p in (*files, *ROOT.glob("*.md")) if p.suffix in (".py", ".md", "") and p.is_file()]
    assert len(files) > 700
    assert not [f"{name(p)}: {line}" for p in files for line in opening.findall(p.read_text())]
