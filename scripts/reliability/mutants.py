"""Runs the trainer on mutated rows, images, data files, safetensors headers, chat templates and paths.

    python3 scripts/reliability/mutants.py TRAINER MODEL FOLDER COUNT SEED [WHAT..]

COUNT is the number of mutated rows; the numbers of the others follow from it. No process may panic,
be ended by a signal, take more than 512 MiB or, for each row, image or file, more than 2 seconds.
MUTANTS_SLOW=n multiplies this time on a busy machine.
"""

import copy
import base64
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path

from columnar import columnar
from limited import Starter

MEMORY_MIB = 512
SECONDS = 2 * float(os.environ.get("MUTANTS_SLOW", "1"))
# Mutants of one process.
BATCH = 250
CRASHES = {101, 132, 134, 135, 136, 137, 139}
IMAGES = Path("tests/fixtures/images")


class Runner:
    def __init__(self, trainer, model, folder, seed):
        self.trainer, self.model, self.folder = trainer, model, folder
        self.draw = random.Random(seed)
        self.starter = Starter()
        self.failures = 0
        self.slowest = 0.0
        self.largest = 0

    def inspect(self, path, model=None):
        """Problem of one process, or None. Its output is in `out` and `err`."""
        config = ["--config", "configs/quickstart.yaml", "--set", f"model.path={model or self.model}"]
        config += ["--set", "data.eval=[]", "--set", "data.max_rejected=1.0", "--set", f"data.train=[{{path: {path}}}]"]
        config += ["--set", f"data.cache_dir={self.folder}/cache", "--set", f"output_dir={self.folder}/none"]
        # Shows each row, and decodes its images.
        return self.problem(["inspect", *config, "--num", "0", "--format", "jsonl"])

    def problem(self, arguments):
        command = [self.trainer, *arguments]
        code, took, peak = self.starter.run(SECONDS, command, self.folder / "out", self.folder / "err")
        self.slowest, self.largest = max(self.slowest, took), max(self.largest, peak)
        self.code = code
        if code in CRASHES or b"panicked at" in (self.folder / "err").read_bytes():
            return f"exit code {code}"
        if code in (1, 70):  # 70: the program calls it a bug of its own
            return f"exit code {code}"
        if code == 124:
            return f"more than {SECONDS:g} s"
        if peak > MEMORY_MIB:
            return f"{peak} MiB"
        return None

    def failed(self, what, problem, keep=None):
        self.failures += 1
        if self.failures <= int(os.environ.get("SHOW", "20")):
            print(f"mutants: {what}: {problem}", file=sys.stderr)
            error = [line for line in (self.folder / "err").read_text(errors="replace").splitlines() if "error" in line or "panicked" in line]
            for line in error[:1]:
                print(f"    {ascii(line[:300])[1:-1]}", file=sys.stderr)
            if keep is not None and os.environ.get("KEEP"):
                kept = Path(os.environ["KEEP"])
                kept.mkdir(parents=True, exist_ok=True)
                (kept / f"{self.failures}-{what.replace(' ', '-')[:40]}").write_bytes(keep)

    def rows(self, what, rows, limit=8):
        """Inspects `rows` in batches. Of a batch that fails, the rows that fail alone are reported."""
        path = self.folder / "rows.jsonl"

        def check(part):
            # A row in a known form, so that the file is not refused as a whole.
            path.write_bytes(b"\n".join([GOOD, *part]) + b"\n")
            return self.inspect(path)

        def search(part, problem):
            if len(part) == 1 or self.failures >= 50:
                self.failed(f"{what} {ascii(part[0][:120])}", problem, part[0])
                return True
            found = False
            for half in (part[: len(part) // 2], part[len(part) // 2 :]):
                if not (found and len(part) > 64):
                    halves_problem = check(half)
                    if halves_problem:
                        found |= search(half, halves_problem)
            return found

        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            problem = check(part)
            # A batch may be slow as a whole without a slow row.
            if problem and not search(part, problem) and problem != f"more than {SECONDS:g} s":
                self.failed(f"{what}, rows {start} to {start + len(part)} together", problem)


def chat(text, **more):
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}], **more}


GOOD = json.dumps(chat("hello")).encode()
SEEDS = [
    chat("<image>What?", images=["rgb.png"]),
    chat("Hello", tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]),
    {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "image", "image": "x.png", "max_pixels": 4096}, {"type": "text", "text": "b"}]}, {"role": "assistant", "content": "c", "weight": 0.5, "train": True}]},
    {"conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": "a"}], "image": "x.jpg"},
    {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]], "system": "f"},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>t</think>a", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}, {"role": "tool", "content": "r"}, {"role": "assistant", "content": "z"}]},
    chat("<image>where is <ref-object>? <bbox>", images=["x.png"], objects={"ref": ["a"], "bbox": [[1, 2, 3, 4]], "bbox_type": "real", "image_id": [0]}),
    chat("<video>what?", videos=[["a.png", "b.png", "c.png"]]),
    {"messages": [{"role": "user", "content": [{"type": "video", "video": ["a.png", "b.png"], "fps": 2.0, "video_start": 0.5}]}, {"role": "assistant", "content": "a"}]},
    {"text": "plain text"},
]
ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 1e308, -1e308, 1e-320, 0.5, "", " ", "\0", "\x1b[2J",
    "a" * 5000, "<image>", "<image>" * 100, "<video>", "<bbox>", "<|im_end|>", "<|image_pad|>", "<|im_start|>assistant\n", "\ud800", "\u202e",
    "e\u0301" * 100, [], {}, [[]], [None], {"": ""}, [[[[[[]]]]]], "data:image/png;base64,", "data:,", "file:///etc/passwd", "http://127.0.0.1/",
    "/dev/zero", "/dev/stdin", "/proc/self/mem", "../../etc/passwd", ".", "..", "/", {"bytes": [1, 2]}, {"path": 5}, {"url": {}}, "NaN", "assistant", "system", "tool",
]


def places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def mutate_value(draw, value):
    """Changes the value at one to three places."""
    value = json.loads(json.dumps(value))
    for _ in range(draw.randint(1, 3)):
        path = draw.choice(list(places(value)))
        if not path:
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        key, action = path[-1], draw.randrange(6)
        if action == 0:
            del parent[key]
        elif action == 1:
            parent[key] = copy.deepcopy(draw.choice(ODD))  # later rows draw it unchanged
        elif action == 2:
            parent[key] = [parent[key]] * draw.choice([2, 3, 100])
        elif action == 3:
            parent[key] = {"content": parent[key]}
        elif action == 4 and isinstance(parent, dict):
            parent[draw.choice(["messages", "images", "image", "videos", "objects", "tools", "text", "weight", "content", "role", "x"])] = parent[key]
        elif isinstance(parent[key], str):
            parent[key] = draw.choice([parent[key] * 1000, parent[key][::-1], parent[key] + draw.choice(["\0", "<image>", "\udfff", "}}{{"])])
    return value


def mutate_bytes(draw, content, times=4):
    content = bytearray(content)
    for _ in range(draw.randint(1, times)):
        position, action = draw.randrange(len(content) + 1), draw.randrange(6)
        if action == 0 and position < len(content):
            content[position] ^= 1 << draw.randrange(8)
        elif action == 1 and position < len(content):
            content[position] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
        elif action == 2:
            del content[position : position + draw.choice([1, 2, 8, 100])]
        elif action == 3:
            content[position:position] = draw.choice([b"\0", b'"', b"[" * 50, b"{" * 50, b"\xff\xfe", b"1e999", b"\\u0000", b"\\ud800", draw.randbytes(8)])
        elif action == 4:
            other = draw.randrange(len(content) + 1)
            content[position:position] = content[min(position, other) : max(position, other)][:200]
        else:
            content = content[: max(1, position)]
    return bytes(content)


def mutated_rows(draw, count):
    rows = [
        b"[" * 100_000, b'{"messages":' * 20_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b"[" * 100_000 + b"]" * 100_000,
        b'{"messages": ' + b"9" * 100_000 + b"}", b'"' + b"\\u0000" * 10_000 + b'"', b"\xef\xbb\xbf{}", b"{" + b'"a":1,' * 20_000 + b'"b":1}',
        json.dumps(chat("a" * 300_000)).encode(), json.dumps(chat("word " * 60_000)).encode(), json.dumps(chat("<image>" * 10_000)).encode(),
        json.dumps({"messages": [{"role": r, "content": "x"} for _ in range(1000) for r in ("user", "assistant")]}).encode(),
        json.dumps(chat("a\u0300" * 50_000)).encode(), json.dumps(chat("<image>" * 3, images=["data:image/png;base64," + "A" * 100_000] * 3)).encode(),
    ]
    while len(rows) < count:
        value = draw.choice(SEEDS)
        if draw.random() < 0.6:
            try:
                row = json.dumps(mutate_value(draw, value)).encode()
            except (TypeError, KeyError, IndexError):
                continue
        else:
            row = mutate_bytes(draw, json.dumps(value).encode())
        rows.append(row.replace(b"\n", b" ").replace(b"\r", b" ") or b"{}")
    return rows


def rows(runner, count):
    runner.rows("row", mutated_rows(runner.draw, count))
    # Each alone: as much text, and as many numbers or objects, as memory would have to be a multiple of.
    size = 100_000_000
    for what, unit in [("text", b"a"), ("numbers", b"0,"), ("objects", b'{"a":1},')]:
        body = unit * (size // len(unit))
        large = json.dumps(chat(body.decode())).encode() if what == "text" else GOOD[:-1] + b',"x":[' + body + b"0]}"
        runner.rows(f"row of 100 MB of {what}", [large])
    # In the largest row that is parsed.
    runner.rows("row of many objects", [GOOD[:-1] + b',"x":[' + b'{"a":1},' * 220_000 + b"0]}"])
    return count + 4


def chunk(kind, data, length=None, checksum=None):
    length = len(data) if length is None else length
    checksum = zlib.crc32(kind + data) if checksum is None else checksum
    return struct.pack(">I", length & 0xFFFFFFFF) + kind + data + struct.pack(">I", checksum)


SIDES = [0, 1, 2, 3, 7, 28, 32, 255, 256, 1000, 4096, 16384, 16385, 32768, 65535, 65536, 2**20, 2**28, 2**31 - 1, 2**31, 2**32 - 1]


def bomb(size):
    """`size` zero bytes, compressed."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()


BOMB = bomb(1 << 30)


def mutated_png(draw):
    width, height = draw.choice(SIDES), draw.choice(SIDES)
    depth, colour = draw.choice([1, 2, 4, 8, 16, 0, 3, 255]), draw.choice([0, 2, 3, 4, 6, 1, 5, 7])
    header = struct.pack(">IIBBBBB", width, height, depth, colour, draw.choice([0, 0, 0, 1, 255]), draw.choice([0, 0, 0, 1]), draw.choice([0, 0, 1, 2]))
    parts = [chunk(b"IHDR", header)]
    kinds = [b"PLTE", b"tRNS", b"gAMA", b"iCCP", b"zTXt", b"iTXt", b"tEXt", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"sRGB", b"cICP", b"IEND", b"IHDR", b"xxxx"]
    for _ in range(draw.randint(0, 3)):
        kind = draw.choice(kinds)
        data = draw.choice([b"", draw.randbytes(draw.choice([1, 3, 6, 26, 256, 768, 769])), b"x\0\0" + zlib.compress(b"p" * 500)])
        if draw.random() < 0.02:
            data = {b"iCCP": b"x\0\0", b"zTXt": b"x\0\0", b"iTXt": b"x\0\1\0\0\0"}.get(kind, b"") + BOMB
        if kind == b"acTL":
            data = struct.pack(">II", draw.choice([0, 1, 2**31, 2**32 - 1]), 0)
        if kind == b"fcTL":
            data = struct.pack(">IIIIIHHBB", 0, draw.choice(SIDES), draw.choice(SIDES), draw.choice(SIDES), 0, 1, 1, draw.randrange(4), draw.randrange(3))
        parts.append(chunk(kind, data, draw.choice([None, None, None, None, 0, 2**31, 2**32 - 1, len(data) + 1]), draw.choice([None, None, None, 0])))
    pixels = zlib.compress(draw.choice([b"", bytes(100), bytes(100_000), draw.randbytes(5000)]))
    if draw.random() < 0.02:
        pixels = BOMB
    parts.append(chunk(b"IDAT", pixels))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


def mutated_jpeg(draw, content):
    """Changes a segment of a JPEG file: its length, its size, or its tables."""
    content = bytearray(content)
    markers = [i for i in range(len(content) - 9) if content[i] == 0xFF and content[i + 1] in {0xC0, 0xC2, 0xC4, 0xDB, 0xDA, 0xDD, 0xE0, 0xE1, 0xE2, 0xEE}]
    for _ in range(draw.randint(1, 3)):
        at = draw.choice(markers)
        action = draw.randrange(4)
        if action == 0:
            content[at + 2 : at + 4] = struct.pack(">H", draw.choice([0, 1, 2, 3, 8, 65535, draw.randrange(65536)]))
        elif action == 1 and content[at + 1] in (0xC0, 0xC2):
            content[at + 5 : at + 9] = struct.pack(">HH", draw.choice([0, 1, 8, 1000, 16384, 65535]), draw.choice([0, 1, 8, 1000, 16384, 65535]))
        elif action == 2:
            content[at + 4 + draw.randrange(5)] = draw.randrange(256)
        else:
            content[at + 1] = draw.choice([0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xD8, 0xD9, 0xDA, 0xFE, 0x01])
    return bytes(content)


def images(runner, count):
    draw, folder = runner.draw, runner.folder / "images"
    seeds = [path.read_bytes() for path in sorted(IMAGES.iterdir()) if path.is_file()]
    jpegs = [content for content in seeds if content.startswith(b"\xff\xd8")]
    fixed = [
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)) + chunk(b"iCCP", b"x\0\0" + BOMB) + chunk(b"IDAT", zlib.compress(bytes(64 * 193))) + chunk(b"IEND", b""),
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 16384, 16384, 16, 6, 0, 0, 0)) + chunk(b"IDAT", BOMB * 2) + chunk(b"IEND", b""),
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 16384, 8192, 8, 2, 0, 0, 0)) + chunk(b"IDAT", BOMB) + chunk(b"IEND", b""),
    ]
    for start in range(0, count, BATCH):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        rows = []
        for i in range(min(BATCH, count - start)):
            kind = draw.random()
            if start + i < len(fixed):
                content = fixed[start + i]
            elif kind < 0.4:
                content = mutated_png(draw)
            elif kind < 0.6:
                content = mutated_jpeg(draw, draw.choice(jpegs))
            else:
                content = mutate_bytes(draw, draw.choice(seeds))
            (folder / f"{i}.png").write_bytes(content)
            rows.append(json.dumps(chat("<image>What?", images=[f"images/{i}.png"])).encode())
        runner.rows(f"image of batch {start // BATCH}", rows)


def headers(runner, count):
    """Mutates the header of the model's weights; each header needs a process."""
    draw, model = runner.draw, runner.folder / "model"
    shutil.copytree(runner.model, model, dirs_exist_ok=True)
    weights = (runner.model / "model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")
    header, values = json.loads(weights[8 : 8 + length]), weights[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    numbers = [0, 1, -1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1, 2**64, 1e30, 0.5, None, "1", [], len(values), len(values) + 1]
    out = runner.folder / "exported"
    for i in range(count):
        action = draw.randrange(7)
        text, size = json.dumps(header).encode(), None
        if action < 4:
            new = json.loads(text)
            for _ in range(draw.randint(1, 3)):
                entry = new.get(draw.choice(names))
                if not isinstance(entry, dict):
                    continue
                field = draw.choice(["dtype", "shape", "data_offsets", "all"])
                if field == "dtype":
                    entry["dtype"] = draw.choice(["F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "F4", "", None, 5, "X" * 1000])
                elif field == "all":
                    new[draw.choice(names)] = draw.choice([None, [], {}, 1, dict(entry, extra=1), {"dtype": "F32"}])
                else:
                    value = entry.get(field) or [0, 0]
                    value = list(value) if isinstance(value, list) else [0, 0]
                    value[draw.randrange(len(value))] = draw.choice(numbers)
                    entry[field] = draw.choice([value, value, value, value * 500, value[:1]])
            text = json.dumps(new).encode()
        elif action == 4:
            text = mutate_bytes(draw, text)
        elif action == 5:
            size = draw.choice([0, 1, 7, 8, length - 1, length + 1, len(weights), len(weights) * 2, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1])
        else:
            text = draw.choice([b"[" * 1_000_000, b'{"a":' * 100_000, b"{" + b'"a":1,' * 100_000 + b'"b":1}', b'{"__metadata__":{"a":1}}', b'"', b"", b"{}"])
        content = struct.pack("<Q", len(text) if size is None else size) + text + values
        if draw.random() < 0.1:
            content = content[: draw.randrange(len(content))]
        (model / "model.safetensors").write_bytes(content)
        problem = runner.problem(["export", "--model", str(model), "--out", str(out)])
        if problem:
            runner.failed(f"safetensors header {i}", problem, content[:10_000])
        if out.exists():
            shutil.rmtree(out)


def templates(runner, _count):
    subprocess.run([sys.executable, "scripts/reliability/hostile_templates.py", runner.folder / "templates"], check=True)
    model = runner.folder / "model"
    shutil.copytree(runner.model, model, dirs_exist_ok=True)
    turns = [{"role": r, "content": f"Turn {i} Of {r}"} for i in range(4) for r in ("user", "assistant")]
    (runner.folder / "rows.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 60)
    count = 0
    for path in sorted((runner.folder / "templates").iterdir()):
        shutil.copy(path, model / "chat_template.jinja")
        problem = runner.inspect(runner.folder / "rows.jsonl", model)
        # A row that the template does not render as it is may also be rejected.
        accepted = runner.code == 0 and bool((runner.folder / "out").read_bytes().strip())
        if problem is None and accepted != path.name.startswith("ok_"):
            problem = f"exit code {runner.code}, expected {'0' if path.name.startswith('ok_') else '65'}"
        if problem:
            runner.failed(f"template {path.stem}", problem)
        count += 1
    return count


def paths(runner, _count):
    """Paths of images outside of the folder of the rows. The secret is a valid image."""
    secret, folder = runner.folder / "secret", runner.folder / "inside"
    secret.mkdir()
    folder.mkdir()
    image = (IMAGES / "exact_96x64.png").read_bytes()
    for place in (secret / "s.png", runner.folder / "s.png", folder / "ok.png"):
        place.write_bytes(image)
    encoded = base64.b64encode(str(secret / "s.png").encode()).decode()
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "to_file.png").symlink_to(secret / "s.png")
    (folder / "to_relative.png").symlink_to("../s.png")
    (folder / "to_folder").symlink_to(secret)
    (folder / "to_parent").symlink_to("..")
    (folder / "to_link.png").symlink_to("to_file.png")
    (folder / "to_root").symlink_to("/")
    (folder / "to_self.png").symlink_to("to_self.png")
    (folder / "a_loop").symlink_to("b_loop")
    (folder / "b_loop").symlink_to("a_loop")
    (folder / "to_fd.png").symlink_to("/proc/self/fd/0")
    os.mkfifo(folder / "pipe.png")
    s, absolute = "s.png", str(secret / "s.png")
    outside = [
        f"../{s}", f"./../{s}", f"deep/../../{s}", f"deep/er/../../../{s}", f"../secret/{s}", f"..//{s}", f".././{s}", f"../inside/../{s}",
        absolute, f"/{absolute}", f"//{absolute}", absolute.replace("/", "//"), f"{folder}/../{s}", f"{folder}/to_file.png", f"{folder}/to_folder/{s}",
        f"file://{absolute}", f"file:{absolute}", f"FILE://{absolute}", f"file://localhost{absolute}", f"%2e%2e/{s}", f"..%2f{s}", f"..\\{s}",
        "to_file.png", "to_relative.png", f"to_folder/{s}", f"to_parent/{s}", "to_link.png", f"to_root/{absolute}", "to_self.png", "a_loop/s.png",
        "to_fd.png", "pipe.png", f"../{s}\0.png", f"ok.png/../../{s}", f"nothing/../../{s}", f"/proc/self/root{absolute}", f"/proc/self/cwd/{absolute}",
        "/dev/zero", "/dev/stdin", "/etc/passwd", f"~/{s}", f"$HOME/{s}", f"data:text/plain;base64,{encoded}", f"{'../' * 40}{absolute[1:]}", f"\u2025/{s}", f"ok.png\n../{s}",
    ]
    rows = [json.dumps(chat("<image>What?", images=[path])) for path in [*outside, "ok.png"]]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    problem = runner.inspect(folder / "rows.jsonl")
    if problem:
        runner.failed("paths", problem)
    shown = [int(json.loads(line)["id"].rsplit(":", 1)[1]) for line in open(runner.folder / "out") if '"id"' in line]
    for line in shown:
        if line <= len(outside):
            runner.failed("path", f"`{ascii(outside[line - 1])}` was read")
    if len(outside) + 1 not in shown:
        runner.failed("paths", "the image inside of the folder was not read")
    return len(outside) + weights_outside(runner)


def weights_outside(runner):
    """Files of a model that the index of its weights names outside of the folder."""
    model = runner.folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    shutil.copytree(runner.model, model)
    (model / "model.safetensors").rename(runner.folder / "secret" / "w.safetensors")
    raw = (runner.folder / "secret" / "w.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    outside = ["../secret/w.safetensors", str(runner.folder / "secret" / "w.safetensors"), "./../secret/w.safetensors", "x/../../secret/w.safetensors", "", ".", ".."]
    for name in outside:
        index = {"metadata": {}, "weight_map": {tensor: name for tensor in header if tensor != "__metadata__"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        problem = runner.problem(["export", "--model", str(model), "--out", str(runner.folder / "exported")])
        if problem is None and runner.code == 0:
            problem = "was read"
        if problem:
            runner.failed(f"index that names `{name}`", problem)
        shutil.rmtree(runner.folder / "exported", ignore_errors=True)
    return len(outside)


def main():
    trainer, model, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    count, seed, selected = int(sys.argv[4]), sys.argv[5], sys.argv[6:]
    runner = Runner(trainer, model, folder, seed)
    done = []
    kinds = {
        "rows": (rows, count),
        "images": (images, count // 4),
        "columnar": (columnar, int(os.environ.get("COLUMNAR", count // 20))),
        "headers": (headers, int(os.environ.get("HEADERS", count // 10))),
        "templates": (templates, 0),
        "paths": (paths, 0),
    }
    for what, (check, number) in kinds.items():
        if not selected or what in selected:
            runner.draw = random.Random(f"{seed} {what}")
            done.append(f"{check(runner, number) or number} {what}")
    print(f"{', '.join(done)}; slowest process {runner.slowest:.1f} s, largest {runner.largest} MiB, {runner.failures} failures")
    return 1 if runner.failures else 0


if __name__ == "__main__":
    sys.exit(main())
