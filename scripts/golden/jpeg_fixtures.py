"""Writes tests/golden/jpeg.safetensors: JPEG files and their pixels by Pillow with libjpeg-turbo.

Needs Pillow, numpy and safetensors. Run from the repository root. The stored file was written by
Pillow 13.0.0 with libjpeg-turbo 3.2.0; the script prints the versions that it uses.

For each case there are two tensors: `NAME/file` (bytes) and `NAME/rgb` (`[height, width, 3]`, by
`Image.convert("RGB")`).
"""

import io
import struct

import numpy as np
import PIL
from PIL import Image, features
from safetensors.numpy import save_file


def pattern(width, height, channels):
    """Waves of all directions with noise and flat blocks, so that all coefficients occur."""
    rng = np.random.default_rng(width * 1000 + height)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    planes = [127.5 + 120 * np.sin(x / (3 + c) + y / (7 - c) + c) for c in range(channels)]
    out = np.stack(planes, axis=-1) + rng.normal(0, 20, (height, width, channels))
    out[(x // 8 + y // 5) % 4 == 0] = rng.integers(0, 256, channels)
    return np.clip(out, 0, 255).astype(np.uint8)


def saved(width, height, mode, **options):
    channels = len(mode)
    values = pattern(width, height, channels)
    out = io.BytesIO()
    Image.fromarray(values[..., 0] if channels == 1 else values, mode).save(out, "JPEG", **options)
    return out.getvalue()


def segments(data):
    """(marker, content) of the segments before the first scan, and all after the segment of the scan."""
    at, found = 2, []
    while True:
        marker, length = data[at + 1], data[at + 2] * 256 + data[at + 3]
        found.append((marker, data[at + 4 : at + 2 + length]))
        at += 2 + length
        if marker == 0xDA:
            return found, data[at:]


def segment(marker, content):
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def rearranged(data, sampling, width, height):
    """The MCUs of a file with other sampling factors and another size, but as many MCUs and blocks."""
    head, scan = segments(data)
    out = b"\xff\xd8"
    for marker, content in head:
        if marker in (0xC0, 0xC2):
            sizes = struct.pack(">BHH", 8, height, width)
            content = sizes + content[5:7] + bytes([sampling]) + content[8:]
        out += segment(marker, content)
    return out + scan


def one_scan_per_component(width, height, sampling):
    """A sequential file whose components have scans of their own, of the data of grey files."""
    out, scans = b"\xff\xd8", b""
    for component, scale in enumerate([1, sampling, sampling]):
        head, rest = segments(saved(-(-width // scale), -(-height // scale), "L", quality=60))
        for marker, content in head if component == 0 else []:
            if marker in (0xDB, 0xC4):
                out += segment(marker, content)
        scans += segment(0xDA, bytes([1, component + 1, 0, 0, 63, 0])) + rest[:-2]
    luma = 0x11 * sampling
    frame = struct.pack(">BHHB", 8, height, width, 3) + bytes([1, luma, 0, 2, 0x11, 0, 3, 0x11, 0])
    return out + segment(0xC0, frame) + scans + b"\xff\xd9"


def without_tables(data):
    """A frame of Motion JPEG: no Huffman tables."""
    head, scan = segments(data)
    return b"\xff\xd8" + b"".join(segment(m, c) for m, c in head if m != 0xC4) + scan


def with_wide_tables(data):
    """Quantisation tables of 16 bits."""
    head, scan = segments(data)
    out = b"\xff\xd8"
    for marker, content in head:
        if marker == 0xDB:
            content = b"".join(
                bytes([content[i] | 0x10]) + b"".join(struct.pack(">H", v) for v in content[i + 1 : i + 65])
                for i in range(0, len(content), 65)
            )
        out += segment(marker, content)
    return out + scan


def ycck(data):
    """A CMYK file with its Adobe segment changed to YCCK."""
    at = data.index(b"Adobe") + 11
    assert data[at] == 0
    return data[:at] + b"\2" + data[at + 1 :]


files = {}
for progressive in (False, True):
    kind = "progressive" if progressive else "sequential"
    for sampling in ("4:4:4", "4:2:2", "4:2:0"):
        name = sampling.replace(":", "")
        for (width, height), quality in [((1, 1), 75), ((3, 5), 90), ((17, 9), 30), ((33, 47), 75), ((72, 40), 95), ((33, 47), 5)]:
            options = dict(quality=quality, subsampling=sampling, progressive=progressive)
            files[f"{name}_{kind}_{width}x{height}_q{quality}"] = saved(width, height, "RGB", **options)
    for mode, name in [("L", "grey"), ("CMYK", "cmyk")]:
        for (width, height), quality in [((1, 1), 75), ((33, 47), 75), ((17, 9), 100)]:
            files[f"{name}_{kind}_{width}x{height}_q{quality}"] = saved(width, height, mode, quality=quality, progressive=progressive)
    files[f"ycck_{kind}"] = ycck(saved(33, 47, "CMYK", quality=75, progressive=progressive))
    files[f"rgb_{kind}"] = saved(33, 47, "RGB", quality=75, progressive=progressive, keep_rgb=True)
    files[f"restarts_{kind}"] = saved(72, 40, "RGB", quality=75, progressive=progressive, restart_marker_blocks=2)
    files[f"restarts_420_{kind}"] = saved(72, 40, "RGB", quality=75, subsampling="4:2:0", progressive=progressive, restart_marker_rows=1)
    files[f"own_tables_{kind}"] = saved(33, 47, "RGB", quality=75, optimize=True, progressive=progressive)
    for name, sampling, source, size in [
        ("440", 0x12, ("4:2:2", 64, 16), (32, 32)),
        ("411", 0x41, ("4:2:0", 32, 32), (64, 16)),
        ("441", 0x14, ("4:2:0", 32, 32), (16, 64)),
    ]:
        data = saved(*source[1:], "RGB", quality=60, subsampling=source[0], progressive=progressive)
        files[f"{name}_{kind}"] = rearranged(data, sampling, *size)
        if not progressive:
            files[f"{name}_{kind}_odd"] = rearranged(data, sampling, size[0] - 3, size[1] - 5)
files["440_sequential_narrow"] = rearranged(saved(16, 16, "RGB", quality=60, subsampling="4:2:2"), 0x12, 3, 27)
files["scans_444"] = one_scan_per_component(33, 47, 1)
files["scans_420"] = one_scan_per_component(33, 47, 2)
files["standard_tables"] = without_tables(saved(33, 47, "RGB", quality=75))
files["wide_tables"] = with_wide_tables(saved(33, 47, "RGB", quality=75))

tensors = {}
for name, data in files.items():
    tensors[f"{name}/file"] = np.frombuffer(data, dtype=np.uint8)
    tensors[f"{name}/rgb"] = np.array(Image.open(io.BytesIO(data)).convert("RGB"))
save_file(tensors, "tests/golden/jpeg.safetensors")
print(f"{len(files)} files, Pillow {PIL.__version__}, libjpeg-turbo {features.version('libjpeg_turbo')}")
