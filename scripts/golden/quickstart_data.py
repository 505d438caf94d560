"""Writes `data/quickstart/`: 1,500 + 200 handwritten digits as chats with embedded images, and a
small model folder without weights.

  python scripts/golden/quickstart_data.py

The images are scikit-learn's 8 x 8 digits, enlarged to 64 x 64 (bilinear) and stored as 8-bit grey
PNG. If `tests/golden/data/digits/` contains the same digit, its RGB pixels must be equal.
"""

import base64
import io
import json
import random
import shutil
import struct
import zlib

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from reference_lib import GOLDEN, ROOT, load_image

OUT = ROOT / "data" / "quickstart"
NUM_TRAIN, NUM_TEST = 1500, 200
SIDE = 64
INITIALIZER_RANGE = 0.09
UP = 2  # PNG filter number


def filtered_rows(grey):
    """Encodes each row of an image with each of PNG's five filters, with the filter's number in
    front. Returns `[row][filter]`."""
    here = grey.astype(int)
    left, up, corner = np.zeros_like(here), np.zeros_like(here), np.zeros_like(here)
    left[:, 1:], up[1:], corner[1:, 1:] = here[:, :-1], here[:-1], here[:-1, :-1]
    guess = left + up - corner
    a, b, c = abs(guess - left), abs(guess - up), abs(guess - corner)
    paeth = np.where((a <= b) & (a <= c), left, np.where(b <= c, up, corner))
    residuals = [(here - p) % 256 for p in (np.zeros_like(here), left, up, (left + up) // 2, paeth)]
    rows = range(len(here))
    return [[bytes([k]) + r[y].astype(np.uint8).tobytes() for k, r in enumerate(residuals)] for y in rows]


def small_png(grey):
    """Returns an 8-bit grey PNG. Each row gets the filter with which the whole image compresses best."""
    rows = filtered_rows(grey)
    pick = [UP] * len(rows)

    def compressed(choice):
        return zlib.compress(b"".join(row[k] for row, k in zip(rows, choice)), 9)

    best = compressed(pick)
    for y in range(len(rows)):
        for k in range(5):
            trial = [*pick[:y], k, *pick[y + 1 :]]
            data = compressed(trial)
            if len(data) < len(best):
                best, pick = data, trial

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    height, width = grey.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", best) + chunk(b"IEND", b"")


def data_uri(index, image):
    """Returns the digit as a data URI, after checking that it decodes to the source pixels and to
    those of the golden file."""
    levels = (image * 255 / 16).astype(np.uint8)  # 0..16 in the data set
    grey = np.asarray(Image.fromarray(levels).resize((SIDE, SIDE), Image.BILINEAR))
    png = small_png(grey)
    rgb = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    golden = GOLDEN / "data" / "digits" / f"{index:04d}.png"
    if (rgb != grey[..., None]).any() or (golden.exists() and (rgb != load_image(golden.name, golden.parent)).any()):
        raise SystemExit(f"digit {index}: pixels differ")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def row(index, digits):
    question = [
        {"type": "image", "image": data_uri(index, digits.images[index])},
        {"type": "text", "text": "What digit is this?"},
    ]
    answer = str(digits.target[index])
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"id": f"digit-{index:04d}", "messages": messages}


def write_model_folder():
    """Writes all files except weights: training starts from random weights, which are drawn with
    `initializer_range`."""
    source, folder = GOLDEN / "models" / "small-tied", OUT / "model"
    folder.mkdir(parents=True, exist_ok=True)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json", "generation_config.json")
    for name in names:
        shutil.copyfile(source / name, folder / name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["initializer_range"] = INITIALIZER_RANGE
    config["vision_config"]["initializer_range"] = INITIALIZER_RANGE
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main():
    digits = load_digits()
    order = list(range(len(digits.images)))
    random.Random(5).shuffle(order)
    write_model_folder()
    splits = {"digits_train.jsonl": order[:NUM_TRAIN], "digits_test.jsonl": order[NUM_TRAIN : NUM_TRAIN + NUM_TEST]}
    for name, indices in splits.items():
        with open(OUT / name, "w", encoding="utf-8") as file:
            for index in indices:
                file.write(json.dumps(row(index, digits), separators=(",", ":")) + "\n")
        print(f"{name}: {len(indices)} rows, {(OUT / name).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
