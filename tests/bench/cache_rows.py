"""Writes seeded rows, images and a model folder for the benchmark of the length cache.

  python tests/bench/cache_rows.py FOLDER [--rows 1000000] [--files 20000] [--headers] [--tokenizer tokenizer.json]

FOLDER/model        config, tokenizer and processor files of a small model, without weights;
                    `--tokenizer` replaces the tests' tokenizer by a published one of 151,936 entries
FOLDER/images/      `--files` files: JPEG with EXIF, and every fourth one a PNG; smooth colours, sides
                    of 200..2000 pixels. 400 are different and the others are copies. With
                    `--headers` the copies have headers but sparse pixel data, so that a million of
                    them take 9 GB
FOLDER/images.jsonl one image per row, a question and an answer of about 25 tokens; each file is used
                    by rows / files rows
FOLDER/text.jsonl   chats without images, about 300 tokens with the published tokenizer
Existing files are not written again.
"""
import argparse
import functools
import json
import random
import shutil
from pathlib import Path

from PIL import Image

SMALL = Path("tests/golden/models/small-tied")
COPIED = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"]
WORDS = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were her all she there would their we him been has when who will more no if out so said what up its about into than them can
only other new some could time these two may then do first any my now such like our over man me even most made after also did many
before must through back years where much your way well down should because each just those people how too little state good very
make world still own see men work long get here between both life being under never day same another know while last might us great
old year off come since against go came right used take three photograph shows bright colour kitchen window mountain river bicycle
answer question describe measure between distance seventeen approximately information development environment particularly""".split()


def make_model(folder, tokenizer):
    folder.mkdir(parents=True)
    config = json.loads((SMALL / "config.json").read_text())
    for name in COPIED:
        shutil.copy(SMALL / name, folder / name)
    if tokenizer:
        shutil.copy(tokenizer, folder / "tokenizer.json")
        added = {token["content"]: token["id"] for token in json.loads(Path(tokenizer).read_text())["added_tokens"]}
        for key, token in {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}.items():
            config[f"{key}_token_id"] = added[token]
        config["text_config"]["vocab_size"] = 151936
        config["text_config"]["bos_token_id"] = added["<|endoftext|>"]
        config["text_config"]["eos_token_id"] = added["<|im_end|>"]
    else:
        shutil.copy(SMALL / "generation_config.json", folder / "generation_config.json")
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def headers(image):
    """Yields (offset, bytes) of the parts with size and orientation: the first 4 KiB, and for a PNG
    the start of each chunk and the last chunk."""
    yield 0, image[:4096]
    if image.startswith(b"\x89PNG"):
        at = 8
        while at < len(image):
            yield at, image[at : at + 8]
            at += 12 + int.from_bytes(image[at : at + 4])
        yield len(image) - 12, image[-12:]


@functools.cache
def kept_of(original):
    image = original.read_bytes()
    return len(image), list(headers(image))


def copy_headers(original, copy):
    size, kept = kept_of(original)
    with open(copy, "wb") as out:
        for offset, part in kept:
            out.seek(offset)
            out.write(part)
        out.truncate(size)


def make_images(folder, files, copy, rng):
    originals = []
    for index in range(min(files, 400)):
        small = Image.new("RGB", (4, 4))
        small.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(16)])
        image = small.resize((rng.randint(200, 2000), rng.randint(200, 2000)), Image.BICUBIC)
        name = folder / "originals" / f"{index}.{'png' if index % 4 == 3 else 'jpg'}"
        name.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        exif[0x0112], exif[0x010F], exif[0x0131] = rng.choice([1, 1, 1, 6]), "Maker " * 20, "Software " * 40
        image.save(name, quality=75, exif=exif) if name.suffix == ".jpg" else image.save(name)
        originals.append(name)
    names = []
    for index in range(files):
        original = originals[index % len(originals)]
        name = f"{index // 1000:03d}/{index:06d}{original.suffix}"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy(original, folder / name)
        names.append(name)
    return names


def sentences(rng, count, words):
    weights = [1 / (rank + 3) for rank in range(len(WORDS))]
    return [" ".join(rng.choices(WORDS, weights, k=words)).capitalize() + "." for _ in range(count)]


def write(path, rows):
    with open(path, "w") as out:
        for row in rows:
            out.write(row + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--headers", action="store_true")
    parser.add_argument("--tokenizer", type=Path)
    a = parser.parse_args()
    rng = random.Random(0)
    if not (a.folder / "model").exists():
        make_model(a.folder / "model", a.tokenizer)
    if not (a.folder / "images.jsonl").exists():
        names = make_images(a.folder / "images", a.files, copy_headers if a.headers else shutil.copyfile, rng)
        short = sentences(rng, 4000, 12)
        chat = lambda i: json.dumps({"id": i, "messages": [{"role": "user", "content": "<image>" + rng.choice(short)}, {"role": "assistant", "content": rng.choice(short)}],
                                     "images": [names[i % len(names)]]})
        write(a.folder / "images.jsonl", map(chat, range(a.rows)))
    if not (a.folder / "text.jsonl").exists():
        long = sentences(rng, 4000, 32)
        turn = lambda: " ".join(rng.choices(long, k=4))
        chat = lambda i: json.dumps({"id": i, "messages": [{"role": "user", "content": turn()}, {"role": "assistant", "content": turn()}]})
        write(a.folder / "text.jsonl", map(chat, range(a.rows)))


if __name__ == "__main__":
    main()
