"""A reader's data and answers: questions joined with passages, drawn targets, inconsistent files."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.models.decoding import Decoding
from jaxir.objectives.reader import FusionInDecoder
from jaxir.objectives.seq2seq import Seq2Seq
from jaxir.retrieval.answering.answer_writer import Reader, write_answers
from jaxir.retrieval.answering.answered import AnsweredQuestions, dev_questions
from jaxir.retrieval.answering.questions import read_questions
from jaxir.retrieval.ranking.runs import write_run
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.evaluators.evaluation_context import Bench
from jaxir.training.evaluators.loss import Loss
from jaxir.training.evaluators.reading import Reading

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "seq2seq_1_1"
QUESTIONS = {"q0": "who sat", "q1": "where is  the mat", "q2": "what do mice eat", "q3": "who chases mice"}
DOCUMENTS = {
    "d0": ("The Cat", "the cat sat on the mat"),
    "d1": ("", "a dog and a cat"),
    "d2": ("Mice", "mice eat the cheese that was left on the table last night"),
    "d3": ("Cats", ""),
    "d4": ("", "unread"),
}
RUN = {"q2": ["d2", "d0", "d1"], "q0": ["d0", "d1", "d3"], "q1": ["d3", "d2"]}
ANSWERS = {"q0": ["cat", "the cat", "a cat"], "q1": ["on"], "q2": ["cheese", "the cheese"], "q9": ["x"]}
FORM = TextFormat(6, 40, passage_prompt="read: ")


def ranked(run) -> dict[str, dict[str, int]]:
    return {query: {d: 9 - n for n, d in enumerate(some)} for query, some in run.items()}


@pytest.fixture
def folder(tmp_path, toy):
    jsonl = toy.write_jsonl
    jsonl(tmp_path / "queries.jsonl", [{"_id": i, "text": text} for i, text in QUESTIONS.items()])
    documents = [{"_id": i, "title": title, "text": text} for i, (title, text) in DOCUMENTS.items()]
    jsonl(tmp_path / "corpus.jsonl", documents)
    jsonl(tmp_path / "answers.jsonl", [{"_id": i, "answers": some} for i, some in ANSWERS.items()])
    write_run(tmp_path / "run.trec", ranked(RUN))
    return tmp_path


@pytest.fixture(params=["tokenizer.json", "sentencepiece"])
def tokenizer(request):
    if request.param == "sentencepiece":
        return Tokenizer.load(request.getfixturevalue("sentencepiece_folder"))
    return Tokenizer.load(GOLDEN)


def read(folder, tokenizer, *, passages=3, length=40, prompt=""):
    files = (folder / name for name in ("run.trec", "queries.jsonl", "corpus.jsonl"))
    return read_questions(*files, tokenizer, passages=passages, length=length, prompt=prompt)


def joint(question: str, document: str) -> str:
    title, text = DOCUMENTS[document]
    return f"question: {QUESTIONS[question]} {f'title: {title} ' if title else ''}context: {text}"


@pytest.mark.parametrize("length", [100, 28])
def test_reader_text_is_cut_at_its_end(folder, tokenizer, length, capsys):
    questions = read(folder, tokenizer, length=length, prompt="read: ")
    assert questions.ids == ["q0", "q1", "q2"]
    assert "1 of 4 questions of" in (note := capsys.readouterr().err) and "have no passages in" in note
    sources = questions.sources(np.array([2, 0, 1]))
    assert sources.shape == (3, 3, length) and sources.dtype == np.int32
    for ids, question in zip(sources, ["q2", "q0", "q1"], strict=True):
        texts = ["read: " + joint(question, document) for document in RUN[question]]
        expected = tokenizer.encode_batch(texts, max_length=length)
        for passage, tokens in zip(ids, expected, strict=False):
            np.testing.assert_array_equal(passage, np.pad(tokens, (0, length - len(tokens))))
    assert not sources[2, 2].any() and sources[2, 1].any(), "one question has a passage less"
    fewer = read(folder, tokenizer, passages=1, length=length, prompt="read: ")
    np.testing.assert_array_equal(fewer.sources(np.arange(3)), questions.sources(np.arange(3))[:, :1])
    again = read(folder, tokenizer, length=length, prompt="read: ")
    assert fewer.fingerprint != questions.fingerprint == again.fingerprint


@pytest.fixture
def data(folder):
    settings = {"run": f"{folder}/run.trec", "directory": str(folder), "answers": f"{folder}/answers.jsonl"}
    return AnsweredQuestions(**settings)


def test_targets_are_drawn_again_at_each_step(data):
    tokenizer, features = Tokenizer.load(GOLDEN), FusionInDecoder(passages=2).features(FORM)
    dataset = data.build(tokenizer, features)
    assert (dataset.num_examples, dataset.answers[0]) == (3, ANSWERS["q0"])
    again = data.build(tokenizer, features)
    assert again.fingerprint == dataset.fingerprint
    steps = [batch for batch, _ in zip(dataset.batches(batch_size=2, seed=3), range(60), strict=False)]
    assert steps[0]["source_ids"].shape == (2, 2, 40) and steps[0]["target_ids"].shape == (2, 6)
    drawn = {question: set() for question in ("q0", "q1", "q2")}
    ends = dict(zip(drawn, dataset.questions.sources(np.arange(3)), strict=True))
    for batch in steps:
        for source, target in zip(batch["source_ids"], batch["target_ids"], strict=True):
            question = next(q for q, ids in ends.items() if np.array_equal(ids, source))
            drawn[question].add(tokenizer.decode(target[target != 0]))
    # Every answer of a question is drawn, and no other question's answer.
    cut = {q: [*map(tokenizer.decode, tokenizer.encode_batch(ANSWERS[q], max_length=6))] for q in drawn}
    expected = {q: set(texts) for q, texts in cut.items()}
    assert drawn == expected and len(expected["q0"]) == 3
    for start in (0, 7):  # batches depend on the step alone, with any number of processes
        how = {"batch_size": 2, "seed": 3, "start_step": start}
        later = dataset.batches(**how)
        parts = [again.batches(**how, process_index=i, process_count=2) for i in (0, 1)]
        for batch in steps[start : start + 20]:
            whole, *shares = next(later), *(next(part) for part in parts)
            for name, array in batch.items():
                np.testing.assert_array_equal(whole[name], array)
                np.testing.assert_array_equal(np.concatenate([s[name] for s in shares]), array)
    once = dataset.once()
    found = sorted(tokenizer.decode(t[t != 0]) for t in once["target_ids"])
    assert found == sorted(texts[0] for texts in cut.values())


def test_split_reads_only_its_judged_questions(folder, data, toy, capsys):
    tokenizer, features = Tokenizer.load(GOLDEN), FusionInDecoder(passages=2).features(FORM)
    for split, judged in {"train": ["q2", "q3", "q0"], "dev": ["q1"], "test": ["q3"]}.items():
        toy.write_qrels(folder, split, {query_id: {"d0": 1} for query_id in judged})

    def read_of(split):
        return dataclasses.replace(data, split=split).build(tokenizer, features).questions.ids

    assert read_of("train") == ["q0", "q2"] and "1 of 3 questions of" in capsys.readouterr().err
    assert read_of("dev") == ["q1"] and not capsys.readouterr().err
    assert read_of(None) == ["q0", "q1", "q2"]
    with pytest.raises(UserError, match="no split 'tran'"):
        read_of("tran")
    with pytest.raises(UserError, match="has no passages for any question of the split"):
        read_of("test")
    assert dev_questions(None, "x", "y") is None
    dev = dev_questions(data.run, data.directory, data.answers, "dev")
    assert dev.build(tokenizer, features).questions.ids == ["q1"]


def without(name: str, identifier: str):
    def spoil(folder: Path) -> None:
        path = folder / name
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["_id"] != identifier))

    return spoil


def test_evaluators_of_equal_data_share_what_is_read(data, monkeypatch):
    """Gin makes two equal objects of data that it names twice; the passages must be read once."""
    built, build = [], AnsweredQuestions.dataset

    def dataset(self, *args):
        built.append(build(self, *args))
        return built[-1]

    monkeypatch.setattr(AnsweredQuestions, "dataset", dataset)
    monkeypatch.setattr(Bench, "texts", lambda *_: None)
    bench = Bench(
        tokenizer=Tokenizer.load(GOLDEN), form=FORM, objective=FusionInDecoder(passages=3),
        training_data=None, batch_size=2, partitioner=MeshConfig().build(jax.devices()[:1]),
    )  # fmt: skip
    Loss(data=data).prepare(bench)
    Reading(data=dataclasses.replace(data)).prepare(bench)
    assert len(built) == 1


BAD = {
    "unknown question": (without("queries.jsonl", "q2"), "queries.jsonl lacks 'q2', a query of "),
    "unknown document": (without("corpus.jsonl", "d2"), r"lacks 'd2', which .* \(1 of 4 documents"),
    "no answers": (without("answers.jsonl", "q1"), r"lacks answers to 'q1', a question of .* \(1 of 3 lack"),
    "a shallow run": (
        lambda f: write_run(f / "run.trec", ranked({q: some[:1] for q, some in RUN.items()})),
        "has at most 1 passages per question, but the reader reads 2",
    ),
}


@pytest.mark.parametrize("how", BAD)
def test_inconsistent_files_are_refused(folder, data, how):
    spoil, sentence = BAD[how]
    spoil(folder)
    with pytest.raises(UserError, match=sentence):
        data.build(Tokenizer.load(GOLDEN), FusionInDecoder(passages=2).features(FORM))


def test_unsuitable_objective_length_or_tokenizer_is_refused(folder, data):
    with pytest.raises(UserError, match="FusionInDecoder, but this one reads source, target"):
        data.build(Tokenizer.load(GOLDEN), Seq2Seq().features(FORM))
    with pytest.raises(UserError, match="no room for passages in 8 tokens"):
        read(folder, Tokenizer.load(GOLDEN), length=8)
    with pytest.raises(UserError, match="adds 2 special tokens to a text"):
        read(folder, Tokenizer.load(GOLDEN.parent / "bert"))


@pytest.fixture(scope="module")
def loaded():
    return model_dir.load(f"hf:{GOLDEN}", kind="seq2seq")


HOW = Decoding(max_new_tokens=8)


@pytest.fixture
def many(folder, toy):
    questions = [{"_id": f"q{i}", "text": "who sat " * (1 + i % 3)} for i in range(11)]
    toy.write_jsonl(folder / "queries.jsonl", questions)
    run = {f"q{i}": [f"d{(i + n) % 5}" for n in range(1 + i % 3)] for i in range(11)}
    write_run(folder / "run.trec", ranked(run))
    return read(folder, Tokenizer.load(GOLDEN))


@pytest.mark.slow
def test_answers_equal_the_models_for_any_batch_and_devices(loaded, many):
    model, examples = loaded.model, np.array([4, 0, 10, 2, 3, 9, 8])
    tokens = jax.jit(lambda ids: model.generate(ids, HOW))(many.sources(examples))
    places = (jax.devices()[:1], jax.devices())
    one, all_ = (Reader(loaded, spec="x", devices=devices, batch_tokens=256) for devices in places)
    expected = [one._texts(outputs) for outputs in np.asarray(tokens)]
    assert len({tuple(texts) for texts in expected}) > 2
    done = []
    assert one.answer(many, examples, HOW, on_batch=done.append) == expected
    assert sum(done) == 7 and len(done) > 1
    assert all_.runner.partitioner.mesh.size == jax.device_count() > 1
    assert all_.answer(many, examples, HOW) == expected


@pytest.mark.usefixtures("many")
def test_passages_are_padded_to_few_lengths(loaded, folder, monkeypatch):
    reader, lengths = Reader(loaded, spec="x", devices=jax.devices()[:1]), []
    none = np.zeros([0, 1, 1], np.int32)
    monkeypatch.setattr(reader.runner, "run", lambda _, rows, **__: lengths.extend(map(len, rows)) or none)
    questions = read(folder, reader.tokenizer, length=61)
    reader.answer(questions, np.arange(11), HOW)
    found = [length // questions.passages for length in lengths]
    longest = (questions.sources(np.arange(11)) != 0).sum(-1).max(-1).tolist()
    assert len(set(found)) < len(set(longest)) and max(longest) == 61
    assert found == [min(-(-length // 8) * 8, 61) for length in longest]


def test_interrupted_answers_resume_to_the_same_output(loaded, many, tmp_path, monkeypatch):
    reader = Reader(loaded, spec="x", devices=jax.devices()[:1])
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    report = write_answers(reader, many, whole, HOW, window=4)
    assert (report.texts, str(report).split(",")[0]) == (11, "11 texts")
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [line["_id"] for line in lines] == many.ids and all(len(line["outputs"]) <= 1 for line in lines)
    calls, real = [], reader.answer

    def stopping(questions, examples, *args, **kwargs):
        calls.append(len(examples))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(questions, examples, *args, **kwargs)

    monkeypatch.setattr(reader, "answer", stopping)
    with pytest.raises(KeyboardInterrupt):
        write_answers(reader, many, cut, HOW, window=4)
    assert not cut.exists()
    with pytest.raises(UserError, match="was started with another num_beams"):
        write_answers(reader, many, cut, Decoding(max_new_tokens=8, num_beams=2), window=4)
    with pytest.raises(UserError, match="was started with another max_length"):
        write_answers(reader, read(tmp_path, reader.tokenizer, length=32), cut, HOW, window=4)
    write_answers(reader, many, cut, HOW, window=4)
    assert calls == [4, 4, 4, 3] and cut.read_bytes() == whole.read_bytes()
