#!/usr/bin/env python3
"""Writes tests/golden/row_cases.json: the plain rows of tests/fixtures/rows/table.json, tokenised,
labelled and with pixels of transformers.

Labels are found as in chat_cases.py. Pixels are the levels 0..255 of the image processor, hashed.
Run from the repository root, with transformers, torch and Pillow installed.
"""
import hashlib, json
import numpy as np
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from chat_cases import case

MODEL = "tests/golden/models/small-tied"
TABLE = "tests/fixtures/rows/table.json"
IMAGES = "tests/fixtures/images"
OUT = "tests/golden/row_cases.json"


def sources(message):
    if isinstance(message["content"], str):
        return []
    return [part["image"] for part in message["content"] if part["type"] == "image"]


def golden(tok, processor, entry):
    row = entry["like"]
    messages = row["messages"]
    names = [name for message in messages for name in sources(message)]
    images = [Image.open(f"{IMAGES}/{name}").convert("RGB") for name in names]
    levels, counts = hashlib.sha256(), []
    for image in images:
        out = processor(images=[image], return_tensors="np")
        levels.update(np.round((out["pixel_values"] * 0.5 + 0.5) * 255).astype(np.uint8).tobytes())
        counts.append(int(out["image_grid_thw"][0].prod()) // processor.merge_size ** 2)
    made = case(tok, "", {"messages": messages, "tools": row.get("tools"), "counts": counts})
    return {"file": entry["file"], "input_ids": made["input_ids"], "targets": made["targets"],
            "pixels_sha256": levels.hexdigest()}


def trained(entry):
    """chat_cases.py labels every answer, and has no videos."""
    text = json.dumps(entry["like"])
    return "\"train\": false" not in text and "\"video\"" not in text


def main():
    tok = AutoTokenizer.from_pretrained(MODEL)
    processor = Qwen2VLImageProcessor.from_pretrained(MODEL)
    with open(TABLE) as f:
        entries = [e for e in json.load(f) if "like" in e and e.get("golden", True) and trained(e)]
    rows = [golden(tok, processor, entry) for entry in entries]
    with open(OUT, "w", encoding="ascii") as f:
        f.write("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")
    print(len(rows))


if __name__ == "__main__":
    main()
