"""Writes adapters of experts in tests/golden/adapters, and their curves in tests/golden/expert_adapters.json.

  python scripts/golden/expert_adapters.py

Needs peft. The adapters belong to the models of `experts.py`; `r` is 2 (`experts-one`: 3), `alpha` 8, `dropout` 0:

  experts-vl       moe-vl: all linear layers of the decoder, `gate_up_proj` and `down_proj` of the experts
  experts-text     moe-text: the same
  experts-one      moe-text: `gate_up_proj` of the experts alone, no linear layer
  experts-vl-4     the values of `experts-vl` as PEFT has them with transformers 4.57, whose experts are `[E, K, M]`:
                   A has the values of each `B_e^T`, and B those of each `A_e^T`

A and B are drawn, and stored in bf16. A curve has 20 steps as those of `experts.py`; `noise` is the largest difference
of the losses of samples alone from those of padded and packed samples.
"""

import json
import shutil

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from experts import ROWS, STEPS, differences, load, train
from ref_trainer import DECODER
from reference_lib import GOLDEN, Encoder, read_jsonl

OUT = GOLDEN / "expert_adapters.json"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ADAPTERS = {
    "experts-vl": ("moe-vl", {"r": 2, "target_modules": DECODER, "target_parameters": BOTH}),
    "experts-text": ("moe-text", {"r": 2, "target_modules": DECODER[:4], "target_parameters": BOTH}),
    "experts-one": ("moe-text", {"r": 3, "target_modules": [], "target_parameters": BOTH[:1]}),
}
DATA = {"experts-vl": ("text", "image_exact"), "experts-text": ("text",), "experts-one": ("text",)}
SEEDS = {"experts-vl": 91, "experts-text": 92, "experts-one": 93}


def write_adapter(name):
    model, settings = ADAPTERS[name]
    torch.manual_seed(SEEDS[name])
    config = LoraConfig(lora_alpha=8, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", **settings)
    folder = GOLDEN / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    get_peft_model(load(GOLDEN / "models" / model), config).save_pretrained(folder)
    (folder / "README.md").unlink()
    path = folder / "adapter_model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    for key in sorted(tensors):
        if "lora_B" in key:
            tensors[key] = 0.05 * torch.randn(tensors[key].shape)
    save(path, tensors)
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = model
    config["target_modules"] = sorted(config["target_modules"])
    config["target_parameters"] = sorted(config["target_parameters"])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save(path, tensors):
    path.unlink(missing_ok=True)
    save_file({k: t.bfloat16().contiguous() for k, t in tensors.items()}, path, metadata={"format": "pt"})


def write_exchanged(source, name, rank=2):
    """The folder `source` as PEFT has it for experts whose matrices are transposed."""
    folder = GOLDEN / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(GOLDEN / "adapters" / source, folder)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    found = dict(tensors)
    for key, a in tensors.items():
        if "lora_A" not in key or ".mlp.experts." not in key:
            continue
        b = tensors[key.replace("lora_A", "lora_B")]
        a = a.reshape(-1, rank, a.shape[-1])  # [E, r, K]
        b = b.reshape(b.shape[0], rank, -1)  # [M, r, E]
        found[key] = b.permute(2, 1, 0).reshape(-1, b.shape[0])
        found[key.replace("lora_A", "lora_B")] = a.permute(2, 1, 0).reshape(a.shape[-1], -1)
    save(path, found)


def curve(name, data):
    model = ADAPTERS[name][0]
    folder, adapter = GOLDEN / "models" / model, GOLDEN / "adapters" / name
    encoder = Encoder(folder, GOLDEN / "data")
    samples = [encoder(row) for row in read_jsonl(GOLDEN / "data" / f"{data}.jsonl")[: STEPS * ROWS]]
    alone = train(folder, samples, adapter=adapter)
    others = [train(folder, samples, mode, adapter=adapter) for mode in ("padded", "packed")]
    off = [max(of) for of in zip(*(differences(alone, other) for other in others))]
    print(f"{name} {data}: {alone['loss'][0]:.6f} to {alone['loss'][-1]:.6f}", flush=True)
    print("  differences", " ".join(f"{x:.1e}" for x in off), "margins", " ".join(f"{x:.1e}" for x in alone["margins"]))
    return {"model": model, "data": f"{data}.jsonl", "args": {"adapter": name}, **alone, "noise": float(f"{max(off):.2g}")}


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name in ADAPTERS:
        write_adapter(name)
    write_exchanged("experts-vl", "experts-vl-4")
    curves = {f"{data}_{name}": curve(name, data) for name in ADAPTERS for data in DATA[name]}
    OUT.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
