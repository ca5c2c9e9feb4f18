"""Expanded queries searched by BM25: ranks by hand, a sidecar that dies, bad input."""

import json
import os
import signal

import pytest

from jaxir import cli
from jaxir.data.expanded.candidates import read_candidates
from jaxir.evaluation import query_candidates
from jaxir.retrieval.indexes.lucene_index import build_lucene_index

DOCUMENTS = [
    ("frank", "Frankenstein", "A novel by Mary Shelley, about a monster."),
    ("drac", "Dracula", "A novel by Bram Stoker, about a vampire."),
    ("vamp", "Vampires", "A vampire is a monster that drinks blood."),
    ("blood", "Blood", "Blood is red."),
]
QUESTIONS = {"q1": "who wrote the vampire novel?", "q2": "what colour is it?", "q3": "zzz?"}
OUTPUTS = {"q1": ["Dracula", "it drinks blood", "Frankenstein by Mary Shelley"], "q2": ["blood"], "q3": []}
ANSWERS = {"q1": ["Bram Stoker"], "q2": ["green", "red"], "q3": ["red"]}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def folder(sidecar, tmp_path, write_corpus):
    build_lucene_index(write_corpus(*DOCUMENTS), tmp_path / "index")
    write(tmp_path / "queries.jsonl", [{"_id": i, "text": t} for i, t in QUESTIONS.items()])
    write(tmp_path / "made.jsonl", [{"_id": i, "outputs": o} for i, o in OUTPUTS.items()])
    write(tmp_path / "answers.jsonl", [{"_id": i, "answers": a} for i, a in ANSWERS.items()])
    return tmp_path


def flags(folder, *more, answers=True, name="out.jsonl"):
    found = [f"--index={folder}/index", f"--queries={folder}/queries.jsonl", f"--output={folder}/{name}"]
    found += [f"--answers={folder}/answers.jsonl"] if answers else []
    return [*found, f"--expansions={folder}/made.jsonl", *more]


def test_ranks_are_those_of_the_first_passage_with_an_answer(folder):
    assert cli.main("jaxir.expand:retrieve", flags(folder, "--depth=3")) == 0
    found = {some.id: some for some in read_candidates(folder / "out.jsonl")}
    assert list(found) == list(QUESTIONS)
    assert found["q1"].passages == ["drac", "vamp", "frank"]
    assert found["q1"].ranks == [1, 2, 2] and found["q1"].depth == 3
    assert (found["q2"].passages, found["q2"].ranks) == (["blood"], [1])
    assert (found["q3"].outputs, found["q3"].passages, found["q3"].ranks) == ([""], [None], [None])
    # `search` finds the same passage for each query.
    write(folder / "q.jsonl", [{"_id": str(n), "text": text} for n, text in enumerate(found["q1"].queries)])
    search = [f"--index={folder}/index", f"--queries={folder}/q.jsonl", f"--output={folder}/run", "--k=1"]
    assert cli.main("jaxir.search:search", search) == 0
    assert [line.split()[2] for line in (folder / "run").read_text().splitlines()] == found["q1"].passages
    # With answers_in=document titles count; a file made with other answers or answers_in is replaced.
    write(folder / "answers.jsonl", [{"_id": i, "answers": ["Dracula"]} for i in ANSWERS])
    for more, ranks in (([], [None] * 3), (["--answers_in=document"], [1, 2, 2])):
        assert cli.main("jaxir.expand:retrieve", flags(folder, "--depth=3", *more)) == 0
        assert next(read_candidates(folder / "out.jsonl")).ranks == ranks
    write(folder / "answers.jsonl", [{"_id": i, "answers": a} for i, a in ANSWERS.items()])
    # An answer below the depth is a miss; without answers only the first passages are written.
    assert cli.main("jaxir.expand:retrieve", flags(folder, "--depth=1", "--num_candidates=2")) == 0
    (some, *_) = read_candidates(folder / "out.jsonl")
    assert (some.outputs, some.ranks) == (OUTPUTS["q1"][:2], [1, None])
    assert cli.main("jaxir.expand:retrieve", flags(folder, answers=False)) == 0
    (some, *_) = read_candidates(folder / "out.jsonl")
    assert (some.ranks, some.depth, some.passages) == (None, 0, ["drac", "vamp", "frank"])


def test_bad_input_is_refused(folder, capsys):
    write(folder / "few.jsonl", [{"_id": "q1", "answers": ["x"]}])
    (folder / "lines.txt").write_text("one\ntwo\n")
    for more, sentence in (
        (f"--answers={folder}/few.jsonl", "2 of 3 questions lack answers, such as 'q2'"),
        (f"--expansions={folder}/lines.txt", "the file has 2 lines, but 3 texts with a line each have 3"),
        ("--index=absent", "absent is not an index"),
    ):
        kept = [flag for flag in flags(folder) if flag.partition("=")[0] != more.partition("=")[0]]
        assert cli.main("jaxir.expand:retrieve", [*kept, more]) == 1
        assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert cli.main("jaxir.expand:retrieve", flags(folder, "--depth=5", answers=False)) == 1
    assert "--depth only applies to --answers" in capsys.readouterr().err
    assert not list(folder.glob("*out.jsonl*"))


@pytest.mark.slow
def test_a_sidecar_that_dies_is_restarted(folder, sidecar, monkeypatch):
    monkeypatch.setitem(query_candidates.write_found.__kwdefaults__, "window", 1)
    assert cli.main("jaxir.expand:retrieve", flags(folder)) == 0
    found, windows = query_candidates.Retriever.found, []

    def killing(self, questions, done):
        windows.append(len(questions))
        if len(windows) == 2:
            os.kill(sidecar.pid, signal.SIGKILL)
        return found(self, questions, done)

    monkeypatch.setattr(query_candidates.Retriever, "found", killing)
    assert cli.main("jaxir.expand:retrieve", flags(folder, name="again.jsonl")) == 0
    assert windows == [1, 1, 1]
    assert (folder / "again.jsonl").read_bytes() == (folder / "out.jsonl").read_bytes()
