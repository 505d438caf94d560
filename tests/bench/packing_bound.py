"""Computes an upper bound on the packing efficiency that any packer can reach.

  python tests/bench/packing_bound.py [--mean 3450] [--spread 0.3] [--length 8192] [--round 16]

Lengths are drawn log-normally, as in the tests of the packer, and rounded to multiples of
`--round`. A linear program over all pack layouts, each used a fractional number of times, needs no
more packs than any packer. It is solved by column generation: a knapsack over the dual prices finds
the next layout. With lengths rounded down, its packing efficiency is an upper bound; with lengths
rounded up, fractional packs reach it. Needs numpy and scipy. Prints one JSON line per rounding.
"""
import argparse, json, math, random
from collections import Counter

import numpy as np
from scipy.optimize import linprog


def best_pattern(sizes, prices, room):
    """Returns how often each size occurs in the most valuable pack, and the value of that pack."""
    values, last = [0.0] * (room + 1), [None] * (room + 1)
    for filled in range(1, room + 1):
        values[filled] = values[filled - 1]
        for index, size in enumerate(sizes):
            if size <= filled and values[filled - size] + prices[index] > values[filled] + 1e-12:
                values[filled], last[filled] = values[filled - size] + prices[index], index
    pattern = np.zeros(len(sizes))
    filled = room
    while filled > 0:
        if last[filled] is None:
            filled -= 1
        else:
            pattern[last[filled]] += 1
            filled -= sizes[last[filled]]
    return pattern, values[room]


def packs_needed(lengths, room):
    counts = Counter(lengths)
    sizes = sorted(counts)
    demand = np.array([counts[size] for size in sizes], float)
    patterns = [np.eye(len(sizes))[i] * (room // size) for i, size in enumerate(sizes)]
    while True:
        solved = linprog(np.ones(len(patterns)), A_ub=-np.array(patterns).T, b_ub=-demand, method="highs")
        pattern, value = best_pattern(sizes, -solved.ineqlin.marginals, room)
        if value < 1 + 1e-6:
            return solved.fun
        patterns.append(pattern)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(mean=3450.0, spread=0.3, length=8192, round=16, rows=40000, seed=1).items():
        parser.add_argument("--" + name, type=type(default), default=default)
    a = parser.parse_args()
    rng = random.Random(a.seed)
    middle = math.log(a.mean) - a.spread**2 / 2
    lengths = [min(a.length, max(16, int(math.exp(rng.gauss(middle, a.spread))))) for _ in range(a.rows)]
    for way, rounded in [("down", lambda n: max(1, n // a.round)), ("up", lambda n: -(-n // a.round))]:
        packs = packs_needed([rounded(n) for n in lengths], a.length // a.round)
        print(json.dumps({"rounded": way, "packs": round(packs, 1), "fill": round(sum(lengths) / (packs * a.length), 4)}), flush=True)


if __name__ == "__main__":
    main()
