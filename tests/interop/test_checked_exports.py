"""What is exported is checked when it is read again; what others wrote, or put beside it, is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxir.core.errors import UserError
from jaxir.data.text.tokenizer import Tokenizer
from jaxir.interop import formats, model_dir
from jaxir.models.t5 import T5Config
from jaxir.storage import checksums

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "t5_1_1"


@pytest.mark.parametrize(
    ("to", "weights"),
    [
        ("hf", "model.safetensors"),
        ("st", "model.safetensors"),
        ("t5x", "checkpoint_0/target.encoder.layers_1.mlp.wo.kernel/0.0"),
    ],
)
def test_a_flipped_bit_in_an_export_is_told(to, weights, tmp_path):
    out = tmp_path / "out"
    formats.convert(f"st:{GOLDEN.parent / 'roberta' if to == 'hf' else GOLDEN}", out, to)
    (out / "NOTES").write_text("mine")
    source = model_dir.load(f"{to}:{out}")
    path = out / weights
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged: .* is not what was written"):
        model_dir.load(f"{to}:{out}")
    content[-100] ^= 1
    path.write_bytes(content)
    assert model_dir.load(f"{to}:{out}").fingerprint == source.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(("words", "token"), [("wordpiece", b"##"), ("sentencepiece", "\u2581".encode())])
def test_a_flipped_bit_in_a_saved_model_is_told(words, token, tmp_path, sentencepiece_folder, save_model):
    """jaxir reads none; sha256sum, which servers have, and `checksums.check` tell."""
    pytest.importorskip("tensorflow_text")
    out, model = tmp_path / "out", f"st:{GOLDEN.parent / 'bert'}"
    if words == "sentencepiece":
        t5 = T5Config(vocab_size=1000, embed_dim=32, num_layers=1, num_heads=2, head_dim=16, mlp_dim=64)
        model = save_model(tmp_path / "model", t5, Tokenizer.load(sentencepiece_folder))
    flags = [f"--model={model}", "--format=saved_model", f"--output={out}"]
    done = subprocess.run([sys.executable, "-m", "jaxir.export", *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def said() -> str:
        command = ["sha256sum", "--check", "--quiet", "SHA256SUMS"]
        return subprocess.run(command, cwd=out, capture_output=True, text=True).stdout

    files = {p: p.read_bytes() for p in out.rglob("*") if p.is_file() and p.name != "SHA256SUMS"}
    of_words = [(p, content.index(token)) for p, content in files.items() if token in content]
    assert of_words, "the vocabulary lies in the graph, in its variables or in its assets"
    (weights,) = out.glob("variables/variables.data-*")
    assert said() == ""
    checksums.check(out)
    for path, at in [*of_words, *((p, len(files[p]) // 2) for p in files), (weights, -1)]:
        content = bytearray(files[path])
        content[at] ^= 1
        path.write_bytes(content)
        name = path.relative_to(out)
        assert said() == f"{name}: FAILED\n"
        with pytest.raises(UserError, match=f"{name} is not what was written"):
            checksums.check(out)
        path.write_bytes(files[path])
    assert said() == ""
    checksums.check(out)


def test_modules_lie_in_their_folder(tmp_path):
    out = tmp_path / "out"
    formats.convert(f"st:{GOLDEN}", out, "st")
    (out / "SHA256SUMS").unlink()
    (out / "1_Pooling").rename(tmp_path / "elsewhere")
    for place in ("../elsewhere", str(tmp_path / "elsewhere"), "link"):
        (out / "link").unlink(missing_ok=True)
        (out / "link").symlink_to("../elsewhere")
        text = (GOLDEN / "modules.json").read_text().replace('"1_Pooling"', f'"{place}"')
        (out / "modules.json").write_text(text)
        with pytest.raises(UserError, match=r"modules\.json: .* (lies outside|is a link that leads out) of"):
            model_dir.load(f"st:{out}")
