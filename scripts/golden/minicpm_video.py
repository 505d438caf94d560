"""Videos of MiniCPM-V 4.6: `tests/golden/minicpm_video.json`, from the rows of video_28.jsonl and
video_slices.jsonl in `tests/golden/data/`.

  python scripts/golden/minicpm_video.py    # a minute, after minicpm_rows.py

`video_28` and `video_slices` have rows as in `qwen2_video.py` and a curve of 8 steps. A video has
the grid [frames, rows of patches, columns of patches]; if its frames have slices, each frame has
[1, rows, columns] and [slices, rows, columns]. Pixels are hashed in the order of
`reference_lib.frame_patches`. `unsliced` has rows of video_slices.jsonl with `changes` of files of
the folder: a map from a file to what changes in its JSON (an object changes the keys that it has,
null removes a key). `indices` has the frames by their number, rate and limit.

The processor samples videos with a rate; a list without one counts as sampled. Each video is
processed in its own call. `check` compares with one call of the processor for all media of a row.
"""

import math
import random
import warnings

import torch
from transformers.models.minicpmv4_6.video_processing_minicpmv4_6 import MiniCPMV4_6VideoProcessor
from transformers.video_utils import VideoMetadata

import adapters
import ref_trainer
from minicpm import FOLDER, changed_folder
from minicpm_rows import parts
from qwen2_video import ANSWER_TOKENS, digest, write
from reference_lib import (
    Encoder, forward, frame_patches, frame_sizes, has_canvas, join_pixels, load_model, media,
    positions, read_jsonl,
)
from video_cases import DATA, pixels

VIDEO_PAD = "<|video_pad|>"
UNSLICED = {"processor_config.json": {"video_processor": {"slice_mode": False}}}


def metadata(total, rate):
    return VideoMetadata(total, fps=rate, duration=total / rate)


class VideoEncoder(Encoder):
    """Stands in for `reference_lib.Encoder`: its samples have `videos` and `video_grid`, too."""

    def video(self, frames, rate):
        """Pixels, grids and text of a video; without a rate, all frames are used."""
        out = self.processor.video_processor(
            [torch.stack(list(map(pixels, frames)))], do_sample_frames=bool(rate),
            video_metadata=[metadata(len(frames), rate or 1)], return_tensors="pt",
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


def patches_digest(values, grid, config):
    if values is not None:
        values = frame_patches(values.permute(1, 2, 0)[None], frame_sizes(grid), config)
        return digest(values.numpy())


def case(encoder, model, row):
    sample, config = encoder(row), encoder.config
    ((loss, targets),) = forward(model, config, [sample])
    return {
        "id": row["id"], "input_ids": sample["input_ids"], "labels": sample["labels"],
        "position_ids": positions(model, config, sample)[0].tolist(), "as_transformers": True,
        "image_grid_thw": sample["grid"], "video_grid_thw": sample["video_grid"],
        "image_sha256": patches_digest(sample["pixel_values"], sample["grid"], config),
        "video_sha256": patches_digest(sample["videos"], sample["video_grid"], config),
        "nll": float(loss), "targets": targets,
    }


def answer(encoder, model, row):
    """Greedy tokens of the last answer, also behind an end token, and the smallest difference of
    the two highest logits."""
    messages, found = parts(row)
    sample, expand = encoder.media(found)
    text = expand(encoder.render(messages[:-1], prompt=True))
    ids = torch.tensor([encoder.tokenizer(text, add_special_tokens=False)["input_ids"]])
    model.model.rope_deltas, model.generation_config.eos_token_id = None, None
    of_videos = join_pixels([sample], "videos", "video_grid")
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, temperature=None,
        top_p=None, top_k=None, max_new_tokens=ANSWER_TOKENS, output_logits=True,
        return_dict_in_generate=True,
        **media(encoder.config, ids, *join_pixels([sample]), *of_videos),
    )
    best = torch.cat(out.logits).topk(2).values
    margin = round(float((best[:, 0] - best[:, 1]).min()), 6)
    assert margin > 1e-4, (row["id"], margin)
    return {"answer": out.sequences[0, ids.shape[1] :].tolist(), "margin": margin}


def cases(folder, data, only=None):
    """Cases of the rows of a data file; `only`: ids of rows."""
    encoder, model = VideoEncoder(folder, DATA), load_model(folder)
    with torch.no_grad():
        for row in read_jsonl(DATA / f"{data}.jsonl"):
            if not only or row["id"] in only:
                check(encoder, row)
                yield case(encoder, model, row) | answer(encoder, model, row)


def check(encoder, row):
    """One call of the processor gives the same ids and pixels. It samples all videos or none."""
    messages, found = parts(row)
    images = [pixels(medium[1]) for medium in found if medium[0] == "image"]
    videos = [(medium[1], medium[2]) for medium in found if medium[0] == "video"]
    more = {}
    if videos:
        assert len({bool(rate) for _, rate in videos}) == 1
        more = {
            "do_sample_frames": bool(videos[0][1]),
            "video_metadata": [metadata(len(frames), rate or 1) for frames, rate in videos],
        }
    out = encoder.processor(
        text=[encoder.render(messages)], return_tensors="pt", images=images or None,
        videos=[torch.stack(list(map(pixels, frames))) for frames, _ in videos] or None,
        videos_kwargs=more,
    )
    sample = encoder(row)
    assert out["input_ids"][0].tolist() == sample["input_ids"], row["id"]
    for name, theirs in (("pixel_values", "pixel_values"), ("videos", "pixel_values_videos")):
        if sample[name] is not None:
            assert torch.equal(out[theirs][0].permute(2, 0, 1), sample[name]), row["id"]


def curve(folder, data, steps):
    """An entry of curves.json, with videos."""
    ref_trainer.Encoder = VideoEncoder
    return adapters.curve(data, ["--steps", str(steps)], folder)


def table():
    """Indices by the number of frames, their rate and the limit. Up to as many seconds as
    `max_num_frames`: a frame a second, twice at slow rates; longer: from ten a second."""
    draw, sampler, found = random.Random(11), MiniCPMV4_6VideoProcessor(), []
    rates = [0.25, 0.3, 0.5, 1, 2, 5, 7.5, 10, 12.5, 15, 23.976, 24, 25, 29.97, 30, 50, 60]
    given = [(1, 30, 128), (1, 0.25, 128), (9, 0.5, 128), (17, 0.6, 8), (32, 24, 1), (31, 24, 1)]
    for rate in (10, 23.976, 24.9, 29.97, 30, 60):  # around 128 seconds
        last = int(128 * rate)
        given += [(last + more, rate, 128) for more in (-1, 0, 1, 2, round(rate / 2))]
    for rate in rates:
        for seconds in (draw.uniform(1, 20), draw.uniform(20, 128), draw.uniform(128, 150)):
            given.append((math.ceil(seconds * rate), rate, 128))
        given.append((math.ceil(draw.uniform(150, 7000) * rate), rate, 128))
        given.append((math.ceil(draw.uniform(1, 60) * rate), rate, draw.choice([2, 7, 16, 33])))
    for total, rate, most in given:
        indices = sampler.sample_frames(metadata(total, rate), max_num_frames=most)
        indices = list(map(int, indices))
        assert 0 <= min(indices) and max(indices) < total
        found.append({"total": total, "rate": rate, "max_frames": most, "indices": indices})
    return found


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
