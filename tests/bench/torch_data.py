"""Times the processors of transformers on JSONL rows: rows, tokens and pixels per second on one core.

  python tests/bench/torch_data.py MODEL ROWS.jsonl [--threads 1] [--way auto]

Covers everything from a row's JSON to the model's input tensors: chat template, tokenizer, image
files. `--way` selects the libraries that decode and resize images; `auto` times each way on the
first rows and uses the fastest. Prints one JSON line.
"""
import argparse
import json
import time
from pathlib import Path

import torch
from PIL import Image

WAYS = {  # way: (image processor, what opens the file)
    "torchvision": ("Qwen2VLImageProcessor", "processor"),  # torchvision decodes and resizes
    "pillow+torchvision": ("Qwen2VLImageProcessor", "pillow"),
    "pillow": ("Qwen2VLImageProcessorPil", "pillow"),
}


class Rows:
    """The rows of a file, and the tokenizer and processors that turn them into tensors."""

    def __init__(self, model, rows, way="auto"):
        import transformers

        self.transformers, self.model, self.root = transformers, Path(model), Path(rows).parent
        self.rows = [json.loads(line) for line in open(rows)]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        settings = json.loads((self.model / "preprocessor_config.json").read_text())
        self.settings = {k: v for k, v in settings.items() if k not in ("image_processor_type", "processor_class")}
        self.videos = transformers.AutoVideoProcessor.from_pretrained(model)
        self.header = self.tokenizer("<|im_start|>assistant\n")["input_ids"]
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.choose(next(iter(WAYS)) if way == "auto" else way)
        if way == "auto" and any(isinstance(part, dict) for row in self.rows[:1] for part in row["messages"][0]["content"]):
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            rounds = [{way: self.seconds(way) for way in WAYS} for _ in range(3)]  # alternately: machines are noisy
            torch.set_num_threads(threads)
            self.choose(min(WAYS, key=lambda way: min(times[way] for times in rounds)))

    def choose(self, way):
        """Sets the way of decoding and resizing images."""
        self.way = way
        kind, self.opens = WAYS[way]
        images = getattr(self.transformers, kind)(**self.settings)
        self.processor = self.transformers.Qwen3VLProcessor(images, self.tokenizer, self.videos, chat_template=self.tokenizer.chat_template)

    def seconds(self, way):
        """CPU time of a way on the first rows."""
        self.choose(way)
        begin = time.process_time()
        for row in self.rows[:8]:
            self.tensors(row)
        return time.process_time() - begin

    def tensors(self, row):
        """The model's arguments for a row."""
        text = self.tokenizer.apply_chat_template(row["messages"], tokenize=False)
        parts = [part for message in row["messages"] if isinstance(message["content"], list) for part in message["content"]]
        files = [str(self.root / part["image"]) for part in parts if part["type"] == "image"]
        if not files:
            return self.tokenizer([text], return_tensors="pt")
        images = [Image.open(file) for file in files] if self.opens == "pillow" else files
        return self.processor(text=[text], images=images, return_tensors="pt")

    def labels(self, ids):
        """`ids [T]` inside the assistant's turns, `<|im_end|>` included, and -100 elsewhere."""
        labels, at = torch.full_like(ids, -100), ids.tolist()
        starts = (ids[: 1 - len(self.header)] == self.header[0]).nonzero()[:, 0].tolist()
        for i in starts:
            if at[i : i + len(self.header)] == self.header:
                begin = i + len(self.header)
                end = at.index(self.end, begin) + 1
                labels[begin:end] = ids[begin:end]
        return labels


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("rows")
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--way", default="auto", choices=["auto", *WAYS])
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    rows = Rows(a.model, a.rows, a.way)
    best, cpu = float("inf"), float("inf")
    for _ in range(3):
        begin, cpu_begin, tokens, pixels = time.perf_counter(), time.process_time(), 0, 0
        for row in rows.rows:
            tensors = rows.tensors(row)
            tokens += len(rows.labels(tensors["input_ids"][0]))
            pixels += 256 * len(tensors["pixel_values"]) if "pixel_values" in tensors else 0
        best, cpu = min(best, time.perf_counter() - begin), min(cpu, time.process_time() - cpu_begin)
    print(json.dumps({"way": rows.way if pixels else "text", "rows": len(rows.rows), "tokens": tokens, "pixels": pixels, "rows/s": len(rows.rows) / best,
                      "tokens/s": tokens / best, "MPix/s": pixels / best / 1e6, "tokens/cpu_s": tokens / cpu, "MPix/cpu_s": pixels / cpu / 1e6}))


if __name__ == "__main__":
    main()
