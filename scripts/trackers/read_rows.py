"""Reads the rows of runs with pandas and polars, and compares each value and key with the file.

    pip install pandas polars
    python scripts/trackers/read_rows.py runs/quickstart

Reads `metrics.jsonl`, `eval.jsonl` and, if they exist, `predictions.jsonl` and `samples.jsonl` of each
run. Fails (exit code 1) if a package cannot read a file, or loses a row, a key or a number.
"""

import json
import math
import sys
from pathlib import Path

import pandas
import polars

NAMES = ["metrics.jsonl", "eval.jsonl", "predictions.jsonl", "samples.jsonl"]


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def problems(rows, columns, column):
    """Differences between the rows of a file and the columns of a table."""
    found = []
    keys = {key for row in rows for key in row}
    if keys != set(columns):
        found.append(f"columns {sorted(keys ^ set(columns))} differ")
    for key in keys & set(columns):
        values = column(key)
        if len(values) != len(rows):
            found.append(f"`{key}`: {len(values)} rows of {len(rows)}")
            continue
        for number, (row, value) in enumerate(zip(rows, values), 1):
            expected = row.get(key)
            if is_number(expected) and not math.isclose(expected, value, rel_tol=1e-15):
                found.append(f"`{key}` of row {number}: {value} instead of {expected}")
                break
    return found


def main(runs):
    failed = False
    for path in (run / name for run in runs for name in NAMES):
        if not path.exists():
            continue
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        of_pandas = pandas.read_json(path, lines=True, precise_float=True)
        # All rows have the same keys; a key may be null in the first rows.
        of_polars = polars.read_ndjson(path, infer_schema_length=None)
        for package, columns, column in [
            ("pandas", of_pandas.columns, lambda key: of_pandas[key].tolist()),
            ("polars", of_polars.columns, lambda key: of_polars[key].to_list()),
        ]:
            found = problems(rows, columns, column)
            failed |= bool(found)
            result = "; ".join(found) if found else "equal"
            print(f"{path}: {package}: {len(rows)} rows, {len(columns)} columns: {result}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main([Path(run) for run in sys.argv[1:]]))
