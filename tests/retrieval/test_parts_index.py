"""An index in parts answers as one index, and resumes its build."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxir import cli
from jaxir.core.errors import UserError
from jaxir.retrieval.indexes import parts_index
from jaxir.retrieval.indexes.base_index import build_index, load_index
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.parts_index import PartsIndex, build_in_parts, merge
from jaxir.retrieval.ranking.runs import read_run


@pytest.fixture(scope="module")
def many(toy):
    """Small whole numbers, so that many scores are equal, also of passages in different parts."""
    rng = np.random.default_rng(0)
    vectors = rng.integers(-2, 3, (103, 6)).astype(np.float32)
    ids = [f"d{i}{'é' * (i % 2)}" for i in rng.permutation(103)]
    return toy.stored(vectors, ids, 20), rng.integers(-2, 3, (300, 6)).astype(np.float32)


def exactly(some):
    return build_index(some, backend="exact"), None


@pytest.mark.slow
def test_parts_answer_as_one_index(many, tmp_path):
    passages, queries = many
    build_in_parts(passages, tmp_path / "index", 4, exactly, how={})
    index = load_index(tmp_path / "index")
    assert isinstance(index, PartsIndex) and index.info.settings == {"parts": 4, "backend": "exact"}
    whole = ExactIndex.build(passages.shards, passages.ids, similarity="dot")
    for k in (7, 200):
        scores, ids = index.search(queries, k)
        expected, names = whole.search(queries, k)
        assert scores.tolist() == expected.tolist() and ids == names
        assert len(set(expected[0].tolist())) < min(k, 30), "guard: ties"


def test_resume_keeps_finished_parts_and_refuses_other_embeddings_and_settings(many, tmp_path):
    passages, queries = many
    built, how = [], {"backend": "exact", "model": None}

    def build(some):
        if len(built) == 2:
            built.append([])
            raise KeyboardInterrupt
        built.append(some.ids)
        return exactly(some)

    with pytest.raises(KeyboardInterrupt):
        build_in_parts(passages, tmp_path / "index", 3, build, how=how)
    assert not (tmp_path / "index").exists()
    changed = {"input_sha256": "1" * 64, "fingerprint": "e" * 64, "tower": "query", "dtype": "bfloat16"}
    changed |= {"max_length": 9, "prompt": "passage: ", "text": "title", "expansion": "typical"}
    changed |= {"views": 10, "expansions_hash": "abc"}
    for name, value in changed.items():
        others = dataclasses.replace(passages, info=dataclasses.replace(passages.info, **{name: value}))
        field = parts_index.CALLED.get(name, rf"{name} \(.*, now {value!r:.40}\)")
        with pytest.raises(UserError, match=f"was started with another {field}"):
            build_in_parts(others, tmp_path / "index", 3, build, how=how)
    with pytest.raises(UserError, match=r"was started with another backend \('exact', now 'scann'\)"):
        build_in_parts(passages, tmp_path / "index", 3, build, how=how | {"backend": "scann"})
    build_in_parts(passages, tmp_path / "index", 3, build, how=how)
    assert [len(ids) for ids in built] == [34, 34, 0, 35] and [*itertools.chain(*built)] == passages.ids
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert len(load_index(tmp_path / "index").search(queries, 5)[1]) == 300


def test_command_builds_in_an_empty_directory_by_any_name(
    tmp_path, toy, small_model, other_model, monkeypatch, capsys
):
    """The output is the working directory or a link; parts of another model there are refused."""
    corpus = toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(9))
    for name, model in (("ours", small_model), ("other", other_model)):
        toy.encode(model, corpus, tmp_path / name)
    build = [f"--embeddings={tmp_path}/ours", "--backend=exact", "--parts=2"]
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main("jaxir.index:index", [*build, "--output=."]) == 0
    monkeypatch.chdir(tmp_path)
    assert cli.main("jaxir.index:index", [*build, "--output=link"]) == 0
    for name in ("here", "link"):
        assert load_index(name).info.settings["parts"] == 2
    assert (tmp_path / "link").is_symlink() and not list(tmp_path.glob(".*unfinished"))
    (tmp_path / "here").rename(tmp_path / ".here.unfinished")  # what a kill before the last step leaves
    build[0] = f"--embeddings={tmp_path}/other"
    capsys.readouterr()
    assert cli.main("jaxir.index:index", [*build, "--output=here"]) == 1
    assert "was started with another model: give the same" in capsys.readouterr().err


def test_merge_takes_parts_with_fewer_than_k_answers():
    found = [(np.float32([[3, 1, -np.inf]]), [["a", "b"]]), (np.float32([[3, 2]]), [["c", "d"]])]
    scores, ids = merge(found, 1, 3)
    assert (scores.tolist(), ids) == ([[3, 3, 2]], [["c", "a", "d"]])
    scores, ids = merge(found, 1, 6)
    assert ids == [["c", "a", "d", "b"]] and scores[0, 4:].tolist() == [-np.inf] * 2


def test_answers_of_all_processes_keep_their_ids(monkeypatch):
    """The ids have different lengths or characters beyond ASCII, or are missing."""
    sent = []

    def gather(x):
        sent.append(x)
        return np.stack([x, x])

    monkeypatch.setattr(parts_index.multihost_utils, "process_allgather", gather)
    scores, ids = np.array([[2, 1], [5, -np.inf]], np.float32), [["é0", "long-id"], ["x"]]
    for values, names in parts_index._of_all_processes(scores, ids):
        assert values.tolist() == scores.tolist() and names == ids
    assert sent[2].shape == (2, 2, 8)


def test_parts_index_refuses_bad_parts_ids_and_changes(many, tmp_path):
    passages, _ = many
    with pytest.raises(UserError, match="from 1 to the number of passages, 103, not 104"):
        build_in_parts(passages, tmp_path / "index", 104, exactly, how={})
    with pytest.raises(UserError, match="some ids of the embeddings occur twice"):
        twice = dataclasses.replace(passages, ids=[*passages.ids[1:], passages.ids[1]])
        build_in_parts(twice, tmp_path / "index", 2, exactly, how={})
    build_in_parts(passages, tmp_path / "index", 2, exactly, how={})
    with pytest.raises(UserError, match="cannot be changed in place"):
        load_index(tmp_path / "index").delete(passages.ids[:1])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_processes_build_and_search_as_one(tmp_path, toy, small_model):
    toy.write_corpus(tmp_path / "corpus.jsonl", toy.random_texts(90))
    toy.write_queries(tmp_path / "queries.jsonl", toy.random_texts(7, seed=1))
    toy.encode(small_model, tmp_path / "corpus.jsonl", tmp_path / "embeddings")
    build = ["--embeddings=embeddings", "--backend=exact", "--corpus=corpus.jsonl"]
    for name, flags, processes in (("whole", [], 1), ("parts", ["--parts=3"], 2)):
        folders = [tmp_path] * processes
        find = ["--queries=queries.jsonl", "--k=30", f"--index={name}", f"--output={name}.trec"]
        for command in (["index", *build, *flags, f"--output={name}"], ["search", *find]):
            done = toy.run_processes(*command, folders=folders)
            assert [status for status, *_ in done] == [0] * processes, done
    assert load_index(tmp_path / "parts").documents is not None
    expected, found = (read_run(tmp_path / f"{name}.trec") for name in ("whole", "parts"))
    assert found.keys() == expected.keys()
    for query, answers in expected.items():
        assert list(found[query]) == list(answers)
        assert list(found[query].values()) == pytest.approx(list(answers.values()), abs=1e-6)


@pytest.mark.slow
def test_scann_in_parts_has_no_lower_recall(toy, tmp_path):
    """Each part has its own tree, and searches as many of its leaves as it would alone."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(500, 16))
    vectors = (centres[rng.integers(0, 500, 45_000)] + 0.7 * rng.normal(size=(45_000, 16))).astype(np.float32)
    queries = (vectors[::150] + 0.3 * rng.normal(size=(300, 16))).astype(np.float32)
    passages = toy.stored(vectors, [f"d{i}" for i in range(len(vectors))], 20_000, "cosine")

    def build(some):
        return build_index(some, backend="scann"), None

    whole = build(passages)[0]
    build_in_parts(passages, tmp_path / "index", 2, build, how={})
    assert "leaves" in whole.info.settings, "guard: approximate"
    true = ExactIndex.build(passages.shards, passages.ids).search(queries, 10)[1]

    def recall(index) -> float:
        found = index.search(queries, 10)[1]
        return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, true, strict=True)])

    assert recall(load_index(tmp_path / "index")) >= recall(whole) - 0.002
