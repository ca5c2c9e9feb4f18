import json
from pathlib import Path

import pytest

from jaxir.core.errors import UserError
from jaxir.core.features import TextFormat
from jaxir.data.batches.mixture import Mixture
from jaxir.data.formats.sources import stable_keys
from jaxir.data.seqio.seqio_pairs import SeqioPairs
from jaxir.data.sets import beir_sets
from jaxir.data.sets.beir_sets import BEIR_SETS
from jaxir.data.sets.dpr import DprPairs
from jaxir.data.sets.msmarco import MsMarcoPairs, MsMarcoTriples
from jaxir.data.sets.multireqa import MultiReqaPairs
from jaxir.data.sets.natural_questions import NaturalQuestionsPairs
from jaxir.data.sets.pair_sources import BeirPairs
from jaxir.data.sets.tfds_beir import TfdsBeirPairs
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.objectives.pair_batch import pair_features
from jaxir.tasks import beir, msmarco, multireqa
from jaxir.tasks import natural_questions as nq
from tests.data import published
from tests.dataset_rows import rows

seqio = pytest.importorskip("seqio")

# From the paper's recipes (gin/models/t5_1_1/encoder.gin).
LENGTHS = {"query_length": 64, "passage_length": 256}


@pytest.fixture(scope="module")
def tokenizer(minilm_folder):
    return Tokenizer.load(minilm_folder)


def write_beir(folder: Path, splits: tuple[str, ...], rows: int = 3, query_id: str = "q") -> None:
    name = folder.name
    corpus = [{"_id": f"d{i}", "title": f"T{i}", "text": f"about {name} {i}"} for i in range(rows)]
    queries = [{"_id": f"{query_id}{i}", "text": f"{name} question {i}"} for i in range(rows)]
    published.write_lines(folder / "corpus.jsonl", list(map(json.dumps, corpus)))
    published.write_lines(folder / "queries.jsonl", list(map(json.dumps, queries)))
    judged = ["query-id\tcorpus-id\tscore", *(f"{query_id}{i}\td{i}\t1" for i in range(rows))]
    for split in splits:
        published.write_lines(folder / f"qrels/{split}.tsv", judged)


def assert_same_batches(tokenizer, name, split, source, **extra):
    """Compares all examples with and without SeqIO, regardless of their order."""
    features = pair_features(TextFormat(**LENGTHS, **extra))
    task = SeqioPairs(mixture=name, split=split).build(tokenizer, features)
    plain = source.build(tokenizer, features)
    assert task.num_examples == plain.num_examples > 0 and task.features == plain.features
    a, b = task.once(), plain.once()
    assert a.keys() == b.keys() and a["query_ids"].shape == (plain.num_examples, 64)
    negatives = [name for name in a if name.startswith("negative")]
    assert rows(a, negatives) == rows(b, negatives)
    assert seqio.get_mixture_or_task(name).splits


def test_msmarco(tokenizer, tmp_path):
    folder = str(published.write_msmarco(tmp_path))
    name = msmarco.msmarco(directory=folder)
    assert set(seqio.TaskRegistry.get(name).splits) == {"train", "dev.small"}
    for split in ("train", "dev.small"):
        assert_same_batches(tokenizer, name, split, MsMarcoPairs(directory=folder, split=split))
    triples = msmarco.msmarco_triples(directory=folder, max_negatives=1)
    source = MsMarcoTriples(directory=folder, max_negatives=1)
    assert_same_batches(tokenizer, triples, "train", source, num_negatives=1)


@pytest.mark.parametrize("dataset", ["NaturalQuestions", "SQuAD"])
def test_multireqa(tokenizer, tmp_path, dataset):
    stem = {"NaturalQuestions": "NaturalQuestionsShort"}.get(dataset, dataset)
    for split in ("train", "dev"):
        mrqa, candidates = published.write_multireqa(tmp_path, split, dataset)
        mrqa.rename(mrqa.with_name(f"{stem}.jsonl.gz"))
    where = {"mrqa_directory": str(tmp_path / "mrqa")}
    where["multireqa_directory"] = str(tmp_path / "MultiReQA/data")
    name = multireqa.multireqa(dataset=dataset, **where)
    source = MultiReqaPairs(mrqa=str(mrqa.with_name(f"{stem}.jsonl.gz")), candidates=str(candidates))
    assert_same_batches(tokenizer, name, "dev", source)
    assert {"TriviaQA-web", "TriviaQA"} == set(multireqa.DATA_SETS["TriviaQA"].mrqa)


def test_multireqa_names_missing_data(tmp_path):
    where = {"mrqa_directory": str(tmp_path), "multireqa_directory": str(tmp_path)}
    with pytest.raises(UserError, match=r"no training data 'SQUAD' .*did you mean 'SQuAD'"):
        multireqa.multireqa(dataset="SQUAD", **where)
    with pytest.raises(UserError, match=r"there is no .*train/NaturalQuestionsShort.jsonl.gz nor"):
        multireqa.multireqa(dataset="NaturalQuestions", **where)


def test_natural_questions(tokenizer, tmp_path):
    records = {"train": [published.nq_record(1, "what is it", published.PARAGRAPH)]}
    records["train"].append(published.nq_record(2, "no", (-1, -1)))
    records["dev"] = [published.nq_dev_record(3, "since when", published.TABLE, published.PARAGRAPH)]
    paths = {split: str(tmp_path / f"{split}.jsonl.gz") for split in records}
    for split, path in paths.items():
        published.write_lines(Path(path), list(map(json.dumps, records[split])))
    name = nq.natural_questions(**paths)
    for split, path in paths.items():
        assert_same_batches(tokenizer, name, split, NaturalQuestionsPairs(path=path))
    path = published.write_lines(tmp_path / "dpr.json", [json.dumps(published.dpr_records(), indent=4)])
    name = nq.open_natural_questions(train=str(path), dev=str(path))
    assert_same_batches(tokenizer, name, "train", DprPairs(path=str(path)), num_negatives=2)


def test_all_sets_of_beir_as_downloaded(tokenizer, tmp_path):
    for dataset in (*sorted(set(BEIR_SETS) - {"cqadupstack"}), "cqadupstack/gis", "msmarco"):
        splits = beir_sets.beir_set(dataset).splits
        write_beir(tmp_path / dataset, splits)
        name = beir.beir_set(dataset=dataset, directory=str(tmp_path))
        assert name.startswith("beir_" + dataset.replace("/", "_").replace("-", "_"))
        assert set(seqio.TaskRegistry.get(name).splits) == set(splits)
    source = BeirPairs(directory=str(tmp_path / dataset), split=splits[-1])
    assert_same_batches(tokenizer, name, splits[-1], source)


def test_a_downloaded_set_without_its_splits_is_refused(tmp_path):
    write_beir(tmp_path / "fiqa", ("train", "test"))
    with pytest.raises(UserError, match=r"fiqa has no split 'dev' \(has: test, train\)"):
        beir.beir_set(dataset="fiqa", directory=str(tmp_path))


def test_tasks_over_tfds(tokenizer, tmp_path):
    row = published.beir_row("q1", "a question", "d1", "an answer", 1.0, "Title")
    splits = {"train": [row] * 3, "validation": [row], "test": [row]}
    published.store_tfds(tmp_path, "beir/nfcorpus", splits)
    name = beir.tfds_beir(dataset="nfcorpus", data_dir=str(tmp_path))
    assert set(seqio.TaskRegistry.get(name).splits) == {"train", "dev", "test"}
    source = TfdsBeirPairs(name="beir/nfcorpus", split="validation", data_dir=str(tmp_path))
    assert_same_batches(tokenizer, name, "dev", source)

    _, candidates = published.write_multireqa(tmp_path, "train")
    published.write_multireqa(tmp_path, "dev")
    where = {"multireqa_directory": str(candidates.parents[2]), "data_dir": str(tmp_path)}
    name = multireqa.tfds_multireqa(dataset="SQuAD", **where)
    assert set(seqio.TaskRegistry.get(name).splits) == {"train", "dev"}
    assert nq.tfds_natural_questions(data_dir=str(tmp_path)) in seqio.TaskRegistry.names()


@pytest.mark.slow
def test_a_mixture_of_tasks_takes_each_batch_from_one_of_them(tokenizer, tmp_path):
    names = {}
    for kind in ("red", "blue"):
        write_beir(tmp_path / kind, ("train",), rows=24, query_id=kind)
        names[kind] = beir.beir(directory=str(tmp_path / kind), name=f"mixed_{kind}")
    seqio.MixtureRegistry.add("red_and_blue", [(names["red"], 3), (names["blue"], 1)])
    known = {key.tobytes(): kind for kind in names for key in stable_keys([f"{kind}{i}" for i in range(24)])}

    def kinds(data, count=60):
        batches = data.build(tokenizer, pair_features(TextFormat(**LENGTHS))).batches(batch_size=4, seed=0)
        return [{known[key.tobytes()] for key in next(batches)["query_key"]} for _ in range(count)]

    drawn = kinds(SeqioPairs(mixture="red_and_blue"))
    assert all(len(found) == 1 for found in drawn)
    assert 30 < sum(found == {"red"} for found in drawn) < 58
    assert {"red", "blue"} in kinds(SeqioPairs(mixture="red_and_blue", mix_within_batch=True), 20)

    sources = [SeqioPairs(mixture=names["red"]), BeirPairs(directory=str(tmp_path / "blue"))]
    assert kinds(Mixture(sources=sources, mix_within_batch=True), 5) == [{"red", "blue"}] * 5
