"""Positions on the canvas of MiniCPM-V 4.7, for `minicpm_47.py`: cases without a chat, and the
places of the tokens of a thumbnail."""

import json
import random
from fractions import Fraction

import numpy as np
import torch

from minicpm import CONFIG, FIRST
from reference_lib import positions

NEWLINE = 198


def places(canvas, tokens):
    """Places of the tokens of a thumbnail on one axis of the canvas."""
    return torch.linspace(0, canvas - 1, tokens).round().long().tolist()


def exact(canvas, tokens):
    """The same by exact fractions; Python rounds half to even."""
    return [round(Fraction(k * (canvas - 1), max(tokens - 1, 1))) for k in range(tokens)]


def from_both_ends(canvas, tokens):
    """The same by steps in f32 from the nearer end, which is torch's rule."""
    end, found = np.float32(canvas - 1), []
    step = end / np.float32(max(tokens - 1, 1))
    for k in range(tokens):
        near = np.float32(k) * step if k < tokens // 2 else end - np.float32(tokens - 1 - k) * step
        found.append(int(np.round(near)) if tokens > 1 else 0)
    return found


def linspace_table():
    """Canvases of 2 to 130 and 2 to 70 tokens where exact fractions differ, and some others."""
    draw = random.Random(3)
    pairs = [(c, t) for c in range(2, 131) for t in range(2, 71)]
    differ = [pair for pair in pairs if places(*pair) != exact(*pair)]
    others = draw.sample([pair for pair in pairs if pair not in differ], 240)
    pairs = [(1, 1), (9, 1), (16, 1), (400, 64), (301, 33)] + differ + others
    print(len(differ), "of the sizes differ from exact fractions")
    for pair in pairs:
        assert places(*pair) == from_both_ends(*pair), pair
        yield [*pair, places(*pair)]


def crop(height, width, token=CONFIG["image_token_id"]):
    return [token] * (height * width)


def sliced(thumbnail, rows=0, columns=0, of_slice=(0, 0), token=CONFIG["image_token_id"]):
    """Ids and grids of an image, sizes in tokens."""
    start, end, open_slice, close = range(FIRST, FIRST + 4)
    ids, grids = [start, *crop(*thumbnail, token), end], [[1, *(4 * side for side in thumbnail)]]
    for row in range(rows):
        ids += [NEWLINE] * (row > 0)
        for _ in range(columns):
            ids += [open_slice, *crop(*of_slice, token), close]
    if rows:
        grids.append([rows * columns, *(4 * side for side in of_slice)])
    return ids, grids


def position_cases(model, folder):
    """Ids without a chat around them."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    plain, tall, wide = sliced((2, 3)), sliced((3, 1), 3, 1, (2, 1)), sliced((1, 3), 1, 3, (2, 2))
    grid, video = sliced((2, 2), 2, 3, (3, 2)), sliced((2, 2), 2, 2, (1, 2), 2030)
    text, line = ([7, 8, 9], []), ([NEWLINE], [])
    for name, parts in {
        "at the start": [plain, text], "sliced at the start": [grid, text], "only": [tall],
        "one token in front": [([5], []), wide, text], "at the end": [text, grid],
        "adjacent": [text, plain, grid, wide, text],
        "line between": [text, plain, line, tall, text],
        "lines behind": [text, grid, line, line, line, text],
        "lines between": [plain, line, line, plain], "text between": [plain, text, plain, text],
        "line in front": [text, line, plain, text], "two in front": [line, line, plain, text],
        "only text": [text, line, text],
        "one token": [text, sliced((1, 1), 2, 2, (2, 2)), text],
        "column": [text, sliced((2, 1))],
        "larger thumbnail": [text, sliced((5, 4), 1, 2, (2, 1))],
        "frames": [text, video, video, video, line, text],
        "video and image": [text, video, video, plain, video, line, plain, text],
    }.items():
        ids = [token for part, _ in parts for token in part]
        grids = {"grid": [], "video_grid": []}
        for part, of in parts:
            grids["video_grid" if 2030 in part else "grid"] += of
        position_ids, delta = positions(model, config, {"input_ids": ids, **grids})
        yield {"case": name, "input_ids": ids, "image_grid_thw": grids["grid"],
               "video_grid_thw": grids["video_grid"], "position_ids": position_ids.tolist(),
               "next": len(ids) + delta}
