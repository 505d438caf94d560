"""Videos of Qwen2.5-VL and Qwen2-VL: `tests/golden/data/video_28.jsonl`, `data/video28/`, `qwen25_video.json` and
`qwen2_video.json`.

  python scripts/golden/qwen2_video.py

Videos are lists of frames whose sides 28 divides, so that no processor resizes them. The reference is the family's
processor in transformers (frames, tokens, patches, seconds of a group) and a small model in float32: the loss of each
row, a training curve as in `curves.json`, greedy answers, and a table of frame indices.

The temporal positions of a video are those of `get_rope_index`. The text after a video continues behind its largest
position on any axis, as in the code that was published with the model, in vLLM and in transformers 4. `get_rope_index`
of transformers 5 continues behind the height and width only, so text may have positions inside of a long video;
`positions` moves it. The other positions are compared.
"""

import hashlib
import json
import random
import shutil
import warnings
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.video_utils import VideoMetadata

import adapters
import ref_trainer
from qwen2_vl import folder_of
from reference_lib import GOLDEN, IGNORE, load_model, nll, token_types
from video_cases import DATA, FPS, pixels, typed

ROWS = "video_28"
# The file, the processor, and the rows whose text is moved.
FAMILIES = {
    "small-qwen25vl": ("qwen25_video.json", Qwen2_5_VLProcessor, ["sampled", "slow", "odd"]),
    "small-qwen2vl": ("qwen2_video.json", Qwen2VLProcessor, ["slow"]),
}
ANSWER_TOKENS = 8


def clip(name, source, width, height, frames, step):
    """Writes frames of a window that moves over an image; returns their paths below `DATA`."""
    image = Image.open(DATA / "images" / source).convert("RGB")
    paths = [f"video28/{name}_{i}.png" for i in range(frames)]
    for i, path in enumerate(paths):
        x, y = min(i * step[0], image.width - width), min(i * step[1], image.height - height)
        image.crop((x, y, x + width, y + height)).save(DATA / path, optimize=True)
    return paths


def rows():
    """Windows of 4 x 4 tokens are cut off in the frames of `wide`, which have 5 x 2 tokens."""
    shutil.rmtree(DATA / "video28", ignore_errors=True)
    (DATA / "video28").mkdir()
    pan = clip("pan", "exact_coins_160x96.png", 56, 56, 9, (11, 4))
    wide = clip("wide", "exact_clock_motion_128x320.png", 56, 140, 5, (12, 30))
    still = "images28/moon_56x56.png"
    user, answer = {"role": "user"}, {"role": "assistant"}
    text = lambda t: {"type": "text", "text": t}
    chat = lambda question, reply: [user | {"content": question}, answer | {"content": reply}]
    return [
        {"id": "sampled", "messages": chat([{"type": "video", "video": pan[:8], "fps": 4}, text("What moves?")], "The window.")},
        {"id": "list", "messages": chat("Watch: <video> What is shown?", "A clock that turns."), "videos": [wide]},
        {"id": "mixed", "messages": [
            *chat("<image>First the moon, then a clip.<video>", "The moon, then coins."), *chat("And again<video>?", "A clock."),
        ], "images": [still], "videos": [pan[:2], wide[:3]]},
        {"id": "slow", "messages": chat([{"type": "video", "video": pan, "fps": 0.5}, text("How long?")], "Eighteen seconds.")},
        {"id": "fast", "messages": chat([{"type": "video", "video": wide, "fps": 23.976}, text("One word.")], "Clock.")},
        {"id": "odd", "messages": chat([{"type": "video", "video": pan[:7], "fps": 3}, text("Describe it.")], "Old coins.")},
        {"id": "text", "messages": chat("No video here.", "Only text.")},
        {"id": "image", "messages": chat("<image>?", "The moon."), "images": [still]},
    ]


def processor(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text(encoding="utf-8"))
    settings = {k: v for k, v in settings.items() if k not in ("image_processor_type", "processor_class")}
    return FAMILIES[folder.name][1](
        image_processor=Qwen2VLImageProcessor(**settings), tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**settings), chat_template=tokenizer.chat_template,
    )


def run(reference, text, media):
    """Calls the processor. A list without a rate counts as sampled: all of its frames are used."""
    images = [pixels(m[1]) for m in media if m[0] == "image"]
    videos = [m for m in media if m[0] == "video"]
    out = reference(text=[text], images=images or None, return_tensors="pt") if not videos else None
    if videos:
        rated = {bool(m[2]) for m in videos}
        assert len(rated) == 1, "one call of the processor samples all videos or none"
        sample = rated.pop()
        out = reference(
            text=[text], images=images or None, videos=[torch.stack([pixels(p) for p in m[1]]) for m in videos],
            return_tensors="pt",
            videos_kwargs={
                "do_sample_frames": sample, **({"fps": FPS} if sample else {}),
                "video_metadata": [VideoMetadata(total_num_frames=len(m[1]), fps=m[2] or FPS) for m in videos],
            },
        )
    return out


def positions(model, out):
    """Returns the position ids [3, L], and whether they are those of transformers 5."""
    ids = out["input_ids"]
    types = token_types(ids, model.config.to_dict())
    found, _ = model.model.get_rope_index(
        ids, mm_token_type_ids=types, image_grid_thw=out.get("image_grid_thw"), video_grid_thw=out.get("video_grid_thw"),
        second_per_grid_ts=out.get("second_per_grid_ts"), attention_mask=torch.ones_like(ids),
    )
    found, moved = found[:, 0], torch.zeros_like(found[:, 0])
    runs = [0, *[i for i in range(1, ids.shape[1]) if types[0, i] != types[0, i - 1]], ids.shape[1]]
    following = 0
    for start, end in zip(runs, runs[1:]):
        first = int(found[1, start])  # the first position of a run of text or of one medium
        moved[:, start:end] = found[:, start:end] - first + following
        following = int(moved[:, start:end].max()) + 1
    return moved, bool(torch.equal(moved, found))


class VideoEncoder:
    """Stands in for `reference_lib.Encoder`."""

    def __init__(self, model_dir, image_root):
        folder = folder_of(Path(model_dir).name)
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.reference, self.model = processor(folder), load_model(folder)

    def render(self, messages, prompt=False):
        return self.reference.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    def run(self, text, media):
        return run(self.reference, text, media)

    def encode(self, row):
        """Answers do not begin with a newline, so that the tokens of a prefix of the text are a prefix of its tokens."""
        messages, media = typed(row)
        count = lambda ms: sum(p["type"] != "text" for m in ms for p in m["content"])
        ids_of = lambda ms, prompt: self.run(self.render(ms, prompt), media[: count(ms)])["input_ids"][0].tolist()
        out = self.run(self.render(messages), media)
        ids = out["input_ids"][0].tolist()
        labels = [IGNORE] * len(ids)
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                head, upto = ids_of(messages[:k], True), ids_of(messages[: k + 1], False)
                assert ids[: len(head)] == head and ids[: len(upto)] == upto
                labels[len(head) : len(upto) - 1] = ids[len(head) : len(upto) - 1]  # without the newline after the end mark
        return {"id": row["id"], "input_ids": ids, "labels": labels, "out": out}

    def __call__(self, row):
        sample = self.encode(row)
        return sample | {"position_ids": positions(self.model, sample["out"])[0]}


def logits_of(model, sample):
    out = sample["out"]
    return model(
        input_ids=out["input_ids"], position_ids=sample["position_ids"][:, None], use_cache=False,
        mm_token_type_ids=token_types(out["input_ids"], model.config.to_dict()),
        **{key: out.get(key) for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")},
    ).logits


def forward(model, config, samples, mode="per-sample"):
    """Stands in for `reference_lib.forward`."""
    assert mode == "per-sample"
    found = []
    for sample in samples:
        loss, is_target = nll(logits_of(model, sample), torch.tensor([sample["labels"]]))
        found.append((loss.sum(), int(is_target.sum())))
    return found


def digest(values):
    return hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()


def case(encoder, row):
    sample = encoder(row)
    out, ((loss, targets),) = sample["out"], forward(encoder.model, encoder.config, [sample])
    values = out["pixel_values_videos"].numpy() if "pixel_values_videos" in out else None
    grids = lambda key: out[key].tolist() if key in out else []
    return {
        "id": row["id"], "input_ids": sample["input_ids"], "labels": sample["labels"],
        "position_ids": sample["position_ids"].tolist(), "as_transformers": positions(encoder.model, out)[1],
        "image_grid_thw": grids("image_grid_thw"), "video_grid_thw": grids("video_grid_thw"),
        "video_sha256": None if values is None else digest(values),
        "nll": float(loss), "targets": targets, "answer": answer(encoder, row),
    }


def answer(encoder, row):
    """Greedy tokens after the prompt of the last answer, each from a forward pass over all tokens so far."""
    messages, media = typed(row)
    out = run(encoder.reference, encoder.render(messages[:-1], True), media)
    position_ids, tokens = positions(encoder.model, out)[0], []
    for _ in range(ANSWER_TOKENS):
        sample = {"out": out, "position_ids": position_ids}
        tokens.append(int(logits_of(encoder.model, sample)[0, -1].argmax()))
        out["input_ids"] = torch.cat([out["input_ids"], torch.tensor([[tokens[-1]]])], dim=1)
        position_ids = torch.cat([position_ids, position_ids.max().repeat(3, 1) + 1], dim=1)
    return tokens


def table():
    """Frame indices and frames per second for random values and edge cases. transformers takes one frame too many for
    some totals, because it rounds the step between frames; these cases are left out."""
    draw, sampler, found = random.Random(7), Qwen2VLVideoProcessor(), []
    for total in [2, 3, 4, 5, 7, 8, 9, 48, 250, 1000] + [draw.randrange(2, 4000) for _ in range(60)]:
        rate = draw.choice([1, 2, 5, 10, 12.5, 15, 23.976, 24, 25, 29.97, 30, 50, 59.94, 60])
        fps, least, most = draw.choice([0.1, 0.5, 1, 2, 3, 4, 8]), draw.choice([1, 2, 4, 6]), draw.choice([6, 7, 16, 33, 64, 768])
        metadata = VideoMetadata(total_num_frames=total, fps=rate)
        wanted = min(max(total / rate * fps, least), most // 2 * 2, total // 2 * 2) // 2 * 2
        if wanted < 2:
            continue
        indices = sampler.sample_frames(metadata, fps=fps, min_frames=least, max_frames=most).tolist()
        if len(indices) != wanted:
            assert len(indices) == wanted + 1 and indices[-1] == total
            continue
        metadata.frames_indices = indices
        digest = hashlib.sha256(",".join(map(str, indices)).encode()).hexdigest()
        found.append({
            "total": total, "rate": rate, "fps": fps, "min_frames": least, "max_frames": most, "count": len(indices),
            "indices": indices if len(indices) <= 33 else digest, "sampled_fps": metadata.sampled_fps,
        })
    return found


def write(file, golden):
    text = json.dumps(golden, separators=(",", ":")).replace('{"id"', '\n{"id"').replace('{"total"', '\n{"total"')
    (GOLDEN / file).write_text(text + "\n", encoding="utf-8")


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    all_rows = rows()
    path = DATA / f"{ROWS}.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in all_rows), encoding="utf-8")
    ref_trainer.Encoder, ref_trainer.forward = VideoEncoder, forward
    for name, (file, _, expected) in FAMILIES.items():
        with torch.no_grad():
            encoder = VideoEncoder(folder_of(name), DATA)
            cases = [case(encoder, row) for row in all_rows]
        moved = [case["id"] for case in cases if not case["as_transformers"]]
        assert moved == expected, moved
        curve = adapters.curve(ROWS, ["--steps", "8"], name)
        golden = {"rows": cases, "curve": curve} | ({"indices": table()} if file == "qwen25_video.json" else {})
        write(file, golden)
        print(name, len(cases), "rows", moved, curve["loss"][0], curve["loss"][-1])


if __name__ == "__main__":
    main()
