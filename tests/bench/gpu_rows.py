"""Writes generated rows, a tokenizer and images for benchmarks of whole steps on a GPU, offline.

  python tests/bench/gpu_rows.py FOLDER [--mixes text,vl,hires] [--rows 1500] [--words 151643]
                                        [--shrink MODEL]

FOLDER/tokenizer    for `trainer init --tokenizer`: each word `0` .. `151642` is one token, followed by
                    the published special tokens with their published ids; the template of the tests
FOLDER/MIX.jsonl    the rows; word frequencies follow Zipf's law
FOLDER/MIX.json     the sizes of the rows, for PyTorch: [tokens, patches down, patches across] per row
FOLDER/images       JPEG files for the mixes with images, which need numpy and Pillow

text   log-normal lengths, median 380, sigma 1.0, 16..8192 tokens
vl     log-normal text, median 200, sigma 1.0, 64..4096; six rows of ten have an image,
       median 1000 tokens, sigma 1.1, 64..4096
hires  an image and a third as much text, together log-normal, median 3400, sigma 0.28, 256..8192
       tokens

Half of the text is supervised. The parameters are fitted to three known length distributions of
training sets: to the share of real tokens when 8 rows are padded to the longest (0.33, 0.34, 0.70),
and when packs of 8,192 are filled in order (0.909, 0.835, 0.774). Prints these two figures for the
written rows, one JSON line per mix.

--shrink replaces the published shape in MODEL/config.json by a tiny one, for a quick test; --words
must be the same in both calls.
"""
import argparse
import bisect
import json
import math
import random
import shutil
from pathlib import Path

SMALL = Path(__file__).resolve().parents[1] / "golden/models/small-tied"
SPECIALS_BEGIN = 2017  # in the tokenizer of the tests; the published order is the same
NUM_IMAGES = 48
TEMPLATE_TOKENS = 6  # <|im_start|> user .. <|im_end|> <|im_start|> assistant .. <|im_end|>
PUBLISHED_WORDS = 151643


def write_tokenizer(folder, words):
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        shutil.copy(SMALL / name, folder / name)
    moved = lambda number: int(number) - SPECIALS_BEGIN + words
    tokenizer = json.loads((SMALL / "tokenizer.json").read_text())
    tokenizer["model"] = {"type": "WordLevel", "vocab": {str(i): i for i in range(words)}, "unk_token": "0"}
    tokenizer |= {"normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None}
    tokenizer["added_tokens"] = [token | {"id": moved(token["id"])} for token in tokenizer["added_tokens"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(moved(number)): token for number, token in config["added_tokens_decoder"].items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    processor = json.loads((SMALL / "preprocessor_config.json").read_text())
    processor["size"] = {"shortest_edge": 65536, "longest_edge": 16777216}  # as published
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def shrink(path, words):
    config = json.loads(path.read_text())
    shift = words - PUBLISHED_WORDS
    for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        config[key] += shift
    for key in ("bos_token_id", "eos_token_id"):
        config["text_config"][key] += shift
    config["text_config"] |= dict(num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
                                  vocab_size=config["text_config"]["vocab_size"] + shift)
    config["vision_config"] |= dict(depth=2, hidden_size=64, num_heads=4, intermediate_size=128, out_hidden_size=64, deepstack_visual_indexes=[0])
    path.write_text(json.dumps(config, indent=2))


def log_normal(rng, median, sigma, low, high):
    return int(min(high, max(low, math.exp(rng.gauss(math.log(median), sigma)))))


def draw(mix, rng):
    """Returns the number of text tokens, the template's included, and of image tokens (or 0)."""
    if mix == "text":
        return log_normal(rng, 380, 1.0, 16, 8192), 0
    if mix == "vl":
        return log_normal(rng, 200, 1.0, 64, 4096), log_normal(rng, 1000, 1.1, 64, 4096) if rng.random() < 0.6 else 0
    tokens = log_normal(rng, 3400, 0.28, 256, 8192)
    return tokens // 4, tokens - tokens // 4


def make_images(folder, rng, mix):
    """Returns [(tokens, name, patches down, patches across)], sorted; a token is 32 x 32 pixels."""
    import numpy as np
    from image_rows import photo

    (folder / "images").mkdir(parents=True, exist_ok=True)
    sizes = []
    while len(sizes) < NUM_IMAGES:
        _, tokens = draw(mix, rng)
        if tokens:
            width = max(2, round(math.sqrt(tokens) * rng.uniform(0.7, 1.4)))
            sizes.append((width, max(2, math.ceil(max(64, tokens) / width))))
    images, pixels = [], np.random.default_rng(0)
    for i, (width, height) in enumerate(sizes):
        name = f"images/{mix}-{i}.jpg"
        photo(pixels, 32 * width, 32 * height).save(folder / name, quality=90)
        images.append((width * height, name, 2 * height, 2 * width))
    return sorted(images)


def write_mix(folder, mix, num_rows, words):
    rng = random.Random(mix)
    images = [] if mix == "text" else make_images(folder, rng, mix)
    most = math.log(words)

    def text(count):
        return " ".join(str(int(math.exp(rng.random() * most)) - 1) for _ in range(max(1, count)))

    sizes = []
    with open(folder / f"{mix}.jsonl", "w") as file:
        for i in range(num_rows):
            num_text, num_image = draw(mix, rng)
            content = max(2, num_text - TEMPLATE_TOKENS)
            question, answer = text(content // 2), text(content - content // 2)
            down = across = num_image_tokens = 0
            if num_image:
                at = min(len(images) - 1, bisect.bisect_left(images, (num_image,)))
                num_image_tokens, name, down, across = images[at]
                question = [{"type": "image", "image": name}, {"type": "text", "text": " " + question}]
                num_image_tokens += 2  # vision_start and vision_end
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"{mix}-{i}", "messages": messages}) + "\n")
            sizes.append([content + TEMPLATE_TOKENS + num_image_tokens, down, across])
    (folder / f"{mix}.json").write_text(json.dumps(sizes))
    lengths = [size[0] for size in sizes]
    padded = sum(8 * max(lengths[at:at + 8]) for at in range(0, len(lengths) // 8 * 8, 8))
    packs, room = 0, 0
    for length in (length for length in lengths if length <= 8192):
        if length > room:
            packs, room = packs + 1, 8192
        room -= length
    fill = sum(length for length in lengths if length <= 8192) / (8192 * packs)
    vision = sum(down * across // 4 for _, down, across in sizes)
    print(json.dumps({"name": f"rows {mix}", "rows": num_rows, "tokens": sum(lengths), "vision_tokens": vision, "longest": max(lengths),
                      "real_of_padded": sum(lengths[:len(lengths) // 8 * 8]) / padded, "in_order_fill": fill}))


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("folder", type=Path)
    ap.add_argument("--mixes", default="text,vl,hires")
    ap.add_argument("--rows", type=int, default=1500)
    ap.add_argument("--words", type=int, default=PUBLISHED_WORDS)
    ap.add_argument("--shrink", type=Path)
    a = ap.parse_args()
    if a.shrink:
        return shrink(a.shrink / "config.json", a.words)
    write_tokenizer(a.folder / "tokenizer", a.words)
    for mix in a.mixes.split(","):
        write_mix(a.folder, mix, a.rows, a.words)


if __name__ == "__main__":
    main()
