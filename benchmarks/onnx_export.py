"""Compares ONNX exports in ONNX Runtime (float32 and int8) with torch: speed, cosine, nDCG@10, a profile.

    python benchmarks/onnx_export.py --peer_python=PYTHON [--texts=64] [--data=beir/med] [--data=xquad_en]

The model is exported with standard operators and with ONNX Runtime's own. `quantize_dynamic` quantises each
graph with its defaults. All systems encode the same batches of 32 texts, sorted by tokens, in one process of
the peer's environment (sentence-transformers, onnxruntime), in turns. Ratios are of CPU time.
nDCG@10 on the folders of --data is measured for the standard graph in float32 and int8, with texts of
--max_length tokens.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

BATCH = 32
PRODUCTS = ("MatMul", "FusedMatMul", "Gemm", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="st:all-MiniLM-L6-v2")
    parser.add_argument("--corpus", help="corpus.jsonl of the timed texts (default: installed documentation)")
    parser.add_argument("--texts", type=int, default=64, help="how many texts are timed; 0 for none")
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--data", action="append", default=[], help="a BEIR folder with a test split")
    parser.add_argument("--peer_python", default=sys.executable)
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "DIRECTORY"), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        return work(*flags.worker, repeats=flags.repeats, cores=flags.cores)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for operators in ("onnx", "onnxruntime"):
            export(flags.model, operators, directory / operators)
        if flags.texts:
            time_systems(flags, directory)
        for path in flags.data:
            judge(path, directory / "onnx", flags.max_length)
    return 0


def export(model: str, operators: str, output: Path) -> None:
    """Exports a model and adds OUTPUT/int8.onnx, its quantised passage encoder."""
    from onnxruntime.quantization import quantize_dynamic

    command = [
        sys.executable,
        "-m",
        "jaxir.export",
        f"--model={model}",
        "--format=onnx",
        f"--output={output}",
    ]
    subprocess.run([*command, f"--operators={operators}"], check=True, stdout=subprocess.DEVNULL)
    quantize_dynamic(output / "passage.onnx", output / "int8.onnx")


def session(path: Path, cores: int, **options: str):
    """Opens a graph; threads do not spin, so that CPU time counts work."""
    import onnxruntime

    how = onnxruntime.SessionOptions()
    how.intra_op_num_threads, how.log_severity_level = cores, 3
    how.add_session_config_entry("session.intra_op.allow_spinning", "0")
    for name, value in options.items():
        setattr(how, name, value)
    return onnxruntime.InferenceSession(str(path), how, providers=["CPUExecutionProvider"])


def batches_of(tokens: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns ids and masks, int64 [B, L], of texts that are sorted by tokens."""
    found = []
    for at in range(0, len(tokens), BATCH):
        rows = tokens[at : at + BATCH]
        ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
        for row, text in zip(ids, rows, strict=True):
            row[: len(text)] = text
        mask = (np.arange(ids.shape[1]) < np.array([len(row) for row in rows])[:, None]).astype(np.int64)
        found.append((ids, mask))
    return found


def time_systems(flags: argparse.Namespace, directory: Path) -> None:
    from encode import load_texts, local_model

    from jaxir.data.text.tokenizer import Tokenizer

    texts = load_texts(flags.corpus, flags.texts)
    tokens = Tokenizer.load(directory / "onnx").encode_batch(texts, max_length=flags.max_length)
    tokens.sort(key=len)
    print(f"{len(tokens)} texts, {sum(map(len, tokens))} tokens, {flags.cores} cores", flush=True)
    arrays = {f"{i}.{j}": x for i, batch in enumerate(batches_of(tokens)) for j, x in enumerate(batch)}
    np.savez(directory / "batches.npz", **arrays)
    worker = ["--worker", local_model(flags.model), str(directory)]
    how = [f"--repeats={flags.repeats}", f"--cores={flags.cores}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    subprocess.run([flags.peer_python, __file__, *worker, *how], check=True, env=environment)


def work(model: str, directory: str, *, repeats: int, cores: int) -> int:
    """Runs in the peer's environment: times all systems, and prints a table and profiles."""
    with np.load(Path(directory) / "batches.npz") as arrays:
        batches = [(arrays[f"{i}.0"], arrays[f"{i}.1"]) for i in range(len(arrays) // 2)]
    systems = {"torch": torch_encoder(model, cores)}
    graphs = {
        "float32": Path(directory) / "onnx" / "passage.onnx",
        "float32, own operators": Path(directory) / "onnxruntime" / "passage.onnx",
        "int8": Path(directory) / "onnx" / "int8.onnx",
        "int8, own operators": Path(directory) / "onnxruntime" / "int8.onnx",
    }
    for name, path in graphs.items():
        systems[name] = encoder_of(session(path, cores))
    seconds, vectors = collections.defaultdict(list), {}
    for _ in range(repeats + 1):
        for name, encode in systems.items():
            started = time.process_time()
            vectors[name] = np.concatenate([encode(*batch) for batch in batches])
            seconds[name].append(time.process_time() - started)
    print("| | CPU s | speed | cosine, mean | least |\n|---|---:|---:|---:|---:|")
    for name in systems:
        kept, base = np.array(seconds[name][1:]), np.array(seconds["torch"][1:])
        cosines = (vectors[name] * vectors["torch"]).sum(1)
        numbers = f"{np.median(base / kept):.2f} | {cosines.mean():.4f} | {cosines.min():.4f}"
        print(f"| {name} | {np.median(kept):.2f} | {numbers} |", flush=True)
    for name in ("float32", "int8"):
        print(
            f"{name}: {profile(graphs[name], batches[len(batches) // 2], cores, Path(directory))}", flush=True
        )
    return 0


def encoder_of(graph) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda ids, mask: graph.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def torch_encoder(model: str, cores: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(cores)
    peer = SentenceTransformer(model, device="cpu")

    def encode(ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
            return peer(given)["sentence_embedding"].numpy()

    return encode


def profile(path: Path, batch: tuple[np.ndarray, np.ndarray], cores: int, directory: Path) -> str:
    """Returns the share of each operator in ONNX Runtime's time for a batch, matrix products first."""
    how = {"enable_profiling": True, "profile_file_prefix": str(directory / "profile")}
    graph = session(path, cores, **how)
    encode = encoder_of(graph)
    for _ in range(3):
        encode(*batch)
    events = json.loads(Path(graph.end_profiling()).read_text())
    times = collections.Counter()
    for event in events:
        if event["name"].endswith("_kernel_time"):
            times[event["args"]["op_name"]] += event["dur"]
    total = sum(times.values())
    shares = [f"{name} {time / total:.1%}" for name, time in times.most_common(7)]
    products = sum(times[name] for name in PRODUCTS) / total
    return f"matrix products {products:.1%} of {total / 3e6:.2f} s ({', '.join(shares)})"


def judge(path: str, export: Path, max_length: int) -> None:
    """Prints nDCG@10 on a collection, by the float32 graph and by the int8 graph."""
    from jaxir.data.text.tokenizer import Tokenizer
    from jaxir.evaluation.collection import read_collection, search_vectors
    from jaxir.evaluation.retrieval_metrics import evaluate_run

    collection, tokenizer, found = read_collection(path), Tokenizer.load(export), {}
    for name in ("passage", "int8"):
        encode = encoder_of(session(export / f"{name}.onnx", len(os.sched_getaffinity(0))))

        def vectors(texts: list[str], encode: Callable = encode) -> np.ndarray:
            tokens = tokenizer.encode_batch(texts, max_length=max_length)
            order = np.argsort([len(row) for row in tokens], kind="stable")
            encoded = np.concatenate([encode(*batch) for batch in batches_of([tokens[i] for i in order])])
            return encoded[np.argsort(order)]

        given = vectors(collection.queries), vectors(collection.documents)
        run = search_vectors(*given, collection, similarity="cosine", depth=10)
        found[name] = evaluate_run(run, collection.qrels, "nDCG@10", depth=10).values["nDCG@10"]
    print(f"{Path(path).name}: nDCG@10 {found['passage']:.4f}, int8 {found['int8']:.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
