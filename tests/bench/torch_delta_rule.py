"""Times the gated delta rule of transformers without CUDA kernels (`torch_chunk_gated_delta_rule`), in f32.

  python tests/bench/torch_delta_rule.py [--threads 2]                       one JSON line: seconds
  python tests/bench/torch_delta_rule.py --table TORCH.jsonl TRAINER.jsonl   the comparison, called by
                                                                            scripts/bench/delta_rule.sh
"""
import argparse, json, sys, time

TOKENS, KEY_HEADS, VALUE_HEADS, DIM = 2048, 16, 32, 128


def measure(threads):
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule as rule
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    heads = ((KEY_HEADS, DIM), (KEY_HEADS, DIM), (VALUE_HEADS, DIM))
    q, k, v = (torch.randn(1, TOKENS, *shape, requires_grad=True) for shape in heads)
    g = (torch.randn(1, TOKENS, VALUE_HEADS).abs() * -0.1).requires_grad_()
    beta = torch.rand(1, TOKENS, VALUE_HEADS, requires_grad=True)
    d_o = torch.randn(1, TOKENS, VALUE_HEADS, DIM)

    def run():
        begin = time.perf_counter()
        # The layers repeat the key heads before the call.
        wide = [t.repeat_interleave(VALUE_HEADS // KEY_HEADS, 2) for t in (q, k)]
        o = rule(*wide, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        middle = time.perf_counter()
        torch.autograd.grad(o, (q, k, v, g, beta), d_o)
        return middle - begin, time.perf_counter() - middle

    runs = [run() for _ in range(3)]
    print(json.dumps(dict(forward=min(f for f, _ in runs), backward=min(b for _, b in runs))))


def table(torch_file, trainer_file):
    rows = [json.loads(line) for line in open(torch_file)]
    theirs = {name: min(row[name] for row in rows) * 1e3 for name in ("forward", "backward")}
    ours = {}
    for row in map(json.loads, open(trainer_file)):
        name = row.get("name", "")
        if name.endswith(f"1x{TOKENS} h{KEY_HEADS}/{VALUE_HEADS} d{DIM}"):
            way = "backward" if "backward" in name else "forward"
            ours[way] = min(ours.get(way, float("inf")), row["ms"])
    for way in ("forward", "backward"):
        print(f"{way:9} transformers {theirs[way]:8.1f} ms   trainer {ours[way]:8.1f} ms   {theirs[way] / ours[way]:5.2f} x")
    ratio = sum(theirs.values()) / sum(ours.values())
    print(f"both      transformers {sum(theirs.values()):8.1f} ms   trainer {sum(ours.values()):8.1f} ms   {ratio:5.2f} x")
    sys.exit(ratio < 3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--table", nargs=2)
    arguments = parser.parse_args()
    table(*arguments.table) if arguments.table else measure(arguments.threads)
