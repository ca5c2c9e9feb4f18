"""Compares generated outputs and tokens a second with transformers in torch, on the same cores and weights.

A T5 1.1 with random weights generates for texts of random words: one greedy output, then ten samples per text
(top-k 10). Outputs never end before `--new_tokens`, so that both systems compute equally many tokens. Each
system has its own process. The processes run one at a time, in turns:

    jaxir   `Generator.generate`, as `jaxir.expand generate` calls it; the first pass, which compiles, and the
            second are reported separately
    peer    transformers' `generate` on batches of texts sorted by tokens, after a warm-up

    python benchmarks/generation.py --peer_python=PYTHON [--model=t5-small] [--texts=64] [--new_tokens=32]
                                   [--cores=N] [--repeats=3] [--dtype=bfloat16]

Nothing is downloaded and TensorFlow is not needed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = {"t5-small": "1.1-small", "t5-base": "1.1-base", "t5-large": "1.1-large", "t5-xl": "1.1-xl"}
TOP_K, SAMPLES = 10, 10
JOBS = {"greedy": 1, f"{SAMPLES} samples": SAMPLES}  # number of outputs per text


def main() -> int:
    """Parses flags, makes the weights, runs the systems in turns, prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", choices=MODELS, default="t5-small")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=128, help="words of the longest text; the shortest: 8")
    parser.add_argument("--new_tokens", type=int, default=32)
    parser.add_argument("--peer_batch", type=int, default=32, help="texts of a batch of the peer")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the products")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="that both may use")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each system")
    parser.add_argument("--peer_python", help="an interpreter with torch and transformers")
    parser.add_argument("--worker", choices=["jaxir", "peer", "weights"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.worker:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: flags.cores])
        work = {"jaxir": work_jaxir, "peer": work_peer, "weights": make_weights}[flags.worker]
        print(json.dumps(work(flags)))
        return 0
    systems = ["jaxir", "peer"] if flags.peer_python else ["jaxir"]
    runs: dict[str, list[dict]] = {system: [] for system in systems}
    with tempfile.TemporaryDirectory() as place:
        flags.folder = place
        run_worker("weights", flags)
        for repeat in range(flags.repeats):
            for system in systems:
                runs[system].append(run_worker(system, flags))
                seconds = ", ".join(f"{job} {runs[system][-1][job]['wall']:.2f} s" for job in JOBS)
                print(f"  repeat {repeat + 1}, {system}: {seconds}", flush=True)
    report(flags, runs)
    return 0


def run_worker(system: str, flags: argparse.Namespace) -> dict:
    """Runs one system in its own process."""
    python = flags.peer_python if system == "peer" else sys.executable
    command = [python, str(Path(__file__).resolve()), f"--worker={system}"]
    command += [f"--{k}={v}" for k, v in vars(flags).items() if k not in ("worker", "peer_python")]
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "HF_HUB_OFFLINE": "1"} | os.environ
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def texts_of(flags: argparse.Namespace) -> list[str]:
    """Returns texts of 8 to `longest` random words."""
    drawn = random.Random(0)
    sizes = [drawn.randint(8, flags.longest) for _ in range(flags.texts)]
    return [" ".join(f"w{drawn.randint(3, 20_000)}" for _ in range(size)) for size in sizes]


def measured(generate, texts: list[str], num_outputs: int) -> tuple[dict, list[list[str]]]:
    """Returns the wall and CPU seconds of a pass, and its outputs."""
    wall, cpu = time.perf_counter(), time.process_time()
    written = generate(texts, num_outputs)
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}, written


# ------------------------------------------------------------------------------------------------ jaxir


def make_weights(flags: argparse.Namespace) -> dict:
    """Writes a T5 with random weights and a word tokenizer into a folder that both systems read."""
    import tokenizers

    from jaxir.data.text.tokenizer import Tokenizer
    from jaxir.interop.huggingface import hf_seq2seq
    from jaxir.interop.model import stored
    from jaxir.interop.model.encoder_settings import EncoderSettings
    from jaxir.models.seq2seq import Seq2SeqConfig
    from jaxir.models.t5 import preset

    backbone = preset(MODELS[flags.model])
    config = Seq2SeqConfig(backbone=backbone, num_decoder_layers=backbone.num_layers)
    special = ["<pad>", "</s>", "<unk>"]
    words = special + [f"w{i}" for i in range(len(special), backbone.vocab_size)]
    numbers = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(f"{flags.folder}/tokenizer.json")
    tokenizer = Tokenizer.load(flags.folder)
    model = stored.initialize(config, seed=0)
    settings = EncoderSettings.of_generator(512)
    params = stored.params_of(model)
    hf_seq2seq.write(
        Path(flags.folder),
        stored.StoredModel(config=config, params=params, tokenizer=tokenizer, settings=settings),
    )
    return {}


def work_jaxir(flags: argparse.Namespace) -> dict:
    """Measures `Generator.generate`."""
    import jax

    from jaxir.models.decoding import Decoding
    from jaxir.retrieval.encoding.generator import Generator

    generator = Generator.load(f"hf:{flags.folder}", dtype=flags.dtype)
    texts = texts_of(flags)

    def generate(texts: list[str], num_outputs: int) -> list[list[str]]:
        sampled = {"num_outputs": num_outputs, "top_k": TOP_K} if num_outputs > 1 else {}
        return generator.generate(texts, Decoding(max_new_tokens=flags.new_tokens, **sampled))

    result: dict = {"versions": f"jax {jax.__version__}"}
    for job, number in JOBS.items():
        first, _ = measured(generate, texts, number)
        result[job], written = measured(generate, texts, number)
        result[job]["first"] = first["wall"]
        if number == 1:
            result["written"] = [outputs[0] for outputs in written]
    return result


# ------------------------------------------------------------------------------------------------- peer


def work_peer(flags: argparse.Namespace) -> dict:
    """Measures transformers' `generate`, without importing jaxir."""
    import torch
    import transformers

    torch.set_num_threads(flags.cores)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=f"{flags.folder}/tokenizer.json", pad_token="<pad>", eos_token="</s>"
    )
    model = transformers.T5ForConditionalGeneration.from_pretrained(
        flags.folder, dtype=getattr(torch, flags.dtype)
    ).eval()
    texts = texts_of(flags)

    @torch.inference_mode()
    def generate(texts: list[str], num_outputs: int) -> list[list[str]]:
        how = {"do_sample": num_outputs > 1, "top_k": TOP_K if num_outputs > 1 else None}
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        order = sorted(range(len(texts)), key=lambda i: -len(ids[i]))
        written: list[list[str]] = [[] for _ in texts]
        for start in range(0, len(order), flags.peer_batch):
            some = order[start : start + flags.peer_batch]
            given = tokenizer.pad({"input_ids": [ids[i] for i in some]}, return_tensors="pt")
            tokens = model.generate(
                input_ids=given["input_ids"],
                attention_mask=given["attention_mask"],
                max_new_tokens=flags.new_tokens,
                num_return_sequences=num_outputs,
                **how,
            )
            found = tokenizer.batch_decode(tokens, skip_special_tokens=True)
            for place, i in enumerate(some):
                written[i] = [x.strip() for x in found[place * num_outputs : (place + 1) * num_outputs]]
        return written

    result: dict = {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}"}
    for job, number in JOBS.items():
        generate(texts[:2], number)
        result[job], written = measured(generate, texts, number)
        if number == 1:
            result["written"] = [outputs[0] for outputs in written]
    return result


# ----------------------------------------------------------------------------------------------- report


def report(flags: argparse.Namespace, runs: dict[str, list[dict]]) -> None:
    """Prints medians over processes. A ratio is the median of the ratios of consecutive processes."""
    print(
        f"\n{flags.model}, {flags.texts} texts of 8 to {flags.longest} tokens, {flags.new_tokens} new tokens,"
        f" {flags.dtype}, {flags.cores} cores; medians of {flags.repeats} processes"
    )
    print(" | ".join(own[0]["versions"] for own in runs.values()))
    print("\n| | | s | CPU s | outputs/s | tokens/s | first pass s | times the peer's speed |")
    print("|---|---|" + "---:|" * 6)
    for job, number in JOBS.items():
        for system, own in runs.items():
            wall, cpu = (statistics.median(r[job][key] for r in own) for key in ("wall", "cpu"))
            outputs = flags.texts * number
            cells = [f"{wall:.2f}", f"{cpu:.2f}", f"{outputs / wall:.1f}"]
            cells += [f"{outputs * flags.new_tokens / wall:.0f}"]
            first = [r[job]["first"] for r in own if "first" in r[job]]
            cells += [f"{statistics.median(first):.2f}" if first else ""]
            cells += [ratio(own, runs["peer"], job) if "peer" in runs and system != "peer" else ""]
            print(f"| {job} | {system} | " + " | ".join(cells) + " |")
    if "peer" in runs:
        ours, theirs = (runs[system][0]["written"] for system in ("jaxir", "peer"))
        same = sum(one == other for one, other in zip(ours, theirs, strict=True))
        print(f"\n{same} of {flags.texts} greedy outputs are the same")


def ratio(own: list[dict], other: list[dict], job: str) -> str:
    """Returns how many times as fast one system is as another, by wall time and by CPU time."""
    wall, cpu = (
        statistics.median(b[job][key] / a[job][key] for a, b in zip(own, other, strict=True))
        for key in ("wall", "cpu")
    )
    return f"{wall:.2f} (CPU {cpu:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
