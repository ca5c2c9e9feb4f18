"""A small random model on disk, and texts for it."""

import json
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from flax import nnx
from tokenizers import models, normalizers, pre_tokenizers, processors

from jaxir import DualEncoder, cli
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import DualEncoderConfig, DualEncoderModel
from jaxir.retrieval.encoding.stored_embeddings import EmbeddingsInfo, StoredEmbeddings
from tests.retrieval import encode_processes

WORDS = [f"w{i}" for i in range(200)]
MAX_LENGTH = 40


def random_texts(count: int, *, seed: int = 0, max_words: int = 60) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, rng.integers(1, max_words))) for _ in range(count)]


def write_jsonl(path, records) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return str(path)


def write_corpus(path, texts, *, title="") -> str:
    return write_jsonl(path, [{"_id": f"d{i}", "title": title, "text": t} for i, t in enumerate(texts)])


def write_queries(path, texts) -> str:
    return write_jsonl(path, [{"_id": f"q{i}", "text": t} for i, t in enumerate(texts)])


def write_qrels(folder, split: str, judged: dict[str, dict[str, int]]) -> None:
    lines = [f"{q}\t{d}\t{score}\n" for q, found in judged.items() for d, score in found.items()]
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))


def encode(model, corpus, output, *flags: str) -> str:
    flags = [f"--model={model}", f"--input={corpus}", f"--output={output}", *flags]
    assert cli.main("jaxir.encode:encode", flags) == 0
    return str(output)


def run_processes(command: str, *flags: str, folders, **environment: str) -> list[tuple[int, str, str]]:
    """Runs a command in each folder, as the processes of one run; returns their (status, stdout, stderr)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = os.environ | {"XLA_FLAGS": ""} | environment
    if len(folders) > 1:
        env |= {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(len(folders))}
    ids = [{"JAX_PROCESS_ID": str(number)} if len(folders) > 1 else {} for number in range(len(folders))]
    started = [sys.executable, "-m", f"jaxir.{command}", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(started, cwd=folder, env=env | own, **pipes)
        for folder, own in zip(folders, ids, strict=True)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


def nearest(vectors, ids, queries, k, *, similarity="cosine"):
    """The reference: sorts all documents by (score, id), both descending; returns (scores [Q, k], ids)."""
    if similarity == "cosine":
        queries, vectors = (
            x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30) for x in (queries, vectors)
        )
    # einsum, because on some CPUs a matrix product gives equal vectors at different places different sums.
    scores = np.einsum("qd,vd->qv", queries, vectors)
    by_id = np.argsort(np.array(ids))[::-1]
    order = by_id[np.argsort(-scores[:, by_id], axis=1, kind="stable")[:, :k]]
    return np.take_along_axis(scores, order, axis=1), [[ids[i] for i in row] for row in order]


def stored(vectors, ids, shard_size, similarity="dot") -> StoredEmbeddings:
    info = EmbeddingsInfo(
        complete=True, count=len(ids), shard_size=shard_size, tower="passage", fingerprint="f" * 64,
        model=None, dimension=vectors.shape[1], similarity=similarity, dtype="float32", max_length=8,
        prompt="", text="text", input_name="corpus.jsonl", input_bytes=1, input_sha256="0" * 64,
    )  # fmt: skip
    return StoredEmbeddings(info, ids, [vectors[i : i + shard_size] for i in range(0, len(ids), shard_size)])


def save_model(directory, *, seed: int) -> str:
    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    files = directory.with_name(directory.name + "-tokenizer")
    files.mkdir()
    backend.save(str(files / "tokenizer.json"))
    backbone = BertConfig(
        vocab_size=len(vocabulary), embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, max_positions=64
    )
    model = DualEncoderModel(DualEncoderConfig(backbone=backbone, sharing="ade"), rngs=nnx.Rngs(seed))
    settings = model_dir.EncoderSettings(query_max_length=16, passage_max_length=MAX_LENGTH)
    model_dir.save(directory, model, Tokenizer.load(files), settings)
    return str(directory)


@pytest.fixture(scope="session")
def toy() -> types.SimpleNamespace:
    """Passes the functions above to tests, because test files cannot import this file."""
    functions = (random_texts, write_jsonl, write_corpus, write_queries, write_qrels, encode, run_processes)
    functions += (save_model, nearest, stored)
    return types.SimpleNamespace(max_length=MAX_LENGTH, **{f.__name__: f for f in functions})


@pytest.fixture(scope="session")
def small_model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "small", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def encoder(small_model):
    return DualEncoder.load(small_model, batch_tokens=64)


@pytest.fixture(scope="session")
def encoded(tmp_path_factory, small_model) -> Path:
    """A folder with a corpus, and `whole`, its embeddings by one process that nobody killed."""
    folder, texts = tmp_path_factory.mktemp("encoded"), random_texts(encode_processes.COUNT)
    texts[7], texts[11] = "", "w3 " * 100_000
    write_corpus(folder / "corpus.jsonl", texts, title="w5")
    assert encode_processes.encode(folder, small_model, "whole").wait(200) == 0
    return folder
