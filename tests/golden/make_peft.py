"""Makes peft/: adapters that PEFT wrote for bert, qwen3 and modernbert of golden/, and PEFT's outputs.

pip install torch==2.14.1 transformers==5.24.0 peft==0.21.2
python tests/golden/make_peft.py

The adapters name their base model "BASE", which the tests replace by a path. The adapters of qwen3 have other
ranks and alphas in some layers, and leave a layer out; modernbert's change fused kernels; bert's use rsLoRA
and adapt its pooler.
"""

import json
import shutil

import numpy as np
import torch
from make_golden import HERE
from peft import LoraConfig, get_peft_model
from transformers import AutoModel

CASES = {
    "bert": {"r": 3, "lora_alpha": 5, "target_modules": ["query", "dense"], "use_rslora": True},
    "qwen3": {
        "r": 3,
        "lora_alpha": 5,
        "target_modules": r"layers\.[01]\..*\.(q|v|up|down)_proj",
        "rank_pattern": {"v_proj": 2, "layers.1.mlp.up_proj": 4},
        "alpha_pattern": {"down_proj": 9},
    },
    "modernbert": {"r": 2, "lora_alpha": 4, "target_modules": ["Wqkv", "Wi"]},
}


def main() -> None:
    for name, settings in CASES.items():
        torch.manual_seed(0)
        model = get_peft_model(
            AutoModel.from_pretrained(HERE / name), LoraConfig(task_type="FEATURE_EXTRACTION", **settings)
        ).eval()
        for key, value in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(value, std=0.1)
        folder = HERE / "peft" / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        config = json.loads((folder / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = "BASE"
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        pad = model.config.pad_token_id or 0
        ids = torch.arange(24).reshape(2, 12) * 3 % 90 + 5
        ids[1, 8:] = pad
        with torch.no_grad():
            output = model(input_ids=ids, attention_mask=(ids != pad).long()).last_hidden_state
        np.savez(folder / "golden.npz", ids=ids.numpy().astype(np.int32), output=output.numpy())


if __name__ == "__main__":
    main()
