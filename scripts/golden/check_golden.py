"""Recomputes `losses_at_init.json`, `enc_*.json` and `smart_resize.json` and compares them with the
stored files.

  python scripts/golden/check_golden.py

`enc_tiny-tied_text.json` needs the published tokenizer: run
`eval "$(scripts/golden/fetch_tokenizer.sh)"` first, otherwise this file is skipped. Exits with 1 if
anything differs.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as smart_resize_video

from reference_lib import GOLDEN, IGNORE, Encoder, forward, load_model, positions, read_jsonl

SMALL = GOLDEN / "models" / "small-tied"


def stored(name):
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def sha256(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def run_lengths(ids):
    """Run-length encoding: `[5, [7, 3]]` for 5, 7, 7, 7."""
    out = []
    for token in ids:
        if out and out[-1][0] == token:
            out[-1][1] += 1
        else:
            out.append([token, 1])
    return [token if n == 1 else [token, n] for token, n in out]


def spans(labels):
    """Half-open ranges of the positions that have a label."""
    marks = [False, *(label != IGNORE for label in labels), False]
    edges = [i for i in range(len(marks) - 1) if marks[i] != marks[i + 1]]
    return [list(pair) for pair in zip(edges[::2], edges[1::2])]


def encoding(sample, model, config):
    """Returns one entry of an `enc_*.json` file."""
    position_ids, delta = positions(model, config, sample)
    entry = {
        "id": sample["id"], "n": len(sample["input_ids"]), "ids_rle": run_lengths(sample["input_ids"]),
        "label_spans": spans(sample["labels"]), "targets": sum(label != IGNORE for label in sample["labels"][1:]),
        "grid": sample["grid"], "pos_sha256_i64": sha256(position_ids.numpy().astype(np.int64)),
        "pos_max": int(position_ids.max()), "pos_last": position_ids[:, -1].tolist(), "rope_delta": delta,
    }
    if sample["pixel_values"] is not None:
        pixels = sample["pixel_values"].numpy()
        entry["pixels"] = {"shape": list(pixels.shape), "sha256_f32": sha256(pixels)}
    return entry


def check_encodings(name, encoder, data, model):
    """Returns one line for each field of a stored entry that differs."""
    rows = {row["id"]: row for row in read_jsonl(GOLDEN / "data" / data)}
    problems = []
    for golden in stored(name):
        found = encoding(encoder(rows[golden["id"]]), model, encoder.config)
        for key, value in found.items():
            expected = golden[key]
            if key == "pixels":  # the stored sums are redundant: the hash covers them
                expected = {k: expected[k] for k in value}
            if value != expected:
                problems.append(f"{name}: {golden['id']}: {key}: expected {expected}, found {value}")
    return problems


def check_losses():
    problems = []
    for key, golden in stored("losses_at_init.json").items():
        folder = GOLDEN / "models" / key.split("|")[0]
        encoder, model = Encoder(folder, GOLDEN / "data"), load_model(folder)
        rows = read_jsonl(GOLDEN / "data" / f"{key.split('|')[1]}.jsonl")[: golden["rows"]]
        for row, (name, mean, targets) in zip(rows, golden["per_sample"], strict=True):
            with torch.no_grad():
                ((nll_sum, found),) = forward(model, encoder.config, [encoder(row)])
            if row["id"] != name or found != targets or abs(float(nll_sum) / found - mean) > 1e-5:
                problems.append(f"losses_at_init.json: {key}: {name}: expected {mean}, found {float(nll_sum) / found}")
    return problems


def check_sizes():
    golden, problems = stored("smart_resize.json"), []
    for *args, expected in golden["image"]:
        try:
            found = list(smart_resize(*args))
        except ValueError:
            found = None
        if found != expected:
            problems.append(f"smart_resize.json: {args}: expected {expected}, found {found}")
    for *args, expected in golden["video"]:
        try:
            found = list(smart_resize_video(*args))
        except ValueError as error:
            found = str(error)
        if found != expected:
            problems.append(f"smart_resize.json: video {args}: expected {expected}, found {found}")
    return problems


def published_tokenizer_folder(tokenizer, folder):
    """Writes small-tied's folder with the published tokenizer, to encode text with."""
    shutil.copytree(SMALL, folder, dirs_exist_ok=True)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    settings = json.loads((SMALL / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("added_tokens_decoder", None)  # contains ids of the small tokenizer
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def main():
    torch.set_num_threads(1)
    encoder, model = Encoder(SMALL, GOLDEN / "data"), load_model(SMALL)
    problems = check_sizes()
    problems += check_losses()
    problems += check_encodings("enc_small-tied_digits_test.json", encoder, "digits_test.jsonl", model)
    tokenizer = os.environ.get("TRAINER_QWEN3_TOKENIZER")
    if tokenizer:
        with tempfile.TemporaryDirectory() as folder:
            published_tokenizer_folder(tokenizer, Path(folder))
            published = Encoder(folder, GOLDEN / "data")
            problems += check_encodings("enc_tiny-tied_text.json", published, "text.jsonl", model)
    else:
        print("enc_tiny-tied_text.json: skipped, TRAINER_QWEN3_TOKENIZER is not set")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(f"{len(problems)} differences")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
