"""Makes mlm_*/: tiny random masked language models and the logits of transformers.

    python tests/golden/make_masked_lm.py

It needs torch and transformers, and the tokenizers of make_golden.py.
"""

import shutil

import numpy as np
import torch
import transformers
from make_golden import HERE, POSITIONS, VOCAB, make_ids, randomize

SHARED = {"vocab_size": VOCAB, "tie_word_embeddings": True}
BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIGS = {
    # The heads of BERT and DistilBERT have the activation of the blocks; RoBERTa's has gelu.
    "bert": transformers.BertConfig(
        **SHARED, **BERT, max_position_embeddings=POSITIONS, hidden_act="gelu_new"
    ),
    "roberta": transformers.RobertaConfig(
        **SHARED,
        **BERT,
        max_position_embeddings=POSITIONS + 2,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        hidden_act="relu",
    ),
    "distilbert": transformers.DistilBertConfig(
        **SHARED,
        dim=32,
        hidden_dim=48,
        n_layers=1,
        n_heads=4,
        max_position_embeddings=POSITIONS,
        activation="relu",
    ),
}


def save(name: str, config: transformers.PretrainedConfig) -> None:
    directory = HERE / f"mlm_{name}"
    model = transformers.AutoModelForMaskedLM.from_config(config).eval()
    randomize(model)
    model.tie_weights()
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    tokenizers = HERE / ("roberta" if name == "roberta" else "bert")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizers / file, directory)
    ids = make_ids(np.random.default_rng(0), config.pad_token_id, [20, 9, 3])
    mask = ids != config.pad_token_id
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask).long()).logits
    np.savez_compressed(directory / "golden.npz", ids=ids, logits=logits.numpy())


if __name__ == "__main__":
    torch.manual_seed(0)
    for name, config in CONFIGS.items():
        save(name, config)
