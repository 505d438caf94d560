"""Writes rows of chats: digits of the quickstart in images of one size, and numbers as words.

    rows.py FOLDER WIDTH HEIGHT      (WIDTH 0: text only)

`train.jsonl` has all of them. `eval.jsonl` has 50 rows, half of them with an image unless WIDTH is 0:
digits of other writers, and numbers of the training rows.
"""

import base64
import io
import json
import sys
from pathlib import Path

from PIL import Image

folder, width, height = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "- - twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(n):
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + ("" if n % 10 == 0 else " " + ONES[n % 10])
    return ONES[n // 100] + " hundred" + ("" if n % 100 == 0 else " and " + words(n % 100))


def chat(question, answer, image=None):
    parts = [{"type": "image", "image": image}] if image else []
    user = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def digits(name, count):
    """Rows of the quickstart with their images as files of the other size."""
    for k, line in enumerate(open(f"data/quickstart/{name}.jsonl").readlines()[:count]):
        user, assistant = json.loads(line)["messages"]
        uri = user["content"][0]["image"]
        image = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
        path = (folder / f"{name}-{k}.png").resolve()
        image.convert("RGB").resize((width, height)).save(path)
        yield chat("What digit is this?", assistant["content"], str(path))


numbers = [chat(f"Write {n} in words.", words(n)) for n in range(200)]
train = [*numbers * 6, *(digits("digits_train", 1500) if width else numbers * 6)]
test = [*(digits("digits_test", 25) if width else numbers[3::8]), *numbers[::8]]
for name, rows in [("train", train), ("eval", test)]:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
