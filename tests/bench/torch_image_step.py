"""Times PyTorch training a small Qwen3-VL on images and text, one forward and backward per sample,
without padding.

  python tests/bench/torch_image_step.py MODEL ROWS.jsonl [--steps 3] [--samples 8] [--threads 2]
                                         [--lr 1e-4]

A step reads 8 rows with the processors of transformers, computes the loss on targets only, clips
gradients, and updates with AdamW (fused). The first step is not timed. Prints one JSON line.
"""
import argparse
import json
import os
import resource
import sys
import time

import torch
import torch.nn.functional as F

from torch_data import WAYS, Rows


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("rows")
    ap.add_argument("--steps", type=int, default=3)
    ap.add_argument("--samples", type=int, default=8)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--way", default="auto", choices=["auto", *WAYS])
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    from transformers import Qwen3VLForConditionalGeneration

    rows = Rows(a.model, a.rows, a.way)
    model = Qwen3VLForConditionalGeneration.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa").train()
    params = list(model.parameters())
    decayed = [p for p in params if p.ndim > 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}], lr=a.lr, fused=True)
    merge = model.config.vision_config.spatial_merge_size**2
    wall, cpu, losses, norms, data = [], [], [], [], []
    total = {"tokens": 0, "vision_tokens": 0, "targets": 0}
    for step in range(a.steps + 1):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        samples = []
        for i in range(step * a.samples, (step + 1) * a.samples):
            tensors = rows.tensors(rows.rows[i % len(rows.rows)])
            samples.append((tensors, rows.labels(tensors["input_ids"][0])[1:]))
        num_targets = sum(int((labels != -100).sum()) for _, labels in samples)
        read = time.perf_counter() - begin
        loss = 0.0
        for tensors, labels in samples:
            hidden = model.model(**tensors, use_cache=False)[0][0, :-1]  # [T - 1, D]
            kept = labels != -100
            one = F.cross_entropy(model.lm_head(hidden[kept]), labels[kept], reduction="sum") / num_targets
            one.backward()
            loss += float(one.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        if step > 0:
            wall.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - cpu_begin)
            data.append(read)
            total["tokens"] += sum(len(labels) + 1 for _, labels in samples)
            total["vision_tokens"] += sum(len(t["pixel_values"]) // merge for t, _ in samples if "pixel_values" in t)
            total["targets"] += num_targets
        print(f"step {step}: loss {loss:.5f}, grad_norm {norms[-1]:.5f}, data {read:.2f} s, all {time.perf_counter() - begin:.2f} s", file=sys.stderr)
    print(json.dumps({"name": "torch", "way": rows.way, "parameters": sum(p.numel() for p in params), "steps": a.steps, **total, "tokens/s": total["tokens"] / sum(wall),
                      "tokens/cpu_s": total["tokens"] / sum(cpu), "data": sum(data) / sum(wall), "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
                      "first_loss": losses[0], "first_grad_norm": norms[0], "loss": losses[-1], "load": os.getloadavg()[0], "torch": torch.__version__}))


if __name__ == "__main__":
    main()
