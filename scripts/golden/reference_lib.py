"""Independent reference: computes tokens, labels, pixels and losses of chats with transformers and
PyTorch.

All numerical code is Hugging Face transformers and PyTorch, in float32 on the CPU. Conventions:
labels are the assistant's content and its `<|im_end|>`; the whole conversation is tokenised in one
call; EXIF orientation is applied, and alpha is composited on white.
"""

import base64
import io
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

IGNORE = -100
MARK = "\u241fmark\u241f"
IMAGE_PAD = "<|image_pad|>"
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GOLDEN = ROOT / "tests" / "golden"


class SampleError(Exception):
    """A row cannot be turned into a sample; the message contains the reason."""


def read_jsonl(path):
    """Returns all rows of a JSON-lines file."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def normalise(row):
    """Returns messages with typed parts, and the image sources in the order of their parts.

    If the row has `images`, an `<image>` in a string content becomes an image part.
    """
    images = list(row.get("images") or [])
    messages, sources = [], []
    for message in row["messages"]:
        content = message["content"]
        if isinstance(content, str):
            if "images" in row and "<image>" in content:
                parts = []
                for k, text in enumerate(content.split("<image>")):
                    if k:
                        parts.append({"type": "image"})
                    if text:
                        parts.append({"type": "text", "text": text})
                content = parts
        else:
            content = [dict(part) for part in content]
        if not isinstance(content, str):
            for part in content:
                if part.get("type") in ("image", "image_url"):
                    source = part.get("image") or (part.get("image_url") or {}).get("url")
                    if source is None:
                        if not images:
                            raise SampleError("more image placeholders than images")
                        source = images.pop(0)
                    sources.append(source)
                    part.clear()
                    part["type"] = "image"
        messages.append({**message, "content": content})
    if images:
        raise SampleError(f"{len(images)} images have no placeholder")
    return messages, sources


def load_image(source, root):
    """Returns the RGB pixels `[H, W, 3]` of a path below `root` or of a `data:` URI."""
    if source.startswith("data:"):
        file = io.BytesIO(base64.b64decode(source.split(",", 1)[1]))
    else:
        file = Path(root) / source
    image = Image.open(file)
    image.load()
    image = ImageOps.exif_transpose(image)
    try:
        return convert_to_rgb(image, return_numpy=True)
    except TypeError:  # transformers 4
        return np.array(convert_to_rgb(image))


class Encoder:
    """Turns rows into samples: input ids, labels, pixel values and image grids."""

    def __init__(self, model_dir, image_root):
        self.root = Path(image_root)
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.config = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
        self.pad, self.around = IMAGE_PAD, ("", "")
        if is_internvl(self.config):
            processor = AutoProcessor.from_pretrained(model_dir)
            self.pad, self.around = processor.image_token, (processor.start_image_token, processor.end_image_token)
            self.merge = round(1 / self.config["downsample_ratio"]) ** 2
            self.images = partial(processor.image_processor, **processor.images_kwargs)
            return
        if is_minicpm(self.config):
            self.processor = AutoProcessor.from_pretrained(model_dir)
            self.images = self.processor.image_processor
            self.divisor = {"4x": 4, "16x": 16}[self.images.downsample_mode]
            self.numbers = self.processor.default_use_image_id
            return
        path = Path(model_dir) / "preprocessor_config.json"
        if not path.exists():  # a text-only model
            self.merge = self.images = None
            return
        settings = json.loads(path.read_text(encoding="utf-8"))
        self.merge = settings["merge_size"] ** 2
        drop = ("image_processor_type", "processor_class")
        self.images = Qwen2VLImageProcessor(**{k: v for k, v in settings.items() if k not in drop})

    def render(self, messages, tools=None, prompt=False):
        """Renders the chat template; `prompt` appends the header of the next assistant turn.

        Templates of thinking models write the header of an answer without thoughts, as in training.
        """
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, enable_thinking=False
        )

    def expand(self, text, texts, pad=None):
        """Replaces the n-th placeholder, by default of an image, by `texts[n]`."""
        left, pad = iter(texts), pad or self.pad

        def replace(_):
            try:
                return next(left)
            except StopIteration:
                raise SampleError(f"an {pad} in the text has no medium") from None

        return re.sub(re.escape(pad), replace, text)

    def pixels(self, sources):
        """Returns `pixel_values` [P, C*t*p*p], the grids [[t, h, w], ..] and the texts of all images of a row.

        InternVL has `pixel_values` [tiles, C, side, side], and `t` counts the tiles of an image. MiniCPM-V has
        [P * p, C, p], and an image has one grid for the whole picture and, if it has slices, one for them.
        """
        arrays = []
        for source in sources:
            try:
                arrays.append(load_image(source, self.root))
            except Exception as error:
                raise SampleError(f"{source[:80]}: {type(error).__name__}: {error}") from error
        tensors = [torch.from_numpy(np.array(a)).permute(2, 0, 1) for a in arrays]
        try:
            out = self.images(tensors, input_data_format="channels_first", return_tensors="pt")
        except ValueError as error:
            raise SampleError(str(error)) from error
        if is_minicpm(self.config):
            return out["pixel_values"][0].permute(2, 0, 1), *self.slices(out)
        if "num_patches" in out:
            vision = self.config["vision_config"]
            height, width = (side // patch for side, patch in zip(vision["image_size"], vision["patch_size"]))
            grid = [[tiles, height, width] for tiles in out["num_patches"].tolist()]
        else:
            grid = out["image_grid_thw"].tolist()
        texts = [self.around[0] + self.pad * (t * h * w // self.merge) + self.around[1] for t, h, w in grid]
        return out["pixel_values"], grid, texts

    def slices(self, out):
        """Grids and texts of MiniCPM-V's images."""
        left, grid, texts = out["target_sizes"].tolist(), [], []
        for k, frames in enumerate(out["num_patches_per_image"]):
            sizes, left = left[:frames], left[frames:]
            grid += [[1, *sizes[0]]] + [[frames - 1, *size] for size in sizes[1:2]]
            text = self.processor.replace_image_token(out, k, image_token_divisor=self.divisor)
            texts.append(f"<image_id>{k}</image_id>{text}" if self.numbers else text)
        return grid, texts

    def __call__(self, row):
        messages, sources = normalise(row)
        pixel_values, grid, texts = self.pixels(sources) if sources else (None, [], [])
        ids, labels = self.labelled(messages, lambda text: self.expand(text, texts), row.get("tools"))
        if self.images is not None and ids.count(self.config["image_token_id"]) != "".join(texts).count(self.pad):
            raise SampleError("image tokens and image features differ")
        return {"id": row.get("id"), "input_ids": ids, "labels": labels, "grid": grid, "pixel_values": pixel_values}

    def labelled(self, messages, expand, tools=None):
        """Ids and labels of a chat; `expand` replaces the placeholders of its media."""
        text = expand(self.render(messages, tools))
        spans = []
        for k, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            # The rendering of the first turns need not be the start of the whole one: templates of thinking
            # models drop earlier thoughts. So the whole chat is rendered again, with a mark as the answer.
            marked = [{**m, "content": MARK} if i == k else m for i, m in enumerate(messages)]
            head, tail = expand(self.render(marked, tools)).split(MARK)
            if not (text.startswith(head) and text.endswith(tail) and tail.startswith("<|im_end|>\n")):
                raise SampleError("the answer cannot be located in the rendered chat")
            spans.append((len(head), len(text) - len(tail) + len("<|im_end|>")))
        encoded = self.tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        ids = encoded["input_ids"]
        labels = [IGNORE] * len(ids)
        for begin, end in spans:
            for i, (a, b) in enumerate(encoded["offset_mapping"]):
                if a >= begin and b <= end and b > a:
                    labels[i] = ids[i]
        return ids, labels


def load_model(model_dir):
    """Loads the folder's model in float32, in training mode (the model has no dropout)."""
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    return model


def is_internvl(config):
    return config["model_type"] == "internvl"


def is_minicpm(config):
    return config["model_type"] in ("minicpmv4_6", "minicpmv4_7")


def has_canvas(config):
    """Whether the tokens of an image, with those around it, have positions on a canvas."""
    return config["model_type"] == "minicpmv4_7"


def counts_tokens(config):
    """Whether a position is the number of the token, also inside an image."""
    return is_internvl(config) or is_minicpm(config) and not has_canvas(config)


def frame_sizes(grid):
    """[rows, columns] of each frame of MiniCPM-V's grids [[frames, rows, columns], ..]."""
    return [[h, w] for frames, h, w in torch.as_tensor(grid).tolist() for _ in range(frames)]


def token_types(ids, config):
    """Returns 0 for text, 1 for image and 2 for video tokens; transformers 5 needs them to compute
    position ids."""
    types = torch.zeros_like(ids)
    types[ids == config["image_token_id"]] = 1
    types[ids == config["video_token_id"]] = 2
    return types


def media(config, ids, pixels, grid, videos=None, video_grid=None):
    """The arguments of a model for the images; a text has none. MiniCPM-V may have videos, too."""
    if is_internvl(config):
        given = {"pixel_values": pixels}
    elif is_minicpm(config):
        given = {}
        for kind, values, of in (("", pixels, grid), ("_videos", videos, video_grid)):
            if values is not None:
                given[f"pixel_values{kind}"] = values.permute(1, 2, 0)[None]
                given[f"target_sizes{kind}"] = torch.tensor(frame_sizes(of))
        if given and has_canvas(config):
            given["mm_token_type_ids"] = token_types(ids, config)
    else:
        given = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": token_types(ids, config)}
    return {name: value for name, value in given.items() if value is not None}


def rope_index(model, config, ids, grid, mask, video_grid=None):
    """Returns the position ids [3, B, L] and the rope deltas. If tokens are counted, the three rows are equal."""
    if counts_tokens(config):
        return torch.arange(ids.shape[1]).expand(3, *ids.shape), torch.zeros(len(ids), 1)
    if has_canvas(config):
        sizes, of_videos = (torch.tensor(frame_sizes(of)) if of is not None else None for of in (grid, video_grid))
        return model.model.get_rope_index(
            ids, mm_token_type_ids=token_types(ids, config), target_sizes=sizes, target_sizes_videos=of_videos,
            attention_mask=mask,
        )
    return model.model.get_rope_index(
        ids, mm_token_type_ids=token_types(ids, config), image_grid_thw=grid, attention_mask=mask
    )


def positions(model, config, sample):
    """Returns the position ids [3, L] of one sample and its rope delta."""
    ids = torch.tensor([sample["input_ids"]])
    grid = torch.tensor(sample["grid"]) if sample["grid"] else None
    of_videos = sample.get("video_grid") or None
    position_ids, delta = rope_index(model, config, ids, grid, torch.ones_like(ids), of_videos)
    return position_ids[:, 0], int(delta)


def logits_of(model, config, ids, mask, position_ids, samples):
    """The logits of a batch or of a packed row that consists of `samples`."""
    given = media(config, ids, *join_pixels(samples), *join_pixels(samples, "videos", "video_grid"))
    return model(
        input_ids=ids, attention_mask=mask, position_ids=position_ids[0] if counts_tokens(config) else position_ids,
        use_cache=False, **given,
    ).logits


def join_pixels(samples, values="pixel_values", grid="grid"):
    """Concatenates the pixel values and grids of several samples; `(None, None)` without images."""
    pixels = [s[values] for s in samples if s.get(values) is not None]
    grids = [g for s in samples for g in s.get(grid, [])]
    return (torch.cat(pixels), torch.tensor(grids)) if pixels else (None, None)


def patches(tiles, config):
    """InternVL's tiles [n, C, side, side] as patches [n * side^2 / patch^2, C * patch^2].

    Tile by tile, blocks of 2 x 2 patches row by row, the patches of a block row by row, and the values of a patch as
    [channel, row, column]: the order in which the other models have theirs.
    """
    patch, merge = config["vision_config"]["patch_size"][0], round(1 / config["downsample_ratio"])
    number, channels, side, _ = tiles.shape
    blocks = side // (patch * merge)
    split = tiles.reshape(number, channels, blocks, merge, patch, blocks, merge, patch)
    return split.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * patch * patch)


def frame_patches(pixels, sizes, config):
    """MiniCPM-V's pixels [1, C, patch, all patches * patch] as patches [all patches, C * patch^2].

    `sizes` has [rows of patches, columns of patches] of each frame: a whole picture or a slice.
    Frame by frame, blocks of 4 x 4 patches row by row, the four blocks of 2 x 2 patches of a block
    row by row, the patches of those row by row, and the values of a patch as [channel, row,
    column]. With `downsample_mode` 4x, blocks of 2 x 2 patches as in the other models.
    """
    _, channels, patch, _ = pixels.shape
    halvings = 1 if config["downsample_mode"] == "4x" else 2
    frames = pixels[0].split([h * w * patch for h, w in sizes], dim=2)
    found = []
    for frame, (height, width) in zip(frames, sizes, strict=True):
        twos = [2] * halvings
        rows, columns = ([side >> halvings, *twos] for side in (height, width))
        split = frame.reshape(channels, patch, *rows, *columns, patch)
        order = [2 + k + part * (halvings + 1) for k in range(halvings + 1) for part in (0, 1)]
        found.append(split.permute(*order, 0, 1, -1).reshape(-1, channels * patch * patch))
    return torch.cat(found)


def nll(logits, labels):
    """Negative log likelihood of each next token [B, L-1] and which of them are targets."""
    logits, targets = logits[:, :-1], labels[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORE, reduction="none"
    )
    return loss.view(targets.shape), targets != IGNORE


def forward(model, config, samples, mode="per-sample"):
    """`[(nll sum, number of targets), ..]`, one a sample. `mode`: `per-sample`, `padded` or `packed`; all agree."""
    if mode == "per-sample":
        return [_packed(model, config, [sample])[0] for sample in samples]
    return {"padded": _padded, "packed": _packed}[mode](model, config, samples)


def _padded(model, config, samples):
    length = max(len(s["input_ids"]) for s in samples)
    ids = torch.full((len(samples), length), config.get("text_config", config)["bos_token_id"])
    labels, mask = torch.full_like(ids, IGNORE), torch.zeros_like(ids)
    for i, sample in enumerate(samples):
        n = len(sample["input_ids"])
        ids[i, :n] = torch.tensor(sample["input_ids"])
        labels[i, :n] = torch.tensor(sample["labels"])
        mask[i, :n] = 1
    position_ids, _ = rope_index(model, config, ids, join_pixels(samples)[1], mask)
    loss, is_target = nll(logits_of(model, config, ids, mask, position_ids, samples), labels)
    return [(loss[i].sum(), int(is_target[i].sum())) for i in range(len(samples))]


def _packed(model, config, samples):
    """Packs the samples into one row, with attention only inside each sample. The last token of a
    sample predicts the first token of the next one, which is never a target: it is `<|im_start|>`."""
    lengths = [len(s["input_ids"]) for s in samples]
    total = sum(lengths)
    ids = torch.tensor([[t for s in samples for t in s["input_ids"]]])
    labels = torch.tensor([[t for s in samples for t in s["labels"]]])
    position_ids = torch.cat([positions(model, config, s)[0] for s in samples], dim=1)[:, None]
    mask = None
    if len(samples) > 1:
        segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask = torch.tril(torch.ones(total, total, dtype=torch.bool)) & (segment[:, None] == segment[None, :])
        mask = mask[None, None]
    loss, is_target = nll(logits_of(model, config, ids, mask, position_ids, samples), labels)
    out, at = [], 0
    for n in lengths:
        span = slice(at, min(at + n, total - 1))
        out.append((loss[0, span].sum(), int(is_target[0, span].sum())))
        at += n
    return out
