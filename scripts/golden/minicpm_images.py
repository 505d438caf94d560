"""What MiniCPM-V 4.6 makes of images: `tests/golden/slices.json`.

  python scripts/golden/minicpm_images.py            # after minicpm.py
  python scripts/golden/minicpm_images.py --check    # makes slices.json again and compares it

slices.json has the sizes in pixels of the whole image and of a slice, for sizes of images, by the
functions of the image processor of transformers; and hashes of the patches of some images as in
resized.json, in the order of `reference_lib.frame_patches`.
"""

import argparse
import json
import random

import torch
from transformers import AutoImageProcessor

from minicpm import FOLDER, NAME
from reference_lib import GOLDEN, frame_patches
from resized import IMAGES, case, pixels

SLICES = GOLDEN / "slices.json"
SETTINGS = ("scale_resolution", "max_slice_nums", "downsample_mode")
COLUMNS = [
    "height", "width", *SETTINGS, "rows of slices", "columns of slices", "height of the image",
    "width of the image", "height of a slice", "width of a slice",
]
COMMON = [(448, 9, "16x"), (448, 9, "4x")]  # for each size, and one of these:
OTHERS = [
    (112, 9, "16x"), (112, 9, "4x"), (448, 1, "16x"), (448, 2, "16x"), (448, 4, "4x"),
    (448, 6, "16x"), (336, 12, "16x"), (1036, 9, "4x"), (224, 25, "16x"),
]
FILES = IMAGES + ["tests/golden/data/images/exact_coffee_256x288.png"]
OF_FILES = [(112, 9, "16x"), (112, 9, "4x"), (56, 9, "16x"), (56, 4, "4x")]


def sizes():
    """Heights and widths: usual, tiny and long ones, between two grids, and random ones."""
    found = [(1, 1), (1, 9), (9, 1), (2, 3), (14, 14), (27, 29), (28, 28), (55, 57), (56, 56)]
    found += [(84, 140), (140, 84), (224, 896), (896, 224), (112, 1792), (480, 640), (720, 1280)]
    found += [(447, 449), (448, 448), (449, 448), (448, 449), (449, 449), (1080, 1920)]
    found += [(1920, 1080), (3024, 4032), (4032, 3024), (8000, 8000), (1, 200), (200, 1)]
    found += [(10, 2000), (2000, 10), (40, 8000), (8000, 40), (100, 1199), (1201, 100), (5000, 100)]
    # Areas around whole numbers of slices, and ratios between those of two grids: more rows win.
    for side in (633, 634, 775, 776, 895, 896, 897, 1001, 1002, 1097, 1098, 1185, 1186, 1344):
        found.append((side, side))
    for side in (316, 317, 387, 388, 448, 500, 633, 634, 700, 900, 1000):
        found += [(side, 2 * side), (2 * side, side)]
    for side in (258, 259, 366, 448, 517, 600):
        found += [(side, 3 * side), (3 * side, side)]
    found += [(200 * a, 200 * b) for a in range(2, 9) for b in range(2, 9) if a != b]
    draw = random.Random(5)
    found += [(draw.randint(8, 2500), draw.randint(8, 2500)) for _ in range(70)]
    return list(dict.fromkeys(found))


def row(processor, height, width, scale, most, mode):
    shared = {"scale_resolution": scale, "patch_size": 14, "downsample_mode": mode}
    grid = processor.get_sliced_grid((height, width), most, scale)
    whole = processor.find_best_resize((height, width), **shared, allow_upscale=grid is None)
    of_slice = [0, 0]
    if grid:
        whole = processor.get_refine_size((height, width), grid, **shared, allow_upscale=True)
        of_slice = [side // parts for side, parts in zip(whole, grid)]
    return [height, width, scale, most, mode, *(grid or [0, 0]), *whole, *of_slice]


def tables():
    """The contents of slices.json."""
    processor, rows, cases = AutoImageProcessor.from_pretrained(FOLDER), [], []
    for number, (height, width) in enumerate(sizes()):
        for settings in [*COMMON, OTHERS[number % len(OTHERS)]]:
            rows.append(row(processor, height, width, *settings))
    for path in FILES:
        for values in OF_FILES:
            settings = dict(zip(SETTINGS, values))
            out = processor([pixels(path)], **settings, return_tensors="pt")
            frames = out["target_sizes"].tolist()
            grid = [[1, *frames[0]]] + [[len(frames) - 1, *size] for size in frames[1:2]]
            patches = frame_patches(out["pixel_values"], frames, settings)
            cases.append(case(NAME, [path], patches, torch.tensor(grid), **settings))
    return rows, cases


def write_tables(rows, cases):
    rows, cases = (",\n".join(map(json.dumps, lines)) for lines in (rows, cases))
    columns = json.dumps(COLUMNS)
    text = f'{{"columns": {columns}, "slices": [\n{rows}\n], "pixels": [\n{cases}\n]}}\n'
    SLICES.write_text(text, encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only compare the tables")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if args.check:
        stored = json.loads(SLICES.read_text(encoding="utf-8"))
        assert (stored["slices"], stored["pixels"]) == tables(), "slices.json differs"
        return
    write_tables(*tables())


if __name__ == "__main__":
    main()
