"""A tiny text-only Qwen3 model, and its training curve by transformers and PyTorch.

  python scripts/golden/qwen3_text.py            # tests/golden/models/qwen3-text, tests/golden/qwen3_text.json
  python scripts/golden/qwen3_text.py --check    # both again, compared to the stored ones
  python scripts/golden/qwen3_text.py --load DIR # loads an exported folder and prints the loss of the first 8 rows

20 optimizer steps of 8 rows of `data/text.jsonl` with the settings of `curves.json`, in three layouts: each sample
alone, padded to one length, packed into one row. Tokenizer and chat template are those of small-tied.
"""

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from optimizers import groups as parameter_groups
from reference_lib import GOLDEN, IGNORE, Encoder, nll, read_jsonl

SMALL = GOLDEN / "models" / "small-tied"
FOLDER = GOLDEN / "models" / "qwen3-text"
CURVE = GOLDEN / "qwen3_text.json"
DATA = "text.jsonl"
SEED, STEPS, ROWS = 31, 20, 8
COPIES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
# heads * head_dim differs from hidden; three query heads per key head; a head of its own
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 2017, "eos_token_id": 2019, "head_dim": 16, "hidden_act": "silu", "hidden_size": 24,
    "initializer_range": 0.02, "intermediate_size": 64, "max_position_embeddings": 40960, "max_window_layers": 3,
    "num_attention_heads": 3, "num_hidden_layers": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "float32", "use_cache": True, "use_sliding_window": False, "vocab_size": 2048,
}


def draw(model):
    """Random weights in `named_parameters` order, large enough that wrong positions or masks change the loss."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if weight.ndim == 1:
                weight.copy_(1 + 0.1 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(0.1 * math.sqrt(128 / CONFIG["hidden_size"]) * noise)
            else:
                weight.copy_(noise / math.sqrt(weight.shape[-1]))


def tensors():
    """The weights of the folder, drawn again."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FOLDER), dtype=torch.float32)
    draw(model)
    return {name: weight.detach().clone().contiguous() for name, weight in model.named_parameters()}


def make_folder():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in COPIES:
        shutil.copy(SMALL / name, FOLDER / name)
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    save_file(tensors(), FOLDER / "model.safetensors", metadata={"format": "pt"})


def load_model(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model.train()


def forward(model, samples, layout):
    """Sum of the negative log likelihoods of all targets of `samples`."""
    if layout == "per-sample":
        return sum(packed(model, [sample]) for sample in samples)
    return {"padded": padded, "packed": packed}[layout](model, samples)


def padded(model, samples):
    length = max(len(s["input_ids"]) for s in samples)
    ids = torch.full((len(samples), length), CONFIG["bos_token_id"])
    labels, mask = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
    for i, sample in enumerate(samples):
        n = len(sample["input_ids"])
        ids[i, :n] = torch.tensor(sample["input_ids"])
        labels[i, :n] = torch.tensor(sample["labels"])
        mask[i, :n] = 1
    return nll(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, labels)[0].sum()


def packed(model, samples):
    """One row; attention and positions of each sample are its own."""
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    ids = torch.tensor([[t for s in samples for t in s["input_ids"]]])
    labels = torch.tensor([[t for s in samples for t in [IGNORE] + s["labels"][1:]]])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    mask = torch.tril(segment[:, None] == segment[None, :])[None, None]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return nll(logits, labels)[0].sum()


def count(samples):
    return sum(label != IGNORE for s in samples for label in s["labels"][1:])


def train(samples, layout):
    """The curve of one layout."""
    model = load_model(FOLDER)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameter_groups(list(model.parameters()), 0.0), lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    curve = {"loss": [], "grad_norm": [], "target_tokens": []}
    for step in range(STEPS):
        batch = [samples[(step * ROWS + k) % len(samples)] for k in range(ROWS)]
        loss = forward(model, batch, layout) / count(batch)
        loss.backward()
        if step == 0:
            curve["grad_norms_step1"] = {n: float(p.grad.double().norm()) for n, p in model.named_parameters()}
        curve["loss"].append(float(loss.detach()))
        curve["grad_norm"].append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        curve["target_tokens"].append(count(batch))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return curve


def worst(found, expected):
    """The largest relative difference of two curves."""
    keys = ("loss", "grad_norm", "target_tokens")
    return max(abs(a - b) / abs(b) for key in keys for a, b in zip(found[key], expected[key], strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare with the stored files")
    parser.add_argument("--load", metavar="DIR", help="only load an exported folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    encoder = Encoder(SMALL, GOLDEN / "data")
    samples = [encoder(row) for row in read_jsonl(GOLDEN / "data" / DATA)]
    if args.load:
        with torch.no_grad():
            print(float(forward(load_model(args.load), samples[:ROWS], "packed")) / count(samples[:ROWS]))
        return
    if not args.check:
        make_folder()
    stored = load_file(FOLDER / "model.safetensors")
    drawn = tensors()
    if stored.keys() != drawn.keys() or any(not torch.equal(stored[name], t) for name, t in drawn.items()):
        raise SystemExit("the stored weights are not those of the seed")
    curves = {layout: train(samples, layout) for layout in ("per-sample", "padded", "packed")}
    for layout, curve in curves.items():
        difference = worst(curve, curves["per-sample"])
        print(layout, difference, flush=True)
        if difference > 1e-5:
            raise SystemExit(f"layout {layout} differs from per-sample")
    if args.check:
        golden = json.loads(CURVE.read_text(encoding="utf-8"))
        difference = max(worst(curves[layout], golden[layout]) for layout in curves)
        print("stored", difference)
        if difference > 1e-4:
            raise SystemExit("the stored curve differs")
    else:
        golden = {"model": FOLDER.name, "data": DATA, **curves}
        CURVE.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
