"""Makes seq2seq_*/: tiny random T5s, and the logits and tokens of transformers, also for separate passages.

    python tests/golden/make_seq2seq.py

It needs torch and transformers, and the tokenizer of make_golden.py.
"""

import json
import shutil

import numpy as np
import torch
import transformers
from make_golden import HERE, VOCAB, WIDTH, make_ids, randomize
from transformers.modeling_outputs import BaseModelOutput

NEW_TOKENS, BEAMS = 12, 4
QUESTIONS, PASSAGES = 4, 3
T5 = {"vocab_size": VOCAB, "d_model": WIDTH, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0}
FORMS = {
    "1_0": {"d_kv": 8, "num_layers": 2, "feed_forward_proj": "relu"},
    "1_1": {"d_kv": 12, "num_layers": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
# Seeds with which some outputs end soon and others do not end.
SEEDS = {"1_0": 0, "1_1": 3}


def make(name: str, seed: int) -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(seed)
    config = transformers.T5Config(**T5, **FORMS[name])
    model = transformers.T5ForConditionalGeneration(config).eval()
    if name == "1_1":  # otherwise transformers 5 would tie lm_head to the token table
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.shared.weight))
    randomize(model)
    with torch.no_grad():  # makes the end token, 1, likely
        model.lm_head.weight[1] *= 2.0
        model.lm_head.weight *= 0.4
    return model


def save(name: str) -> None:
    directory = HERE / f"seq2seq_{name}"
    make(name, SEEDS[name]).save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    path = directory / "config.json"
    content = json.loads(path.read_text()) | {"tie_word_embeddings": name == "1_0"}
    content.pop("scale_decoder_outputs", None)  # published folders lack this entry
    path.write_text(json.dumps(content, indent=2) + "\n")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(HERE / "t5_1_1" / file, directory / file)
    model = transformers.T5ForConditionalGeneration.from_pretrained(directory).eval()
    assert (model.lm_head.weight is model.shared.weight) == (name == "1_0")
    np.savez_compressed(directory / "golden.npz", **outputs(model))
    rng = np.random.default_rng(7)
    source = make_ids(rng, 0, rng.integers(4, 20, QUESTIONS * PASSAGES).tolist())
    source[-1] = 0  # a passage that is only padding
    source = source.reshape(QUESTIONS, PASSAGES, -1)
    target = make_ids(rng, 0, [10, 4, 1, 7])
    np.savez_compressed(directory / "reader.npz", **reader_outputs(model, source, target))


def outputs(model: transformers.T5ForConditionalGeneration) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    source = make_ids(rng, 0, [30, 12, 3, 20, 8, 25])
    target = make_ids(rng, 0, [140, 40, 3, 1, 20, 9])
    given = {"input_ids": torch.tensor(source).long(), "attention_mask": torch.tensor(source != 0).long()}
    with torch.no_grad():
        logits = model(**given, labels=torch.tensor(target).long()).logits.numpy()
        how = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        greedy = model.generate(**given, **how)
        beams = model.generate(
            **given,
            **how,
            num_beams=BEAMS,
            num_return_sequences=BEAMS,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = {"source_ids": source, "target_ids": target, "logits": np.where(target[..., None], logits, 0.0)}
    found |= {"greedy": ended(greedy), "beams": ended(beams.sequences).reshape(len(source), BEAMS, -1)}
    return found | {"beam_scores": beams.sequences_scores.numpy().reshape(len(source), BEAMS)}


def reader_outputs(
    model: transformers.T5ForConditionalGeneration, source: np.ndarray, target: np.ndarray
) -> dict[str, np.ndarray]:
    def encoded(ids: np.ndarray) -> torch.Tensor:
        mask = torch.tensor(ids != 0).long()
        return model.encoder(input_ids=torch.tensor(ids).long(), attention_mask=mask).last_hidden_state

    with torch.no_grad():
        hidden = torch.cat([encoded(source[:, passage]) for passage in range(PASSAGES)], dim=1)
        mask = torch.tensor(source.reshape(QUESTIONS, -1) != 0).long()
        given = {"encoder_outputs": BaseModelOutput(last_hidden_state=hidden), "attention_mask": mask}
        logits = model(**given, labels=torch.tensor(target).long()).logits.numpy()
        how = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        greedy = ended(model.generate(**given, **how))
        beams = ended(model.generate(**given, **how, num_beams=BEAMS))
    logits = np.where(target[..., None], logits, 0.0)
    return {"source_ids": source, "target_ids": target, "logits": logits, "greedy": greedy, "beams": beams}


def ended(sequences: torch.Tensor) -> np.ndarray:
    """Returns the tokens without the first, [N, NEW_TOKENS], with 0 after the end."""
    ids = sequences.numpy()[:, 1:]
    ids = np.pad(ids, ((0, 0), (0, NEW_TOKENS - ids.shape[1])))
    behind = np.cumsum(ids == 1, axis=1) - (ids == 1) > 0
    return np.where(behind, 0, ids).astype(np.int32)


def main() -> None:
    for name in FORMS:
        save(name)


if __name__ == "__main__":
    main()
