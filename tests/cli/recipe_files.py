"""The paths of gin/'s files, by kind of file, for the tests of recipes."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
INCLUDED = ("encoder", "settings")  # files that other gin files include
FILES = [f.relative_to(ROOT).as_posix() for f in (ROOT / "gin").rglob("*.gin") if f.stem not in INCLUDED]
KINDS = ("models", "objectives", "runs")
PIECES = {kind: sorted(f for f in FILES if f.startswith(f"gin/{kind}/")) for kind in KINDS}
MODELS = [*PIECES["models"], "gin/experiments/minilm.gin"]
SEQ2SEQ = {kind: f"gin/{kind}/seq2seq.gin" for kind in ("models", "objectives")}
CROSS = {kind: f"gin/{kind}/cross_encoder.gin" for kind in ("models", "objectives")}
MULTI_VECTOR = "gin/models/multi_vector.gin"
HYBRID = "gin/models/hybrid_encoder.gin"
SPARSE = "gin/models/sparse_encoder.gin"
AUTOENCODERS = [f"gin/objectives/{name}.gin" for name in ("tsdae", "clm_autoencoder", "mlm_autoencoder")]
OTHERS = ("simcse", "consert", "multi_task", "diffcse", "cpdae", "seed", "prop", "ict")
OF_TEXTS = [*AUTOENCODERS, *(f"gin/objectives/{name}.gin" for name in OTHERS)]
MASKED_LM = f"hf:{ROOT}/tests/golden/mlm_bert"


def recorded_settings(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line and line[0] != "#")
