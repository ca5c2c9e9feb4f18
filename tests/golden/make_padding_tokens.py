"""Makes padding_tokens.npz: vectors and scores of texts that contain a padding token.

    python tests/golden/make_padding_tokens.py --minilm=DIRECTORY_OF_ALL_MINILM_L6_V2

It needs torch, transformers and sentence-transformers 6.2, and the models of this directory.
"""

import argparse
import itertools

import numpy as np
from make_golden import HERE
from sentence_transformers import CrossEncoder, SentenceTransformer

TEXTS = [
    "the [PAD] cat <pad> sat",
    "[PAD]",
    "<pad>",
    "a dog [PAD][PAD] and <pad><pad> a cat [PAD] <pad>",
    "[PAD] <pad> the mat",
    "cats",
]
ENCODERS = ("bert", "roberta", "t5_1_1", "modernbert")
CROSS_ENCODERS = ("cross_bert", "cross_roberta", "cross_distilbert", "cross_modernbert", "cross_deberta")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minilm", required=True, help="folder of the published all-MiniLM-L6-v2")
    folders = {name: str(HERE / name) for name in ENCODERS} | {"minilm": parser.parse_args().minilm}
    arrays = {"texts": np.array(TEXTS)}
    for name, folder in folders.items():
        arrays[name] = SentenceTransformer(folder, device="cpu").encode_document(TEXTS)
    pairs = list(itertools.product(TEXTS[:4], repeat=2))
    for name in CROSS_ENCODERS:
        arrays[name] = CrossEncoder(str(HERE / name), device="cpu").predict(pairs)
    np.savez_compressed(HERE / "padding_tokens.npz", **arrays)


if __name__ == "__main__":
    main()
