"""Reads the files of `trainer export --gguf` with the package `gguf`, and compares the values with
those of the model folder: matrices are rounded, or quantised, as the package does it.

    read.py GGUF_FOLDER MODEL_FOLDER
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

written, folder = Path(sys.argv[1]), Path(sys.argv[2])


def tensors(path):
    """Tensors in f32 of a safetensors file, by name."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    for name, info in header.items():
        if name == "__metadata__" or info["dtype"] != "F32":
            continue
        start, end = info["data_offsets"]
        values = np.frombuffer(data[8 + size + start : 8 + size + end], np.float32)
        yield name, values.reshape(info["shape"])


def plain(name):
    """The name of a tensor of the published files, in the spelling that the package maps."""
    for prefix, short in [("model.language_model.", "model."), ("model.visual.", "visual.")]:
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name


compared = 0
for path in sorted(written.glob("*.gguf")):
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    found = {tensor.name: tensor for tensor in reader.tensors}
    is_vision = arch == "clip"
    kind = "MMPROJ" if is_vision else {v: k.name for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch]
    blocks = reader.fields["clip.vision.block_count" if is_vision else f"{arch}.block_count"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind], blocks.contents())
    expected = {gguf.TENSOR_NAMES[key] for key in gguf.MODEL_TENSORS[gguf.MODEL_ARCH[kind]]}
    for name in found:
        stem = name.removesuffix(".1").removesuffix(".weight").removesuffix(".bias")
        parts = [("{bid}" if part.isdecimal() else part) for part in stem.split(".")]
        assert ".".join(parts) in expected or stem in expected or parts[0] == "mm", name
    for name, values in tensors(folder / "model.safetensors"):
        mapped = names.get_name(plain(name), try_suffixes=(".weight", ".bias"))
        if mapped not in found or found[mapped].shape.tolist()[::-1] != list(values.shape):
            continue  # of the other file, or with other values or another shape there
        tensor = found[mapped]
        if arch == "qwen35" and (values.ndim < 2 or "linear_attn" in name):
            continue
        bytes_expected = gguf.quants.quantize(values.copy(), tensor.tensor_type)
        same = np.array_equal(bytes_expected.view(np.uint8).ravel(), tensor.data.view(np.uint8).ravel())
        assert same, f"{path.name}: {mapped} differs from {name}"
        compared += 1
assert compared > 20, compared
print(f"{written.name}: the package gguf reads {compared} tensors with the bytes that it would write")
