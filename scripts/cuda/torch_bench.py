"""Times PyTorch with transformers on the shapes and rows of `trainer`'s benchmark, on the same GPU.

  python scripts/cuda/torch_bench.py step MODEL SIZES.json [--way ..] [--compile] [--checkpointing]
                                          [--state ..] [--freeze ..]
  python scripts/cuda/torch_bench.py ops    matmul, copy, attention, linear_cross_entropy in bf16

`scripts/cuda/gpu_bench.sh torch` calls it. `step` trains the model of MODEL/config.json with random
weights, on rows of random tokens (and pixels) with the sizes of SIZES.json
(tests/bench/gpu_rows.py). The rows of a step fill one pack of --packing-length, by best fit. Half of
the text is supervised. Only supervised rows enter the loss, which is computed in chunks, together
with its gradient.

ways       padded-mask   right-padded batches of 8, sdpa with the mask of transformers (the default
                         of transformers)
           padded        the same without the mask, which right padding does not need, so that sdpa
                         can use its flash kernel
           padded-flash  the same with flash_attention_2; needs flash-attn
           packed        one row with variable-length attention in decoder and vision encoder, by
                         flash-attn if installed, otherwise by torch.nn.attention.varlen, otherwise
                         (and on a CPU) by sdpa on each segment
--compile  torch.compile of the loss and of each layer of decoder and vision encoder
--state    master: bf16 weights, f32 master weights and moments, as `trainer` has (but gradients are
           bf16 here and f32 in `trainer`)
           bf16: everything in bf16, moments included; needs less memory and trains differently
AdamW is fused; gradients are clipped at 1.0. The first two steps are not timed (the first six with
--compile). Prints one JSON line, with the key `error` if the way does not work on this machine.
"""
import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch_packs import Packs, boundaries, find_varlen, pack_attention

GIB = 2**30


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(run, device, rounds=10, batch=5):
    """Seconds per run in the fastest round."""
    best = float("inf")
    for round in range(rounds + 2):
        wait(device)
        begin = time.perf_counter()
        for _ in range(batch):
            run()
        wait(device)
        if round > 1:
            best = min(best, (time.perf_counter() - begin) / batch)
    return best


def matmul_peak(device, side):
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, w = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / seconds(lambda: x @ w.T, device)


# The head


def chunk_loss(h, w, y):
    return F.cross_entropy((h @ w.T).float(), y, reduction="sum")


class ChunkedLoss(torch.autograd.Function):
    """Sum of the cross-entropies of the rows `h`. Computes the gradients in the same pass, so that
    logits are computed once and only one chunk of them is in memory."""

    rows, of_chunk, of_frozen = 2048, None, None

    @staticmethod
    def set_up(compiled):
        both = [torch.func.grad_and_value(chunk_loss, argnums=arguments) for arguments in ((0, 1), (0,))]
        ChunkedLoss.of_chunk, ChunkedLoss.of_frozen = (torch.compile(f, dynamic=True) for f in both) if compiled else both

    @staticmethod
    def forward(ctx, h, w, y):
        dh, total = torch.empty_like(h), torch.zeros((), device=h.device)
        dw = torch.zeros_like(w, dtype=torch.float32) if w.requires_grad else None
        for at in range(0, len(h), ChunkedLoss.rows):
            part = slice(at, at + ChunkedLoss.rows)
            grads, loss = (ChunkedLoss.of_frozen if dw is None else ChunkedLoss.of_chunk)(h[part], w, y[part])
            dh[part] = grads[0]
            if dw is not None:
                dw += grads[1]
            total += loss
        ctx.save_for_backward(dh, *([] if dw is None else [dw.to(w.dtype)]))
        return total

    @staticmethod
    def backward(ctx, d):
        dh, *dw = ctx.saved_tensors
        return dh * d, dw[0] * d if dw else None, None


# Rows


class Sample:
    """Random tokens (and pixels) of one row: `[vision_start, image.., vision_end, question, answer]`."""

    def __init__(self, size, config, generator):
        tokens, down, across = size
        merge = config.vision_config.spatial_merge_size
        pad, image = config.image_token_id, down * across // merge**2
        words = torch.randint(0, config.vision_start_token_id - 10, (tokens - image,), generator=generator)
        if image:
            words[0], words[1] = config.vision_start_token_id, config.vision_end_token_id
            self.ids = torch.cat([words[:1], torch.full((image,), pad), words[1:]])
        else:
            self.ids = words
        self.labels = self.ids.clone()
        self.labels[: tokens - (tokens - image) // 2] = -100
        self.grid = [1, down, across] if image else None
        self.positions = torch.arange(tokens).expand(3, -1).clone()
        if image:
            h, w = down // merge, across // merge
            self.positions[0, 1 : 1 + image] = 1
            self.positions[1, 1 : 1 + image] = 1 + torch.arange(h).repeat_interleave(w)
            self.positions[2, 1 : 1 + image] = 1 + torch.arange(w).repeat(h)
            self.positions[:, 1 + image :] = 1 + max(h, w) + torch.arange(tokens - image - 1)


def packs_of(sizes, packing_length, steps):
    """Best fit over windows of 1,000 rows. Drops rows longer than a pack."""
    packs = []
    for at in range(0, len(sizes), 1000):
        opened = []
        for size in sorted(sizes[at : at + 1000], reverse=True):
            room = [pack for pack in opened if sum(s[0] for s in pack) + size[0] <= packing_length]
            if size[0] > packing_length:
                continue
            if room:
                max(room, key=lambda pack: sum(s[0] for s in pack)).append(size)
            else:
                opened.append([size])
        packs += opened
        if len(packs) >= steps:
            break
    # Packs of long rows come first, so shuffle the packs.
    order = torch.randperm(len(packs), generator=torch.Generator().manual_seed(0)).tolist()
    return [packs[order[i % len(packs)]] for i in range(steps)]


def join(samples, padded, config, device, dtype, generator):
    """Returns the model's arguments and the labels `[B, L]`."""
    rows = samples if padded else [samples]
    pad = lambda x, n, value: F.pad(x, (0, n - x.shape[-1]), value=value)
    if padded:
        longest = max(len(sample.ids) for sample in samples)
        ids = torch.stack([pad(s.ids, longest, 0) for s in rows])
        labels = torch.stack([pad(s.labels[1:], longest, -100) for s in rows])
        positions = torch.stack([pad(s.positions, longest, 0) for s in rows], 1)
        mask = torch.stack([pad(torch.ones(len(s.ids), dtype=torch.long), longest, 0) for s in rows])
    else:
        ids = torch.cat([s.ids for s in samples])[None]
        labels = torch.cat([pad(s.labels[1:], len(s.ids), -100) for s in samples])[None]
        positions = torch.cat([s.positions for s in samples], 1)[:, None]
        mask = None
        Packs.text = boundaries([len(s.ids) for s in samples], device)
    arguments = {"input_ids": ids, "position_ids": positions, "attention_mask": mask}
    grids = [s.grid for s in samples if s.grid]
    if grids:
        vision = config.vision_config
        values = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        patches = [t * h * w for t, h, w in grids]
        arguments["pixel_values"] = torch.randn(sum(patches), values, generator=generator).to(dtype)
        arguments["image_grid_thw"] = torch.tensor(grids)
        Packs.vision = boundaries(patches, device)
    arguments = {key: value if value is None else value.to(device, non_blocking=True) for key, value in arguments.items()}
    return arguments, labels.to(device)


# The step


def flops_of(model, sizes, num_targets):
    """Floating-point operations of a step, counted as `trainer` counts them for its MFU. The vision
    encoder and the head may be frozen."""
    c = model.config
    text, vision = c.text_config, c.vision_config
    merge = vision.spatial_merge_size**2
    matrices = {"text": 0, "vision": 0, "merger": 0}
    for name, p in model.named_parameters():
        if p.ndim > 1 and not any(table in name for table in ("embed_tokens", "lm_head", "pos_embed")):
            matrices["merger" if "merger" in name else "vision" if ".visual." in name else "text"] += p.numel()
    tokens, squares = sum(s[0] for s in sizes), sum(s[0] ** 2 for s in sizes)
    patches, patch_squares = sum(s[1] * s[2] for s in sizes), sum((s[1] * s[2]) ** 2 for s in sizes)
    head = 6 if model.lm_head.weight.requires_grad else 4
    encoder = 6 if model.model.visual.blocks[0].attn.qkv.weight.requires_grad else 2
    return (6 * (matrices["text"] * tokens + text.num_hidden_layers * text.num_attention_heads * text.head_dim * squares)
            + head * text.vocab_size * text.hidden_size * num_targets
            + encoder * (matrices["vision"] * patches + 2 * vision.depth * vision.hidden_size * patch_squares)
            + 6 * matrices["merger"] * patches / merge)


class Optimizer:
    """Fused AdamW on f32 master copies of bf16 weights, or on the weights themselves."""

    def __init__(self, params, state, lr):
        self.params = params
        self.masters = [p.detach().float() for p in params] if state == "master" and params[0].dtype != torch.float32 else None
        self.adamw = torch.optim.AdamW(self.masters or params, lr=lr, weight_decay=0.01, fused=True)

    @torch.no_grad()
    def step(self):
        norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        if self.masters:
            for master, param in zip(self.masters, self.params):
                # The vision encoder has no gradients if no row has an image.
                master.grad, param.grad = None if param.grad is None else param.grad.float(), None
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self.masters:
            torch._foreach_copy_(self.params, self.masters)
        return norm


def build(a, device, dtype):
    """Returns the model and the name of its attention."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig.from_pretrained(a.model)
    implementation = "flash_attention_2" if a.way == "padded-flash" else "sdpa"
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = Qwen3VLForConditionalGeneration._from_config(config, attn_implementation=implementation, dtype=dtype)
    torch.set_default_dtype(torch.float32)
    model.train()
    model.config.use_cache = False
    name = implementation
    if a.way == "packed":
        name, varlen = find_varlen(device)
        pack_attention(model, varlen)
    for part in filter(None, a.freeze.split(",")):
        found = [p.requires_grad_(False) for n, p in model.named_parameters() if part in n]
        if not found:
            raise ValueError(f"no parameter name contains `{part}`")
    if a.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ChunkedLoss.set_up(a.compile)
    if a.compile:
        torch._dynamo.config.recompile_limit = 64
        for layer in [*model.model.language_model.layers, *model.model.visual.blocks]:
            layer.compile(dynamic=True)
    return model, name


def step(a, device, dtype):
    model, attention = build(a, device, dtype)
    config, generator = model.config, torch.Generator().manual_seed(0)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = Optimizer(params, a.state, a.lr)
    untimed = 6 if a.compile else 2
    packs = packs_of(json.loads(Path(a.sizes).read_text()), a.packing_length, a.steps + untimed)
    total = dict(tokens=0, computed_tokens=0, vision_tokens=0, targets=0)
    elapsed, flops, each = 0.0, 0.0, []
    padded = a.way != "packed"
    for number, sizes in enumerate(packs):
        samples = [Sample(size, config, generator) for size in sizes]
        num_targets = sum(int((s.labels[1:] != -100).sum()) for s in samples)
        groups = [samples[i : i + 8] for i in range(0, len(samples), 8)] if padded else [samples]
        # Created before the clock starts: generating data is not timed on either side.
        batches = [(join(group, padded, config, torch.device("cpu"), dtype, generator), Packs.text, Packs.vision) for group in groups]
        wait(device)
        begin = time.perf_counter()
        losses, computed = [], 0
        for (arguments, labels), *ends in batches:
            Packs.text, Packs.vision = ((b[0].to(device), *b[1:]) if b else None for b in ends)
            arguments = {key: value if value is None else value.to(device, non_blocking=True) for key, value in arguments.items()}
            if a.way in ("padded", "packed"):
                arguments["attention_mask"] = None
            computed += labels.numel()
            kept = (labels.flatten() != -100).nonzero()[:, 0].to(device)
            y = labels.flatten().to(device)[kept]
            hidden = model.model(**arguments, use_cache=False)[0].flatten(0, 1)[kept]
            loss = ChunkedLoss.apply(hidden, model.lm_head.weight, y) / num_targets
            loss.backward()
            losses.append(loss.detach())
        norm = optimizer.step()
        loss = float(sum(losses))  # synchronizes with the GPU
        wait(device)
        took = time.perf_counter() - begin
        print(f"step {number}: {took:.3f} s, loss {loss:.4f}, norm {float(norm):.4f}", file=sys.stderr, flush=True)
        if number >= untimed:
            elapsed += took
            each.append(took)
            flops += flops_of(model, sizes, num_targets)
            total["tokens"] += sum(size[0] for size in sizes)
            total["computed_tokens"] += computed
            total["vision_tokens"] += sum(size[1] * size[2] for size in sizes) // config.vision_config.spatial_merge_size**2
            total["targets"] += num_targets
    peak_memory = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else None
    reserved = torch.cuda.max_memory_reserved() / GIB if device.type == "cuda" else None
    del optimizer
    peak = matmul_peak(device, a.side)
    return {**total, "tokens/s": total["tokens"] / elapsed, "step_s": elapsed / a.steps, "steps_s": each, "GFLOP/s": flops / elapsed / 1e9, "mfu": flops / elapsed / peak,
            "peak_GFLOP/s": peak / 1e9, "peak_device_memory_gib": peak_memory, "reserved_device_memory_gib": reserved,
            "attention": attention, "parameters": sum(p.numel() for p in model.parameters()), "loss": loss}


def ops(a, device, dtype):
    """Prints rows with the names of `trainer bench --ops`; `backward` rows time only the backward pass."""
    show = lambda name, way, ms, **more: print(json.dumps({"name": name, "way": way, "ms": ms * 1e3, **more}), flush=True)
    side = a.side
    show(f"matmul {side}x{side}x{side}", "cublas", 2 * side**3 / (peak := matmul_peak(device, side)), **{"TFLOP/s": peak / 1e12})
    source = torch.zeros((512 << 20) // a.divide, device=device)
    took = seconds(lambda: source.clone(), device)
    show("copy", "clone", took, **{"GB/s": 8 * len(source) / took / 1e9})
    del source
    _, varlen = find_varlen(device)
    for segments, length, heads, kv_heads, dim, causal in [(8, 4096, 16, 16, 128, True), (8, 4096, 32, 8, 128, True), (128, 128, 32, 8, 128, True), (16, 4096, 16, 16, 72, False)]:
        length = max(8, length // a.divide)
        t = segments * length
        q, k, v = (torch.randn(t, h, dim, device=device, dtype=dtype, requires_grad=True) for h in (heads, kv_heads, kv_heads))
        b = boundaries([length] * segments, device)
        size = f"{segments}x{length} h{heads}/{kv_heads} d{dim} {'Causal' if causal else 'Full'}"
        product = 2 * (0.5 if causal else 1) * segments * length**2 * heads * dim

        def batched():
            parts = (x.view(segments, length, -1, dim).transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=heads != kv_heads)

        for way, forward in ((find_varlen(device)[0], lambda: varlen(q, k, v, b, causal)), ("sdpa", batched)):
            try:
                o = forward()
                d = torch.randn_like(o)
                took = seconds(forward, device)
                show(f"attention {size}", way, took, **{"TFLOP/s": 2 * product / took / 1e12})
                took = seconds(lambda: torch.autograd.grad(o, (q, k, v), d, retain_graph=True), device)
                show(f"attention backward {size}", way, took, **{"TFLOP/s": 5 * product / took / 1e12})
            except RuntimeError as error:
                print(json.dumps({"name": f"attention {size}", "way": way, "error": str(error)[:300]}), flush=True)
    s, d, vocabulary = 16384 // a.divide, 2560 // a.divide, 151936 // a.divide
    h, w = (torch.randn(n, d, device=device, dtype=dtype, requires_grad=True) for n in (s, vocabulary))
    y = torch.arange(s, device=device) % vocabulary
    w.grad = torch.zeros_like(w)
    for way in ("chunked", "chunked and compiled"):
        ChunkedLoss.set_up(way != "chunked")

        def run():
            h.grad = None
            (ChunkedLoss.apply(h, w, y) * 1e-3).backward()

        try:
            run()
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                run()
                added = (torch.cuda.max_memory_allocated() - before) / 2**20
            took = seconds(run, device)
            more = {"memory_mib": added} if device.type == "cuda" else {}
            show(f"linear_cross_entropy {s}x{d}x{vocabulary}", way, took, **{"TFLOP/s": 6 * s * d * vocabulary / took / 1e12, **more})
        except RuntimeError as error:
            print(json.dumps({"name": "linear_cross_entropy", "way": way, "error": str(error)[:300]}), flush=True)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("what", choices=["step", "ops"])
    ap.add_argument("model", nargs="?")
    ap.add_argument("sizes", nargs="?")
    ap.add_argument("--name", default="torch", help="`name` of the JSON line")
    ap.add_argument("--way", default="packed", choices=["padded-mask", "padded", "padded-flash", "packed"])
    ap.add_argument("--compile", action="store_true")
    ap.add_argument("--checkpointing", action="store_true")
    ap.add_argument("--state", default="master", choices=["master", "bf16"])
    ap.add_argument("--freeze", default="", help="freeze parameters whose names contain one of these, comma-separated")
    ap.add_argument("--steps", type=int, default=8)
    ap.add_argument("--packing-length", type=int, default=16384)
    ap.add_argument("--lr", type=float, default=1e-5)
    ap.add_argument("--device", default="cuda:0")
    ap.add_argument("--side", type=int, default=8192, help="side of the matrices whose product measures the peak")
    ap.add_argument("--divide", type=int, default=1, help="divides the sizes of `ops`, for a quick test")
    a = ap.parse_args()
    device = torch.device(a.device)
    dtype = torch.bfloat16
    torch.manual_seed(0)
    if a.what == "ops":
        return ops(a, device, dtype)
    if a.model is None or a.sizes is None:
        ap.error("`step` needs MODEL and SIZES.json")
    way = a.way + (", compiled" if a.compile else "") + (", checkpointing" if a.checkpointing else "") + f", {a.state}"
    row = {"name": a.name, "way": way}
    try:
        row |= step(a, device, dtype) | {"torch": torch.__version__}
    # Out of memory is a RuntimeError; a missing flash-attn is an ImportError or a ValueError.
    except (RuntimeError, ImportError, ValueError) as error:
        row["error"] = str(error).strip()[:300]
    print(json.dumps(row))


if __name__ == "__main__":
    main()
