"""Makes seq2seq_*/reader.npz: outputs of transformers' T5s for questions with separately encoded passages.

    python tests/golden/make_reader.py

It needs torch and transformers, and the folders of make_seq2seq.py. One passage of the last question is all
padding.
"""

import numpy as np
import torch
import transformers
from make_golden import HERE, make_ids
from make_seq2seq import BEAMS, FORMS, NEW_TOKENS, ended
from transformers.modeling_outputs import BaseModelOutput

QUESTIONS, PASSAGES = 4, 3


def main() -> None:
    rng = np.random.default_rng(7)
    source = make_ids(rng, 0, rng.integers(4, 20, QUESTIONS * PASSAGES).tolist())
    source[-1] = 0
    source = source.reshape(QUESTIONS, PASSAGES, -1)
    target = make_ids(rng, 0, [10, 4, 1, 7])
    for name in FORMS:
        model = transformers.T5ForConditionalGeneration.from_pretrained(HERE / f"seq2seq_{name}").eval()
        np.savez_compressed(HERE / f"seq2seq_{name}" / "reader.npz", **outputs(model, source, target))


def outputs(
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


if __name__ == "__main__":
    main()
