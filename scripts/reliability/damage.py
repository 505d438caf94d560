"""Damages a checkpoint in one way and prints which one.

    python3 scripts/reliability/damage.py NEWEST BEFORE SEED NUMBER

NEWEST and BEFORE are two checkpoints of one run. NUMBER selects the kind of damage.
"""

import json
import os
import random
import shutil
import sys
from pathlib import Path

newest, before = Path(sys.argv[1]), Path(sys.argv[2])
number = int(sys.argv[4])
draw = random.Random(f"{sys.argv[3]} {number}")
manifest = newest / "manifest.json"
names = sorted(path.name for path in newest.iterdir())
# Files whose content differs between the two checkpoints.
changing = [name for name in names if (newest / name).read_bytes() != (before / name).read_bytes()]
# A small file is damaged as often as a large one.
path = newest / draw.choice(names)
content = path.read_bytes()


def write(new):
    assert new != content
    # A hard link would damage another file, too.
    path.unlink()
    path.write_bytes(new)


def flip():
    position = draw.randrange(len(content))
    bit = draw.randrange(8)
    new = bytearray(content)
    new[position] ^= 1 << bit
    write(bytes(new))
    return f"flip bit {bit} of byte {position} of {path.name}"


def truncate():
    length = draw.choice([0, len(content) // 2, len(content) - 1, draw.randrange(len(content))])
    write(content[:length])
    return f"truncate {path.name} to {length} bytes"


def delete():
    path.unlink()
    return f"delete {path.name}"


def zero():
    nonzero = [i for i in range(0, len(content), max(1, len(content) // 4096)) if content[i]]
    start = draw.choice(nonzero)
    length = draw.choice([1, 512, 4096, len(content)])
    write(content[:start] + bytes(min(length, len(content) - start)) + content[start + length :])
    return f"zero {length} bytes from byte {start} of {path.name}"


def exchange():
    name = draw.choice(changing)
    (newest / name).unlink()
    shutil.copy(before / name, newest / name)
    return f"replace {name} by that of the checkpoint before"


def swap():
    first, second = draw.sample([name for name in names if name != "manifest.json"], 2)
    shutil.move(newest / first, newest / "swap")
    shutil.move(newest / second, newest / first)
    shutil.move(newest / "swap", newest / second)
    return f"swap {first} and {second}"


def extend():
    write(content + bytes(draw.choice([1, 8, 4096])))
    return f"extend {path.name}"


def folder():
    path.unlink()
    path.mkdir()
    return f"replace {path.name} by a folder"


def pipe():
    path.unlink()
    os.mkfifo(path)
    return f"replace {path.name} by a pipe"


def link():
    path.unlink()
    path.symlink_to("/nonexistent")
    return f"replace {path.name} by a link to nothing"


def change_manifest(change):
    value = json.loads(manifest.read_text())
    text = change(value)
    manifest.unlink()
    manifest.write_text(json.dumps(value))
    return text


def forget():
    def change(value):
        name = draw.choice(sorted(value["files"]))
        del value["files"][name]
        # Without a checksum, the file of another step must not be used.
        if name in changing:
            (newest / name).unlink()
            shutil.copy(before / name, newest / name)
        return f"remove {name} from the manifest"

    return change_manifest(change)


def other_step():
    def change(value):
        value["step"] += draw.choice([-2, 1, 2**63])
        return f"set the step of the manifest to {value['step']}"

    return change_manifest(change)


def hidden_index():
    """An index next to the weights selects which files are read."""
    weights = newest / "model.safetensors"
    raw = weights.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    tensors = [name for name in json.loads(raw[8 : 8 + length]) if name != "__metadata__"]
    shutil.copy(before / "model.safetensors", newest / "other.safetensors")
    index = {"metadata": {}, "weight_map": {name: "other.safetensors" for name in tensors}}
    (newest / "model.safetensors.index.json").write_text(json.dumps(index))
    return "add an index that names weights of the checkpoint before"


kinds = [flip, truncate, delete, zero, flip, exchange, swap, flip, extend, forget, folder, zero, link, other_step, flip, pipe]
# The short form must contain it.
kinds.insert(3, hidden_index)
print(kinds[number % len(kinds)]())
