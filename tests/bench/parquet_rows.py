"""Writes rows with a JPEG image of 64 x 64 pixels in each as a Parquet file, in the form of `datasets`.

parquet_rows.py FILE ROWS [--group ROWS_PER_GROUP] [--no-page-index]

The images are 4,096 different ones in random order. Dictionary encoding of images is off, so that each
row has its own copy. Needs numpy, pillow and pyarrow.
"""

import argparse
import io
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

parser = argparse.ArgumentParser()
parser.add_argument("file")
parser.add_argument("rows", type=int)
parser.add_argument("--group", type=int, default=1000)
parser.add_argument("--no-page-index", action="store_true")
args = parser.parse_args()

draw, pick = np.random.default_rng(1), random.Random(1)
images = []
for _ in range(4096):
    small = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(small).resize((64, 64), Image.Resampling.BICUBIC).save(out, "JPEG", quality=85)
    images.append(out.getvalue())

turn = pa.struct([("role", pa.string()), ("content", pa.string())])
image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
schema = pa.schema([("id", pa.string()), ("messages", pa.list_(turn)), ("images", pa.list_(image))])
words = "the moon a crater of bright dark round small large image shows two lines and one colour".split()
options = dict(compression="snappy", use_dictionary=False, write_page_index=not args.no_page_index)
with pq.ParquetWriter(args.file, schema, **options) as writer:
    for first in range(0, args.rows, args.group):
        rows = []
        for number in range(first, min(first + args.group, args.rows)):
            answer = " ".join(pick.choices(words, k=20))
            messages = [
                {"role": "user", "content": "<image>What does the image show?"},
                {"role": "assistant", "content": f"{number}: {answer}"},
            ]
            images_of_row = [{"bytes": pick.choice(images), "path": None}]
            rows.append({"id": str(number), "messages": messages, "images": images_of_row})
        writer.write_table(pa.Table.from_pylist(rows, schema), row_group_size=args.group)
