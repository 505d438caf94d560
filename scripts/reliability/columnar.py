"""Mutants of Parquet and Arrow files for `mutants.py`. Each file needs a process, which must read its
rows or refuse the file (exit code 65)."""

from pathlib import Path

SEEDS = Path("tests/fixtures/columnar")
# Lengths and counts that a reader may believe.
NUMBERS = [0, 1, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def mutant(draw, content):
    """One changed byte, a changed number of 4 or 8 bytes, a cut, or a part in another place."""
    content = bytearray(content)
    action, at = draw.randrange(5), draw.randrange(len(content))
    if action < 2:
        content[at] = draw.choice([content[at] ^ 1 << draw.randrange(8), 0, 0x7F, 0x80, 0xFF, draw.randrange(256)])
    elif action == 2:
        size = draw.choice([4, 8])
        content[at : at + size] = (draw.choice(NUMBERS) % 2 ** (8 * size)).to_bytes(size, "little")
    elif action == 3:
        del content[at : at + draw.choice([1, 2, 4, 8, 64, len(content)])]
    else:
        other = draw.randrange(len(content))
        content[at : at + 32] = content[other : other + 32]
    return bytes(content)


def deep_schema(levels):
    """A Parquet file whose schema is groups inside of each other."""
    number = levels + 1
    elements = b"".join(b"\x48\x01g\x15\x02\x00" for _ in range(levels)) + b"\x15\x02\x35\x04\x18\x01l\x00"
    count = bytes([number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14])
    footer = b"\x15\x02\x19\xfc" + count + elements + b"\x16\x00\x19\x0c\x00"
    return b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def columnar(runner, count):
    """`count` mutants of each of the files."""
    seeds = sorted(SEEDS.iterdir())
    fixed = [("deep.parquet", deep_schema(levels)) for levels in (100, 129, 5000, 100_000)]
    mutants = [(path.name, mutant(runner.draw, path.read_bytes())) for path in seeds for _ in range(count)]
    for name, content in fixed + mutants:
        path = runner.folder / name
        path.write_bytes(content)
        problem = runner.inspect(path)
        if problem is None and runner.code not in (0, 65):
            problem = f"exit code {runner.code}"
        if problem:
            runner.failed(f"mutant of {name}", problem, content)
        path.unlink()
    return len(fixed) + len(mutants)
