"""Videos of InternVL3.5: `tests/golden/internvl_video.json`, from the rows of `tests/golden/data/video_28.jsonl`.

  python scripts/golden/internvl_video.py

The keys are those of `qwen2_video.json`, with a table of frame indices in `indices`; a grid is [tiles or frames, rows
of patches, columns of patches]. The reference is the folder's own processor, which receives all frames and samples
none, and the model of transformers. The processor takes only videos of equal numbers of frames in a call, so it is
called for each turn. Pixels are hashed in the order of `reference_lib.patches`.
"""

import json
import re
import warnings
from pathlib import Path

import torch
from transformers import AutoProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
from transformers.video_utils import VideoMetadata

import adapters
import qwen2_video
import ref_trainer
from internvl import FOLDER, NAME
from qwen2_video import ANSWER_TOKENS, ROWS, digest, write
from reference_lib import forward, load_model, patches, read_jsonl
from video_cases import DATA, pixels, typed


class VideoEncoder(qwen2_video.VideoEncoder):
    """Stands in for `reference_lib.Encoder`."""

    def __init__(self, model_dir, _):
        self.config = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
        self.reference = AutoProcessor.from_pretrained(model_dir)

    def run(self, text, media):
        """The ids of all turns and the tiles of each medium, in order."""
        left, ids, tiles = list(media), [], []
        for turn in re.split(r"(?=<\|im_start\|>)", text)[1:]:
            found = [left.pop(0) for _ in self.reference.multimodal_pattern.finditer(turn)]
            images = [pixels(m[1]) for m in found if m[0] == "image"]
            videos = [torch.stack([pixels(path) for path in m[1]]) for m in found if m[0] == "video"]
            out = self.reference(
                text=[turn], images=images or None, videos=videos or None, return_tensors="pt",
                videos_kwargs={"do_sample_frames": False},
            )
            ids.append(out["input_ids"])
            if found:
                # The images of these rows have one tile.
                sizes = [len(m[1]) if m[0] == "video" else 1 for m in found]
                tiles += out["pixel_values"].split(sizes)
        assert not left
        return {"input_ids": torch.cat(ids, dim=1), "tiles": tiles}

    def __call__(self, row):
        sample = self.encode(row)
        tiles = sample["out"]["tiles"]
        side = self.config["vision_config"]["image_size"][0] // self.config["vision_config"]["patch_size"][0]
        grid = [[len(of_medium), side, side] for of_medium in tiles]
        return sample | {"grid": grid, "pixel_values": torch.cat(tiles) if tiles else None}


def case(encoder, model, row):
    sample = encoder(row)
    kinds = [medium[0] for medium in typed(row)[1]]
    grids = lambda kind: [grid for grid, found in zip(sample["grid"], kinds, strict=True) if found == kind]
    tiles = [tiles for tiles, kind in zip(sample["out"]["tiles"], kinds) if kind == "video"]
    ((loss, targets),) = forward(model, encoder.config, [sample])
    return {
        "id": row["id"], "input_ids": sample["input_ids"], "labels": sample["labels"],
        "position_ids": [list(range(len(sample["input_ids"])))] * 3, "as_transformers": True,
        "image_grid_thw": grids("image"), "video_grid_thw": grids("video"),
        "video_sha256": digest(patches(torch.cat(tiles), encoder.config).numpy()) if tiles else None,
        "nll": float(loss), "targets": targets, "answer": answer(encoder, model, row),
    }


def answer(encoder, model, row):
    """Greedy tokens after the prompt of the last answer, each from a forward pass over all tokens so far."""
    messages, media = typed(row)
    out = encoder.run(encoder.render(messages[:-1], True), media)
    ids, given = out["input_ids"], {"pixel_values": torch.cat(out["tiles"])} if media else {}
    for _ in range(ANSWER_TOKENS):
        last = model(input_ids=ids, use_cache=False, **given).logits[0, -1]
        ids = torch.cat([ids, last.argmax()[None, None]], dim=1)
    return ids[0, -ANSWER_TOKENS:].tolist()


def table():
    """Indices of a given number of frames."""
    sampler, found = InternVLVideoProcessor(), []
    for total in (1, 2, 3, 5, 7, 8, 9, 30, 31, 48, 100, 250, 719, 1000, 36_000):
        for count in (1, 2, 3, 5, 6, 7, 8, 12, 16, 30, 31, 32, 48):
            if count <= total:
                indices = sampler.sample_frames(VideoMetadata(total_num_frames=total), num_frames=count).tolist()
                found.append({"total": total, "count": count, "indices": indices})
    return found


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.no_grad():
        encoder, model = VideoEncoder(FOLDER, DATA), load_model(FOLDER)
        cases = [case(encoder, model, row) for row in read_jsonl(DATA / f"{ROWS}.jsonl")]
    ref_trainer.Encoder = VideoEncoder
    golden = {"rows": cases, "curve": adapters.curve(ROWS, ["--steps", "8"], NAME), "indices": table()}
    write("internvl_video.json", golden)
    print(len(cases), "rows", golden["curve"]["loss"][0], golden["curve"]["loss"][-1])


if __name__ == "__main__":
    main()
