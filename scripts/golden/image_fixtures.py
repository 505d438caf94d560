"""Writes tests/fixtures/images and tests/golden/images.{json,safetensors}.

Needs Pillow, numpy, torch, torchvision, transformers (5.23) and safetensors. Run from the
repository root. The output depends only on the versions of the libraries.

Expected values:
- `rgb/FILE`: upright RGB, by `ImageOps.exif_transpose` and transformers' `convert_to_rgb`. For
  16-bit images it is round(value / 257), computed here, because Pillow clips or drops the low byte.
- `resize/FILE/HxW`: Pillow's bicubic, width first, then height (two calls, so that the order does
  not depend on the version). For large sizes only a sha256 is stored.
- `processor`: transformers' Qwen2VLImageProcessor (torchvision): a sha256 of `pixel_values` if the
  image is not resized, otherwise the resized image as bytes (`processor/FILE`).
"""

import hashlib
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.numpy import save_file
from transformers import Qwen2VLImageProcessor
from transformers.image_transforms import convert_to_rgb

FIXTURES = Path("tests/fixtures/images")
GOLDEN = Path("tests/golden")
W, H = 24, 16


def pattern(width=W, height=H, channels=3, smooth=False):
    """An image of gradients with a disc and a sharp edge; with `smooth`, no edges (for lossy formats)."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    u, v = x / max(width - 1, 1), y / max(height - 1, 1)
    planes = [255 * u, 255 * v, 255 * (1 - u) * (1 - v), 255 * (u + v) / 2]
    out = np.stack(planes[:channels], axis=-1)
    if not smooth:
        disc = (u - 0.6) ** 2 + (v - 0.4) ** 2 < 0.05
        out[disc] = 255 - out[disc]
        out[:, width // 3 : width // 3 + 2, :3] = 0
    return np.round(out).astype(np.uint8)


def wide(channels):
    """A 16-bit image with random low bytes."""
    base = pattern(channels=channels).astype(np.uint32)
    noise = np.random.default_rng(0).integers(0, 256, base.shape, dtype=np.uint32)
    return (base * 256 + noise).astype(np.uint16)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(array, color_type, bits, before=(), after=()):
    """A PNG without row filters, with additional chunks before and after the pixel data."""
    height, width = array.shape[0], array.shape[1] * 8 // min(bits, 8)
    rows = array.astype(">u2") if bits == 16 else array
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    head = struct.pack(">IIBBBBB", width, height, bits, color_type, 0, 0, 0)
    parts = [chunk(b"IHDR", head), *before, chunk(b"IDAT", zlib.compress(raw, 9)), *after, chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def saved(image, **options):
    out = io.BytesIO()
    image.save(out, **options)
    return out.getvalue()


def exif(orientation, big_endian=False):
    """A TIFF block with one entry."""
    e = ">" if big_endian else "<"
    magic = b"MM\0*" if big_endian else b"II*\0"
    return magic + struct.pack(e + "IHHHIHHI", 8, 1, 0x112, 3, 1, orientation, 0, 0)


def ycck():
    """A CMYK JPEG with its Adobe marker changed to YCCK, so that decoders apply another transform."""
    data = saved(Image.fromarray(pattern(channels=4, smooth=True), "CMYK"), format="JPEG", quality=95)
    at = data.index(b"Adobe")
    assert data[at + 11] == 0
    return data[: at + 11] + b"\2" + data[at + 12 :]


def webp_with_prefixed_exif(orientation):
    """A WebP whose EXIF has JPEG's prefix, as some programs write it."""
    return saved(rgb, format="WEBP", lossless=True, exif=b"Exif\0\0" + exif(orientation))


def photo(width, height):
    """An image with texture at all scales, quantised to keep the file small."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    waves = [np.sin(x / 3.1 + y / 7.3), np.sin(x * y / 900.0), np.cos(x / 11.0 - y / 2.3)]
    out = np.stack(waves, axis=-1) * 127.5 + 127.5
    out[(x // 16 + y // 16) % 5 == 0] = 255
    out[(x - y) % 37 < 2] = 0
    return (np.clip(out, 0, 255).astype(np.uint8) // 16) * 17


rgb = Image.fromarray(pattern())
grey = Image.fromarray(pattern(channels=1)[..., 0])
alpha = pattern(channels=4)
smooth = Image.fromarray(pattern(smooth=True))
palette = rgb.quantize(16)
grey_alpha = Image.fromarray(np.stack([pattern()[..., 0], pattern()[..., 1]], axis=-1), "LA")
levels = bytes([0, 255, 128, 1, 254, 77, 200, 33] * 2)
animation = [palette, Image.fromarray(255 - pattern()).quantize(16)]
ramp = np.repeat(np.arange(16, dtype=np.uint8)[:, None], 24, axis=1)

files = {
    "grey.png": saved(grey, format="PNG"),
    "grey_1bit.png": saved(grey.convert("1"), format="PNG"),
    "grey_4bit.png": png((ramp[:, ::2] << 4) | ramp[:, ::2], 0, 4),
    "grey_alpha.png": saved(grey_alpha, format="PNG"),
    "grey_key.png": saved(grey, format="PNG", transparency=int(np.asarray(grey)[3, 5])),
    "palette.png": saved(palette, format="PNG"),
    "palette_alpha.png": saved(palette, format="PNG", transparency=levels),
    "rgb.png": saved(rgb, format="PNG"),
    "rgb_key.png": saved(rgb, format="PNG", transparency=tuple(int(v) for v in pattern()[2, 3])),
    "rgba.png": saved(Image.fromarray(alpha), format="PNG"),
    "grey_16bit.png": png(wide(1), 0, 16),
    "grey_alpha_16bit.png": png(wide(2), 4, 16),
    "rgb_16bit.png": png(wide(3), 2, 16),
    "rgba_16bit.png": png(wide(4), 6, 16),
    "orientation_6.png": png(pattern(), 2, 8, before=[chunk(b"eXIf", exif(6, True))]),
    "orientation_8_behind_pixels.png": png(pattern(), 2, 8, after=[chunk(b"eXIf", exif(8))]),
    "one_pixel.png": saved(rgb.crop((3, 3, 4, 4)), format="PNG"),
    "one_column_orientation_2.png": png(pattern()[:, 4:5], 2, 8, before=[chunk(b"eXIf", exif(2))]),
    "one_column_orientation_5.png": png(pattern()[:, 4:5], 2, 8, before=[chunk(b"eXIf", exif(5))]),
    "rgb.jpg": saved(smooth, format="JPEG", quality=95, subsampling="4:4:4"),
    "chroma_420.jpg": saved(smooth, format="JPEG", quality=95, subsampling="4:2:0"),
    "chroma_422.jpg": saved(smooth, format="JPEG", quality=95, subsampling="4:2:2"),
    "progressive.jpg": saved(smooth, format="JPEG", quality=95, progressive=True),
    "restarts.jpg": saved(smooth, format="JPEG", quality=95, restart_marker_blocks=1),
    "grey.jpg": saved(grey, format="JPEG", quality=95),
    "not_ycc.jpg": saved(smooth, format="JPEG", quality=95, keep_rgb=True),
    "cmyk.jpg": saved(Image.fromarray(pattern(channels=4, smooth=True), "CMYK"), format="JPEG", quality=95),
    "ycck.jpg": ycck(),
    "lossless.webp": saved(rgb, format="WEBP", lossless=True),
    "lossless_alpha.webp": saved(Image.fromarray(alpha), format="WEBP", lossless=True, exact=True),
    "lossy.webp": saved(smooth, format="WEBP", quality=95),
    "lossy_alpha.webp": saved(Image.fromarray(pattern(channels=4, smooth=True)), format="WEBP", quality=95),
    "animated.webp": saved(rgb, format="WEBP", lossless=True, save_all=True, append_images=[grey.convert("RGB")]),
    "orientation_6.webp": saved(rgb, format="WEBP", lossless=True, exif=exif(6)),
    "orientation_3_prefixed.webp": webp_with_prefixed_exif(3),
    "palette.gif": saved(palette, format="GIF"),
    "transparent.gif": saved(palette, format="GIF", transparency=3),
    "animated.gif": saved(animation[0], format="GIF", save_all=True, append_images=animation[1:]),
    "grey.bmp": saved(grey, format="BMP"),
    "palette_1bit.bmp": saved(grey.convert("1"), format="BMP"),
    "rgb.bmp": saved(rgb, format="BMP"),
    "rgba.bmp": saved(Image.fromarray(alpha), format="BMP"),
    "exact_96x64.png": saved(Image.fromarray(photo(96, 64)), format="PNG"),
    "photo_150x100.png": saved(Image.fromarray(photo(150, 100)), format="PNG"),
    "photo_40x30.png": saved(Image.fromarray(photo(40, 30)), format="PNG"),
    "strip_120x7.png": saved(Image.fromarray(photo(120, 7)), format="PNG"),
}
for orientation in range(1, 9):
    block = b"Exif\0\0" + exif(orientation, big_endian=orientation % 2 == 0)
    files[f"orientation_{orientation}.jpg"] = saved(smooth, format="JPEG", quality=95, exif=block)

tensors = {}
for name, data in files.items():
    (FIXTURES / name).write_bytes(data)
    if "16bit" in name:
        channels = {"grey": 1, "grey_alpha": 2, "rgb": 3, "rgba": 4}[name.removesuffix("_16bit.png")]
        reduced = np.round(wide(channels).astype(np.float64) / 257).astype(np.uint8)
        image = Image.fromarray(reduced[..., 0] if channels == 1 else reduced, {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels])
    else:
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    tensors[f"rgb/{name}"] = np.ascontiguousarray(convert_to_rgb(image, return_numpy=True))

# (file, height, width): smaller, larger, one side unchanged, mixed, and much smaller.
sizes = [
    ("photo_150x100.png", 32, 64), ("photo_150x100.png", 100, 96), ("photo_150x100.png", 64, 150),
    ("photo_150x100.png", 224, 320), ("photo_150x100.png", 128, 96), ("photo_150x100.png", 32, 32),
    ("photo_40x30.png", 64, 96), ("photo_40x30.png", 17, 23), ("strip_120x7.png", 32, 480),
    ("strip_120x7.png", 1, 1), ("one_pixel.png", 64, 64), ("rgb.png", 32, 32),
]
resizes = []
for file, height, width in sizes:
    source = Image.fromarray(tensors[f"rgb/{file}"])
    out = source.resize((width, source.height), Image.BICUBIC).resize((width, height), Image.BICUBIC)
    if height * width <= 6144:
        tensors[f"resize/{file}/{height}x{width}"] = np.asarray(out).copy()
    digest = hashlib.sha256(np.asarray(out).tobytes()).hexdigest()
    resizes.append({"file": file, "height": height, "width": width, "sha256": digest})

settings = {
    "size": {"shortest_edge": 4096, "longest_edge": 16384}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
}
uneven = settings | {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
cases = [
    ("exact_96x64.png", settings), ("exact_96x64.png", uneven), ("exact_96x64.png", settings | {"patch_size": 8, "merge_size": 4}),
    ("photo_150x100.png", settings), ("photo_40x30.png", settings), ("strip_120x7.png", settings), ("rgba.png", settings),
]
processed = []
for file, config in cases:
    processor = Qwen2VLImageProcessor(**config)
    image = Image.fromarray(tensors[f"rgb/{file}"])
    out = processor(images=[image], return_tensors="pt")
    values, grid = out["pixel_values"].numpy(), out["image_grid_thw"][0].tolist()
    case = {"file": file, "config": config, "grid_thw": grid, "sum": float(values.sum(dtype=np.float64)), "abs_sum": float(np.abs(values).sum(dtype=np.float64))}
    if file.startswith("exact"):
        case["sha256"] = hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()
    else:
        # In the order of the processor, so that the test also compares the order of the patches.
        tensors[f"processor/{file}"] = np.round(values * 127.5 + 127.5).astype(np.uint8)
    processed.append(case)

# At [v, a]: value v with opacity a, composited on white.
table = np.zeros((256, 256, 4), dtype=np.uint8)
table[..., :3], table[..., 3] = np.arange(256)[:, None, None], np.arange(256)[None, :]
over_white = convert_to_rgb(Image.fromarray(table), return_numpy=True)[..., 0]

golden = {
    "over_white_sha256": hashlib.sha256(over_white.tobytes()).hexdigest(),
    "resize": resizes,
    "processor": processed,
}
(GOLDEN / "images.json").write_text(json.dumps(golden, indent=1) + "\n")
save_file(tensors, GOLDEN / "images.safetensors")
