"""Plans of generation, compared with counts by hand and with the TPU's own compiler."""

import re
from pathlib import Path

import jax
import pytest

from jaxir.core.errors import UserError
from jaxir.costs import targets
from jaxir.interop.build import PretrainedSeq2Seq
from jaxir.interop.huggingface import hf_config
from jaxir.interop.model import stored
from jaxir.interop.weights.weights import write_json
from jaxir.models.decoding import Decoding
from jaxir.models.seq2seq import Seq2SeqConfig
from jaxir.planning import architecture, decoding_plan
from jaxir.runtime.partitioning import MeshConfig
from tests.planning.conftest import SMALL

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

V, E, H, K, F, LAYERS, S, ROWS = 72, 32, 2, 16, 64, 2, 24, 8
BUCKETS, CHIPS = 32, 4
CONFIG = Seq2SeqConfig(backbone=SMALL, num_decoder_layers=LAYERS)


def planned(how: Decoding) -> decoding_plan.DecodingPlan:
    batch = decoding_plan.Batch(texts=ROWS, length=S, how=how)
    partitioner = MeshConfig().build(jax.devices()[:CHIPS])
    return decoding_plan.make(targets.parse("gpu:4xh100"), CONFIG, batch, partitioner)


def by_hand(new_tokens: int, outputs: int) -> float:
    """Returns the operations of a batch's products, which each text and each output token add to."""
    feed_forward, inner = 2 * 3 * E * F, H * K
    text = LAYERS * S * (2 * 4 * E * inner + feed_forward + 2 * 2 * S * inner)  # the encoder
    text += LAYERS * S * 2 * 2 * E * inner  # the decoder's keys and values of the encoder's output
    token = LAYERS * (2 * (4 + 2) * E * inner + feed_forward + 2 * 2 * (new_tokens + S) * inner) + 2 * V * E
    biases = 2 * BUCKETS * H * (S**2 + new_tokens**2)  # biases of relative positions, computed on every chip
    return ROWS * (text + outputs * new_tokens * token) + CHIPS * biases


@pytest.mark.parametrize(
    "how",
    [Decoding(max_new_tokens=8), Decoding(max_new_tokens=16, num_outputs=3, temperature=1.0)],
    ids=["greedy", "samples"],
)
def test_work_and_rate_of_the_decoding_loop_equal_hand_counts(how):
    plan = planned(how)
    assert plan.costs.work.flops * CHIPS == by_hand(how.max_new_tokens, how.num_outputs)
    assert plan.batch.tokens == ROWS * how.num_outputs * how.max_new_tokens
    shapes = stored.model_shapes(CONFIG)
    assert plan.parameters == 4 * sum(a * (b[0] if b else 1) for a, *b in shapes.values())
    text = "\n".join(decoding_plan._lines(plan))
    rate = re.search(r"all at once +([\d.]+) (ms|s) a batch: ([\d,]+) tokens/s", text)
    seconds = float(rate[1]) / (1000 if rate[2] == "ms" else 1)
    assert int(rate[3].replace(",", "")) == pytest.approx(plan.batch.tokens / seconds, rel=0.02)


def test_generator_is_described_without_weights(tmp_path):
    config, settings = architecture.describe_generator("hf:google/t5-v1_1-base")
    assert (config.num_decoder_layers, config.tied, config.scaled) == (12, False, False)
    assert (settings.passage_max_length, settings.query_max_length) == (512, 64)
    assert architecture.describe_generator("hf:t5-small")[0].scaled
    for tied in (True, False):
        content = hf_config.describe(SMALL, 0) | {"tie_word_embeddings": tied, "num_decoder_layers": 3}
        folder = tmp_path / str(tied)
        folder.mkdir()
        write_json(folder / "config.json", content)
        found, _ = architecture.describe_generator(f"hf:{folder}")
        assert (found.tied, found.scaled, found.num_decoder_layers) == (tied, tied, 3)
    start = PretrainedSeq2Seq(source="hf:google/t5-v1_1-small", query_max_length=16, passage_max_length=99)
    config, settings = architecture.describe(start)
    assert isinstance(config, Seq2SeqConfig) and settings.passage_max_length == 99
    with pytest.raises(UserError, match="model_type 'bert' is not a generator"):
        architecture.describe_generator(f"hf:{GOLDEN / 'bert'}")


@pytest.mark.slow
def test_plan_command_compiles_generation_for_a_tpu_slice(tpu_compiler, in_process, model):
    write_json(model / "config.json", hf_config.describe(SMALL, 0) | {"tie_word_embeddings": False})
    flags = [f"--model=hf:{model}", "--topology=v5e:2x2", "--max_length=24", "--batch_tokens=96"]
    flags += ["--max_new_tokens=8", "--top_k=4", "--num_outputs=2", "--prices=v5e=1.2"]
    done = in_process("-m", "jaxir.expand", "plan", *flags)
    assert done.returncode == 0, done.stderr
    assert "batch     16 texts of 24 tokens, 2 outputs of 8 for each" in done.stdout
    assert re.search(r"one after another .* a batch: [\d,]+ tokens/s", done.stdout)
    assert re.match(
        r"fits: [\d.]+ of 15.75 GiB on each chip \(\d+%\)\n"
        r"a million texts at full speed: .*, costs [\d.]+( to [\d.]+)?\n\nplan for v5e:2x2: 4 v5e chips\n",
        done.stdout,
    )
