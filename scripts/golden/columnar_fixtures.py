"""Writes tests/fixtures/columnar: the same rows as a Parquet file, an Arrow IPC file and an Arrow stream, with lists,
structs, a map, a dictionary, nulls and binary data. Tests and `scripts/reliability/columnar.py` damage them.

  python scripts/golden/columnar_fixtures.py
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

OUT = Path("tests/fixtures/columnar")
ROWS = 6


def table():
    turns = [
        [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"Answer {i} " * (i + 1)}]
        for i in range(ROWS)
    ]
    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    return pa.table({
        "messages": pa.array(turns, pa.list_(turn)),
        "source": pa.array([("a", "b", None)[i % 3] for i in range(ROWS)]).dictionary_encode(),
        "extra": pa.array([[("k", i)] for i in range(ROWS)], pa.map_(pa.string(), pa.int64())),
        "score": pa.array([None if i == 2 else i / 3 for i in range(ROWS)], pa.float32()),
        "data": pa.array([bytes(range(i)) for i in range(ROWS)], pa.binary()),
    })


def main():
    OUT.mkdir(exist_ok=True)
    rows = table()
    pq.write_table(rows, OUT / "rows.parquet", compression="zstd", write_page_index=True, row_group_size=4)
    for name, make, options in [
        ("rows.arrow", pa.ipc.new_file, pa.ipc.IpcWriteOptions(compression="lz4")),
        ("stream.arrow", pa.ipc.new_stream, pa.ipc.IpcWriteOptions()),
    ]:
        with make(str(OUT / name), rows.schema, options=options) as writer:
            writer.write_table(rows, max_chunksize=4)


if __name__ == "__main__":
    main()
