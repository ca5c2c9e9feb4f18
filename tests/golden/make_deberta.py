"""Makes deberta/ and cross_deberta/: a tiny random DeBERTa-v3, a cross-encoder, and their outputs.

pip install torch==2.13.0 transformers==5.23.0 sentence-transformers==6.2.0 sentencepiece==0.2.3 protobuf
python tests/golden/make_deberta.py
"""

import io
import itertools
import json
import shutil

import numpy as np
import sentencepiece
import torch
import transformers
from make_cross_encoders import PAIRS
from make_golden import (
    HERE,
    POSITIONS,
    SENTENCES,
    TEXTS,
    VOCAB,
    WIDTH,
    make_ids,
    randomize,
    save_gradients,
)
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers import models as st_modules
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

NAME, CROSS, MAX_LENGTH, PIECES = "deberta", "cross_deberta", 40, 80
# Gradients are saved of the shared table of distances, their norm, and projections of tokens and distances.
WITH_GRADIENTS = (
    "encoder.rel_embeddings",
    "encoder.LayerNorm",
    "encoder.layer.1.attention.self.query_proj",
    "encoder.layer.0.attention.self.key_proj",
)
# Texts that are difficult for tokenizers.
AWKWARD = [
    *TEXTS,
    *SENTENCES,
    " two  spaces, one before ",
    "\ttabs\nand\r\nlines\n",
    "\u00a0no\u2003break\u200bspaces",
    "na\u00efve e\u0301tude \ufb01sh \uff46\uff55\uff4c\uff4c \u2460\u00bd",
    "\U0001f600 family \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1f3\U0001f1f1",
    "a [MASK] and [CLS] in the [SEP] text",
    "[MASK]",
    " [MASK] cat[MASK]s",
    "\u6771\u4eac \u043c\u044b\u0448\u044c \u0627\u0644\u0642\u0637",
    "\u2581the\u2581cat <unk> <s> </s> [UNK]",
    "\x00\x07control\x7f",
    "   ",
    "CATS Cats cats!?...--",
]
# Settings of attention other than v3's.
VARIANTS = {
    "c2p": {"pos_att_type": ["c2p"], "share_att_key": False},
    "p2c": {"pos_att_type": ["p2c"], "share_att_key": False, "norm_rel_ebd": "none"},
    "apart": {"share_att_key": False},
    "neither": {"pos_att_type": []},
    "unbucketed": {"position_buckets": -1, "max_relative_positions": 12},
}


def config(**more: object) -> transformers.DebertaV2Config:
    """Returns a small DeBERTa-v3, with so few buckets that some distances in a text share one."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    }
    return transformers.DebertaV2Config(**shape | more)


def save_spm(directory) -> None:
    """Trains a sentencepiece model whose first ids are those of DeBERTa-v3."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS + SENTENCES),
        model_writer=out,
        model_type="unigram",
        vocab_size=PIECES,
        normalization_rule_name="identity",  # transformers 5 reads no other rule, and its table takes 200 KB
        minloglevel=2,
        character_coverage=1.0,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="[PAD]",
        bos_piece="[CLS]",
        eos_piece="[SEP]",
        unk_piece="[UNK]",
        num_threads=1,
    )
    (directory / "spm.model").write_bytes(out.getvalue())
    # As in published folders, the file names no class and no mask token; the mask token has the next id.
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"do_lower_case": False, "vocab_type": "spm"})
    )


def save_outputs(directory, model, name: str, outputs: str) -> None:
    draw, arrays = np.random.default_rng(0), {}
    for case, lengths in {"padded": [150, 40, 3], "unpadded": [20, 20]}.items():
        ids = make_ids(draw, 0, lengths)
        mask = torch.tensor(ids != 0)
        with torch.no_grad():
            found = model(input_ids=torch.tensor(ids).long(), attention_mask=mask.long())[0].numpy()
        arrays[f"{case}_ids"] = ids
        arrays[f"{case}_{outputs}"] = (
            found[:, 0] if outputs == "logits" else np.where(mask[..., None], found, 0)
        )
        if outputs == "logits":
            arrays[f"{case}_types"] = np.zeros_like(ids)
    if outputs == "logits":
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        rows = tokenizer([list(pair) for pair in PAIRS], truncation=True, max_length=MAX_LENGTH)["input_ids"]
        scorer = CrossEncoder(str(directory), device="cpu", max_length=MAX_LENGTH)
        arrays |= {
            "pairs": np.array(PAIRS),
            "pair_ids": np.concatenate(rows).astype(np.int32),
            "pair_lengths": np.array([len(ids) for ids in rows]),
            "pair_scores": np.array([scorer.predict([pair])[0] for pair in PAIRS]),
        }
    np.savez_compressed(directory / name, **arrays)


def save_variants() -> None:
    """Saves the parameters and outputs of a block with each of VARIANTS, and buckets of distances."""
    arrays = {}
    torch.manual_seed(1)
    ids = make_ids(np.random.default_rng(0), 0, [24, 9])
    ids = np.where(ids != 0, 1 + ids % 19, 0)
    for name, more in VARIANTS.items():
        small = {"num_hidden_layers": 1, "vocab_size": 20, "hidden_size": 16, "intermediate_size": 8}
        model = transformers.DebertaV2Model(config(**small, **more)).eval()
        randomize(model)
        model.half().float()  # saved as float16
        with torch.no_grad():
            given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(ids != 0).long()}
            output = model(**given).last_hidden_state.numpy()
        arrays[f"{name}.config"] = np.array(json.dumps(model.config.to_diff_dict()))
        arrays[f"{name}.output"] = np.where((ids != 0)[..., None], output, 0)
        weights = model.state_dict().items()
        arrays |= {f"{name}/{key}": value.numpy().astype(np.float16) for key, value in weights}
    distances = torch.arange(-1100, 1101)
    for buckets, farthest in ((256, 512), (16, 160)):
        found = make_log_bucket_position(distances, buckets, farthest).numpy()
        arrays[f"buckets_{buckets}_{farthest}"] = found.astype(np.int16)
    np.savez_compressed(HERE / NAME / "variants.npz", ids=ids, **arrays)


def main() -> None:
    torch.manual_seed(0)
    for name in (NAME, CROSS):  # transformers would read an old tokenizer.json
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
    encoder = transformers.DebertaV2Model(config()).eval()
    head = transformers.DebertaV2ForSequenceClassification(config(num_labels=1)).eval()
    for name, model in ((NAME, encoder), (CROSS, head)):
        randomize(model)
        model.save_pretrained(HERE / name)
        save_spm(HERE / name)
    save_outputs(HERE / NAME, encoder, "golden.npz", "output")
    save_gradients(HERE / NAME, encoder, 0, WITH_GRADIENTS)
    save_variants()
    tokenizer = transformers.AutoTokenizer.from_pretrained(HERE / NAME)
    ids = tokenizer(AWKWARD)["input_ids"]
    vectors = SentenceTransformer(
        modules=[
            st_modules.Transformer(str(HERE / NAME), max_seq_length=24),
            st_modules.Pooling(WIDTH, pooling_mode="mean"),
            st_modules.Normalize(),
        ],
        device="cpu",
    ).encode(TEXTS)
    np.savez_compressed(
        HERE / NAME / "golden_texts.npz",
        texts=np.array(TEXTS),
        query=vectors,
        passage=vectors,
        awkward=np.array(json.dumps(AWKWARD)),
        awkward_ids=np.array(list(itertools.chain(*ids)), np.int32),
        awkward_lengths=np.array(list(map(len, ids))),
    )
    # The cross-encoder's folder has only a tokenizer.json, like models that were trained with transformers.
    transformers.AutoTokenizer.from_pretrained(HERE / CROSS, model_max_length=MAX_LENGTH).save_pretrained(
        HERE / CROSS
    )
    (HERE / CROSS / "spm.model").unlink()
    save_outputs(HERE / CROSS, head, "golden.npz", "logits")


if __name__ == "__main__":
    main()
