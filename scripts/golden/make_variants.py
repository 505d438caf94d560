"""Writes two small model folders of `tests/golden/models/` and the reference results for them.

  python scripts/golden/make_variants.py
      writes untied, sharded-bf16, variants.json and variants_grads.safetensors
  python scripts/golden/make_variants.py --check-small-tied
      draws small-tied's weights again and compares them with the stored ones

Linear weights have std 1/sqrt(fan_in), norms are 1 + 0.1 N(0,1), and biases 0.1 N(0,1). With the
usual std of 0.02, a tiny model predicts a nearly uniform distribution whatever its positions, masks
or deepstack features are, so that a golden loss would not detect a wrong implementation.
"""

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from reference_lib import GOLDEN, IGNORE, Encoder, forward, load_model, read_jsonl

SMALL = GOLDEN / "models" / "small-tied"
COPIES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json", "generation_config.json",
)
FILES = {"text.jsonl": 4, "image_exact.jsonl": 4}  # rows of each in the batch
MAX_TOKENS = 200  # rows of the batch must be shorter

# Differences from small-tied's config.json. Sizes are as small as the tested shapes allow.
VARIANTS = {
    # separate lm_head; heads * head_dim != hidden; three query heads per key head; deepstack from
    # layers 1 and 3
    "untied": {
        "seed": 21,
        "top": {"tie_word_embeddings": False},
        "text": {
            "tie_word_embeddings": False, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 48,
        },
        "vision": {
            "deepstack_visual_indexes": [1, 3], "hidden_size": 16, "num_heads": 2, "intermediate_size": 40,
            "num_position_embeddings": 144, "out_hidden_size": 16,
        },
    },
    # bf16 in two shards; tied; one key head; another mrope_section; two text layers, one deepstack
    # layer
    "sharded-bf16": {
        "seed": 22,
        "top": {},
        "text": {
            "dtype": "bfloat16", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 96,
        },
        "vision": {
            "deepstack_visual_indexes": [2], "hidden_size": 32, "num_heads": 4, "intermediate_size": 80,
            "num_position_embeddings": 256, "out_hidden_size": 32,
        },
    },
}
SECTIONS = {32: [6, 5, 5], 16: [4, 2, 2]}  # mrope_section by head_dim, near the published 24:20:20


def variant_config(spec):
    """small-tied's config.json with the variant's changes."""
    config = json.loads((SMALL / "config.json").read_text(encoding="utf-8"))
    config.update(spec["top"])
    config["text_config"].update(spec["text"])
    config["text_config"]["rope_scaling"]["mrope_section"] = SECTIONS[spec["text"]["head_dim"]]
    config["vision_config"].update(spec["vision"])
    return config


def respell_as_transformers_5(folder):
    """Rewrites config.json as transformers 5 saves it: `rope_parameters` contains the base too, the
    vision encoder has its own model type and rope, and absent token ids are null."""
    AutoConfig.from_pretrained(folder).save_pretrained(folder)


def draw(model, seed):
    """Draws random weights in the order of `named_parameters` from one generator."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.get_text_config().hidden_size
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if weight.ndim == 1 and name.endswith("weight"):  # norms
                weight.copy_(1 + 0.1 * noise)
            elif name.endswith("bias"):
                weight.copy_(0.1 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.copy_(0.1 * math.sqrt(128 / hidden) * noise)  # logits of std 1.1 at any hidden size
            elif "lambda_" in name:  # LayerScale
                weight.copy_(0.5 + 0.1 * noise)
            elif "pos_embed" in name or "position_embedding" in name or "cls_token" in name:
                weight.copy_(0.5 * noise)
            elif weight.ndim >= 4:  # patch embedding
                weight.copy_(noise / math.sqrt(weight[0].numel()))
            else:
                weight.copy_(noise / math.sqrt(weight.shape[-1]))


def couple(layer):
    """Makes the keys of a layer of linear attention similar to its queries. With independent ones, outputs of nearly no
    length are normalised, and rounding errors grow."""
    qkv, taps, width = layer.in_proj_qkv.weight, layer.conv1d.weight, layer.key_dim
    qkv[width : 2 * width] = 0.95 * qkv[:width] + 0.31 * qkv[width : 2 * width]
    qkv[2 * width :] *= 3
    taps.mul_(0.4)
    taps[..., -1].add_(1.0)


def drawn_tensors(folder, seed, adjust=None):
    """Returns the tensors that transformers saves for the folder's config, drawn with `seed` and adjusted."""
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    draw(model, seed)
    if adjust:
        adjust(model)
    model.tie_weights()
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        return load_file(Path(tmp) / "model.safetensors")


def check_drawn(folder, seed, adjust=None):
    """Draws the folder's weights again; they must be bit-identical to the stored ones."""
    stored, drawn = load_file(folder / "model.safetensors"), drawn_tensors(folder, seed, adjust)
    if stored.keys() != drawn.keys() or not all(torch.equal(stored[n], drawn[n]) for n in stored):
        raise SystemExit(f"{folder.name}: the drawn weights differ from the stored ones")
    print(f"{folder.name}: {len(stored)} tensors equal to the stored ones")


def save(tensors, folder):
    """Saves the tensors in one file."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def check_loads(folder):
    """Checks that transformers loads the folder without a remark, and prints its size."""
    model, info = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    notes = {key: sorted(map(str, value)) for key, value in info.items() if value}
    if notes:
        raise SystemExit(f"{folder.name}: transformers reports {notes}")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"{folder.name}: {sum(p.numel() for p in model.parameters()):,} parameters, {size:,} bytes")


def save_shards(tensors, folder):
    """Saves the tensors as bfloat16 in two files with an index."""
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}
    names = sorted(tensors)
    half = len(names) // 2
    weight_map = {}
    for i, part in enumerate((names[:half], names[half:])):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(t.numel() * 2 for t in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_json(path, value, indent=2):
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")


def build(name, spec):
    """Writes `tests/golden/models/<name>` and checks that transformers loads it without a warning."""
    folder = GOLDEN / "models" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in COPIES:
        shutil.copy(SMALL / file, folder / file)
    write_json(folder / "config.json", variant_config(spec))
    if name == "untied":
        respell_as_transformers_5(folder)
    tensors = drawn_tensors(folder, spec["seed"])
    if name == "sharded-bf16":
        save_shards(tensors, folder)
    else:
        save(tensors, folder)
    check_loads(folder)


def batch_rows():
    """Returns the first short rows of each file as `[(file, row), ..]`, the same for all variants."""
    encoder = Encoder(SMALL, GOLDEN / "data")
    rows = []
    for file, count in FILES.items():
        short = [row for row in read_jsonl(GOLDEN / "data" / file) if len(encoder(row)["input_ids"]) < MAX_TOKENS]
        rows += [(file, row) for row in short[:count]]
    return rows


def chosen(spec, names):
    """Returns the parameters whose complete gradient is stored; `lm_head` only if it is untied."""
    merger = len(spec["vision"]["deepstack_visual_indexes"]) - 1
    wanted = [
        "model.visual.patch_embed.proj.weight",
        "model.visual.pos_embed.weight",
        f"model.visual.deepstack_merger_list.{merger}.linear_fc1.weight",
        "model.language_model.layers.1.self_attn.q_norm.weight",
        "model.language_model.embed_tokens.weight",
        "lm_head.weight",
    ]
    return [name for name in wanted if name in names]


def measure(name, spec, rows):
    """Computes the loss of each row, and the gradient of sum(nll) / sum(targets) over the batch."""
    folder = GOLDEN / "models" / name
    encoder = Encoder(folder, GOLDEN / "data")
    model = load_model(folder)
    samples = [encoder(row) for _, row in rows]
    num_targets = sum(label != IGNORE for s in samples for label in s["labels"][1:])
    per_sample, loss = [], 0.0
    for sample in samples:
        ((nll_sum, targets),) = forward(model, encoder.config, [sample])
        (nll_sum / num_targets).backward()
        loss += float(nll_sum.detach().double()) / num_targets
        per_sample.append({
            "id": sample["id"], "num_tokens": len(sample["input_ids"]), "grid": sample["grid"],
            "nll_sum": float(nll_sum.detach()), "num_targets": targets,
        })
    grads = {n: p.grad for n, p in model.named_parameters()}
    norms = {n: float(g.double().norm()) for n, g in grads.items()}
    keep = chosen(spec, grads)
    golden = {
        "loss": loss,
        "num_targets": num_targets,
        "grad_norm": math.sqrt(sum(v * v for v in norms.values())),
        "per_sample": per_sample,
        "full_gradients": keep,
        "grad_norms": norms,
    }
    packed = sum(r[0] for r in forward(model, encoder.config, samples, "packed")).item() / num_targets
    print(f"{name}: loss {loss:.6f} (packed {packed:.6f}), grad norm {golden['grad_norm']:.6f}, smallest {min(norms.items(), key=lambda i: i[1])}")
    return golden, {f"{name}/{n}": grads[n].contiguous() for n in keep}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check-small-tied", action="store_true", help="only draw small-tied's weights and compare them with the stored ones")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.check_small_tied:
        check_drawn(SMALL, 13)
        return
    rows = batch_rows()
    out = {"rows": [{"file": file, "id": row["id"]} for file, row in rows]}
    tensors = {}
    for name, spec in VARIANTS.items():
        build(name, spec)
        out[name], grads = measure(name, spec, rows)
        tensors.update(grads)
    write_json(GOLDEN / "variants.json", out, indent=1)
    save_file(tensors, GOLDEN / "variants_grads.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
