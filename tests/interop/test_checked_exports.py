"""What is exported is checked when it is read again; what others wrote, or put beside it, is not."""

from pathlib import Path

import pytest

from jaxir.errors import UserError
from jaxir.interop import formats, model_dir

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
