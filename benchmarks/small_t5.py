"""Makes a small T5 with random weights and its own vocabulary, for docs/results/generated_text.md.

The T5 1.1 has 3 + 3 layers (or LAYERS) of width 256 (or WIDTH). Its 8,000 SentencePiece pieces (or PIECES)
are learnt from the passages and queries of a BEIR folder. Needs an environment with torch, transformers and
sentencepiece.

    python benchmarks/small_t5.py BEIR_FOLDER OUTPUT [PIECES [WIDTH [LAYERS]]]
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import sentencepiece
import torch
from transformers import T5Config, T5ForConditionalGeneration

TEXTS = 15_000  # maximum number of passages, and of queries, that the vocabulary is learnt from
CHARACTERS = 400  # number of first characters of a passage that are used


def main(data: Path, output: Path, pieces: int = 8000, width: int = 256, layers: int = 3) -> None:
    """Learns the vocabulary, initialises the model, and writes both as a folder of transformers."""
    random.seed(0)
    torch.manual_seed(0)
    passages, queries = (
        [json.loads(line) for line in (data / f"{name}.jsonl").read_text().splitlines()]
        for name in ("corpus", "queries")
    )
    texts = [
        f"{d.get('title', '')} {d['text'][:CHARACTERS]}"
        for d in random.sample(passages, min(TEXTS, len(passages)))
    ]
    texts += [q["text"] for q in random.sample(queries, min(TEXTS, len(queries)))]
    output.mkdir(parents=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(" ".join(text.split()) + "\n" for text in texts)
        file.flush()
        sentencepiece.SentencePieceTrainer.train(
            input=file.name,
            model_prefix=str(output / "spiece"),
            vocab_size=pieces,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    config = T5Config(
        vocab_size=pieces,
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=width // 64,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():  # with standard deviation 1, the first logits would be about 16
        model.lm_head.weight.mul_(config.d_model**-0.5)
    model.save_pretrained(output)
    print(f"{output}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4, 5, 6):
        sys.exit(__doc__.rpartition("    ")[2].strip())
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
