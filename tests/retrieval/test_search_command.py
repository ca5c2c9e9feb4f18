"""The commands from a corpus to answers, at a terminal and through pipes."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.retrieval.indexes.base_index import load_index
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.ranking.runs import read_run
from jaxir.retrieval.searcher import Searcher


def command(name: str, *flags: str) -> int:
    return cli.main(f"jaxir.{name}:{name}", flags)


@pytest.fixture(scope="module")
def texts(toy) -> list[str]:
    return toy.random_texts(120, seed=4)


@pytest.fixture(scope="module")
def index(tmp_path_factory, toy, small_model, texts) -> str:
    root = tmp_path_factory.mktemp("search")
    records = [{"_id": f"d{i}", "title": f"Title {i}", "text": t} for i, t in enumerate(texts)]
    corpus = toy.write_jsonl(root / "corpus.jsonl", records)
    toy.encode(small_model, corpus, root / "emb")
    flags = [f"--embeddings={root}/emb", f"--corpus={corpus}", "--backend=exact", f"--output={root}/index"]
    assert command("index", *flags) == 0
    return f"{root}/index"


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("--model=absent", "absent: no such model directory"),
        ("--model=hf:{golden}", "did not encode the passages"),
        ("--corpus=absent", "absent: no such file"),
    ],
)
def test_index_refuses_unusable_model_and_corpus_before_it_builds(flag, says, index, tmp_path, capsys):
    root = Path(index).parent
    flag = flag.format(root=root, golden=Path(__file__).parent.parent / "golden" / "bert")
    flags = [f"--embeddings={root}/emb", "--backend=exact", f"--output={tmp_path}/new/index", flag]
    assert command("index", *flags) == 1
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@contextlib.contextmanager
def search_process(index: str, *flags: str, **options) -> Iterator[subprocess.Popen]:
    # pytest-xdist's workers ignore SIGINT, and their children would, too.
    arguments = ["env", "--default-signal=INT", sys.executable, "-m", "jaxir.search", f"--index={index}"]
    with subprocess.Popen([*arguments, *flags], **options) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def search_at_a_terminal(index: str) -> Iterator[tuple[subprocess.Popen, int]]:
    master, slave = pty.openpty()
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), slave) | {"env": os.environ | {"TERM": "dumb"}}
    with search_process(index, **pipes, start_new_session=True) as process:
        os.close(slave)
        yield process, master
    os.close(master)


def test_search_writes_a_run(tmp_path, index, toy, encoder, texts, capsys):
    questions = toy.random_texts(7, seed=5)
    queries = toy.write_queries(tmp_path / "queries.jsonl", questions)
    flags = [f"--index={index}", f"--queries={queries}", f"--output={tmp_path}/run", "--k=9"]
    assert command("search", *flags) == 0
    assert "7 queries, 63 answers" in capsys.readouterr().out
    run = read_run(tmp_path / "run")
    scores, ids = load_index(index).search(encoder.encode_queries(questions), 9)
    assert list(run) == [f"q{i}" for i in range(7)]
    for i in range(7):
        assert list(run[f"q{i}"]) == ids[i]
        assert list(run[f"q{i}"].values()) == pytest.approx(scores[i].tolist(), abs=1e-5)


def test_texts_on_lines_are_shown_as_they_were_encoded(tmp_path, toy, small_model, capsys):
    lines, others = tmp_path / "lines.txt", tmp_path / "others.txt"
    lines.write_text("w1 w2 w3\n\nw7 w8 é\n", encoding="utf-8")
    others.write_text("w4\nw5\nw6\n", encoding="utf-8")
    toy.encode(small_model, lines, tmp_path / "emb")
    flags = [f"--embeddings={tmp_path}/emb", "--backend=exact", f"--output={tmp_path}/index"]
    assert command("index", *flags, f"--corpus={others}") == 1
    assert "others.txt is not the file that was encoded (lines.txt)" in capsys.readouterr().err
    assert not (tmp_path / "index").exists()
    assert command("index", *flags, f"--corpus={lines}") == 0
    capsys.readouterr()
    assert command("search", f"--index={tmp_path}/index", "--query=w1") == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {head[2]: snippet for head, snippet in zip(shown[::2], shown[1::2], strict=True)}
    assert found == {"1": ["w1", "w2", "w3"], "3": ["w7", "w8", "é"]}


@pytest.mark.parametrize("parts", [[], ["--parts=2"]])
def test_corpus_that_lacks_documents_is_refused_before_an_index_is_built(
    tmp_path, small_model, toy, texts, parts, capsys, monkeypatch
):
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", texts[:6])
    partial = toy.write_corpus(tmp_path / "partial.jsonl", texts[:5])
    more = toy.write_corpus(tmp_path / "more.jsonl", texts[:7])
    toy.encode(small_model, corpus, tmp_path / "emb")
    flags = [f"--embeddings={tmp_path}/emb", "--backend=exact", f"--output={tmp_path}/new/index", *parts]
    built = []
    build = ExactIndex.build.__func__
    counting = classmethod(lambda *args, **options: built.append(args) or build(*args, **options))
    monkeypatch.setattr(ExactIndex, "build", counting)
    capsys.readouterr()
    assert command("index", *flags, f"--corpus={partial}") == 1
    assert "lacks 1 of the 6 documents that were encoded, for example 'd5'" in capsys.readouterr().err
    assert not built and not (tmp_path / "new").exists()
    assert command("index", *flags, f"--corpus={more}") == 0, "a corpus with more documents is accepted"
    assert built and load_index(tmp_path / "new" / "index").documents["d5"].text == texts[5]


def test_search_prints_answers_to_a_query(index, capsys, texts):
    assert command("search", f"--index={index}", "--query=w1 w2", "--k=3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == ["1", "2", "3"]
    number = int(lines[0].split("[d")[1].rstrip("]"))
    assert f"Title {number}  [d{number}]" in lines[0]
    assert texts[number].startswith(lines[1].strip().removesuffix(" ..."))


def test_empty_query_is_refused(index, toy, tmp_path, capsys):
    with pytest.raises(UserError, match="the question ' ' has no visible characters"):
        Searcher.open(index).search(["w1", " "], 2)
    queries = toy.write_queries(tmp_path / "q.jsonl", ["w1", "\u200b"])
    assert command("search", f"--index={index}", f"--queries={queries}", f"--output={tmp_path}/run") == 1
    assert capsys.readouterr().err == f"error: {queries}:2: field 'text' is empty\n"


@pytest.mark.slow
def test_questions_through_a_pipe(index):
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with search_process(index, "--k=2", **pipe) as process:
        out, error = process.communicate(b"w1 w2\n\n\xe2\x80\x8b\n\xff\xfe w7\n", timeout=120)
    assert process.returncode == 0, error
    assert [line.split()[0] for line in out.decode().splitlines() if "Title" in line] == ["1", "2"] * 2
    assert b"question>" not in out
    assert error == b""


@pytest.mark.parametrize("ending", [pytest.param("end of file", marks=pytest.mark.slow), "interrupt"])
def test_questions_typed_at_a_terminal(index, ending):
    with search_at_a_terminal(index) as (process, master):
        shown = read_until(master, "question> ", process)
        assert "120 documents" in shown
        os.write(master, b"w1 w2 w3\n")
        shown = read_until(master, "question> ", process)
        assert shown.count("Title") == 5 and shown.count("w") > 10
        if ending == "end of file":
            os.write(master, b"\x04")
        else:
            time.sleep(0.5)  # readline notices an earlier signal only at the next key
            os.kill(process.pid, signal.SIGINT)
        shown = read_until(master, None, process)
        assert process.wait(30) == 0
    assert "Traceback" not in shown


DOCUMENTS = {
    "short": ("Sorting", "w1 w2"),
    "long": ("A title of several words that no narrow terminal shows in one line", "Procedures " * 40),
    "japanese": ("日本語の文書", "日本語の文は単語の間に空白がありません。行は文字の間で折り返します。" * 9),
    "address": ("w3", "see https://example.com/" + "path/" * 12 + "?page=1 for more \x1b[2J\x07"),
}


@pytest.mark.slow
def test_answers_are_wrapped_between_words_at_any_width(tmp_path, toy, small_model, monkeypatch):
    """The width of the terminal changes between answers."""
    records = [{"_id": i, "title": title, "text": text} for i, (title, text) in DOCUMENTS.items()]
    corpus = toy.write_jsonl(tmp_path / "corpus.jsonl", records)
    toy.encode(small_model, corpus, tmp_path / "emb")
    flags = [f"--embeddings={tmp_path}/emb", f"--corpus={corpus}", "--backend=exact"]
    assert command("index", *flags, f"--output={tmp_path}/index") == 0
    monkeypatch.delenv("COLUMNS", raising=False)
    with search_at_a_terminal(f"{tmp_path}/index") as (process, master):
        for width in (40, 80, 200, 20):
            fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
            if width == 40:
                read_until(master, "question> ", process)
            os.write(master, b"w1\n")
            _, *lines = read_until(master, "question> ", process).splitlines()
            shown = lines[: lines.index("")]
            wide = [len(line) + sum(unicodedata.east_asian_width(c) in "WF" for c in line) for line in shown]
            assert max(wide) <= width and (width == 200 or max(wide) > 0.8 * width)
            assert "\x1b" not in "".join(shown) and "\x07" not in "".join(shown)
            words = {word for line in shown for word in line.split()}
            title, text = DOCUMENTS["long"]
            assert {*title.split(), text.split()[0], "[long]", "..."} <= words
            assert all(word in {*text.split()} for word in words if "Proc" in word or "dures" in word)
            joined = "".join("".join(shown).split())
            assert DOCUMENTS["japanese"][1][:70] in joined and "path/" * 12 + "?page=1" in joined
            assert not any(line.strip().startswith(("。", "、")) for line in shown)


def read_until(master: int, wanted: str | None, process: subprocess.Popen) -> str:
    """Reads what a terminal shows until `wanted` comes (None: until it closes)."""
    shown = ""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if wanted is not None and wanted in shown:
            return shown
        if select.select([master], [], [], 0.2)[0]:
            try:
                block = os.read(master, 4096)
            except OSError:  # the terminal was closed at the other end
                block = b""
            if not block:
                break
            shown += block.decode(errors="replace")
    assert wanted is None, f"{wanted!r} was not shown, but:\n{shown}"
    return shown


def test_search_refuses_another_model(index, other_model, capsys):
    assert command("search", f"--index={index}", f"--model={other_model}", "--query=w1") == 1
    error = capsys.readouterr().err
    assert "the index cannot be searched with this model: it was made with" in error and other_model in error
    assert error.count("\n") == 1
