import json

import pytest

from jaxir import cli
from jaxir.core.errors import BadInputError, UserError
from jaxir.data.expanded.candidates import QueryCandidates, expanded, read_candidates, read_questions
from jaxir.data.formats.lines import OnBadInput
from jaxir.data.formats.sources import read_queries
from jaxir.data.sets.texts import SourcesAndTargets
from tests.beir_folder import write_jsonl as write

QUESTIONS = {"q1": "who wrote it ?", "q2": "when", "q3": "where?"}


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "queries.jsonl", [{"_id": i, "text": t} for i, t in QUESTIONS.items()])
    outputs = {"q2": ["then", "now", "then "], "q1": ["me"], "q3": []}
    write(tmp_path / "made.jsonl", [{"_id": i, "outputs": o} for i, o in outputs.items()])
    # The file has two titles for each question, one title a line.
    (tmp_path / "titles.txt").write_text("A title\nme\nnow\nSoon\nHere\nhere\n")
    return tmp_path


def candidates(folder, **changes):
    records = []
    for identifier, outputs, ranks in (("q1", ["a", "b", "c"], [None, 7, 2]), ("q2", ["d"], [None])):
        record = {"_id": identifier, "question": QUESTIONS[identifier], "outputs": outputs, "depth": 100}
        records.append(record | {"passages": [f"p{o}" for o in outputs], "ranks": ranks} | changes)
    return write(folder / "candidates.jsonl", records)


@pytest.mark.parametrize("question", ["who wrote it", "who wrote it?", " who wrote it ? "])
def test_a_question_is_joined_with_its_expansion(question):
    assert expanded(question, "Mary Shelley did") == "who wrote it ? Mary Shelley did"
    assert expanded(question, "") == question


def test_expansions_of_several_files_are_joined_without_repeats(folder):
    queries, made, lines = (folder / name for name in ("queries.jsonl", "made.jsonl", "titles.txt"))
    found = read_questions(queries, [made])
    assert {some.id: some.outputs for some in found} == {"q1": ["me"], "q2": ["then", "now"], "q3": [""]}
    assert found[2].queries == ["where?"], "it has no expansion"
    both = read_questions(queries, [made, lines], lines_each=2)
    assert [some.outputs for some in both] == [["me", "A title"], ["then", "now", "Soon"], ["Here", "here"]]
    first = read_questions(queries, [lines], lines_each=2, limit=1)
    assert [some.outputs for some in first] == [["A title"], ["now"], ["Here"]]
    bare = read_questions(queries, [made], limit=1, with_question=True)
    assert [some.outputs for some in bare] == [["me", ""], ["then", ""], [""]]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"q1": "who wrote it ? a", "q2": "when ? d"}),
        (["--place=2"], {"q1": "who wrote it ? b"}),
        (["--by=concat"], {"q1": "who wrote it ? a b c", "q2": "when ? d"}),
        (["--by=oracle"], {"q1": "who wrote it ? c", "q2": "when ? d"}),
        (["--by=oracle", "--num_candidates=2"], {"q1": "who wrote it ? b", "q2": "when ? d"}),
    ],
)
def test_a_query_is_chosen_without_a_model(folder, flags, expected):
    command = [f"--candidates={candidates(folder)}", f"--output={folder}/out.jsonl", *flags]
    assert cli.main("jaxir.expand:choose", command) == 0
    assert {query.id: query.text for query in read_queries(folder / "out.jsonl")} == expected


def test_the_first_of_a_file_of_expansions_is_greedy_gar(folder):
    flags = [f"--queries={folder}/queries.jsonl", f"--expansions={folder}/made.jsonl"]
    assert cli.main("jaxir.expand:choose", [*flags, f"--output={folder}/out.jsonl"]) == 0
    texts = [query.text for query in read_queries(folder / "out.jsonl")]
    assert texts == ["who wrote it ? me", "when ? then", "where?"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": [1, 2]}, "have different lengths"),
        ({"ranks": [1, 2, 0]}, "not a line of candidates"),
        ({"outputs": []}, "not a line of candidates"),
        ({"ranks": [1, 2, 101]}, "a rank exceeds 'depth'"),
        ({"_id": "q1", "passages": [], "ranks": []}, "duplicate id 'q1'"),
        ({"question": " "}, "'question' is empty"),
    ],
)
def test_malformed_candidates_are_refused(folder, changes, sentence):
    with pytest.raises(BadInputError, match=sentence):
        list(read_candidates(candidates(folder, **changes)))


def test_unsuitable_candidates_and_flags_are_refused(folder, capsys):
    with pytest.raises(UserError, match="is 90, but must exceed the depth 100"):
        list(QueryCandidates(path=str(candidates(folder)), max_rank=90).questions())
    path = candidates(folder, ranks=[])
    with pytest.raises(UserError, match=r"has no ranks, .* --answers=FILE"):
        list(QueryCandidates(path=str(path)).questions())
    for flags, sentence in (
        (["--by=oracle"], "choosing the best query needs ranks"),
        (["--place=4"], "no question has 4 candidates"),
        (["--by=concat", "--place=2"], "--place only applies to --by=place"),
        (["--lines_each=2"], "--lines_each only applies to --expansions"),
        (["--queries=absent"], "give --candidates, or --queries and --expansions"),
    ):
        command = [f"--candidates={path}", f"--output={folder}/out.jsonl", *flags]
        assert cli.main("jaxir.expand:choose", command) == 1
        assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not (folder / "out.jsonl").exists()


def test_malformed_passages_can_be_skipped(folder, capsys):
    path, corpus = candidates(folder), folder / "corpus.jsonl"
    write(corpus, [{"_id": f"p{x}", "title": "", "text": f"passage {x}"} for x in "abcd"])
    corpus.write_text(corpus.read_text() + "no JSON\n")
    source = QueryCandidates(path=str(path), corpus=str(corpus))
    with pytest.raises(BadInputError, match=r"corpus.jsonl:5"):
        list(source.records(OnBadInput("stop")))
    policy = OnBadInput("skip")
    records = list(source.records(policy))
    assert [record["passages"][0] for record in records] == [("pa", "passage a"), ("pd", "passage d")]
    assert policy.skipped.total() == 1


def test_folds_hold_questions_out_of_their_generators_targets(tmp_path, capsys):
    questions = [{"_id": f"q{n}", "text": f"what is number {n}?"} for n in range(40)]
    write(tmp_path / "queries.jsonl", questions)
    targets = [{"source": q["text"].upper(), "target": f"{n}"} for q in questions for n in range(2)]
    write(tmp_path / "targets.jsonl", targets)
    flags = [f"--targets={tmp_path}/targets.jsonl", f"--queries={tmp_path}/queries.jsonl"]
    assert cli.main("jaxir.expand:folds", [*flags, f"--output={tmp_path}/out", "--folds=3"]) == 0
    assert "have no question" not in capsys.readouterr().out

    def records(name):
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    asked = [records(f"out/queries-{k}.jsonl") for k in (1, 2, 3)]
    assert sorted(r["_id"] for some in asked for r in some) == sorted(q["_id"] for q in questions)
    for k, some in enumerate(asked, 1):
        held_out = {r["text"].upper() for r in some}
        learned = [r["source"] for r in records(f"out/targets-{k}.jsonl")]
        assert held_out.isdisjoint(learned) and len(learned) == 80 - 2 * len(held_out)
    write(tmp_path / "targets.jsonl", [*targets, {"source": "another", "target": "x"}])
    assert cli.main("jaxir.expand:folds", [*flags, f"--output={tmp_path}/other", "--folds=3"]) == 0
    assert "; 1 of 81 targets have no question in" in capsys.readouterr().out
    # The order of the files does not matter.
    write(tmp_path / "queries.jsonl", questions[::-1])
    assert cli.main("jaxir.expand:folds", [*flags, f"--output={tmp_path}/again", "--folds=3"]) == 0
    assert records("again/queries-2.jsonl") == asked[1][::-1]
    for more, sentence in ((["--folds=30"], "too few for 30 folds"), (["--folds=1"], "of at least 2")):
        assert cli.main("jaxir.expand:folds", [*flags, f"--output={tmp_path}/no", *more]) != 0
        assert sentence in capsys.readouterr().err
    write(tmp_path / "targets.jsonl", [{"source": "another", "target": "x"}])
    assert cli.main("jaxir.expand:folds", [*flags, f"--output={tmp_path}/no"]) == 1
    assert "none of its sources is a question" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_targets_are_answers_sentences_or_titles(folder, capsys):
    corpus = [
        {"_id": "d1", "title": "Novels", "text": "Novels are long. This one has no author."},
        {"_id": "d2", "title": "Frankenstein", "text": "A novel. Mary Shelley wrote it. Shelley was young."},
        {"_id": "d3", "title": "", "text": "It was then, in 1818."},
        {"_id": "d4", "title": "Authors", "text": "Percy Shelley was one."},
    ]
    write(folder / "corpus.jsonl", corpus)
    answers = {"q1": ["Shelley"], "q2": ["1818", "x"]}
    write(folder / "answers.jsonl", [{"_id": q, "answers": some} for q, some in answers.items()])
    ranked = {"q1": ["d1", "d2"], "q2": ["d2", "d3"], "q3": ["d1"]}
    run = [f"{q} Q0 {d} 0 {9 - n} t\n" for q, found in ranked.items() for n, d in enumerate(found)]
    (folder / "run.trec").write_text("".join(run))
    (folder / "qrels.tsv").write_text("q1\td2\t1\nq2\td3\t1\n")
    (folder / "later.trec").write_text("q1 Q0 d4 1 9 t\nq1 Q0 d2 2 8 t\n")  # d4 is last in the corpus
    common = [f"--queries={folder}/queries.jsonl", f"--answers={folder}/answers.jsonl"]
    sentences = ["Mary Shelley wrote it.", "It was then, in 1818."]
    run, texts = f"--run={folder}/run.trec", f"--corpus={folder}/corpus.jsonl"
    for kind, more, expected in (
        ("answer", [], ["Shelley", "1818"]),
        ("sentence", [run, texts], sentences),
        ("title", [run, texts], ["Frankenstein"]),
        ("title", [f"--run={folder}/later.trec", texts], ["Authors"]),
        ("sentence", [f"--qrels={folder}/qrels.tsv", texts], sentences),
    ):
        out = folder / "targets.jsonl"
        command = [*common, *more, f"--kind={kind}", f"--output={out}"]
        assert cli.main("jaxir.expand:targets", command) == 0
        records = list(SourcesAndTargets(path=str(out)).records(OnBadInput("stop")))
        assert [r["target"][1] for r in records] == expected
        assert records[0]["source"][1] == QUESTIONS["q1"]
        assert f"{len(expected)} targets; {3 - len(expected)} questions have" in capsys.readouterr().out
    # The answer is only in a title.
    write(folder / "novels.jsonl", [{"_id": "q1", "answers": ["Frankenstein"]}])
    flags = [common[0], f"--answers={folder}/novels.jsonl", run, texts, "--kind=title", f"--output={out}.2"]
    assert cli.main("jaxir.expand:targets", flags) == 1
    assert "no question has a target" in capsys.readouterr().err
    assert cli.main("jaxir.expand:targets", [*flags, "--answers_in=document"]) == 0
    for more, sentence in (
        (["--kind=sentence", texts, run, "--answers_in=document"], "only applies to --kind=title"),
        (["--kind=title", run], "needs --corpus, and either --run or --qrels"),
        (["--kind=answer", texts], "--corpus only applies to --kind=sentence and --kind=title"),
        (["--kind=title", f"--qrels={folder}/other.tsv", texts], "no question has a target"),
    ):
        (folder / "other.tsv").write_text("q1\td1\t1\n")
        assert cli.main("jaxir.expand:targets", [*common, *more, f"--output={folder}/no.jsonl"]) == 1
        assert sentence in capsys.readouterr().err.splitlines()[-1]
    assert not (folder / "no.jsonl").exists()
