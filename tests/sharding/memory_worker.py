"""Makes, saves and loads a model in one of two processes; reports bytes held, read and written."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import model_dir
from jaxir.interop.huggingface import hf
from jaxir.interop.model import stored
from jaxir.interop.model.encoder_settings import EncoderSettings
from jaxir.interop.model.stored import StoredModel
from jaxir.interop.weights.lazy import LazyArray
from jaxir.models.dual_encoder import DualEncoderConfig
from jaxir.models.t5 import T5Config
from jaxir.runtime.distributed import maybe_initialize_distributed, together, wait_for_all
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.run.checkpoints import Checkpoints
from jaxir.training.step import train_state as state_lib
from jaxir.training.step.optimizers import AdamW

# 16 MB, all of which can be split; the settings are those of a large model.
T5 = T5Config(
    vocab_size=512,
    embed_dim=256,
    num_layers=4,
    num_heads=4,
    head_dim=64,
    mlp_dim=1024,
    scan_layers=True,
    remat=True,
)
CONFIG = DualEncoderConfig(backbone=T5)
TOKENIZER = Path(__file__).parent.parent / "golden" / "bert"


def transferred(what: str) -> int:
    """Returns the bytes that this process has read ("rchar") or written ("wchar") by system calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def held(tree) -> int:
    """Returns the bytes of a tree that this process holds."""
    return sum(s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards)


def size(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def total(tree) -> float:
    return float(jax.jit(lambda t: sum(abs(x).sum() for x in jax.tree.leaves(t)))(tree))


def counted(params: dict[str, LazyArray], reads: list[int]) -> dict[str, LazyArray]:
    """Returns arrays that append the bytes of each part that is read to `reads`."""

    def one(array: LazyArray) -> LazyArray:
        def read(index):
            part = array[index]
            reads.append(part.nbytes)
            return part

        return LazyArray(array.shape, read)

    return {name: one(value) for name, value in params.items()}


def as_in_the_file(loaded, params: dict[str, LazyArray]) -> bool:
    """Whether the parts that this process holds equal those of the file, transposed and stacked."""
    same = []
    for ours, theirs in (("mlp", "wi_0"), ("attention", "query")):
        stack = np.stack([params[f"layers.{i}.{ours}.{theirs}.kernel"] for i in range(T5.num_layers)])
        shards = loaded["layers"][ours][theirs]["kernel"].addressable_shards
        same += [np.array_equal(stack[s.index], s.data) and s.data.size * 4 == stack.size for s in shards]
    return all(same) and len(same) == 4


def main(output: Path) -> None:
    partitioner = MeshConfig(fsdp=4).build()
    model = stored.initialize(CONFIG, seed=0, partitioner=partitioner)
    params = nnx.to_pure_dict(nnx.state(model))
    report = {"model": size(params), "held": held(params)}

    transform = AdamW().build(10).transform
    plan = state_lib.plan_state(model, transform, partitioner)
    state = state_lib.initial_state(model, transform, plan)
    report["state"], report["held state"] = size(state), held(state)
    checkpoints = Checkpoints(output / "run", {}, keep_last=1, metric=None)
    checkpoints.open(plan.abstract)
    before = transferred("wchar")
    checkpoints.save(0, state, None)
    checkpoints.settle()
    report["written"] = transferred("wchar") - before
    checkpoints.close()

    again = Checkpoints(output / "run", {}, keep_last=1, metric=None)
    before = transferred("rchar")
    resumed = again.open(plan.abstract)
    report["restored"] = transferred("rchar") - before
    report["same after restoring"] = total(resumed.state.params) == total(state.params)
    report["laid out as planned"] = all(
        x.sharding == s
        for x, s in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(plan.shardings), strict=True)
    )
    again.close()

    if jax.process_index() == 0:
        (output / "hf").mkdir()
        rng = np.random.default_rng(0)
        shapes = stored.encoder_shapes(T5)
        new = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        hf.write_encoder(output / "hf", T5, new, pad_id=0)
    wait_for_all("the Hugging Face folder is written")
    reads: list[int] = []
    encoder = hf.read_encoder(output / "hf")
    source = StoredModel(
        config=CONFIG,
        params=counted({f"encoder.{name}": value for name, value in encoder.params.items()}, reads),
        tokenizer=None,
        settings=EncoderSettings(query_max_length=8, passage_max_length=8),
    )
    loaded = nnx.to_pure_dict(nnx.state(stored.build(source, partitioner)))
    report["read"], report["largest read"] = sum(reads), max(reads)
    report["as in the file"] = as_in_the_file(loaded["encoder"], encoder.params)

    before = transferred("wchar")
    settings = EncoderSettings(query_max_length=8, passage_max_length=8)
    model_dir.save(output / "saved", model, Tokenizer.load(TOKENIZER), settings)
    report["written of the model"] = transferred("wchar") - before
    again = model_dir.load(str(output / "saved"), mesh=partitioner)
    report["same after loading"] = total(nnx.to_pure_dict(nnx.state(again.model))) == total(params)
    report["fingerprint"] = again.fingerprint
    (output / f"memory-{jax.process_index()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    maybe_initialize_distributed()
    with together():
        main(Path(sys.argv[1]))
