"""Makes cross_*/: tiny random cross-encoders and the scores of the reference implementations.

cross_saved/ has only the files of cross_bert that change if sentence-transformers 6.2 saves it again.

    python tests/golden/make_cross_encoders.py

It needs torch, transformers and sentence-transformers, and the tokenizers of make_golden.py.
"""

import json
import tempfile
from pathlib import Path

import make_modernbert
import numpy as np
import tokenizers
import torch
import transformers
from make_golden import HERE, POSITIONS, SENTENCES, TEXTS, VOCAB, WIDTH, make_ids, randomize
from sentence_transformers import CrossEncoder
from tokenizers import processors

MAX_LENGTH = 40
PAIRS = [
    (TEXTS[0], TEXTS[1]),
    (TEXTS[1], TEXTS[3]),
    (TEXTS[3], TEXTS[0]),
    ("", TEXTS[0]),
    (TEXTS[0], ""),
    (SENTENCES[0], SENTENCES[5]),
    (SENTENCES[5], SENTENCES[1]),
    (TEXTS[3] * 2, TEXTS[3] * 3),
]
# The activation of the scores, in the forms that versions of sentence-transformers have written.
OUTPUTS = {
    "bert": {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
    "roberta": {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
    "distilbert": {},
    "modernbert": {},
}


def config(name: str) -> transformers.PretrainedConfig:
    shared = {"vocab_size": VOCAB, "num_labels": 1}
    if name == "modernbert":
        return make_modernbert.config(num_labels=1, classifier_pooling="mean")
    bert = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "bert":
        return transformers.BertConfig(**shared, **bert, max_position_embeddings=POSITIONS)
    if name == "roberta":
        positions = {"max_position_embeddings": POSITIONS + 2, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
        return transformers.RobertaConfig(**shared, **bert, **positions)
    distil = {"dim": WIDTH, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    return transformers.DistilBertConfig(**shared, **distil, max_position_embeddings=POSITIONS)


def save_tokenizer(name: str) -> None:
    directory = HERE / f"cross_{name}"
    source = HERE / (name if name in ("roberta", "modernbert") else "bert")
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    # A folder may have settings of truncation and padding, which the reader must ignore.
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    start, end = ("<s>", "</s>") if name == "roberta" else ("[CLS]", "[SEP]")
    pair = f"{start} $A {end} {end} $B {end}" if name == "roberta" else f"{start} $A {end} $B:1 {end}:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A {end}",
        pair=pair,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (start, end)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>" if name == "roberta" else "[PAD]",
        "model_max_length": MAX_LENGTH,
    }
    if name == "bert":
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def save_cross_encoder(name: str) -> None:
    directory, settings = HERE / f"cross_{name}", config(name)
    model = transformers.AutoModelForSequenceClassification.from_config(settings).eval()
    randomize(model)
    model.save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | OUTPUTS[name], indent=2) + "\n")
    save_tokenizer(name)
    rng = np.random.default_rng(0)
    arrays = {}
    for case, lengths in {"padded": [150, 40, 5], "unpadded": [20, 20]}.items():
        ids = make_ids(rng, settings.pad_token_id, lengths)
        mask = ids != settings.pad_token_id
        types = np.where(mask & (np.arange(ids.shape[1]) > 3) & (name == "bert"), 1, 0).astype(np.int32)
        inputs = {"input_ids": ids, "attention_mask": mask} | (
            {"token_type_ids": types} if name == "bert" else {}
        )
        with torch.no_grad():
            logits = model(**{key: torch.tensor(value).long() for key, value in inputs.items()}).logits
        arrays |= {f"{case}_ids": ids, f"{case}_types": types, f"{case}_logits": logits[:, 0].numpy()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    # transformers drops the empty second text of a single pair, so all pairs are tokenised together.
    rows = tokenizer([list(pair) for pair in PAIRS], truncation=True, max_length=MAX_LENGTH)
    reference = CrossEncoder(str(directory), device="cpu")
    arrays |= {
        "pairs": np.array(PAIRS),
        "pair_ids": np.concatenate(rows["input_ids"]).astype(np.int32),
        "pair_lengths": np.array([len(ids) for ids in rows["input_ids"]]),
        "pair_scores": np.array([reference.predict([pair])[0] for pair in PAIRS]),
    }
    if name == "bert":
        arrays["pair_types"] = np.concatenate(rows["token_type_ids"]).astype(np.int32)
    np.savez_compressed(directory / "golden.npz", **arrays)


def save_as_sentence_transformers() -> None:
    source, directory = HERE / "cross_bert", HERE / "cross_saved"
    directory.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as saved:
        CrossEncoder(str(source), device="cpu").save_pretrained(saved, create_model_card=False)
        for path in Path(saved).iterdir():
            same = source / path.name
            if not (same.exists() and same.read_bytes() == path.read_bytes()):
                (directory / path.name).write_bytes(path.read_bytes())


def main() -> None:
    torch.manual_seed(0)
    for name in OUTPUTS:
        save_cross_encoder(name)
    save_as_sentence_transformers()


if __name__ == "__main__":
    main()
