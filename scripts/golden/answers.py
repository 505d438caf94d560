"""Greedy answers of transformers to 50 prompts.

  python scripts/golden/answers.py            # tests/golden/answers.json
  python scripts/golden/answers.py --check    # compares with the stored file

The prompts are the first rows of three data files without their last answer. `model.generate` answers them in float32
with small-tied, with sharded-bf16, whose weights are bf16, with small-qwen35,
small-qwen25vl, small-qwen2vl, small-internvl and small-minicpm. For each answer: the row, the new ids without the end
token, their text. `margin` is the smallest difference of the two highest logits of all steps of a model: answers of
another correct program can differ only where it is not much larger than rounding errors.
"""

import argparse
import json

import torch
from transformers import AutoModelForImageTextToText

from reference_lib import GOLDEN, Encoder, media, normalise, read_jsonl

OUT = GOLDEN / "answers.json"
MODELS = ("small-tied", "sharded-bf16", "small-qwen35", "small-qwen25vl", "small-qwen2vl", "small-internvl", "small-minicpm")
PROMPTS = (("text.jsonl", 25), ("image_exact.jsonl", 20), ("digits_test.jsonl", 5))
NEW_TOKENS = 16


def prompt(encoder, row):
    """Input ids, pixels and grids of a row without its last answer."""
    last = max(k for k, message in enumerate(row["messages"]) if message["role"] == "assistant")
    messages, sources = normalise({**row, "messages": row["messages"][:last]})
    pixels, grid, texts = encoder.pixels(sources) if sources else (None, [], [])
    text = encoder.expand(encoder.render(messages, row.get("tools"), prompt=True), texts)
    return encoder.tokenizer(text, add_special_tokens=False)["input_ids"], pixels, grid


def answers(name):
    """All answers of a model, by the name or the path of its folder, and the smallest margin."""
    folder = GOLDEN / "models" / name
    encoder = Encoder(folder, GOLDEN / "data")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    found, margin = [], float("inf")
    for file, count in PROMPTS:
        for line, row in enumerate(read_jsonl(GOLDEN / "data" / file)[:count], 1):
            ids, pixels, grid = prompt(encoder, row)
            ids = torch.tensor([ids])
            model.model.rope_deltas = None  # MiniCPM-V 4.7 keeps those of the image before
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids),
                do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=NEW_TOKENS,
                output_logits=True, return_dict_in_generate=True,
                **media(encoder.config, ids, pixels, torch.tensor(grid) if grid else None),
            )
            for logits in out.logits:
                best = logits[0].float().topk(2).values
                margin = min(margin, float(best[0] - best[1]))
            new = [i for i in out.sequences[0, ids.shape[1]:].tolist() if i not in settings["eos_token_id"]]
            text = encoder.tokenizer.decode(new, skip_special_tokens=True)
            found.append({"row": f"{file}:{line}", "ids": new, "text": text})
    return {"answers": found, "margin": round(margin, 6)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare with the stored file")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    found = {name: answers(name) for name in MODELS}
    for name, of in found.items():
        ends = sum(len(answer["ids"]) < NEW_TOKENS for answer in of["answers"])
        distinct = len({tuple(answer["ids"]) for answer in of["answers"]})
        print(f"{name}: {len(of['answers'])} answers, {distinct} different, {ends} end early, margin {of['margin']}")
    if args.check:
        stored = json.loads(OUT.read_text(encoding="utf-8"))
        assert all(stored[name]["answers"] == found[name]["answers"] for name in MODELS), "the answers differ"
        return
    lines = []
    for name, of in found.items():
        rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in of["answers"])
        lines.append(f'{json.dumps(name)}: {{"margin": {of["margin"]}, "answers": [\n{rows}\n]}}')
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
