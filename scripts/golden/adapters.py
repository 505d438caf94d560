"""Writes tests/golden/adapters, and their curves in tests/golden/curves.json.

  python scripts/golden/adapters.py

Needs peft. The adapters belong to small-tied; `alpha` is 16 and `dropout` 0:

  lora         rank 8, the linear layers of the decoder; A drawn by PEFT, B zero
  dora         rank 4, the same layers; B and the magnitudes are drawn too
  lora-vision  rank 4, also the linear layers of the vision blocks and of all mergers; B is drawn too

They are stored in bf16, and PEFT computes with them in float32. The curve `..rslora` starts from
`lora` with `use_rslora: true`; `..pissa` and `..olora` start from PEFT's own initial values.

start.safetensors has matrices X and what PEFT makes of them: `X.pissa` and `X.olora` are `scaling * B
@ A` of rank 4 and alpha 6, and `..rest` the weight that is left.
"""

import json
import shutil

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from ref_trainer import DECODER, make_parser, train
from reference_lib import GOLDEN, load_model

MODEL = "small-tied"
# Not `proj`, which would also select the patch convolution.
VISION = ["attn.qkv", "attn.proj", "linear_fc1", "linear_fc2"]
ADAPTERS = {
    "lora": {"r": 8, "target_modules": DECODER},
    "dora": {"r": 4, "target_modules": DECODER, "use_dora": True},
    "lora-vision": {"r": 4, "target_modules": DECODER + VISION},
}
CURVES = {
    "text_small-tied_lora": ("text", ["--adapter", "lora"]),
    "text_small-tied_rslora": ("text", ["--adapter", "lora", "--rslora"]),
    "text_small-tied_dora": ("text", ["--adapter", "dora"]),
    "text_small-tied_pissa": ("text", ["--init", "pissa"]),
    "text_small-tied_olora": ("text", ["--init", "olora"]),
    "image_exact_small-tied_lora-vision": ("image_exact", ["--adapter", "lora-vision"]),
}


def write_adapter(name):
    """Writes one adapter folder."""
    torch.manual_seed(21)
    config = LoraConfig(lora_alpha=16, lora_dropout=0.0, bias="none", task_type="CAUSAL_LM", **ADAPTERS[name])
    folder = GOLDEN / "adapters" / name
    shutil.rmtree(folder, ignore_errors=True)
    get_peft_model(load_model(GOLDEN / "models" / MODEL), config).save_pretrained(folder)
    (folder / "README.md").unlink()
    path = folder / "adapter_model.safetensors"
    tensors = {key: tensor.clone() for key, tensor in load_file(path).items()}
    if name != "lora":
        for key in sorted(tensors):
            if "lora_B" in key:
                tensors[key] = 0.02 * torch.randn(tensors[key].shape)
            elif key.endswith("magnitude_vector"):
                tensors[key] *= 1 + 0.05 * torch.randn(tensors[key].shape)
    path.unlink()
    save_file({k: t.bfloat16() for k, t in tensors.items()}, path, metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = MODEL
    config["target_modules"] = sorted(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_start():
    """Writes start.safetensors."""
    torch.manual_seed(22)
    tensors = {}
    for name, shape in {"wide": (24, 40), "tall": (50, 30), "square": (32, 32)}.items():
        tensors[name] = torch.randn(shape) * 0.1
        for init in ["pissa", "olora"]:
            model = torch.nn.Sequential(torch.nn.Linear(shape[1], shape[0], bias=False))
            model[0].weight.data = tensors[name].clone()
            config = LoraConfig(r=4, lora_alpha=6, target_modules=["0"], init_lora_weights=init)
            layer = get_peft_model(model, config).base_model.model[0]
            b, a = layer.lora_B["default"].weight.data, layer.lora_A["default"].weight.data
            tensors[f"{name}.{init}"] = layer.scaling["default"] * b @ a
            tensors[f"{name}.{init}.rest"] = layer.base_layer.weight.data.clone()
    save_file(tensors, GOLDEN / "adapters" / "start.safetensors", metadata={"format": "pt"})


def curve(data, arguments, model=MODEL):
    """An entry of curves.json."""
    args = make_parser().parse_args(["--quiet", *arguments])
    name = args.adapter
    args.model, args.data = str(GOLDEN / "models" / model), str(GOLDEN / "data" / f"{data}.jsonl")
    args.adapter = name and str(GOLDEN / "adapters" / name)
    metrics, summary = train(args)
    settings = {**summary["args"], **({"adapter": name} if name else {})}
    entry = {"model": summary["model"], "data": summary["data"], "args": settings}
    for key in ("loss", "grad_norm", "lr", "tokens", "target_tokens"):
        entry[key] = [row[key] for row in metrics]
    for key in ("grad_norms_step1", "param_norms_final"):
        entry[key] = {n: float(f"{norm:.7g}") for n, norm in summary[key].items()}
    return entry


def main():
    torch.set_num_threads(1)
    for name in ADAPTERS:
        write_adapter(name)
    write_start()
    path = GOLDEN / "curves.json"
    curves = json.loads(path.read_text(encoding="utf-8"))
    for name, (data, arguments) in CURVES.items():
        curves[name] = curve(data, arguments)
        print(name, curves[name]["loss"][0], curves[name]["loss"][-1], flush=True)
    path.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
