"""Writes tests/golden/eight_bit.safetensors: the dynamic maps of bitsandbytes, and its 8-bit AdamW.

  python scripts/golden/eight_bit.py           (needs torch, bitsandbytes and safetensors)

`signed` and `unsigned` are the maps. `weight.K`, `codes1.K`, `absmax1.K`, `codes2.K` and `absmax2.K` are the weight and
the moments after K steps (K = 0 .. 5) with the gradients `grad.1` .. `grad.5`; lr 0.01, betas 0.9 and 0.999, eps 1e-8,
weight decay 0.1. Blocks of the gradient are ordinary, constant, zero, tiny and huge; the last one is shorter.
"""
from pathlib import Path

import bitsandbytes.functional as F
import torch
from safetensors.torch import save_file

from optimizers import use_nearest_codes

OUT = Path(__file__).resolve().parents[2] / "tests/golden/eight_bit.safetensors"
SIZE, STEPS = 5 * 256 + 77, 5


def gradient(step):
    generator = torch.Generator().manual_seed(step)
    grad = torch.randn(SIZE, generator=generator)
    grad[256:512] = 0.25
    grad[512:768] = 0
    grad[768:1024] *= 1e-12
    grad[1024:1280] *= 1e12
    return grad


def main():
    use_nearest_codes()
    maps = {"signed": F.create_dynamic_map(True), "unsigned": F.create_dynamic_map(False)}
    tensors = dict(maps)
    weight = torch.randn(SIZE, generator=torch.Generator().manual_seed(0))
    codes = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(2)]
    absmax = [torch.zeros(-(-SIZE // 256)) for _ in range(2)]
    tensors["weight.0"] = weight.clone()
    for step in range(1, STEPS + 1):
        tensors[f"grad.{step}"] = gradient(step)
        F.optimizer_update_8bit_blockwise(
            "adam", tensors[f"grad.{step}"], weight, *codes, 0.9, 0.999, 0.0, 0.0, 1e-8, step, 0.01,
            maps["signed"], maps["unsigned"], *absmax, weight_decay=0.1,
        )
        for name, tensor in [("weight", weight), ("codes1", codes[0]), ("codes2", codes[1]), ("absmax1", absmax[0]), ("absmax2", absmax[1])]:
            tensors[f"{name}.{step}"] = tensor.clone()
    save_file(tensors, OUT)


main()
