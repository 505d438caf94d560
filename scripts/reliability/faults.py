"""Writes a data set with planted faults, and compares what a run did with it.

    python3 scripts/reliability/faults.py write FOLDER ROWS SEED
    python3 scripts/reliability/faults.py inspected FOLDER OUTPUT    # of `inspect --num 0 --format jsonl`
    python3 scripts/reliability/faults.py trained FOLDER OUTPUT_DIR  # of one epoch
    python3 scripts/reliability/faults.py measured FOLDER OUTPUT     # of `cache`

5 % of the rows have a fault, each of KINDS as often as the others. good.jsonl has the other rows.
"""

import collections
import json
import random
import struct
import sys
import zlib
from pathlib import Path


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width=32, height=32, grey=128, pixels=None):
    if pixels is None:
        pixels = zlib.compress((b"\0" + bytes([grey]) * width) * height)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def noise(width, height):
    """Pixels that do not compress, so that a cut file lacks some of them."""
    draw = random.Random(1)
    return zlib.compress(b"".join(b"\0" + draw.randbytes(width) for _ in range(height)))


def user(text, **more):
    return {"role": "user", "content": text, **more}


def answer(text):
    return {"role": "assistant", "content": text}


def chat(text, images=(), **more):
    row = {"messages": [user(text), answer("yes")], **more}
    if images:
        row["images"] = list(images)
    return row


def good(i):
    if i % 3 == 0:
        return chat(f"<image>What is number {i}?", [f"images/{i % 50}.png"])
    if i % 3 == 1:
        return {"messages": [{"role": "system", "content": "Be brief."}, user(f"Is {i} even?"), answer(str(i % 2 == 0)), user("Sure?"), answer("Yes.")]}
    return {"conversations": [{"from": "human", "value": f"Say {i}."}, {"from": "gpt", "value": str(i)}]}


# Kind -> reason and row. A row in bytes is written as it is.
KINDS = {
    "cut line": ("json", lambda i: json.dumps(good(i)).encode()[:-9]),
    "not UTF-8": ("json", lambda i: json.dumps(good(i)).encode().replace(b"n", b"\xff")),
    "a list": ("json", lambda i: b"[1, 2]"),
    "control character": ("json", lambda i: b'{"messages": "a\x01b"}'),
    "unknown form": ("row_form", lambda i: {"some": "thing", "else": i}),
    "content is a number": ("wrong_type", lambda i: {"messages": [user(7), answer("a")]}),
    "turns are a text": ("wrong_type", lambda i: {"messages": "hello"}),
    "no content": ("missing_key", lambda i: {"messages": [{"role": "user"}, answer("a")]}),
    "no turns": ("no_messages", lambda i: {"messages": []}),
    "unknown role": ("role", lambda i: {"messages": [{"role": "wizard", "content": "a"}, answer("b")]}),
    "late system turn": ("role", lambda i: {"messages": [user("a"), {"role": "system", "content": "b"}, answer("c")]}),
    "audio": ("not_supported", lambda i: chat("a", audios=["a.wav"])),
    "too many placeholders": ("media_missing", lambda i: chat("<image><image>a", ["images/1.png"])),
    "too few placeholders": ("image_count", lambda i: chat("<image>a", ["images/1.png", "images/2.png"])),
    "media token in text": ("reserved_token", lambda i: chat("a <|image_pad|> b")),
    "boxes without entries": ("box_count", lambda i: chat("<image>where is <bbox>?", ["images/1.png"], objects={"ref": [], "bbox": []})),
    "box outside": ("box_range", lambda i: chat("<image>where is <bbox>?", ["images/1.png"], objects={"ref": [], "bbox": [[1, 1, 99, 99]]})),
    "box inverted": ("box_inverted", lambda i: chat("<image>where is <bbox>?", ["images/1.png"], objects={"ref": [], "bbox": [[20, 1, 10, 9]]})),
    "no answer": ("no_supervised_token", lambda i: {"messages": [user("a")]}),
    "missing image": ("image_missing", lambda i: chat("<image>a", [f"images/none{i}.png"])),
    "image outside": ("image_path_escapes_root", lambda i: chat("<image>a", ["../secret.png"])),
    "image is a folder": ("image_unreadable", lambda i: chat("<image>a", ["images/folder.png"])),
    "bad data URI": ("image_data_uri", lambda i: chat("<image>a", ["data:image/png;base64,####"])),
    "image by address": ("image_url", lambda i: chat("<image>a", ["https://example.com/a.png"])),
    "text as an image": ("image_format", lambda i: chat("<image>a", ["images/text.png"])),
    "cut image": ("image_broken", lambda i: chat("<image>a", ["images/cut.png"])),
    "empty image": ("image_broken", lambda i: chat("<image>a", ["images/empty.png"])),
    "damaged image": ("image_broken", lambda i: chat("<image>a", ["images/damaged.png"])),
    "flat image": ("image_aspect_ratio", lambda i: chat("<image>a", ["images/flat.png"])),
    "huge image": ("image_too_large", lambda i: chat("<image>a", ["images/huge.png"])),
    "too long": ("overlong", lambda i: chat("word " * 3000)),
}
# Found only when pixels are decoded, not when rows are measured.
PIXELS = {"cut image", "damaged image"}


def write(folder, rows, seed):
    draw = random.Random(seed)
    images = folder / "images"
    images.mkdir(parents=True)
    (images / "folder.png").mkdir()
    for i in range(50):
        (images / f"{i}.png").write_bytes(png(grey=5 * i))
    (folder.parent / "secret.png").write_bytes(png())
    whole = png(64, 64, pixels=noise(64, 64))
    (images / "cut.png").write_bytes(whole[:-2000])
    (images / "damaged.png").write_bytes(whole[:2000] + bytes(100) + whole[2100:])
    (images / "text.png").write_bytes(b"only some text " * 20)
    (images / "empty.png").write_bytes(b"")
    (images / "flat.png").write_bytes(png(2000, 2))
    (images / "huge.png").write_bytes(png(60000, 60000, pixels=zlib.compress(b"")))
    faults = rows // 20
    kinds = sorted(KINDS)
    planted = {line: kinds[n % len(kinds)] for n, line in enumerate(draw.sample(range(1, rows + 1), faults))}
    with open(folder / "rows.jsonl", "wb") as out, open(folder / "good.jsonl", "w") as good_rows:
        for line in range(1, rows + 1):
            if line not in planted:
                good_rows.write(json.dumps(good(line)) + "\n")
            row = KINDS[planted[line]][1](line) if line in planted else good(line)
            out.write((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
    (folder / "planted.json").write_text(json.dumps({"rows": rows, "planted": planted}))


def load(folder):
    value = json.loads((folder / "planted.json").read_text())
    return value["rows"], {int(line): kind for line, kind in value["planted"].items()}


def compare(what, found, expected):
    """Reports lines that differ; `found` and `expected` map a line to its reason."""
    wrong = 0
    for line in sorted(found.keys() | expected.keys()):
        if found.get(line) != expected.get(line):
            wrong += 1
            if wrong <= 5:
                print(f"{what}: line {line} is `{found.get(line)}`, expected `{expected.get(line)}`", file=sys.stderr)
    return wrong


def inspected(folder, output):
    rows, planted = load(folder)
    lines = [json.loads(line) for line in open(output)]
    good_lines = {int(row["id"].rsplit(":", 1)[1]): "good" for row in lines if "id" in row}
    # `inspect` shows a row that is too long, with a warning.
    shown = {line: "good" for line in range(1, rows + 1) if planted.get(line, "too long") == "too long"}
    return compare("inspect", good_lines, shown), len(good_lines)


def trained(folder, output_dir):
    rows, planted = load(folder)
    expected = {line: KINDS[kind][0] for line, kind in planted.items()}
    listed = [json.loads(line) for line in open(output_dir / "rejects.jsonl")]
    wrong = compare("rejects.jsonl", {row["row"]: row["reason"] for row in listed}, expected)
    wrong += compare("rejects.jsonl", {"rows": len(listed)}, {"rows": len(planted)})
    steps = [json.loads(line) for line in open(output_dir / "metrics.jsonl")]
    last = steps[-1]
    samples = sum(step["num_samples"] for step in steps)
    wrong += compare("metrics.jsonl", {"samples": samples}, {"samples": rows - len(planted)})
    wrong += compare("metrics.jsonl", {"rejected": last["rejected"]}, {"rejected": len(planted)})
    by_reason = dict(collections.Counter(expected.values()))
    wrong += compare("metrics.jsonl, rejected_by_reason", last.get("rejected_by_reason", {}), by_reason)
    return wrong, samples


def measured(folder, output):
    rows, planted = load(folder)
    by_reason = dict(collections.Counter(KINDS[kind][0] for kind in planted.values() if kind not in PIXELS))
    summary = json.loads(open(output).read().splitlines()[-1])
    wrong = compare("cache, rejected", summary["rejected"], by_reason)
    wrong += compare("cache", {"usable": summary["usable"]}, {"usable": rows - sum(by_reason.values())})
    return wrong, summary["usable"]


def main():
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "write":
        write(folder, int(sys.argv[3]), sys.argv[4])
        print(f"{len(KINDS)} kinds")
        return 0
    wrong, count = {"inspected": inspected, "trained": trained, "measured": measured}[command](folder, Path(sys.argv[3]))
    print(count)
    return 1 if wrong else 0


sys.exit(main())
