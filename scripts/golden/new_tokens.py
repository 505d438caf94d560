"""Tokens that are added to a vocabulary, by transformers: ids, losses and gradients.

  python scripts/golden/new_tokens.py             # tests/golden/new_tokens.{json,safetensors}
  python scripts/golden/new_tokens.py --check     # both again, compared to the stored ones
  python scripts/golden/new_tokens.py --load DIR  # loads a folder that `trainer sft` or `trainer export` wrote after
                                                  # these tokens were added: compares the ids and resaves the tokenizer

`add_tokens`, then `resize_token_embeddings`; the new rows of the embedding and of an untied head become the mean of the
rows of the tokens that encode the text of the token without it. Five of the eight tokens use rows that the embedding
has beyond the ids of its tokenizer.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from reference_lib import GOLDEN, IGNORE, Encoder, forward, load_model, read_jsonl

NORMAL = ["<box>", "ünit é", "hello world", "日本語モデル"]
SPECIAL = ["<|act_0|>", "<|act_1|>", "<|act_10|>", "<|äct|>"]
MODELS = ("small-tied", "untied")
TEXTS = [
    *NORMAL, *SPECIAL, "x<box>y", "<box><box> <box>\n<box>", "xhello worldy", "hello  world", " hello world ", "hello wor",
    "u\u0308nit e\u0301", "ü nit é", "ünit e", "ünit é\u0301", "xu\u0308nit e\u0301x", "日本語モテ\u3099ル", "日本語モデ ル",
    "<|act_1|>0|>", "<|act_10|>", "<|act_100|>", "a<|act_1|>b<|act_0|><|act_", "<|a\u0308ct|>", "<|äct|>é", "e<|äct|>\u0301",
    "<|im_start|><|act_0|><|im_end|>\n<box><|image_pad|>", "Hello World hello\u00a0world", "<bo<box>x>", "1<box>2 3<|act_1|>4",
    "hello worldhello world", "<think>hello world</think>",
]
FILES = GOLDEN / "new_tokens.json", GOLDEN / "new_tokens.safetensors"


def tables(model):
    """The embedding, and the head if it is another matrix."""
    found = {"embed": model.get_input_embeddings().weight}
    if model.get_output_embeddings().weight is not found["embed"]:
        found["head"] = model.get_output_embeddings().weight
    return found


def measure(name):
    folder = GOLDEN / "models" / name
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load_model(folder)
    first = len(tokenizer)
    pieces = [tokenizer(token, add_special_tokens=False)["input_ids"] for token in NORMAL + SPECIAL]
    tokenizer.add_tokens(NORMAL)
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = {}
    with torch.no_grad():
        for table, weight in tables(model).items():
            new = torch.stack([weight[ids].double().mean(0).float() for ids in pieces])
            weight[first : first + len(new)] = new
            rows[table] = new
    with tempfile.TemporaryDirectory() as grown:
        tokenizer.save_pretrained(grown)
        for file in ("config.json", "preprocessor_config.json"):
            (Path(grown) / file).write_bytes((folder / file).read_bytes())
        encoder = Encoder(grown, GOLDEN / "data")
    samples = [encoder(row) for row in read_jsonl(GOLDEN / "data" / "new_tokens.jsonl")]
    num_targets = sum(label != IGNORE for s in samples for label in s["labels"][1:])
    losses = []
    for sample in samples:
        ((nll_sum, targets),) = forward(model, encoder.config, [sample])
        (nll_sum / num_targets).backward()
        losses.append([sample["id"], float(nll_sum.detach()) / targets, targets])
    tensors = {f"{name}/rows/{table}": new for table, new in rows.items()}
    for table, weight in tables(model).items():
        tensors[f"{name}/grad/{table}"] = weight.grad[first : first + len(pieces)].contiguous()
    return {
        "first_id": first,
        "vocab_size": model.get_input_embeddings().num_embeddings,
        "texts": [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS],
        "input_ids": [sample["input_ids"] for sample in samples],
        "losses": losses,
        "grad_norms": {n: float(p.grad.double().norm()) for n, p in model.named_parameters() if p.grad is not None},
    }, tensors


def load(folder):
    """Compares the ids of `folder` with the stored ones, before and after transformers saves its tokenizer again."""
    stored = json.loads(FILES[0].read_text(encoding="utf-8"))
    expected = stored["models"]["small-tied"]["texts"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as again:
        tokenizer.save_pretrained(again)
        for name, of in ((folder, tokenizer), ("saved again", AutoTokenizer.from_pretrained(again))):
            found = [of(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
            wrong = [text for text, a, b in zip(TEXTS, found, expected) if a != b]
            if wrong:
                raise SystemExit(f"{name}: other ids of {wrong}")
            special = [token for token in SPECIAL if of.decode(of.convert_tokens_to_ids(token), skip_special_tokens=True)]
            if special:
                raise SystemExit(f"{name}: {special} are not special")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    rows = {table: list(weight.shape) for table, weight in tables(model).items()}
    print(f"{folder}: {len(TEXTS)} texts have the stored ids; {len(tokenizer)} tokens; {rows}; {model.config.text_config.vocab_size=}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--load", metavar="DIR")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.load:
        load(args.load)
        return
    models, tensors = {}, {}
    for name in MODELS:
        models[name], new = measure(name)
        tensors.update(new)
        print(name, models[name]["vocab_size"], [round(loss, 5) for _, loss, _ in models[name]["losses"]])
    golden = {"add_tokens": NORMAL, "add_special_tokens": SPECIAL, "texts": TEXTS, "models": models}
    if args.check:
        stored, kept = json.loads(FILES[0].read_text(encoding="utf-8")), load_file(FILES[1])
        for name, found in models.items():
            before = stored["models"][name]
            for key in ("first_id", "vocab_size", "texts", "input_ids"):
                assert found[key] == before[key], (name, key)
            for (_, a, _), (_, b, _) in zip(found["losses"], before["losses"]):
                assert abs(a - b) <= 1e-5 * abs(b), (name, a, b)
        for name, tensor in tensors.items():
            assert torch.allclose(tensor, kept[name], rtol=1e-4, atol=1e-7), name
        print("equal to the stored files")
        return
    FILES[0].write_text(json.dumps(golden, ensure_ascii=False) + "\n", encoding="utf-8")
    save_file(tensors, FILES[1], metadata={"format": "pt"})


if __name__ == "__main__":
    main()
