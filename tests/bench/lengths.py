"""Writes chats with given token counts for benchmarks:

  python tests/bench/lengths.py --distribution NAME --rows N --out FILE

A digit is one token in the published tokenizer and in those of the tests, so a chat of n tokens has n
digits less the tokens of the template (`--template-tokens`: 12 with the tests' tokenizer, 10 with the
published one; compare with the tokens that `trainer bench --step` prints). Half of the digits are the
question, half the supervised answer.

log-normal  exp(N(log median, sigma)), clamped to min..max
mix         nine short rows (min..4 min) for each long one (max/2..max)
fixed       `--median` tokens in every row

Prints one JSON line: the number of rows and tokens, the longest row, and the number of tokens if
batches of `--batch-size` rows in this order are padded to their longest row.
"""
import argparse, json, math, random


def draw(a, rng):
    if a.distribution == "fixed":
        return a.median
    if a.distribution == "mix":
        low, high = (a.min_len, 4 * a.min_len) if rng.random() < 0.9 else (a.max_len // 2, a.max_len)
        return rng.randint(low, high)
    return int(min(a.max_len, max(a.min_len, math.exp(rng.gauss(math.log(a.median), a.sigma)))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distribution", choices=["log-normal", "mix", "fixed"], required=True)
    parser.add_argument("--out", required=True)
    for name, default in dict(rows=64, median=256, min_len=64, max_len=1024, batch_size=8, seed=0, template_tokens=12).items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default)
    parser.add_argument("--sigma", type=float, default=0.7)
    a = parser.parse_args()
    rng = random.Random(a.seed)
    lengths = [draw(a, rng) for _ in range(a.rows)]
    with open(a.out, "w") as rows:
        for i, n in enumerate(lengths):
            digits = "".join(rng.choice("0123456789") for _ in range(max(2, n - a.template_tokens)))
            half = len(digits) // 2
            messages = [{"role": "user", "content": digits[:half]}, {"role": "assistant", "content": digits[half:]}]
            rows.write(json.dumps({"id": str(i), "messages": messages}) + "\n")
    batches = [lengths[at:at + a.batch_size] for at in range(0, len(lengths), a.batch_size)]
    padded = sum(len(batch) * max(batch) for batch in batches)
    print(json.dumps({"rows": len(lengths), "tokens": sum(lengths), "longest": max(lengths), "padded_tokens": padded, "batches": len(batches)}))


if __name__ == "__main__":
    main()
