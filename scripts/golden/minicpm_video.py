"""Videos of MiniCPM-V 4.6: `tests/golden/minicpm_video.json`, from the rows of video_28.jsonl and
video_slices.jsonl in `tests/golden/data/`.

  python scripts/golden/minicpm_video.py    # a minute, after minicpm_rows.py

`video_28` and `video_slices` have rows as in `qwen2_video.py` and a curve of 8 steps. A video has
the grid [frames, rows of patches, columns of patches]; if its frames have slices, each frame has
[1, rows, columns] and [slices, rows, columns]. Pixels are hashed in the order of
`reference_lib.frame_patches`. `unsliced` has rows of video_slices.jsonl with `changes` of files of
the folder: a map from a file to what changes in its JSON (an object changes the keys that it has,
null removes a key). `indices` is a table of frame indices.

The processor samples videos with a rate; a list without one counts as sampled. Each video is
processed in its own call. `check` compares with one call of the processor for all media of a row.
"""

import hashlib
import json
import shutil
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.video_utils import VideoMetadata

import adapters
import ref_trainer
from make_variants import write_json
from minicpm import FOLDER, NAME
from qwen2_video import ANSWER_TOKENS, digest, write
from reference_lib import (
    GOLDEN, Encoder, forward, frame_patches, frame_sizes, has_canvas, load_model, logits_of,
    normalise, positions, read_jsonl,
)
from video_cases import DATA, pixels, typed

VIDEO_PAD = "<|video_pad|>"
UNSLICED = {"processor_config.json": {"video_processor": {"slice_mode": False}}}


def parts(row):
    """Messages with typed parts, and the media in order as in `video_cases.typed`."""
    if "videos" in row or '"video"' in json.dumps(row["messages"]):
        return typed(row)
    messages, images = normalise(row)
    return messages, [("image", image) for image in images]


class VideoEncoder(Encoder):
    """Stands in for `reference_lib.Encoder`: its samples have `videos` and `video_grid`, too."""

    def video(self, frames, rate):
        """Pixels, grids and text of a video; without a rate, all frames are used."""
        fps = rate or 1.0
        metadata = VideoMetadata(len(frames), fps=fps, duration=len(frames) / fps)
        out = self.processor.video_processor(
            [torch.stack([pixels(path) for path in frames])], do_sample_frames=bool(rate),
            video_metadata=[metadata], return_tensors="pt",
        )
        text = self.processor.replace_video_token(out, 0, video_token_divisor=self.divisor)
        sizes, slices = out["target_sizes_videos"].tolist(), int(out["grids_videos"][0].prod())
        grid = [[len(sizes), *sizes[0]]]
        if slices:
            first = sizes[:: slices + 1]
            grid = [of for size in first for of in ([1, *size], [slices, *sizes[1]])]
        assert frame_sizes(grid) == sizes
        return out["pixel_values_videos"][0].permute(2, 0, 1), grid, text

    def media(self, found):
        """The parts of a sample and the texts of images and of videos."""
        images = [medium[1] for medium in found if medium[0] == "image"]
        videos = [self.video(*medium[1:]) for medium in found if medium[0] == "video"]
        values, grid, texts = self.pixels(images) if images else (None, [], [])
        of_videos = [text for _, _, text in videos]
        if self.numbers and not has_canvas(self.config):
            of_videos = [f"<image_id>{k}</image_id>{text}" for k, text in enumerate(of_videos)]
        sample = {"pixel_values": values, "grid": grid, "videos": None, "video_grid": []}
        if videos:
            sample["videos"] = torch.cat([values for values, _, _ in videos])
            sample["video_grid"] = [of for _, grid, _ in videos for of in grid]
        return sample, lambda text: self.expand(self.expand(text, texts), of_videos, VIDEO_PAD)

    def __call__(self, row):
        messages, found = parts(row)
        sample, expand = self.media(found)
        ids, labels = self.labelled(messages, expand)
        return sample | {"id": row["id"], "input_ids": ids, "labels": labels}

    def prompt(self, row):
        """A sample without the last answer."""
        messages, found = parts(row)
        sample, expand = self.media(found)
        text = expand(self.render(messages[:-1], prompt=True))
        return sample | {"input_ids": self.tokenizer(text, add_special_tokens=False)["input_ids"]}


def values_of(sample, config, values, grid):
    """Hash of the patches."""
    if sample[values] is None:
        return None
    arranged = sample[values].permute(1, 2, 0)[None]
    return digest(frame_patches(arranged, frame_sizes(sample[grid]), config).numpy())


def case(encoder, model, row):
    sample, config = encoder(row), encoder.config
    ((loss, targets),) = forward(model, config, [sample])
    return {
        "id": row["id"], "input_ids": sample["input_ids"], "labels": sample["labels"],
        "position_ids": positions(model, config, sample)[0].tolist(), "as_transformers": True,
        "image_grid_thw": sample["grid"], "video_grid_thw": sample["video_grid"],
        "image_sha256": values_of(sample, config, "pixel_values", "grid"),
        "video_sha256": values_of(sample, config, "videos", "video_grid"),
        "nll": float(loss), "targets": targets,
    }


def answer(encoder, model, row):
    """Greedy tokens after the prompt of the last answer, each from a forward pass over all tokens
    so far, and the smallest difference of the two highest logits."""
    sample, margin = encoder.prompt(row), float("inf")
    for _ in range(ANSWER_TOKENS):
        ids = torch.tensor([sample["input_ids"]])
        position_ids = positions(model, encoder.config, sample)[0][:, None]
        logits = logits_of(model, encoder.config, ids, None, position_ids, [sample])[0, -1]
        best = logits.topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        sample["input_ids"] = [*sample["input_ids"], int(best.indices[0])]
    return {"answer": sample["input_ids"][-ANSWER_TOKENS:], "margin": round(margin, 6)}


def cases(folder, data, with_answers=True, only=None):
    """Cases of the rows of a data file; `only`: ids of rows."""
    encoder, model = VideoEncoder(folder, DATA), load_model(folder)
    with torch.no_grad():
        for row in read_jsonl(DATA / f"{data}.jsonl"):
            if only is None or row["id"] in only:
                check(encoder, row)
                more = answer(encoder, model, row) if with_answers else {}
                yield case(encoder, model, row) | more


def check(encoder, row):
    """One call of the processor gives the same ids and pixels. It samples all videos or none."""
    messages, found = parts(row)
    videos = [medium for medium in found if medium[0] == "video"]
    rates = [medium[2] for medium in videos]
    assert all(rates) or not any(rates)
    metadata = [VideoMetadata(len(m[1]), fps=m[2] or 1, duration=len(m[1]) / (m[2] or 1)) for m in videos]
    more = {"do_sample_frames": bool(rates and rates[0]), "video_metadata": metadata}
    out = encoder.processor(
        text=[encoder.render(messages)], return_tensors="pt", videos_kwargs=more if videos else {},
        images=[pixels(medium[1]) for medium in found if medium[0] == "image"] or None,
        videos=[torch.stack([pixels(path) for path in m[1]]) for m in videos] or None,
    )
    sample = encoder(row)
    assert out["input_ids"][0].tolist() == sample["input_ids"], row["id"]
    for ours, theirs in (("pixel_values", "pixel_values"), ("videos", "pixel_values_videos")):
        if sample[ours] is not None:
            assert torch.equal(out[theirs][0].permute(2, 0, 1), sample[ours]), row["id"]


@contextmanager
def changed_folder(*changes, source=FOLDER):
    """A copy of a folder with changed JSON files."""

    def merged(old, new):
        if not isinstance(new, dict):
            return new
        old = dict(old) if isinstance(old, dict) else {}
        for key, value in new.items():
            old[key] = merged(old.get(key), value)
            if value is None:
                del old[key]
        return old

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / NAME
        shutil.copytree(source, folder)
        for name, new in (item for change in changes for item in change.items()):
            old = json.loads((folder / name).read_text(encoding="utf-8"))
            write_json(folder / name, merged(old, new))
        yield folder


def curve(folder, data, steps):
    """An entry of curves.json, with videos."""
    ref_trainer.Encoder = VideoEncoder
    return adapters.curve(data, ["--steps", str(steps)], folder)


def table():
    return []


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    golden = {}
    for data in ("video_28", "video_slices"):
        golden[data] = {"rows": list(cases(FOLDER, data)), "curve": curve(FOLDER, data, 8)}
        print(data, golden[data]["curve"]["loss"])
    with changed_folder(UNSLICED) as folder:
        golden["unsliced"] = {"changes": UNSLICED, "rows": list(cases(folder, "video_slices"))}
    golden["indices"] = table()
    write("minicpm_video.json", golden)


if __name__ == "__main__":
    main()
