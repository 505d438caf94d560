"""Compares `trainer inspect` with the processor of a model folder in transformers, over generated rows.

  python scripts/golden/encodings.py MODEL_DIR [--rows 200] [--seed 0] [--smallest 29]
                                      [--trainer target/release/trainer]

The rows have one to three turns, sometimes a system turn, and up to three images of odd sizes, so most images are
resized. Compares ids, labels, positions, grids and every pixel, and fails (exit code 1) at the first difference.

An image of InternVL has the grid [tiles, rows of patches, columns of patches], and its tiles are compared as patches.
An image of MiniCPM-V has the grid [1, rows, columns] of the whole picture and, if there are slices, a second one with
their number. `minicpm_47.py --folder DIR` writes a folder of MiniCPM-V 4.7.
"""

import argparse
import json
import random
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoProcessor

from reference_lib import (
    Encoder, frame_patches, frame_sizes, is_internvl, is_minicpm, load_model, normalise, patches, positions,
)

WORDS = "What is the colour of this? It shows 3 boxes, näıve 日本 text.\nA second line , 12:30 !".split(" ")

EDGES = ["", "", "", "\n", "\n\n", " \n", "\n "]  # of a text next to an image or to the end of a turn


def image(draw, path, smallest):
    """Noise over a gradient, so that every pixel counts."""
    width, height = draw.randint(smallest, 331), draw.randint(smallest, 331)
    noise = np.random.default_rng(draw.getrandbits(32)).integers(0, 128, (height, width, 3))
    ramp = np.linspace(0, 127, width)[None, :, None] + np.zeros((height, 1, 3))
    Image.fromarray((noise + ramp).astype(np.uint8)).save(path)


def expected_pixels(encoder, theirs, reference):
    """Patches and grids of a row by its processor."""
    if is_minicpm(encoder.config):
        sizes = theirs["target_sizes"].tolist()
        grid = torch.tensor(reference["grid"])
        assert sizes == frame_sizes(grid)
        return frame_patches(theirs["pixel_values"], sizes, encoder.config), grid
    if not is_internvl(encoder.config):
        return theirs["pixel_values"], theirs["image_grid_thw"]
    return patches(theirs["pixel_values"], encoder.config), torch.tensor(reference["grid"])


def rows(draw, count, folder, smallest):
    for i in range(count):
        texts = lambda: " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        messages = [{"role": "system", "content": texts()}] if draw.random() < 0.3 else []
        images = [f"{i}_{k}.png" for k in range(draw.choice([0, 1, 1, 1, 2, 3]))]
        for name in images:
            image(draw, folder / name, smallest)
        turns, left = draw.randint(1, 3), len(images)
        for turn in range(turns):
            here = left if turn == turns - 1 else draw.randint(0, left)
            left -= here
            edge = lambda: draw.choice(EDGES)
            parts = [edge() + ("" if here and draw.random() < 0.2 else texts()) + edge() for _ in range(here + 1)]
            messages.append({"role": "user", "content": "<image>".join(parts)})
            messages.append({"role": "assistant", "content": texts()})
        yield {"id": f"row{i}", "messages": messages, "images": images}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smallest", type=int, default=29, help="shortest side of an image")
    parser.add_argument("--trainer", default="target/release/trainer")
    args = parser.parse_args()
    processor, model = AutoProcessor.from_pretrained(args.model), load_model(args.model)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        encoder = Encoder(args.model, folder)
        generated = list(rows(random.Random(args.seed), args.rows, folder, args.smallest))
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in generated), encoding="utf-8")
        config = {
            "model": {"path": str(args.model.resolve())}, "output_dir": str(folder / "run"),
            "data": {"train": [{"path": str(folder / "rows.jsonl")}], "packing_length": 1 << 16, "shuffle": False},
        }
        (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
        inspect = [args.trainer, "inspect", "--config", folder / "config.yaml", "--num", "0", "--format", "jsonl"]
        out = subprocess.run(
            [*inspect, "--tensors", folder / "all.safetensors"], check=True, capture_output=True, text=True
        ).stdout
        found, tensors = [json.loads(line) for line in out.splitlines()], load_file(folder / "all.safetensors")
        assert len(found) == len(generated), f"{len(found)} rows of {len(generated)}"
        num_images = 0
        for row, ours in zip(generated, found):
            messages, sources = normalise(row)
            text = processor.apply_chat_template(messages, tokenize=False)
            images = [Image.open(folder / source) for source in sources]
            theirs = processor(text=[text], images=images or None, return_tensors="pt")
            reference = encoder(row)
            position_ids, _ = positions(model, encoder.config, reference)
            assert theirs["input_ids"][0].tolist() == ours["input_ids"], row["id"]
            assert reference["labels"] == ours["labels"], row["id"]
            assert position_ids.tolist() == ours["position_ids"], row["id"]
            if sources:
                of_row = lambda name: tensors[f"{ours['id']}/{name}"]
                pixels, grid = expected_pixels(encoder, theirs, reference)
                assert torch.equal(of_row("image_grid_thw"), grid), row["id"]
                assert torch.equal(of_row("pixel_values"), pixels), row["id"]
            num_images += len(sources)
    print(f"{len(generated)} rows with {num_images} images: 0 differences")


if __name__ == "__main__":
    main()
