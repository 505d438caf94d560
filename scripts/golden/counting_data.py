"""Writes data/quickstart/counting.txt and counting_test.jsonl: sequences of numbers as words. Needs
only Python.

    python3 scripts/golden/counting_data.py
"""

import json
import random
from pathlib import Path

SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def words(number: int) -> str:
    if number < 20:
        return SMALL[number]
    if number < 100:
        ten = TENS[number // 10 - 2]
        return ten if number % 10 == 0 else f"{ten}-{SMALL[number % 10]}"
    hundred = f"{SMALL[number // 100]} hundred"
    return hundred if number % 100 == 0 else f"{hundred} {words(number % 100)}"


def main() -> None:
    random.seed(0)
    runs = []
    for _ in range(400):
        first = random.randrange(0, 980)
        last = first + random.randrange(6, 20)
        runs.append(", ".join(words(number) for number in range(first, last)) + ".")
    folder = Path(__file__).parents[2] / "data" / "quickstart"
    folder.joinpath("counting.txt").write_text("".join(f"{run}\n" for run in runs[:360]))
    rows = "".join(json.dumps({"text": run}) + "\n" for run in runs[360:])
    folder.joinpath("counting_test.jsonl").write_text(rows)


if __name__ == "__main__":
    main()
