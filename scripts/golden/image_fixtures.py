"""Writes tests/fixtures/images and tests/golden/images.{json,safetensors}.

Needs Pillow, numpy, torch, torchvision, transformers (5.23) and safetensors. Run from the
repository root. The output depends only on the versions of the libraries.

Expected values:
- `rgb/FILE`: upright RGB, by `ImageOps.exif_transpose` and transformers' `convert_to_rgb`. For
  16-bit images it is round(value / 257), computed here, because Pillow clips or drops the low byte.
- `resize/FILE/HxW`: torchvision's antialiased bicubic. For large sizes only a sha256 is stored.
- `processor`: a sha256 of the `pixel_values` of transformers' Qwen2VLImageProcessor (torchvision).
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
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tvF
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


def exif_of(kind, value, big_endian=False):
    """A TIFF block with an orientation of any type; values of more than four bytes follow the directory."""
    e = ">" if big_endian else "<"
    packed = struct.pack(e + value[0], *value[1:])
    tail = b"" if len(packed) <= 4 else packed
    field = packed.ljust(4, b"\0") if not tail else struct.pack(e + "I", 26)
    head = (b"MM\0*" if big_endian else b"II*\0") + struct.pack(e + "IHHHI", 8, 1, 0x112, kind, len(value) - 1)
    return head + field + struct.pack(e + "I", 0) + tail


def xmp(orientation, element=False):
    """XMP with an orientation, as attribute or as element."""
    tag = f'tiff:Orientation="{orientation}"'
    inside = f"><tiff:Orientation>{orientation}</tiff:Orientation></rdf:Description>" if element else f" {tag}/>"
    rdf = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
    return (f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="{rdf}"><rdf:Description'
            f' xmlns:tiff="http://ns.adobe.com/tiff/1.0/"{inside}</rdf:RDF></x:xmpmeta>').encode()


def jpeg_with(*segments):
    """A JPEG with segments APP1 after its start."""
    data = saved(smooth, format="JPEG", quality=95)
    parts = [b"\xff\xe1" + struct.pack(">H", len(s) + 2) + s for s in segments]
    return data[:2] + b"".join(parts) + data[2:]


def raw_profile(exif):
    """EXIF as ImageMagick writes it to a text of a PNG."""
    digits = exif.hex()
    lines = "\n".join(digits[at : at + 72] for at in range(0, len(digits), 72))
    return f"\nexif\n{len(exif):8}\n{lines}\n".encode()


def tiff(array, tags, extra=b"", big_endian=False):
    """A TIFF of one strip without compression. `tags` are (tag, type, value), values of type 3 or lists of them."""
    e = ">" if big_endian else "<"
    pixels = array.tobytes()
    entries = [(256, 4, array.shape[1]), (257, 4, array.shape[0]), (278, 4, array.shape[0]), (279, 4, len(pixels)), *tags]
    at = 8 + 2 + 12 * (len(entries) + 1) + 4
    body, blocks = b"", []
    for tag, kind, value in entries:
        if isinstance(value, (list, bytes)):
            data = value if isinstance(value, bytes) else struct.pack(f"{e}{len(value)}H", *value)
            field = struct.pack(e + "I", at + len(body)) if len(data) > 4 else data.ljust(4, b"\0")
            body += data if len(data) > 4 else b""
            body += b"\0" * (len(body) % 2)
            blocks.append((tag, kind, len(value), field))
        else:
            blocks.append((tag, kind, 1, struct.pack(e + ("HH" if kind == 3 else "I"), *([value, 0] if kind == 3 else [value]))))
    blocks.append((273, 4, 1, struct.pack(e + "I", at + len(body))))
    head = (b"MM\0*" if big_endian else b"II*\0") + struct.pack(e + "IH", 8, len(blocks))
    table = b"".join(struct.pack(e + "HHI", tag, kind, count) + field for tag, kind, count, field in sorted(blocks))
    return head + table + struct.pack(e + "I", 0) + body + pixels + extra


def gif(frame, place, canvas, transparent=None):
    """A GIF of one frame of 4 colours, with 2 bits for each pixel and a clear code before each pixel."""
    left, top = place
    height, width = frame.shape
    colours = bytes([200, 30, 60, 10, 220, 90, 0, 0, 255, 255, 255, 0])
    bits, data = 0, 0
    for code in [c for value in frame.flatten() for c in (4, int(value))] + [5]:
        data |= code << bits
        bits += 3
    data = data.to_bytes((bits + 7) // 8, "little")
    blocks = b"".join(bytes([len(data[at : at + 255])]) + data[at : at + 255] for at in range(0, len(data), 255))
    control = b"" if transparent is None else b"!\xf9\4" + bytes([1, 0, 0, transparent, 0])
    return (b"GIF89a" + struct.pack("<HHBBB", *canvas, 0x81, 1, 0) + colours + control
            + b"," + struct.pack("<HHHHB", left, top, width, height, 0) + b"\2" + blocks + b"\0;")


def bmp16(masks=None):
    """A BMP of 16 bits for each pixel with all levels of each channel."""
    values = (np.arange(64 * 8).reshape(8, 64) * 127 % 65536).astype("<u2")
    masks = struct.pack("<3I", *masks) if masks else b""
    start = 54 + len(masks)
    head = struct.pack("<IHHI", start + values.nbytes, 0, 0, start)
    info = struct.pack("<IiiHHIIiiII", 40, 64, 8, 1, 16, 3 if masks else 0, values.nbytes, 0, 0, 0, 0)
    return b"BM" + head + info + masks + values.tobytes()


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
    "photo_96x50.png": saved(Image.fromarray(photo(96, 50)), format="PNG"),
    "photo_50x84.png": saved(Image.fromarray(photo(50, 84)), format="PNG"),
    "strip_120x7.png": saved(Image.fromarray(photo(120, 7)), format="PNG"),
}
# Orientations in EXIF of other types than SHORT, and in XMP. Types: 1 BYTE, 3 SHORT, 4 LONG, 6 SBYTE, 8 SSHORT, 9 SLONG.
HEADER, XAP = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"
for name, kind, value in [
    ("byte", 1, ("B", 6)), ("shorts", 3, ("2H", 6, 1)), ("long", 4, ("I", 6)), ("sbyte", 6, ("b", 6)),
    ("sshort", 8, ("h", 6)), ("slong", 9, ("i", 6)), ("longs", 4, ("2I", 6, 3)), ("long8", 16, ("Q", 6)),
]:
    for end in ("le", "be"):
        files[f"exif_{name}_{end}.jpg"] = jpeg_with(HEADER + exif_of(kind, value, end == "be"))
split = HEADER + exif_of(4, ("2I", 6, 3))
files |= {
    "exif_in_two_segments.jpg": jpeg_with(split[:30], HEADER + split[30:]),
    "exif_prefixed_twice.jpg": jpeg_with(HEADER + HEADER + exif(6)),
    "exif_before_xmp.jpg": jpeg_with(HEADER + exif(6), XAP + xmp(3)),
    "exif_of_0_before_xmp.jpg": jpeg_with(HEADER + exif(0), XAP + xmp(3)),
    "exif_without_orientation.jpg": jpeg_with(XAP + xmp(6), HEADER + exif_of(4, ("I", 9))[:10] + b"\1\1" + exif_of(4, ("I", 9))[12:]),
    "xmp.jpg": jpeg_with(XAP + xmp(6)),
    "xmp_element.jpg": jpeg_with(XAP + xmp(6, True)),
    "xmp_of_9.jpg": jpeg_with(XAP + xmp(9)),
    "xmp.png": png(pattern(), 2, 8, before=[chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp(6))]),
    "xmp_element_packed.png": png(pattern(), 2, 8, before=[chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0en\0x\0" + zlib.compress(xmp(6, True)))]),
    "xmp_behind_pixels.png": png(pattern(), 2, 8, after=[chunk(b"tEXt", b"XML:com.adobe.xmp\0" + xmp(6))]),
    "exif_long.png": png(pattern(), 2, 8, before=[chunk(b"eXIf", exif_of(4, ("I", 6), True))]),
    "profile_text.png": png(pattern(), 2, 8, before=[chunk(b"tEXt", b"Raw profile type exif\0" + raw_profile(HEADER + exif(6)))]),
    "profile_packed.png": png(pattern(), 2, 8, after=[chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(HEADER + exif(6, True))))]),
    "xmp.webp": saved(rgb, format="WEBP", lossless=True, xmp=xmp(6)),
    "xmp_element.webp": saved(rgb, format="WEBP", lossless=True, xmp=xmp(6, True)),
    "exif_long.webp": saved(rgb, format="WEBP", lossless=True, exif=exif_of(4, ("I", 6), True)),
}
# TIFF: palettes and grey of each depth, orientations, two pages; GIF: frames smaller than the canvas; BMP of 16 bits.
shades = np.random.default_rng(3).integers(0, 65536, (3, 256)).tolist()
for bits in (1, 2, 4, 8):
    for end in ("le", "be"):
        indices = np.random.default_rng(bits).integers(0, 256, (10, 24 * bits // 8), dtype=np.uint8)
        colours = [value for channel in shades for value in channel[: 1 << bits]]
        tags = [(256, 4, 24 - 1 if bits < 8 else 24), (258, 3, bits), (259, 3, 1), (277, 3, 1)]
        one = lambda tags: [t for t in tags if t[0] != 256]
        def of(photometric, more=()):
            data = tiff(indices, [*one(tags), (262, 3, photometric), *more], big_endian=end == "be")
            width = struct.pack(("<" if end == "le" else ">") + "I", tags[0][2])
            at = data.index(struct.pack(("<" if end == "le" else ">") + "HHI", 256, 4, 1)) + 8
            return data[:at] + width + data[at + 4 :]
        files[f"palette_{bits}bit_{end}.tif"] = of(3, [(320, 3, colours)])
        if bits in (2, 4):
            files[f"grey_{bits}bit_{end}.tif"] = of(1)
            files[f"white_is_zero_{bits}bit_{end}.tif"] = of(0)
palette_tiff = lambda **options: saved(palette, format="TIFF", **options)
files |= {
    "palette_lzw.tif": palette_tiff(compression="tiff_lzw"),
    "palette_deflate.tif": palette_tiff(compression="tiff_adobe_deflate"),
    "two_pages.tif": saved(rgb, format="TIFF", save_all=True, append_images=[grey.convert("RGB")]),
    "xmp.tif": tiff(np.repeat(pattern(channels=1), 1, axis=2)[..., 0].copy(), [(258, 3, 8), (259, 3, 1), (262, 3, 1), (277, 3, 1), (700, 1, xmp(6))]),
    "orientation_long.tif": tiff(pattern(channels=1)[..., 0].copy(), [(258, 3, 8), (259, 3, 1), (262, 3, 1), (277, 3, 1), (274, 4, 6)]),
    "small_frame.gif": gif(np.random.default_rng(1).integers(0, 4, (5, 7)), (3, 2), (16, 12)),
    "small_frame_transparent.gif": gif(np.random.default_rng(2).integers(0, 4, (5, 7)), (3, 2), (16, 12), transparent=2),
    "555.bmp": bmp16(),
    "555_masks.bmp": bmp16((0x7C00, 0x3E0, 0x1F)),
    "565_masks.bmp": bmp16((0xF800, 0x7E0, 0x1F)),
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

# (file, height, width): smaller, larger, one side unchanged, mixed, and much smaller. torchvision fails for 1 x 1.
sizes = [
    ("photo_150x100.png", 32, 64), ("photo_150x100.png", 100, 96), ("photo_150x100.png", 64, 150),
    ("photo_150x100.png", 224, 320), ("photo_150x100.png", 128, 96), ("photo_150x100.png", 32, 32),
    ("photo_40x30.png", 64, 96), ("photo_40x30.png", 17, 23), ("strip_120x7.png", 32, 480),
    ("strip_120x7.png", 1, 2), ("strip_120x7.png", 2, 1), ("one_pixel.png", 64, 64), ("rgb.png", 32, 32),
]
resizes = []
for file, height, width in sizes:
    source = torch.from_numpy(tensors[f"rgb/{file}"]).permute(2, 0, 1).contiguous()
    out = tvF.resize(source, [height, width], interpolation=InterpolationMode.BICUBIC, antialias=True)
    out = np.ascontiguousarray(out.permute(1, 2, 0).numpy())
    if height * width <= 6144:
        tensors[f"resize/{file}/{height}x{width}"] = out
    digest = hashlib.sha256(out.tobytes()).hexdigest()
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
    digest = hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()
    processed.append({"file": file, "config": config, "grid_thw": grid, "sha256": digest})

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
