"""MiniCPM-V 4.7: `tests/golden/minicpm_47.json`, from the weights of models/small-minicpm.

  python scripts/golden/minicpm_47.py           # 3 minutes, after minicpm_rows.py
  python scripts/golden/minicpm_47.py --folder DIR    # only writes such a folder, for encodings.py

The vision encoder and the tensors are those of 4.6. Of the three numbers of a position, those of
tokens in and around an image, or a frame of a video, are places on a canvas, by `get_rope_index` of
transformers; there are other settings in `changes` (as in `minicpm_video.py`).

  losses      as in losses_at_init.json, with text.jsonl and image_exact.jsonl
  curve       as in curves.json, with image_exact.jsonl and 12 steps
  answers     as in answers.json
  rows        of canvas.jsonl, and 8 of image_exact.jsonl, in the form of minicpm_video.json
  variants    the same, of canvas.jsonl, with further changes
  videos      rows of video_28.jsonl and video_slices.jsonl in that form, and a curve of 8 steps
  positions   ids and grids that no chat has, like an image at the very start
  linspace    [size of the canvas, tokens of the thumbnail, their places] on one axis

Every sample is computed alone: transformers packs neither the states of the decoder nor these
positions.
"""

import argparse
import json
import random
import shutil
import warnings
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from adapters import curve as images_curve
from answers import answers
from minicpm import CONFIG, FIRST, FOLDER, NAME
from minicpm_video import cases, changed_folder, curve
from qwen2_video import write
from qwen2_vl import losses
from reference_lib import GOLDEN, load_model, positions, read_jsonl

OWNER = {"processor_class": "MiniCPMV4_7Processor"}
NEWLINE = 198
CHANGES = {
    "config.json": {
        "architectures": ["MiniCPMV4_7ForConditionalGeneration"], "model_type": "minicpmv4_7",
        "drop_vision_last_layer": None, "image_start_id": FIRST, "image_end_id": FIRST + 1,
        "slice_start_id": FIRST + 2, "slice_end_id": FIRST + 3, "newline_id": NEWLINE,
        "text_config": {
            "rope_parameters": {"mrope_interleaved": True, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {"model_type": "minicpmv4_7_vision"},
    },
    "preprocessor_config.json": OWNER, "processor_config.json": OWNER,
    "tokenizer_config.json": OWNER,
}


def in_both_files(settings):
    """Changes of the settings of images, and of those of videos."""
    kinds = {kind: settings for kind in ("image_processor", "video_processor")}
    return {"preprocessor_config.json": settings, "processor_config.json": kinds}


MODE = {"downsample_mode": "4x"}
VARIANTS = {
    "no_image_id": in_both_files({"use_image_id": False}),
    "unsliced": in_both_files({"slice_mode": False}),
    "4x": in_both_files(MODE) | {"config.json": MODE},
}


def check_settings(folder):
    """transformers writes the same config.json, up to the order of its keys."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    saved = AutoConfig.from_pretrained(folder).to_diff_dict()
    for key, value in config.items():
        assert saved[key] == value or key == "architectures", (key, saved[key], value)


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
    """All sizes where exact fractions differ, of canvases of 2 to 130 and 2 to 70 tokens; others."""
    draw = random.Random(3)
    pairs = [(c, t) for c in range(2, 131) for t in range(2, 71)]
    differ = [pair for pair in pairs if places(*pair) != exact(*pair)]
    others = draw.sample([pair for pair in pairs if pair not in differ], 300 - len(differ) % 200)
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


def position_cases():
    """Ids without a chat around them."""
    model = load_model_of_47()
    plain, tall, wide = sliced((2, 3)), sliced((3, 1), 3, 1, (2, 1)), sliced((1, 3), 1, 3, (2, 2))
    grid, video = sliced((2, 2), 2, 3, (3, 2)), sliced((2, 2), 2, 2, (1, 2), 2030)
    text, line = ([7, 8, 9], []), ([NEWLINE], [])
    for name, parts in {
        "at the start": [plain, text], "sliced at the start": [grid, text], "only": [tall],
        "one token in front": [([5], []), wide, text], "at the end": [text, grid],
        "adjacent": [text, plain, grid, wide, text], "line between": [text, plain, line, tall, text],
        "lines behind": [text, grid, line, line, line, text],
        "lines between": [plain, line, line, plain], "text between": [plain, text, plain, text],
        "line in front": [text, line, plain, text], "two in front": [line, line, plain, text],
        "only text": [text, line, text], "larger thumbnail": [text, sliced((5, 4), 1, 2, (2, 1))],
        "frames": [text, video, video, video, line, text],
        "video and image": [text, video, video, plain, video, line, plain, text],
    }.items():
        ids = [token for part, _ in parts for token in part]
        grids = {"grid": [], "video_grid": []}
        for part, of in parts:
            grids["video_grid" if 2030 in part else "grid"] += of
        position_ids, delta = positions(model[0], model[1], {"input_ids": ids, **grids})
        yield {"case": name, "input_ids": ids, "image_grid_thw": grids["grid"],
               "video_grid_thw": grids["video_grid"], "position_ids": position_ids.tolist(),
               "next": len(ids) + delta}


def load_model_of_47():
    with changed_folder(CHANGES) as folder:
        return load_model(folder), json.loads((folder / "config.json").read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="write only a model folder, here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    golden = {"changes": CHANGES}
    with changed_folder(CHANGES) as folder:
        check_settings(folder)
        if args.folder:
            shutil.copytree(folder, args.folder)
            return
        golden["losses"] = {data: losses(folder, data) for data in ("text", "image_exact")}
        golden["curve"] = images_curve("image_exact", ["--steps", "12"], folder)
        print(golden["curve"]["loss"])
        rows = [row["id"] for row in read_jsonl(GOLDEN / "data" / "image_exact.jsonl")[:8]]
        golden["rows"] = [*cases(folder, "canvas"), *cases(folder, "image_exact", only=rows)]
        golden["variants"] = {}
        for name, more in VARIANTS.items():
            with changed_folder(CHANGES, more) as varied:
                found = list(cases(varied, "canvas"))
            golden["variants"][name] = {"changes": more, "rows": found}
        golden["videos"] = {}
        for data in ("video_28", "video_slices"):
            of = {"rows": list(cases(folder, data)), "curve": curve(folder, data, 8)}
            golden["videos"][data] = of
        with torch.no_grad():
            golden["answers"] = answers(folder)
    golden["positions"] = list(position_cases())
    golden["linspace"] = list(linspace_table())
    write("minicpm_47.json", golden)


if __name__ == "__main__":
    main()
