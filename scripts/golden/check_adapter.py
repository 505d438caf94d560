"""Loads an adapter folder with PEFT and recomputes the loss of each row.

  python scripts/golden/check_adapter.py MODEL_DIR ADAPTER_DIR DATA.jsonl \
      [--num 8] [--expect per_sample.jsonl] [--merged MERGED_DIR]

Needs the package peft, with transformers 4.57 or 5. Fails (exit code 1) if a tensor of the file is
missing, left out or changed after loading, if loading gives a warning, if a row differs from the
output of `trainer eval --adapter ADAPTER_DIR --per-sample` (`--expect`), or if the logits differ from
those of the model that `trainer export --adapter ADAPTER_DIR --merge --out MERGED_DIR` writes.
"""

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import transformers
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from check_checkpoint import Collect, differences
from reference_lib import Encoder, media, nll, read_jsonl

# About the versions of the packages, not about the adapter.
HARMLESS = ("is_gradient_checkpointing", "kernels", "fast path is not available")


def load_base(model_dir):
    """The model in float32, without dropout."""
    is_text = "vision_config" not in json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
    load = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    return load.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()


def load(model_dir, adapter_dir):
    """Returns the model with the adapter, and all warnings of both packages."""
    collect = Collect()
    for name in ("transformers", "peft", "py.warnings"):
        logging.getLogger(name).addHandler(collect)
    logging.captureWarnings(True)
    warnings.simplefilter("always")
    transformers.utils.logging.disable_progress_bar()
    base = load_base(model_dir)
    with safe_open(Path(adapter_dir) / "adapter_model.safetensors", "pt") as file:
        rows = [file.get_slice(name).get_shape()[0] for name in file.keys() if name.endswith("embed_tokens.weight")]
    if rows and rows[0] > base.get_input_embeddings().num_embeddings:  # new tokens
        base.resize_token_embeddings(rows[0], mean_resizing=False)
    model = PeftModel.from_pretrained(base, adapter_dir).eval()
    return model, [text for text in collect.messages if not any(word in text for word in HARMLESS)]


def in_memory(model):
    """The tensors of the adapter in the model, by their names in the file."""
    found = {}
    for name, tensor in model.state_dict().items():
        if "lora_magnitude_vector" in name:
            found[name.removesuffix(".default.weight")] = tensor
        elif ".default." in name:  # also `modules_to_save.default.weight`
            found[name.replace(".modules_to_save.default.", ".").replace(".default.", ".")] = tensor
    return found


def key_problems(model, adapter_dir):
    """Compares the tensors of the file with those in the model: PEFT itself ignores unexpected ones."""
    path = Path(adapter_dir) / "adapter_model.safetensors"
    expected, found = load_file(path), in_memory(model)
    problems = [f"not in the file: {name}" for name in sorted(found.keys() - expected.keys())]
    problems += [f"ignored by PEFT: {name}" for name in sorted(expected.keys() - found.keys())]
    for name in sorted(expected.keys() & found.keys()):
        if not torch.equal(expected[name].float(), found[name].float()):
            problems.append(f"another value after loading: {name}")
    with safe_open(path, "pt") as file:
        if (file.metadata() or {}).get("format") != "pt":
            problems.append("the metadata of the file lacks `format: pt`")
    print(f"{len(expected)} tensors in the file, {len(found)} in the model")
    return problems


def logits_of(model, encoder, sample):
    """Logits [1, L, V] of one sample; transformers computes the positions."""
    ids = torch.tensor([sample["input_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    if sample["grid"]:
        given = media(encoder.config, ids, sample["pixel_values"], torch.tensor(sample["grid"]))
        if int(transformers.__version__.split(".")[0]) < 5:
            given.pop("mm_token_type_ids", None)
        inputs |= given
    return model(**inputs).logits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("adapter_dir")
    parser.add_argument("data", help="JSON-lines file of chats")
    parser.add_argument("--num", type=int, help="only the first rows (default: all)")
    parser.add_argument("--image-root", help="folder that image paths are relative to (default: the data file's)")
    parser.add_argument("--expect", help="output of `trainer eval --adapter DIR --per-sample` to compare with")
    parser.add_argument("--merged", help="folder of the merged model to compare with")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative, on nll_sum and on the largest logit")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"transformers {transformers.__version__}")
    model, problems = load(args.model_dir, args.adapter_dir)
    problems = [f"loading: {text}" for text in problems] + key_problems(model, args.adapter_dir)
    merged = load_base(args.merged) if args.merged else None
    encoder = Encoder(args.model_dir, args.image_root or Path(args.data).parent)
    if (Path(args.adapter_dir) / "tokenizer.json").exists():
        encoder.tokenizer = AutoTokenizer.from_pretrained(args.adapter_dir)  # with its new tokens
    found, worst = [], 0.0
    with torch.no_grad():
        for line, row in enumerate(read_jsonl(args.data)[: args.num], 1):
            sample = encoder(row)
            logits = logits_of(model, encoder, sample)
            loss, is_target = nll(logits, torch.tensor([sample["labels"]]))
            found.append({"line": line, "nll_sum": float(loss.sum()), "num_targets": int(is_target.sum())})
            print(json.dumps(found[-1]), flush=True)
            if merged is not None:
                other = logits_of(merged, encoder, sample)
                worst = max(worst, float((logits - other).abs().max() / logits.abs().max()))
    if merged is not None:
        print(f"largest difference of the merged model's logits: {worst:.1e} of the largest logit")
        if not worst <= args.tolerance:
            problems.append(f"logits of {args.merged} differ by {worst:.1e}")
    if args.expect:
        problems += differences(found, read_jsonl(args.expect), args.tolerance)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
