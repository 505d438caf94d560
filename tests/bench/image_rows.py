"""Writes a model folder and seeded rows for the image benchmarks. Other scripts of this folder import
it.

  python tests/bench/image_rows.py FOLDER [--rows 64] [--text-rows 256]

FOLDER/model        a Qwen3-VL with about 20 M random weights, the tests' tokenizer and the published
                    pixel limits
FOLDER/images       JPEG files, every fourth one a PNG: blurred noise, discs and grain, sides of
                    256..1024 pixels
FOLDER/rows.jsonl   one image per row and about as many text tokens as vision tokens, half supervised
FOLDER/exact.jsonl  the first two of these rows whose image is a PNG; JPEG decoders differ, so only
                    these can be compared exactly
FOLDER/jpeg.jsonl   24 rows with a JPEG of 1,000 pixels width and few words, to time image work
FOLDER/text.jsonl   rows without images, 64..1024 tokens
Existing files are not written again.
"""
import argparse
import json
import math
import random
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

SMALL = Path("tests/golden/models/small-tied")
FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "video_preprocessor_config.json"]
SYLLABLES = "an ber cal do en fil gra hu im jor kel lo men nor ol pra qua ri son ter un vel wi xen yo zar".split()


def config():
    """The config in its published layout, which both sides read."""
    c = json.loads((SMALL / "config.json").read_text())
    c["text_config"] |= dict(hidden_size=256, num_hidden_layers=8, intermediate_size=1280, num_attention_heads=4, num_key_value_heads=2,
                             head_dim=64, initializer_range=0.06)
    c["text_config"]["rope_scaling"]["mrope_section"] = [12, 10, 10]
    c["vision_config"] |= dict(hidden_size=256, depth=6, num_heads=4, intermediate_size=1024, out_hidden_size=256,
                               deepstack_visual_indexes=[1, 3], initializer_range=0.06)
    return c


def make_model(folder):
    """Writes weights drawn by transformers, so that both sides start from the same ones."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(), indent=2))
    for name in FILES:
        shutil.copy(SMALL / name, folder / name)
    processor = json.loads((SMALL / "preprocessor_config.json").read_text())
    processor["size"] = {"shortest_edge": 65536, "longest_edge": 16777216}
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_pretrained(folder)).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config(), indent=2))  # transformers writes another layout
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def photo(rng, width, height):
    """An image of noise blurred at several scales, discs with sharp edges, and grain."""
    total = np.zeros((height, width, 3), np.float32)
    for octave in range(2, 8):
        size = (max(2, width >> (8 - octave)), max(2, height >> (8 - octave)))
        noise = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
        total += (np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float32) - 128) * 2.0 ** (1 - octave)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    for _ in range(8):
        cx, cy, r = rng.uniform(0, width), rng.uniform(0, height), rng.uniform(10, 150)
        total[(x - cx) ** 2 + (y - cy) ** 2 < r * r] += rng.uniform(-60, 60, 3).astype(np.float32)
    return Image.fromarray(np.clip(total + 128 + rng.normal(0, 2, total.shape), 0, 255).astype(np.uint8))


def write_rows(folder, num_rows, num_text_rows):
    from tokenizers import Tokenizer
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

    tokenizer = Tokenizer.from_file(str(folder / "model/tokenizer.json"))
    rng, pixels = random.Random(0), np.random.default_rng(0)
    words = ["".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4))) for _ in range(800)]
    words = [(word, len(tokenizer.encode(" " + word).ids)) for word in words]

    def text(num_tokens):
        out = []
        while num_tokens > 0:
            word, count = rng.choice(words)
            out.append(word)
            num_tokens -= count
        return " ".join(out)

    (folder / "images").mkdir(exist_ok=True)
    with open(folder / "rows.jsonl", "w") as file:
        for i in range(num_rows):
            width, height = rng.randint(256, 1024), rng.randint(256, 1024)
            name = f"images/{i}.{'png' if i % 4 == 3 else 'jpg'}"
            photo(pixels, width, height).save(folder / name, **({} if i % 4 == 3 else {"quality": 90}))
            h, w = smart_resize(height, width, 32, 65536, 16777216)
            num_text = int(h * w / 1024 * rng.uniform(0.5, 1.5))
            parts = [{"type": "image", "image": name}, {"type": "text", "text": text(num_text / 2 - 8)}]
            answer = {"role": "assistant", "content": text(num_text / 2 - 4)}
            file.write(json.dumps({"id": f"image-{i}", "messages": [{"role": "user", "content": parts}, answer]}) + "\n")
    rows = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "exact.jsonl").write_text("".join(row for row in rows if ".png" in row and rows.index(row) < 8))
    with open(folder / "jpeg.jsonl", "w") as file:
        for i in range(24):
            name = f"images/large_{i}.jpg"
            photo(pixels, 1000, rng.randint(600, 1000)).save(folder / name, quality=90)
            parts = [{"type": "image", "image": name}, {"type": "text", "text": text(8)}]
            answer = {"role": "assistant", "content": text(4)}
            file.write(json.dumps({"id": f"jpeg-{i}", "messages": [{"role": "user", "content": parts}, answer]}) + "\n")
    with open(folder / "text.jsonl", "w") as file:
        for i in range(num_text_rows):
            n = min(1024, max(64, math.exp(rng.gauss(math.log(256), 0.7))))
            turns = [{"role": role, "content": text(n / 2 - 5)} for role in ("user", "assistant")]
            file.write(json.dumps({"id": f"text-{i}", "messages": turns}) + "\n")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("folder", type=Path)
    ap.add_argument("--rows", type=int, default=64)
    ap.add_argument("--text-rows", type=int, default=1024)
    a = ap.parse_args()
    if not (a.folder / "model/model.safetensors").exists():
        shutil.rmtree(a.folder / "model", ignore_errors=True)
        make_model(a.folder / "model")
    made = a.folder / "made.json"
    want = json.dumps([a.rows, a.text_rows, 24])
    if not made.exists() or made.read_text() != want:
        write_rows(a.folder, a.rows, a.text_rows)
        made.write_text(want)


if __name__ == "__main__":
    main()
