"""Reference trainer: Hugging Face model and an optimizer of PyTorch in float32, rows in file order, no dropout.

  python scripts/golden/ref_trainer.py --model tests/golden/models/small-tied \
      --data tests/golden/data/text.jsonl --out RUN --steps 20 --batch-size 8 --lr 1e-3
  python scripts/golden/ref_trainer.py --check-curves
      recomputes tests/golden/curves.json and optimizers.json and compares them with the stored files

Writes RUN/metrics.jsonl (step, loss, grad_norm before clipping, lr, tokens, target_tokens) and
RUN/summary.json (settings, gradient norms of step 1, parameter norms at the end). The loss of a step
is the sum of its target losses divided by its number of targets; grad_norm is the L2 norm over all
trained parameters, with a tied embedding counted once. `--adapter` trains a PEFT adapter and needs
the package peft; `--optimizer adamw8bit` needs bitsandbytes.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch

import optimizers
from reference_lib import GOLDEN, IGNORE, Encoder, forward, load_model, read_jsonl


def lr_at(args, step):
    """Learning rate of a 0-based optimizer step. The first step of a warm-up has 0, as in
    Hugging Face's schedules."""
    if step < args.warmup:
        return args.lr * step / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    factor = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[args.schedule]
    return args.lr * factor


def file_name(name):
    """Name of a parameter in files: PEFT renames the tensors of adapters."""
    if "lora_" not in name:
        return name
    name = name.replace("lora_magnitude_vector.default.weight", "lora_magnitude_vector").replace(".default", "")
    return f"base_model.model.{name}"


def add_adapter(model, args):
    """Adds the adapter's layers to the model and freezes all other parameters."""
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(args.adapter)
    config.use_rslora = config.use_rslora or args.rslora
    config.inference_mode = False
    PeftModel.from_pretrained(model, args.adapter, config=config, is_trainable=True)
    model.train()


def train(args):
    """Runs the steps. Returns the metrics of each step and the summary."""
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    encoder = Encoder(args.model, Path(args.data).parent)
    rows = read_jsonl(args.data)
    model = load_model(args.model)
    if args.adapter:
        add_adapter(model, args)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    optimizer = optimizers.make(named, args)
    micro = 1 if args.mode == "per-sample" else args.batch_size
    metrics, first, start = [], {}, time.time()
    for step in range(args.steps):
        samples = [encoder(rows[(step * args.batch_size + k) % len(rows)]) for k in range(args.batch_size)]
        lr = lr_at(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        num_targets = sum(label != IGNORE for s in samples for label in s["labels"][1:])
        loss = 0.0
        for at in range(0, len(samples), micro):
            part = sum(r[0] for r in forward(model, encoder.config, samples[at : at + micro], args.mode)) / num_targets
            part.backward()
            loss += float(part.detach())
        for parameter in parameters:  # a step without images computes no gradients for the vision encoder
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if step == 0:
            first = {file_name(n): float(p.grad.double().norm()) for n, p in named}
        grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, args.clip if args.clip > 0 else math.inf))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        metrics.append({
            "step": step + 1, "loss": loss, "grad_norm": grad_norm, "lr": lr,
            "tokens": sum(len(s["input_ids"]) for s in samples), "target_tokens": num_targets,
        })
        if not args.quiet:
            print(json.dumps(metrics[-1]), flush=True)
    summary = {
        "args": {k: v for k, v in vars(args).items() if k not in ("model", "data", "out", "adapter", "check_curves", "quiet")},
        "model": Path(args.model).name, "data": Path(args.data).name, "seconds": round(time.time() - start, 1),
        "grad_norms_step1": first,
        "param_norms_final": {file_name(n): float(p.detach().double().norm()) for n, p in named},
    }
    return metrics, summary


def check_curves(parser):
    """Recomputes every curve of `curves.json` and `optimizers.json` and compares it. Bounds are
    relative; padded and per-sample runs differ by 1.4e-6."""
    wrong = []
    stored = [json.loads((GOLDEN / name).read_text(encoding="utf-8")) for name in ("curves.json", "optimizers.json")]
    for name, golden in (curve for curves in stored for curve in curves.items()):
        folder, data = GOLDEN / "models" / golden["model"], GOLDEN / "data" / golden["data"]
        args = parser.parse_args(["--quiet", "--model", str(folder), "--data", str(data)])
        for key in ("steps", "batch_size", "mode", "lr", "schedule", "warmup", "weight_decay", "beta1", "beta2", "eps", "clip"):
            setattr(args, key, golden["args"][key])
        args.optimizer = golden["args"].get("optimizer", "adamw")
        args.rslora = golden["args"].get("rslora", False)
        args.adapter = golden["args"].get("adapter") and str(GOLDEN / "adapters" / golden["args"]["adapter"])
        metrics, _ = train(args)
        worst = {}
        for key, bound in (("loss", 1e-5), ("grad_norm", 1e-4), ("lr", 0.0), ("tokens", 0.0), ("target_tokens", 0.0)):
            worst[key] = max(abs(m[key] - g) / max(abs(g), 1e-12) for m, g in zip(metrics, golden[key], strict=True))
            if not worst[key] <= bound:
                wrong.append(f"{name}: {key} differs by {worst[key]:.2g}")
        print(name, worst, flush=True)
    if wrong:
        raise SystemExit("\n".join(wrong))


def make_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-curves", action="store_true", help="only recompute and compare curves.json and optimizers.json")
    parser.add_argument("--model", help="model folder")
    parser.add_argument("--data", help="JSON-lines file; image paths are relative to its folder")
    parser.add_argument("--out", help="folder for metrics.jsonl and summary.json")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="samples per optimizer step")
    parser.add_argument("--mode", default="per-sample", choices=["per-sample", "padded", "packed"])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--schedule", default="constant", choices=["constant", "linear", "cosine"])
    parser.add_argument("--warmup", type=int, default=0, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm; 0: no clipping")
    parser.add_argument("--adapter", help="folder of a PEFT adapter; only its values are trained")
    parser.add_argument("--rslora", action="store_true", help="multiply the adapter's output by alpha / sqrt(r)")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "adamw_8bit", "muon", "adafactor"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quiet", action="store_true")
    return parser


def main():
    parser = make_parser()
    args = parser.parse_args()
    if args.check_curves:
        check_curves(parser)
        return
    if not (args.model and args.data and args.out):
        parser.error("--model, --data and --out are required")
    metrics, summary = train(args)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics), encoding="utf-8")
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
