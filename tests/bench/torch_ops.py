"""Times the ops of `trainer bench --ops` in PyTorch: on the CPU, in f32, with the same sizes.

  python tests/bench/torch_ops.py [--threads 2] [--filter TEXT]      one JSON line per op and way
  python tests/bench/torch_ops.py --memory                           memory that linear + cross-entropy
                                                                     adds to the peak
  python tests/bench/torch_ops.py --table TORCH.jsonl TRAINER.jsonl  the comparison, called by
                                                                     scripts/bench/ops_vs_torch.sh

The table adds the fastest forward and the fastest backward of many. Backward calls
`torch.autograd.grad`, which returns new tensors and accumulates nothing; this is the fastest way in
PyTorch. If PyTorch has several ways to compute an op (see OPS), each is timed and the fastest counts.
"""
import argparse, json, resource, time
import torch
import torch.nn.functional as F


def attention(segments, length, heads, kv_heads, dim, causal):
    sizes = dict(is_causal=causal, enable_gqa=heads != kv_heads)

    def per_segment():
        n = segments * length
        q, k, v = (leaf(1, h, n, dim) for h in (heads, kv_heads, kv_heads))

        def forward():
            parts = [slice(i, i + length) for i in range(0, n, length)]
            return torch.cat([F.scaled_dot_product_attention(q[:, :, p], k[:, :, p], v[:, :, p], **sizes) for p in parts], 2)

        return forward, [q, k, v]

    def batched():
        q, k, v = (leaf(segments, h, length, dim) for h in (heads, kv_heads, kv_heads))
        return lambda: F.scaled_dot_product_attention(q, k, v, **sizes), [q, k, v]

    def repeated():  # without `enable_gqa`: keys and values repeated, as transformers does
        q, k, v = (leaf(segments, h, length, dim) for h in (heads, kv_heads, kv_heads))

        def forward():
            wide = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
            return F.scaled_dot_product_attention(q, *wide, is_causal=causal)

        return forward, [q, k, v]

    return dict(batched=batched) | (dict(per_segment=per_segment) if segments > 1 else {}) | (dict(repeated=repeated) if heads != kv_heads else {})


def plain_rms_norm(x, w):  # Qwen3VLTextRMSNorm
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def fused_rms_norm(x, w):
    return F.rms_norm(x, w.shape, w, 1e-6)


def rms_norm(n, d):
    def of(norm):
        def make():
            x, w = leaf(n, d), leaf(d)
            return lambda: norm(x, w), [x, w]

        return make

    return dict(fused=of(fused_rms_norm), plain=of(plain_rms_norm))


def layer_norm(n, d):
    def make():
        x, w, b = leaf(n, d), leaf(d), leaf(d)
        return lambda: F.layer_norm(x, (d,), w, b, 1e-6), [x, w, b]

    return dict(fused=make)


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def qk_norm_rope(t, h, d):
    def of(norm):
        def make():
            x, w = leaf(1, t, h * d), leaf(d)
            cos, sin = torch.randn(1, 1, t, d), torch.randn(1, 1, t, d)

            def forward():
                q = norm(x.view(1, t, h, d), w).transpose(1, 2)
                return q * cos + rotate_half(q) * sin

            return forward, [x, w]

        return make

    return dict(fused=of(fused_rms_norm), plain=of(plain_rms_norm))


def swiglu(n, f):
    def make():
        gate, up = leaf(n, f), leaf(n, f)
        return lambda: F.silu(gate) * up, [gate, up]

    return dict(plain=make)


def gelu(n, f, approximate):
    def make():
        x = leaf(n, f)
        return lambda: F.gelu(x, approximate=approximate), [x]

    return dict(fused=make)


def linear(n, k, m):
    def make():
        x, w = leaf(n, k), leaf(m, k)
        return lambda: F.linear(x, w), [x, w]

    return dict(fused=make)


def linear_cross_entropy(s, d, v):
    def of(reduction):
        def make():
            h, w, targets = leaf(s, d), leaf(v, d), torch.arange(s)
            return lambda: F.cross_entropy(F.linear(h, w), targets, reduction="sum") * 1e-3, [h, w]

        return make

    return dict(plain=of("sum"))


def adamw(count):
    def of(**kind):
        def make():
            p = leaf(count)
            p.grad = torch.randn(count)
            step = torch.optim.AdamW([p], lr=1e-4, weight_decay=0.1, **kind).step
            return lambda: step() and None, []

        return make

    return dict(fused=of(fused=True), foreach=of(foreach=True))


def rows(name, size, parts=("", "backward ")):
    """The rows of `trainer bench --ops` whose times add up to the op."""
    return [f"{name} {part}{size}" for part in parts]


# Op of the table: (ways in PyTorch, rows of `trainer`, required speed relative to PyTorch). `None`
# requires nothing.
OPS = {}
for sizes, bar in [((1, 2048, 16, 8, 128, True), 1.0), ((16, 128, 16, 8, 128, True), 1.0), ((4, 512, 16, 16, 64, False), None)]:
    s, n, h, kv, d, causal = sizes
    size = f"{s}x{n} h{h}/{kv} d{d} {'Causal' if causal else 'Full'}"
    OPS[f"attention {size}"] = (attention(*sizes), rows("attention", size), bar)
OPS["rms_norm 2048x1024"] = (rms_norm(2048, 1024), rows("rms_norm", "2048x1024"), 2.0)
OPS["layer_norm 2048x1024"] = (layer_norm(2048, 1024), rows("layer_norm", "2048x1024"), 1.0)
for d in (64, 128):
    OPS[f"qk_norm_rope 2048x16x{d}"] = (qk_norm_rope(2048, 16, d), rows("qk_norm_rope", f"2048x16x{d}"), 2.0)
OPS["swiglu 2048x3072"] = (swiglu(2048, 3072), rows("swiglu", "2048x3072"), 2.0)
for kind, approximate in (("tanh", "tanh"), ("erf", "none")):
    OPS[f"gelu {kind} 2048x3072"] = (gelu(2048, 3072, approximate), rows(f"gelu {kind}", "2048x3072"), 2.0)
for n, k, m in [(2048, 1024, 3072), (1881, 512, 1536)]:
    OPS[f"linear {n}x{k}x{m}"] = (linear(n, k, m), rows("linear", f"{n}x{k}x{m}", ("", "dx ", "dw ")), None)
HEAD = "linear_cross_entropy 1024x512x151936"
OPS[HEAD] = (linear_cross_entropy(1024, 512, 151936), [HEAD], 1.5)
OPS["adamw 16.8M"] = (adamw(16 << 20), ["adamw 16.8M"], 1.0)
MEMORY_BAR = 0.10  # maximum memory of HEAD relative to PyTorch's


def leaf(*size):
    return torch.randn(*size).requires_grad_()


def fastest(forward, inputs, seconds):
    """Seconds of the fastest forward and of the fastest backward."""
    best, runs = [float("inf")] * 2, 0
    with torch.set_grad_enabled(bool(inputs)):
        out = forward()
    dy = torch.randn_like(out) if inputs else None
    del out
    start = time.perf_counter()
    while runs < 4 or time.perf_counter() - start < seconds:
        begin = time.perf_counter()
        out = forward()
        between = time.perf_counter()
        if inputs:
            torch.autograd.grad(out, inputs, dy)
        end = time.perf_counter()
        del out
        if runs:  # the first run is a warm-up
            best = [min(best[0], between - begin), min(best[1], end - between if inputs else 0.0)]
        runs += 1
    return best


def head_memory():
    """Bytes that loss and gradients add to the peak resident memory of operands and `.grad`."""
    forward, inputs = OPS[HEAD][0]["plain"]()
    for t in inputs:
        t.grad = torch.zeros_like(t).add_(1.0)  # write, so that the pages are resident
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    forward().backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def table(theirs, ours):
    """Prints the best of all rounds; returns whether every op reaches its required ratio."""
    theirs, ours = ([json.loads(line) for line in open(path)] for path in (theirs, ours))
    figures = lambda rows, name, key: [row[key] for row in rows if row["name"] == name and key in row]
    kept = True
    print(f"| {'op, forward + backward':44} | PyTorch, ms | trainer, ms | ratio | required | |\n|---|---|---|---|---|---|")
    for name, (ways, parts, bar) in OPS.items():
        mine = [figures(ours, part, "ms") for part in parts]
        if not all(mine) or not figures(theirs, name, "forward_ms"):
            continue
        sums = {}
        for way in ways:
            rows = [row for row in theirs if row["name"] == name and row.get("way") == way]
            sums[way] = sum(min(row[key] for row in rows) for key in ("forward_ms", "backward_ms"))
        way = min(sums, key=sums.get)
        mine = sum(min(part) for part in mine)
        ratio = sums[way] / mine
        ok = bar is None or ratio >= bar
        kept &= ok
        label = f"{name} ({way})" if len(ways) > 1 else name
        print(f"| {label:44} | {sums[way]:8.2f} | {mine:8.2f} | {ratio:5.2f} | {bar or '-'} | {'ok' if ok else 'NOT OK'} |")
    memory = [figures(rows, HEAD, "memory_mib") for rows in (theirs, ours)]
    if all(memory):
        theirs, ours = map(min, memory)
        ok = ours <= MEMORY_BAR * theirs
        kept &= ok
        print(f"| {'linear_cross_entropy, added memory, MiB':44} | {theirs:8.0f} | {ours:8.0f} | {ours / theirs:5.3f} | <= {MEMORY_BAR} | {'ok' if ok else 'NOT OK'} |")
    return kept


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--seconds", type=float, default=0.5, help="minimum time for each way of each op")
    ap.add_argument("--filter", default="", help="only ops with a row whose name contains this")
    ap.add_argument("--memory", action="store_true")
    ap.add_argument("--table", nargs=2, metavar=("TORCH", "TRAINER"))
    a = ap.parse_args()
    if a.table:
        raise SystemExit(0 if table(*a.table) else 1)
    torch.set_num_threads(a.threads)
    if a.memory:
        if a.filter in HEAD:
            print(json.dumps({"name": HEAD, "memory_mib": round(head_memory() / 2**20, 1)}))
        return
    for name, (ways, parts, _) in OPS.items():
        if not any(a.filter in part for part in parts):
            continue
        for way, make in ways.items():
            forward, backward = fastest(*make(), a.seconds)
            print(json.dumps({"name": name, "way": way, "forward_ms": round(forward * 1e3, 4), "backward_ms": round(backward * 1e3, 4)}), flush=True)


if __name__ == "__main__":
    main()
