"""Writes tests/golden/nf4.safetensors: matrices that bitsandbytes stores in NF4, as in its checkpoints.

    pip install torch bitsandbytes safetensors numpy
    python scripts/golden/nf4.py

For each matrix X: `X.weight` and its quant state under the names of a checkpoint; `X.original` (f32 or
bf16); `X.dequantized` in the dtype of the original; `X.absmax_f32`, the scales before their own
quantisation; `X.absmax_nearest`, their 8-bit codes by the rule "nearest value of the map". The CPU
kernel of bitsandbytes searches approximately and misses the nearest value for about one scale in
600; its CUDA kernel does not.
"""

import numpy as np
import torch
import bitsandbytes.functional as F
from safetensors.torch import save_file


def nearest(state):
    code = state.state2.code.numpy()
    middles = (code[:-1] + code[1:]) / np.float32(2)

    def of(absmax):
        x = (absmax - state.offset).numpy().reshape(-1)
        full = np.zeros(-(-x.size // 256) * 256, np.float32)
        full[: x.size] = x
        blocks = full.reshape(-1, 256)
        largest = np.abs(blocks).max(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            scaled = blocks * (np.float32(1) / largest)[:, None]
        codes = np.searchsorted(middles, np.nan_to_num(scaled, nan=-2.0), side="left")
        return torch.from_numpy(codes.reshape(-1)[: x.size].astype(np.uint8))

    return of


def matrices():
    random = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=random)
    code = F.get_4bit_type("nf4", device="cpu")
    middles = (code[:-1] + code[1:]) / 2
    tiny = draw(6, 64)
    tiny[1] = 0
    tiny[2] *= 1e-30
    tiny[3] = 1e-39
    return {
        "random": (draw(60, 300) * 0.02).bfloat16(),  # 282 blocks: two ranges, the last block incomplete
        "constant": torch.full((3, 64), -0.3),
        "tiny": tiny,
        "huge": draw(4, 64) * 1e36,
        "odd": draw(5, 27),  # 135 elements: two blocks and a rest of 7
        "middles": torch.cat([code, middles, code, middles, code[:2]]).reshape(1, 64),
    }


def main():
    out = {}
    for name, matrix in matrices().items():
        packed, state = F.quantize_4bit(matrix, blocksize=64, quant_type="nf4", compress_statistics=True)
        plain = F.quantize_4bit(matrix, blocksize=64, quant_type="nf4", compress_statistics=False)[1]
        out[f"{name}.weight"] = packed
        for key, value in state.as_dict(packed=True).items():
            out[f"{name}.weight.{key}"] = value
        out[f"{name}.original"] = matrix.contiguous()
        out[f"{name}.dequantized"] = F.dequantize_4bit(packed, state).contiguous()
        out[f"{name}.absmax_f32"] = plain.absmax
        out[f"{name}.absmax_nearest"] = nearest(state)(plain.absmax)
        differ = (out[f"{name}.absmax_nearest"] != state.absmax).sum().item()
        print(name, tuple(matrix.shape), f"{differ} of {state.absmax.numel()} scales are not the nearest")
    save_file(out, "tests/golden/nf4.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
