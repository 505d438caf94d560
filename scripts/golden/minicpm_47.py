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
import shutil
import warnings
from pathlib import Path

import torch
from transformers import AutoConfig

from adapters import curve as images_curve
from answers import answers
from minicpm import FIRST, changed_folder
from minicpm_canvas import NEWLINE, linspace_table, position_cases
from minicpm_video import cases, curve
from qwen2_video import write
from qwen2_vl import losses
from reference_lib import GOLDEN, load_model, read_jsonl

OWNER = {"processor_class": "MiniCPMV4_7Processor"}
# With fast angles in 8 of 16 pairs, each axis shows in a loss.
ROPE = {
    "mrope_interleaved": True, "mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5,
    "rope_theta": 16,
}
CHANGES = {
    "config.json": {
        "architectures": ["MiniCPMV4_7ForConditionalGeneration"], "model_type": "minicpmv4_7",
        "drop_vision_last_layer": None, "image_start_id": FIRST, "image_end_id": FIRST + 1,
        "slice_start_id": FIRST + 2, "slice_end_id": FIRST + 3, "newline_id": NEWLINE,
        "text_config": {"rope_parameters": ROPE},
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
        golden["positions"] = list(position_cases(load_model(folder), folder))
    golden["linspace"] = list(linspace_table())
    write("minicpm_47.json", golden)


if __name__ == "__main__":
    main()
