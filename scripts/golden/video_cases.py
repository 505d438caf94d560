"""Writes `tests/golden/data/video/`, `tests/golden/data/video.jsonl`, `tests/golden/video.json` and
`video.safetensors`.

  python scripts/golden/video_cases.py

Videos are lists of frame images. The reference is transformers' `Qwen3VLProcessor` (tokens,
positions, patches) and the model folder `small-tied` in float32 (the loss of each row, and the
gradient norm of each parameter over all rows that need no resizing). The processor receives each
list as a clip with its frame rate, so that the processor samples the frames. `video.json` also has
tables of frame indices, timestamps and sizes.
"""

import hashlib
import json
import random
import warnings

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata

from reference_lib import GOLDEN, IGNORE, load_model, nll

SMALL = GOLDEN / "models" / "small-tied"
DATA = GOLDEN / "data"
FPS = 2.0  # of a list without `fps`, which counts as sampled at the target rate


def clip(name, source, width, height, frames, step):
    """Writes frames of a window that moves over an image; returns their paths below `DATA`."""
    image = Image.open(DATA / "images" / source).convert("RGB")
    paths = []
    for i in range(frames):
        x = min(i * step[0], image.width - width)
        y = min(i * step[1], image.height - height)
        path = f"video/{name}_{i}.png"
        image.crop((x, y, x + width, y + height)).save(DATA / path, optimize=True)
        paths.append(path)
    return paths


def rows():
    """Rows in every supported form. Only the row `resized` needs resizing."""
    pan = clip("pan", "exact_coins_160x96.png", 64, 64, 8, (12, 4))
    tall = clip("tall", "exact_camera_64x448.png", 64, 96, 5, (0, 32))
    odd = clip("odd", "exact_page_256x288.png", 50, 40, 6, (9, 5))
    still = "images/exact_moon_64x64.png"
    ask, answer = {"role": "user"}, {"role": "assistant"}
    text = lambda t: {"type": "text", "text": t}
    return [
        {"id": "parts", "messages": [ask | {"content": [{"type": "video", "video": pan, "fps": 4}, text("What moves?")]}, answer | {"content": "The window."}]},
        {"id": "list", "messages": [ask | {"content": "Watch: <video> What is shown?"}, answer | {"content": "A man with a camera."}], "videos": [tall]},
        {"id": "mixed", "messages": [
            ask | {"content": "<image>First a picture, then a clip.<video>"}, answer | {"content": "The moon, then coins."},
            ask | {"content": "And again<video>?"}, answer | {"content": "The camera."}], "images": [still], "videos": [pan[:2], tall[:3]]},
        {"id": "fast", "messages": [ask | {"content": [{"type": "video", "video": tall, "fps": 23.976}, text("One word.")]}, answer | {"content": "Camera."}]},
        {"id": "llava", "video": pan[2:6], "conversations": [{"from": "human", "value": "<video>\nDescribe it."}, {"from": "gpt", "value": "Old coins."}]},
        {"id": "resized", "messages": [ask | {"content": "<video>What is it?"}, answer | {"content": "A page of text."}], "videos": [{"video": odd, "fps": 3}]},
    ]


def typed(row):
    """Returns messages with typed parts, and the media in order as `("image", path)` or
    `("video", paths, fps)`."""
    if "conversations" in row:
        roles = {"human": "user", "gpt": "assistant"}
        row = {"messages": [{"role": roles[t["from"]], "content": t["value"]} for t in row["conversations"]], "videos": [row["video"]]}
    images, videos = list(row.get("images", [])), list(row.get("videos", []))
    messages, media = [], []

    def take_video(entry, fps=None):
        if isinstance(entry, dict):
            entry, fps = entry["video"], entry.get("fps")
        media.append(("video", entry, fps))

    for message in row["messages"]:
        parts, content = [], message["content"]
        if isinstance(content, str):
            while content:
                at = min((content.find(m) for m in ("<image>", "<video>") if m in content), default=-1)
                if at < 0:
                    parts.append({"type": "text", "text": content})
                    break
                if at:
                    parts.append({"type": "text", "text": content[:at]})
                kind = content[at + 1 : at + 6]
                parts.append({"type": kind})
                if kind == "image":
                    media.append(("image", images.pop(0)))
                else:
                    take_video(videos.pop(0))
                content = content[at + 7 :]
        else:
            for part in content:
                if part["type"] == "video":
                    take_video(part["video"], part.get("fps"))
                    parts.append({"type": "video"})
                else:
                    parts.append(part)
        messages.append({"role": message["role"], "content": parts})
    return messages, media


def pixels(path):
    return torch.from_numpy(np.asarray(Image.open(DATA / path).convert("RGB")).copy()).permute(2, 0, 1)


def settings(name):
    values = json.loads((SMALL / name).read_text(encoding="utf-8"))
    return {k: v for k, v in values.items() if k not in ("image_processor_type", "video_processor_type", "processor_class")}


def processor():
    tokenizer = AutoTokenizer.from_pretrained(SMALL)
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**settings("preprocessor_config.json")), tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**settings("video_preprocessor_config.json")), chat_template=tokenizer.chat_template,
    )


def run(reference, text, media):
    """Calls the processor with a text and its images and videos."""
    images = [pixels(m[1]) for m in media if m[0] == "image"]
    videos = [torch.stack([pixels(p) for p in m[1]]) for m in media if m[0] == "video"]
    metadata = [VideoMetadata(total_num_frames=len(m[1]), fps=m[2] or FPS) for m in media if m[0] == "video"]
    out = reference(
        text=[text], images=images or None, videos=videos or None, return_tensors="pt",
        videos_kwargs={"do_sample_frames": True, "video_metadata": metadata, "fps": FPS} if videos else {},
    )
    return out


def encode(reference, row):
    """Returns ids, labels and media tensors of a row. Answers do not begin with a newline, so that
    the tokens of a prefix of the text are a prefix of its tokens."""
    messages, media = typed(row)
    render = lambda m, prompt: reference.tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=prompt)
    count = lambda ms: sum(p["type"] != "text" for m in ms for p in m["content"])
    out = run(reference, render(messages, False), media)
    ids = out["input_ids"][0].tolist()
    labels = [IGNORE] * len(ids)
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            head = run(reference, render(messages[:k], True), media[: count(messages[:k])])["input_ids"][0].tolist()
            upto = run(reference, render(messages[: k + 1], False), media[: count(messages[: k + 1])])["input_ids"][0].tolist()
            assert ids[: len(head)] == head and ids[: len(upto)] == upto
            labels[len(head) : len(upto) - 1] = ids[len(head) : len(upto) - 1]  # without the newline after `<|im_end|>`
    return out, ids, labels


def tables():
    """Returns tables of frame indices, timestamps and sizes, for random values and edge cases."""
    draw = random.Random(5)
    sampler, reference = Qwen3VLVideoProcessor(), processor()
    indices = []
    for total in [1, 2, 3, 4, 5, 7, 8, 9, 48, 250, 1000, 30000] + [draw.randrange(1, 4000) for _ in range(60)]:
        rate = draw.choice([1, 2, 5, 10, 12.5, 15, 23.976, 24, 25, 29.97, 30, 50, 59.94, 60])
        fps = draw.choice([0.1, 0.5, 1, 2, 3, 4, 8])
        least = draw.choice([1, 2, 4, 6])
        most = draw.choice([6, 7, 16, 33, 64, 768])
        sampler.min_frames, sampler.max_frames = least, most
        found = sampler.sample_frames(VideoMetadata(total_num_frames=total, fps=rate), fps=fps).tolist()
        times = reference._calculate_timestamps(list(found), rate, 2)
        digest = hashlib.sha256(",".join(map(str, found)).encode()).hexdigest()
        indices.append({"total": total, "rate": rate, "fps": fps, "min_frames": least, "max_frames": most, "count": len(found), "indices": found if len(found) <= 33 else digest, "times": [f"{t:.1f}" for t in times[:40]]})
    sizes = []
    for _ in range(300):
        frames, height, width = draw.choice([2, 3, 4, 5, 7, 9, 16, 31, 768]), draw.randrange(1, 2200), draw.randrange(1, 2200)
        if draw.random() < 0.3:
            height, width = draw.randrange(1, 40), draw.randrange(1, 40)
        if draw.random() < 0.2:
            height = draw.randrange(1, 8)
        factor, least, most = draw.choice([(32, 4096, 25165824), (32, 131072, 786432), (28, 4096, 200704), (32, 65536, 65536)])
        try:
            out = list(smart_resize(frames, height, width, 2, factor, least, most))
        except ValueError:
            out = None
        sizes.append([frames, height, width, factor, least, most, out])
    return indices, sizes


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    (DATA / "video").mkdir(exist_ok=True)
    reference, model = processor(), load_model(SMALL)
    config = json.loads((SMALL / "config.json").read_text(encoding="utf-8"))
    out, tensors, exact_loss, num_targets, all_rows = [], {}, 0.0, 0, rows()
    for row in all_rows:
        made, ids, labels = encode(reference, row)
        types = made["mm_token_type_ids"]
        assert [int(t) for t in types[0]] == [1 if i == config["image_token_id"] else 2 if i == config["video_token_id"] else 0 for i in ids]
        image_grid, video_grid = made.get("image_grid_thw"), made["video_grid_thw"]
        position_ids, _ = model.model.get_rope_index(made["input_ids"], mm_token_type_ids=types, image_grid_thw=image_grid, video_grid_thw=video_grid)
        logits = model(
            input_ids=made["input_ids"], position_ids=position_ids, mm_token_type_ids=types, use_cache=False,
            pixel_values=made.get("pixel_values"), image_grid_thw=image_grid,
            pixel_values_videos=made["pixel_values_videos"], video_grid_thw=video_grid,
        ).logits
        loss, is_target = nll(logits, torch.tensor([labels]))
        loss_sum, targets = loss.sum(), int(is_target.sum())
        values = made["pixel_values_videos"].numpy()
        case = {
            "id": row["id"], "input_ids": ids, "labels": labels, "position_ids": position_ids[:, 0].tolist(),
            "image_grid_thw": image_grid.tolist() if image_grid is not None else [], "video_grid_thw": video_grid.tolist(),
            "nll": float(loss_sum), "targets": targets, "video_sha256": hashlib.sha256(values.astype("<f4").tobytes()).hexdigest(),
        }
        if row["id"] != "resized":
            exact_loss, num_targets = exact_loss + loss_sum, num_targets + targets
            tensors[f"logits/{row['id']}"] = logits.detach()[0, :-1][is_target[0]].contiguous()  # a row for each target
        out.append(case)
    (exact_loss / num_targets).backward()
    norms = {name: float(p.grad.double().norm()) for name, p in model.named_parameters()}
    indices, sizes = tables()
    golden = {"rows": out, "loss": float(exact_loss) / num_targets, "num_targets": num_targets, "grad_norms": norms, "indices": indices, "sizes": sizes}
    (GOLDEN / "video.json").write_text(json.dumps(golden, separators=(",", ":")).replace('{"id"', '\n{"id"').replace('{"total"', '\n{"total"') + "\n", encoding="utf-8")
    (DATA / "video.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in all_rows), encoding="utf-8")
    save_file(tensors, GOLDEN / "video.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
