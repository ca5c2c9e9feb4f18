"""SavedModels, loaded without JAX and jaxir, answer as the encoders and `Searcher`."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from jaxir import CrossEncoder, DualEncoder, cli
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.models.bert import BertConfig
from jaxir.models.dual_encoder import Projection
from jaxir.retrieval.indexes.base_index import load_index, normalize
from jaxir.retrieval.indexes.exact import ExactIndex
from jaxir.retrieval.indexes.saved_search import SavedSearch
from jaxir.retrieval.indexes.scann_index import ScannIndex
from jaxir.storage import checksums
from tests.interop.conftest import AWKWARD_TEXTS, SMALL_T5
from tests.interop.folders import GOLDEN

tf = pytest.importorskip("tensorflow")
pytest.importorskip("tensorflow_text")
pytest.importorskip("scann")

WORKER = Path(__file__).with_name("saved_model_worker.py")
QUERIES = AWKWARD_TEXTS


def export(*flags: str) -> int:
    return cli.main("jaxir.export:export", ["--format=saved_model", *flags])


def answers_of(folder: Path, requests: list[dict]) -> dict[str, np.ndarray]:
    """Runs the worker, which imports only TensorFlow and the libraries that requests name."""
    (folder / "requests.json").write_text(json.dumps(requests))
    keep = {n: v for n, v in os.environ.items() if n not in ("PYTHONPATH", "XLA_FLAGS")}
    pipes = {"capture_output": True, "text": True, "timeout": 250}
    done = subprocess.run([sys.executable, str(WORKER), str(folder)], cwd=folder, env=keep, **pipes)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(folder / "answers.npz") as answers:
        return dict(answers)


def request(model: Path, signature: str, texts=None, ids=None, imports=("tensorflow_text",), **more) -> dict:
    inputs = {"texts": texts} if texts is not None else {"ids": ids}
    return {"model": str(model), "signature": signature, "inputs": inputs, "imports": list(imports), **more}


def library_tokens(folder: Path, padding: str, texts: list, max_length: int) -> list[list[int]]:
    library = Library.from_file(str(folder / "tokenizer.json"))
    library.enable_truncation(max_length)
    library.enable_padding(pad_id=library.token_to_id(padding), pad_token=padding)
    return [row.ids for row in library.encode_batch(texts)]


@pytest.mark.slow
def test_served_without_jax(tmp_path, two_sentencepieces, save_model):
    """Loads all models in one process, because importing TensorFlow is slow."""
    bert = BertConfig(vocab_size=100, embed_dim=32, num_layers=1, num_heads=2, mlp_dim=64, max_positions=40)
    more = {"sharing": "ade", "projection": Projection(dimension=24)}
    words = save_model(tmp_path / "words", bert, Tokenizer.load(GOLDEN / "bert"), **more)
    pieces = save_model(tmp_path / "pieces", SMALL_T5, two_sentencepieces)
    bytes_ = f"st:{GOLDEN / 'roberta'}"

    encoder = DualEncoder.load(words)
    rng = np.random.default_rng(1)
    documents = ["".join(rng.choice(list("abcdefghi "), 40)) for _ in range(50)]
    names = [f"d{i}" for i in range(50)] + ["twin"]  # twin has the vector of d7, so they tie
    vectors = encoder.encode_passages([*documents, documents[7]], show_progress=False)
    vectors[-1] = vectors[7]
    index = ScannIndex.build(vectors, names, fingerprint=encoder.fingerprint, model=words)
    index.save(tmp_path / "index")

    out = {n: tmp_path / f"{n}-out" for n in ("words", "pieces", "bytes")}
    search = [f"--index={tmp_path / 'index'}", "--k=60"]
    assert export(f"--model={words}", f"--output={out['words']}", *search) == 0
    assert export(f"--model={pieces}", f"--output={out['pieces']}", "--dtype=bfloat16") == 0
    assert export(f"--model={bytes_}", f"--output={out['bytes']}", "--signatures=ids") == 0

    roberta = DualEncoder.load(bytes_)
    texts = ["a cat", "the mats of", "a <pad> dog sat <pad>"]
    ids = library_tokens(GOLDEN / "roberta", "<pad>", texts, 24)
    assert ids[0][0] == 0 and ids[0][-1] == 1  # in the tokenizer's file <s> has id 0 and padding id 1
    too_long, scann = [[5] * 41], ("tensorflow_text", "scann")
    requests = [
        request(out["bytes"], "query_ids", ids=ids, imports=()),
        request(out["words"], "passage", QUERIES, imports=scann),
        request(out["words"], "search", QUERIES, imports=scann),
        request(out["words"], "query_ids", ids=too_long, imports=scann),
        request(out["words"], "search", [b"ab\xff".hex()], imports=scann, bytes=True),
        request(out["pieces"], "query", QUERIES, imports=scann),
        request(out["words"], "query", [QUERIES[0]] * 3000 + ["a " * 200_000], imports=scann),
    ]
    answers = answers_of(tmp_path, requests)
    np.testing.assert_allclose(answers["0.vectors"], roberta.encode_queries(texts), atol=1e-5)
    queries, passages = encoder.encode_queries(QUERIES), encoder.encode_passages(QUERIES)
    assert np.abs(queries - passages).max() > 0.01  # the towers differ, and so do the prompts
    np.testing.assert_allclose(answers["1.vectors"], passages, atol=1e-5)
    # Unlike a Searcher, a served model accepts a question without text.
    scores, found = load_index(tmp_path / "index").search(queries, 60)
    np.testing.assert_allclose(answers["2.scores"], scores, atol=1e-5)
    for row, expected in zip(answers["2.ids"].tolist(), found, strict=True):
        assert sorted(row) == sorted(expected) and row[:3] == expected[:3]
        assert row.index("twin") + 1 == row.index("d7")  # of equal scores the larger id comes first
    assert "ids has more columns than the 40 tokens" in str(answers["3.error"])
    assert "Invalid formatting on input string" in str(answers["4.error"])
    # In bfloat16 XLA rounds between fused operations, and the two programs fuse different ones.
    half, whole = DualEncoder.load(pieces, dtype="bfloat16"), DualEncoder.load(pieces)
    halves = half.encode_queries(QUERIES, show_progress=False)
    assert np.abs(halves[:1] - whole.encode_queries(QUERIES[:1], show_progress=False)).max() > 1e-3
    np.testing.assert_allclose(answers["5.vectors"], halves, atol=0.02)
    assert answers["6.vectors"].shape == (3001, 24)
    np.testing.assert_allclose(answers["6.vectors"][[0, -2]], queries[[0, 0]], atol=1e-5)
    assert answers["peak"] < 4e9  # TensorFlow takes 1 GB; characters [rows, longest row] would take 10
    about = json.loads((out["words"] / "jaxir_export.json").read_text())
    assert about["versions"].keys() == {"tensorflow", "tensorflow-text", "scann", "jax"}
    assert about["default"] == "search" and about["fingerprint"] == encoder.fingerprint
    assert "with its padding, 1, on the right" in (out["bytes"] / "README.md").read_text()
    graph = (out["words"] / "saved_model.pb").read_bytes()
    assert all(platform in graph for platform in (b"CPU", b"CUDA", b"TPU"))


@pytest.mark.slow
def test_pairs_served_without_jax(tmp_path, minilm_folder, save_cross_encoder):
    """Exports models with token types and prompts, with neither, with ids alone, and a real encoder."""
    models = {name: f"hf:{GOLDEN / f'cross_{name}'}" for name in ("deberta", "distilbert", "modernbert")}
    prompts = {"query_prompt": "ask: ", "passage_prompt": "tell: "}
    models["bert"] = save_cross_encoder(tmp_path / "model", f"hf:{GOLDEN / 'cross_bert'}", **prompts)
    for name in ("minilm", "half"):
        models[name] = save_cross_encoder(tmp_path / name, f"st:{minilm_folder}")
    more = {name: ["--signatures=ids"] for name in ("deberta", "modernbert")} | {"half": ["--dtype=bfloat16"]}
    for name, model in models.items():
        assert export(f"--model={model}", f"--output={tmp_path / f'{name}-out'}", *more.get(name, [])) == 0
    pairs = [(a, b) for a in QUERIES for b in QUERIES]
    texts = dict(zip(("queries", "passages"), map(list, zip(*pairs, strict=True)), strict=True))
    scorers = {name: CrossEncoder.load(model) for name, model in models.items()}
    tokens = {name: scorer.tokens(pairs) for name, scorer in scorers.items()}
    own = library_tokens(GOLDEN / "cross_modernbert", "[PAD]", pairs, scorers["modernbert"].max_length)
    assert own[0][-1] == 1  # the padding id of the tokenizer's file

    def padded(name: str, field: str) -> list[list[int]]:
        rows = [getattr(row, field).tolist() for row in tokens[name]]
        return [[*row, *[0] * (max(map(len, rows)) - len(row))] for row in rows]

    def asked(name: str, signature: str, **inputs: list) -> dict:
        model = str(tmp_path / f"{name}-out")
        imports = [] if name == "modernbert" else ["tensorflow_text"]
        return {"model": model, "signature": signature, "inputs": inputs, "imports": imports}

    requests = [
        asked("modernbert", "score_ids", ids=own),
        asked("bert", "score", **texts),
        asked("bert", "score_ids", ids=padded("bert", "ids"), token_types=padded("bert", "types")),
        asked("distilbert", "score", **texts),
        asked("minilm", "score", **texts),
        asked("half", "score", **texts),
        asked("bert", "score_ids", ids=[[5] * 200], token_types=[[0] * 200]),
        asked("bert", "score_ids", ids=[[5, 6]], token_types=[[0]]),
        asked("bert", "score", queries=["a", "b"], passages=["a"]),
        asked("bert", "serving_default", **texts),
        asked("deberta", "score_ids", ids=padded("deberta", "ids")),
    ]
    answers = answers_of(tmp_path, requests)
    for i, name in enumerate(["modernbert", "bert", "bert", "distilbert", "minilm"]):
        expected = scorers[name].score(pairs)
        np.testing.assert_allclose(answers[f"{i}.scores"], expected, atol=1e-5, err_msg=name)
        lengths = [len(row.ids) for row in tokens[name]]
        assert np.ptp(expected) > 0.01 and lengths.count(scorers[name].max_length) > 5, "some are cut"
    np.testing.assert_allclose(answers["10.scores"], scorers["deberta"].score(pairs), atol=1e-5)
    np.testing.assert_allclose(answers["5.scores"], answers["4.scores"], atol=0.02)
    assert np.abs(answers["5.scores"] - answers["4.scores"]).max() > 1e-4
    assert "ids has more columns than the" in str(answers["6.error"])
    assert "inputs differ in shape" in str(answers["7.error"])
    assert "8.error" in answers
    np.testing.assert_array_equal(answers["9.scores"], answers["1.scores"])
    assert "'tell: '" in (tmp_path / "bert-out" / "README.md").read_text()


@pytest.mark.slow
def test_export_prints_one_line_and_no_log_of_tensorflow(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "jaxir.export", "--format=saved_model", f"--output={out}"]
    keep = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    command.append(f"--model=st:{GOLDEN / 'bert'}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=keep)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {out}\n", "")
    assert checksums.read(out).keys() >= {"saved_model.pb", "variables/variables.index", "README.md"}


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_tree_of_scann_in_a_graph(storage, tmp_path):
    rng = np.random.default_rng(0)
    vectors, ids = rng.normal(size=(21_000, 32)).astype(np.float32), [f"d{i}" for i in range(21_000)]
    index = ScannIndex.build(vectors, ids, fingerprint="f", storage=storage)
    assert "leaves" in index.info.settings
    index.save(tmp_path / "index")
    index.with_settings(leaves_to_search=5, reorder=40).save(tmp_path / "narrow")
    queries = vectors[:200] + rng.normal(size=(200, 32)).astype(np.float32)
    exact = ExactIndex.build(vectors, index.ids)
    unit = normalize(vectors)
    recalls = {}

    def recall(found: list[list[str]], k: int) -> float:
        true = exact.search(queries, k)[1]
        return np.mean([len(set(a) & set(b)) / k for a, b in zip(found, true, strict=True)])

    for name, k in (("index", 1), ("index", 100), ("narrow", 10)):
        ids, scores = SavedSearch(tmp_path / name, k=k, fingerprint="f", name="m")(tf.constant(queries))
        found = [[i.decode() for i in row] for row in ids.numpy()]
        true = [unit[[int(i[1:]) for i in row]] @ q for row, q in zip(found, normalize(queries), strict=True)]
        np.testing.assert_allclose(scores.numpy(), true, atol={"float32": 1e-5, "int8": 0.02}[storage])
        assert (np.diff(scores) <= 0).all()
        recalls[name, k] = recall(found, k)
    # An index tuned to search fewer leaves keeps its recall.
    narrow = recall(load_index(tmp_path / "narrow").search(queries, 10)[1], 10)
    assert recalls["index", 1] > 0.9 and recalls["index", 100] > 0.8
    assert 0.2 < narrow < 0.9 and recalls["narrow", 10] > narrow - 0.05


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("roberta", "its model is BPE, not WordPiece; export with --signatures=ids"),
        ("bert --index={index} --signatures=ids", "a search takes texts"),
        ("bert --index={index}", "is an index of engine exact, but a SavedModel needs engine scann"),
        ("cross_bert --index={index}", "is a cross-encoder, which cannot search an index"),
        ("bert --k=3", "--k only applies to --index"),
        ("bert --dtype=bfloat16 --format=onnx", "apply to --format=saved_model"),
        ("bert --optimizer_state --format=onnx", "applies to --format=t5x, not to onnx"),
    ],
)
@pytest.mark.slow
def test_export_refuses_unsupported_models_indexes_and_flags(flags, message, tmp_path, capsys):
    ExactIndex.build(np.eye(4, dtype=np.float32), list("abcd")).save(tmp_path / "index")
    name, *flags = flags.format(index=tmp_path / "index").split()
    model = f"--model={'hf' if name == 'cross_bert' else 'st'}:{GOLDEN / name}"
    assert export(f"--output={tmp_path / 'out'}", model, *flags) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["index"]


@pytest.mark.slow
def test_saved_model_export_reports_a_full_disk(tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    flags = [f"--model=hf:{GOLDEN / 'bert'}", "--format=saved_model", "--signatures=ids"]
    try:
        assert cli.main("jaxir.export:export", [*flags, f"--output={tmp_path}/out"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err == f"error: {tmp_path}/out could not be written: file too large\n"
    assert list(tmp_path.iterdir()) == []
