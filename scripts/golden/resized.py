"""Pixels that the processors of transformers resize: `tests/golden/resized.json`, and curves of images that need
resizing in `curves.json`.

  python scripts/golden/resized.py

The processors are the default ones of each family (torchvision), with the settings of its model folder here. For every
image and for every list of frames, resized.json has the grid and a sha256 of the patches in float32. Sides grow,
shrink, or stay. `image_28` has sides that 28 divides, and `image_exact` sides that 32 divides, so each is resized for
the other families.
"""

import hashlib
import json

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

from adapters import curve
from qwen2_vl import update
from reference_lib import GOLDEN, ROOT

MODELS = ["small-tied", "small-qwen35", "small-qwen25vl", "small-qwen2vl"]
CURVES = {"small-tied": "image_28", "small-qwen35": "image_28", "small-qwen25vl": "image_exact", "small-qwen2vl": "image_exact"}
IMAGES = [f"tests/fixtures/images/{name}" for name in (
    "photo_150x100.png", "photo_40x30.png", "photo_96x50.png", "photo_50x84.png", "strip_120x7.png", "exact_96x64.png",
)] + ["tests/golden/data/images28/china_140x84.png"]
# Minimum and maximum area of an image in pixels; none: those of the model folder.
AREAS = [None, (784, 6000), (90_000, 120_000)]
VIDEOS = [("video/pan", 4), ("video/tall", 5), ("video/odd", 6), ("video28/pan", 3), ("video28/wide", 4)]


def settings(model, *files):
    """The settings in the first of the files that the model folder has."""
    folder = GOLDEN / "models" / model
    path = next(folder / name for name in files if (folder / name).exists())
    values = json.loads(path.read_text(encoding="utf-8"))
    return {k: v for k, v in values.items() if not k.endswith(("_type", "_class"))}


def pixels(path):
    return torch.from_numpy(np.asarray(Image.open(ROOT / path).convert("RGB")).copy()).permute(2, 0, 1).contiguous()


def case(model, files, values, grid, **more):
    return {
        "model": model, "files": files, "grid_thw": grid.tolist(),
        "sha256": hashlib.sha256(values.numpy().astype("<f4").tobytes()).hexdigest(), **more,
    }


def cases(model):
    family = json.loads((GOLDEN / "models" / model / "config.json").read_text(encoding="utf-8"))["model_type"]
    Images = getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[family]["torchvision"])
    Videos = getattr(transformers, VIDEO_PROCESSOR_MAPPING_NAMES[family]["torchvision"])
    of_images = settings(model, "preprocessor_config.json")
    for areas in AREAS:
        limits = {}
        if areas:
            limits = {"size": {"shortest_edge": areas[0], "longest_edge": areas[1]}}
        kept = {k: v for k, v in of_images.items() if not (areas and k in ("min_pixels", "max_pixels", "size"))}
        for path in IMAGES:
            out = Images(**kept, **limits)(images=[pixels(path)], return_tensors="pt")
            yield case(model, [path], out["pixel_values"], out["image_grid_thw"][0], areas=areas)
    videos = Videos(**settings(model, "video_preprocessor_config.json", "preprocessor_config.json"))
    for name, count in VIDEOS:
        paths = [f"tests/golden/data/{name}_{i}.png" for i in range(count)]
        out = videos(videos=[torch.stack([pixels(path) for path in paths])], do_sample_frames=False, return_tensors="pt")
        yield case(model, paths, out["pixel_values_videos"], out["video_grid_thw"][0])


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    lines = [json.dumps(case) for model in MODELS for case in cases(model)]
    (GOLDEN / "resized.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    curves = {f"{data}_{model}": curve(data, [], model) for model, data in CURVES.items()}
    for name, golden in curves.items():
        print(name, golden["loss"][0], golden["loss"][-1], flush=True)
    update("curves.json", 1, curves)


if __name__ == "__main__":
    main()
