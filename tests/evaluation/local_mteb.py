"""Tasks of MTEB with local data, and programs that evaluate models on them; run by the Python of `.mteb`.

python -m tests.evaluation.local_mteb PROGRAM FOLDER MODEL
"""

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

import mteb
import numpy as np
import sentence_transformers
from datasets import Dataset, DatasetDict
from mteb.abstasks import AbsTaskClassification, AbsTaskClustering, AbsTaskRetrieval, AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer

import jaxir.mteb
from jaxir import DualEncoder, quantize_embeddings
from jaxir.data.formats.sources import read_documents, read_queries
from jaxir.evaluation.judgements import read_judgements

WORDS = ("cat", "dog", "bird", "fish")


def about(name: str, kind: str, score: str, **more: Any) -> TaskMetadata:
    unknown = ("date", "domains", "task_subtypes", "license", "annotations_creators", "dialect")
    return TaskMetadata(
        name=name,
        type=kind,
        main_score=score,
        description="a local task",
        dataset={"path": "local/data", "revision": "1"},
        category="t2t",
        reference=None,
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        sample_creation=None,
        bibtex_citation=None,
        **dict.fromkeys(unknown),
        **more,
    )


class LocalRetrieval(AbsTaskRetrieval):
    """A BEIR folder as a task."""

    folder: ClassVar[Path]
    metadata = about("LocalRetrieval", "Retrieval", "ndcg_at_10")

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        documents = [
            {"id": document.id, "title": document.title, "text": document.text}
            for document in read_documents(self.folder / "corpus.jsonl")
        ]
        judged = read_judgements(self.folder / "qrels" / "test.tsv")
        queries = [
            {"id": query.id, "text": query.text}
            for query in read_queries(self.folder / "queries.jsonl")
            if query.id in judged
        ]
        self.dataset = {
            "default": {
                "test": {
                    "corpus": Dataset.from_list(documents),
                    "queries": Dataset.from_list(queries),
                    "relevant_docs": judged,
                    "top_ranked": None,
                }
            }
        }
        self.data_loaded = True


class LocalSTS(AbsTaskSTS):
    metadata = about("LocalSTS", "STS", "cosine_spearman")
    min_score = 0
    max_score = 5

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        pairs = [
            {"sentence1": f"a {a} runs", "sentence2": f"the {b} runs", "score": 5.0 if a == b else float(i)}
            for i, a in enumerate(WORDS)
            for b in WORDS
        ]
        self.dataset = DatasetDict({"test": Dataset.from_list(pairs)})
        self.data_loaded = True


def labelled(count: int) -> Dataset:
    texts = [
        f"{start} {word}" for word in WORDS for start in ("one", "two", "my", "your", "a", "the")[:count]
    ]
    return Dataset.from_dict({"text": texts, "label": [i for i in range(len(WORDS)) for _ in range(count)]})


class LocalClassification(AbsTaskClassification):
    metadata = about("LocalClassification", "Classification", "accuracy")
    samples_per_label = 2
    n_experiments = 3

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        self.dataset = DatasetDict({"train": labelled(6), "test": labelled(4)})
        self.data_loaded = True


class LocalClustering(AbsTaskClustering):
    metadata = about("LocalClustering", "Clustering", "v_measure")
    input_column_name = "text"
    label_column_name = "label"
    max_fraction_of_documents_to_embed = None
    max_document_to_embed = 24
    max_documents_per_cluster = 24

    def load_data(self, *args: Any, **kwargs: Any) -> None:
        self.dataset = DatasetDict({"test": labelled(6)})
        self.data_loaded = True


def tasks(folder: Path) -> list[Any]:
    LocalRetrieval.folder = folder
    return [LocalRetrieval(), LocalSTS(), LocalClassification(), LocalClustering()]


def evaluate(folder: str, output: str, *models: str) -> list[dict[str, float]]:
    """Evaluates models of jaxir, or of sentence-transformers (`ST=FOLDER`); returns scores by task."""
    scores = []
    for number, model in enumerate(models):
        by_st = model.startswith("ST=")
        loaded = SentenceTransformer(model[3:]) if by_st else jaxir.mteb.load(model)
        place = Path(output) / str(number)
        cache = mteb.ResultCache(place)
        found = mteb.evaluate(
            loaded, tasks(Path(folder)), cache=cache, prediction_folder=place / "predictions"
        )
        scores.append({result.task_name: result.get_score() for result in found.task_results})
    return scores


def prompts(model: str) -> list[Any]:
    """Returns the (tower, prompt, batch size) that each kind of text gets, without and with a template."""
    kinds = mteb.types.PromptType
    found = []
    for how in ({}, {"instruction_template": "Do: {instruction}: "}):
        encoder = jaxir.mteb.load(model, **how)
        assert isinstance(encoder, mteb.EncoderProtocol) and not isinstance(encoder, mteb.SearchProtocol)
        calls = []
        encoder.model.encode = lambda texts, calls=calls, **given: calls.append(
            (given["tower"], given["prompt"], given["batch_size"])
        )
        for task in (LocalRetrieval, LocalSTS):
            for kind in (kinds.query, kinds.document, None):
                place = {"task_metadata": task.metadata, "hf_split": "test", "hf_subset": "default"}
                encoder.encode([{"text": ["a"]}], prompt_type=kind, batch_size=3, **place)
        found.append(calls)
    return found


def differences(model: str) -> dict[str, float]:
    """Returns the largest difference from sentence-transformers' vectors for each call of `encode`."""
    ours, theirs = DualEncoder.load(model), SentenceTransformer(model.removeprefix("st:"))
    texts = [f"{word} {i}" for word in WORDS for i in range(30)]
    found = {}
    for how in ({"truncate_dim": 8}, {"prompt": "a "}, {"prompt_name": "STS"}, {}):
        for name, others in (("encode", "encode"), ("encode_queries", "encode_query")):
            vectors = getattr(ours, name)(texts, **how), getattr(theirs, others)(texts, **how)
            found[f"{name} {how}"] = float(np.abs(np.subtract(*vectors)).max())
    shorter = {"truncate_dim": 8}
    unit = theirs.encode(texts, normalize_embeddings=True, **shorter)
    found["normalize"] = float(np.abs(ours.encode(texts, normalize=True, **shorter) - unit).max())
    for precision in ("int8", "uint8", "binary", "ubinary"):
        vectors = ours.encode(texts)
        of_ours = quantize_embeddings(vectors, precision)
        of_theirs = sentence_transformers.quantize_embeddings(vectors, precision)
        assert of_ours.dtype == of_theirs.dtype
        found[precision] = float(np.abs(of_ours.astype(float) - of_theirs.astype(float)).max())
    found["similarity"] = float(
        np.abs(ours.similarity(vectors, vectors[:3]) - theirs.similarity(vectors, vectors[:3]).numpy()).max()
    )
    return found


def main(folder: str, output: str, minilm: str, prompted: str) -> None:
    scores = evaluate(folder, output, "all-MiniLM-L6-v2", f"ST={minilm}")
    found = {"scores": scores, "prompts": prompts(prompted), "differences": differences(prompted)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
