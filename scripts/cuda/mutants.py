#!/usr/bin/env python3
"""Plants errors in the PTX of the kernels, one at a time, and counts how many the tests of the ops find that
execute it (crates/ptx). Prints each one that is not found.

    python3 scripts/cuda/mutants.py TESTS PTX {8.0|9.0} [--each N] [--seed N] [--seconds N] [--most N] [--only KERNEL] [--counts FILE] [--unused N]

TESTS is the program of their unit tests (scripts/test_program.sh kernels cuda-emulation), PTX the folder of
scripts/cuda/ptx.sh. `--each` errors of each kind are planted in each kernel (1), at random places
that a test executes.
`--counts` is the file TRAINER_PTX_COUNTS of a run of all tests; without it, they run first. The tests of a kernel
run in the order of their time, until they have taken `--seconds` (120) without errors: the short ones do not compare
the results of all tiles.

Two fences in a row are deleted together: each alone makes a barrier visible to copies (CUTLASS has only
fence.mbarrier_init after an init, and the CUDA guide only fence.proxy.async).
"""
import argparse, collections, hashlib, os, pathlib, random, re, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor

# An instruction that orders accesses or counts bytes: deleted.
ORDER = re.compile(r"\b(bar\.sync|bar\.warp\.sync|bar\.arrive|mbarrier\.arrive|mbarrier\.init|cp\.async\.wait_group|cp\.async\.commit_group|wgmma\.fence"
                   r"|wgmma\.wait_group|wgmma\.commit_group|fence\.)")
SHARED = re.compile(r"\b(ld|st)\.shared(\S*)(\s.*?)\[(%r\d+)((?:\+-?\d+)?)\]")
GLOBAL = re.compile(r"\b(ld|st)\.global(?:\.nc|\.wb)*(\S*\s.*?\[%rd)")
ROOT = pathlib.Path(__file__).resolve().parents[2]
ADDRESS = re.compile(r"\b(?:ld|st)\.(?:shared|global)\S*\s.*?\[(%\w+)(?:\+(-?\d+))?\]")
WIDTH = {"8": 1, "16": 2, "32": 4, "64": 8}


def width(line):
    """Bytes of an access of one thread."""
    vector = re.search(r"\.v([24])\b", line)
    return int(vector.group(1) if vector else 1) * WIDTH[re.search(r"\.[bfsu](8|16|32|64)\b", line).group(1)]


def mutants(line, after=""):
    """Names and texts of what can become of a line; `after` is the next one."""
    order = ORDER.search(line)
    if order and order.group(1) == "fence." and after.startswith("fence."):
        yield "delete fence.", f"//{line}\n//{after}"
    elif order and order.group(1) != "fence.":
        yield "delete " + order.group(1), "//" + line
    if "ld.acquire" in line or "red.release" in line:
        yield "no order between blocks", line.replace(".acquire.", ".relaxed.").replace(".release.", ".relaxed.")
    if "wait_group" in line:
        yield "wait for one group less", re.sub(r"(\d+);", lambda n: f"{int(n.group(1)) + 1};", line)
    waited = re.search(r"mbarrier\.try_wait\S* (\S+), ", line)
    if waited:
        yield "do not wait for a phase", f"setp.eq.u32 {waited.group(1)}, 0, 0;"
    threads = re.search(r"\bbar\.(?:sync|arrive)\s+%r\d+, (\d+);", line)
    if threads:
        start, end = threads.span(1)
        yield "barrier of one warp less", f"{line[:start]}{int(threads.group(1)) - 32}{line[end:]}"
    arrivals = re.search(r"mbarrier\.init\S* \[%r\d+\], (%r\d+);", line)
    if arrivals:
        register = arrivals.group(1)
        yield "one arrival more", f"{{ .reg .b32 more; add.s32 more, {register}, 1; {line.replace(f', {register};', ', more;')} }}"
    if "setmaxnreg.inc" in line:
        yield "registers that are taken", re.sub(r"(\d+);", lambda n: f"{int(n.group(1)) + 8};", line)
    expected = re.search(r"expect_tx.*, (%r\d+);", line)
    if expected:
        register = expected.group(1)
        yield "expect 16 bytes more", f"{{ .reg .b32 more; add.s32 more, {register}, 16; {line.replace(f', {register};', ', more;')} }}"
    if SHARED.search(line):
        # As an intrinsic for global memory does with a pointer to shared memory.
        access = SHARED.sub(r"\1.global\2\3[generic\5]", line)
        yield "shared memory through an instruction for global memory", f"{{ .reg .b64 generic; cvt.u64.u32 generic, {SHARED.search(line).group(4)}; {access} }}"
    if GLOBAL.search(line):
        yield "global memory through an instruction for shared memory", GLOBAL.sub(r"\1.shared\2", line)
    address = ADDRESS.search(line)
    if address:
        start, end = address.span(1)[0], address.end() - 1
        yield "address of the neighbour", f"{line[:start]}{address.group(1)}+{int(address.group(2) or 0) + width(line)}{line[end:]}"
    if "wgmma.mma_async" in line:
        yield "transpose of a product", re.sub(r"([01]);", lambda n: f"{1 - int(n.group(1))};", line)
    if "ldmatrix" in line:
        yield "transpose of a matrix", line.replace(".trans", "") if ".trans" in line else line.replace(".shared", ".trans.shared", 1)
    if re.search(r"\bxor\.b32\b.*, (16|32|64|112);", line):
        yield "swizzle", re.sub(r", (\d+);", lambda n: f", {int(n.group(1)) ^ 16};", line)


def launches(test):
    """Whether a test launches kernels itself, to compare them with the ops on the CPU."""
    return test.startswith("cuda::")


class Tests:
    """The tests of the ops, and which of them execute a line of a kernel."""

    def __init__(self, program, ptx, capability, counts):
        self.program, self.capability = program, capability
        if not counts.exists():
            new = counts.with_suffix(".new")
            new.unlink(missing_ok=True)
            for tests in ["--skip", "cuda::"], ["cuda::"]:
                result = self.run(ptx, tests, counts=new, timeout=3600)
                if result is None or result.returncode:
                    sys.exit(f"the tests fail without an error in a kernel:\n{result.stdout[-2000:] if result else 'no end'}")
            new.rename(counts)
        self.times, self.of = collections.Counter(), collections.defaultdict(set)
        for row in counts.read_text().splitlines():
            test, kernel, _, _, _, _, time, *_, lines = row.split("\t")
            self.times[test] += int(time)
            if test != "-":
                for line in lines.split(",")[:-1]:
                    self.of[kernel, int(line)].add(test)

    def run(self, ptx, arguments, counts=None, timeout=None):
        """Runs tests with the PTX of a folder."""
        variables = dict(os.environ, TRAINER_PTX=str(ptx), TRAINER_EMULATE_CUDA=f"ptx:{self.capability}", RAYON_NUM_THREADS="1")
        if counts:
            variables["TRAINER_PTX_COUNTS"] = str(counts)
        with tempfile.TemporaryDirectory() as folder:
            if launches(arguments[0]):
                # These tests take the kernels of 9.0, so those of 8.0 get the name of their folder.
                del variables["TRAINER_EMULATE_CUDA"]
                for name, target in ("90", "80" if self.capability == "8.0" else "90"), ("90a", "90a"):
                    pathlib.Path(folder, name).symlink_to(pathlib.Path(ptx, target).resolve())
                variables["TRAINER_PTX"] = folder
            try:
                return subprocess.run([self.program, *arguments], env=variables, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
            except subprocess.TimeoutExpired:
                return None

    def find(self, place, ptx, seconds):
        """The first test that fails, and why; None if all pass."""
        kernel, _ = place
        for number, test in enumerate(sorted(self.of[place], key=self.times.__getitem__)):
            seconds -= self.times[test] / 1e6
            if number and seconds < 0:
                break
            result = self.run(ptx, [test, "--exact", "--test-threads", "1"], timeout=60 + 10 * self.times[test] / 1e6)
            if result is None:
                return test, "it does not end"
            if result.returncode == 0 and " 1 passed" not in result.stdout:
                sys.exit(f"the program has no test `{test}`; was `--counts` written by another one?")
            if result.returncode:
                text = result.stdout + result.stderr
                if re.search(r"line \d+ of the PTX", text):
                    sys.exit(f"the PTX with an error cannot be parsed:\n{text[-2000:]}")
                why = re.search(rf"{kernel}[,:].*", text) or re.search(r"panicked at .*\n.*", text)
                return test, (why.group(0) if why else "it fails").replace("\n", " ")
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", type=os.path.abspath)
    parser.add_argument("ptx", type=pathlib.Path)
    parser.add_argument("capability", choices=["8.0", "9.0"])
    parser.add_argument("--each", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--most", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("--unused", type=int, default=10, help="kernels to list with most places that no test executes")
    parser.add_argument("--counts", type=pathlib.Path)
    given = parser.parse_args()
    ptx = given.ptx.resolve()
    # Another program, or one that was compiled again, may have other tests.
    program = hashlib.sha256(pathlib.Path(given.tests).read_bytes()).hexdigest()[:12]
    tests = Tests(given.tests, ptx, given.capability, given.counts or ptx / f"counts-{given.capability}-{program}")
    draw = random.Random(given.seed)
    planted, unused, places_of_all = [], collections.Counter(), 0
    for folder in {"8.0": ["80"], "9.0": ["90", "90a"]}[given.capability]:
        for path in sorted((ptx / folder).iterdir()):
            lines, kernel, places = path.read_text().split("\n"), "", collections.defaultdict(list)
            for number, line in enumerate(lines, 1):
                entry = re.search(r"\.entry (\w+)", line)
                kernel = entry.group(1) if entry else kernel
                for what, new in mutants(line, "".join(lines[number:number + 1])) if given.only in kernel else []:
                    if new != line:
                        places_of_all += 1
                        unused[kernel] += (kernel, number) not in tests.of
                        if (kernel, number) in tests.of:
                            places[kernel, what].append((path, number, new))
            for (kernel, what), found in places.items():
                planted += [(kernel, what, *place) for place in draw.sample(found, min(given.each, len(found)))]

    draw.shuffle(planted)
    if given.most is not None:
        del planted[given.most:]
    if not planted:
        sys.exit("no error can be planted: no test executes these kernels, or none has the name of `--only`")

    def one(mutant):
        kernel, what, path, number, new = mutant
        with tempfile.TemporaryDirectory() as folder:
            for other in filter(pathlib.Path.is_dir, ptx.iterdir()):
                target = pathlib.Path(folder, other.name)
                if other != path.parent:
                    target.symlink_to(other)
                    continue
                target.mkdir()
                for file in other.iterdir():
                    if file != path:
                        (target / file.name).symlink_to(file)
            lines = path.read_text().split("\n")
            text = "\n".join([*lines[:number - 1], new, *lines[number + new.count("\n"):]])
            pathlib.Path(folder, path.parent.name, path.name).write_text(text)
            return mutant, lines[number - 1].strip(), tests.find((kernel, number), folder, given.seconds)

    kinds = collections.defaultdict(lambda: [0, 0])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (kernel, what, _, number, _), line, why in pool.map(one, planted):
            kinds[what][0] += why is not None
            kinds[what][1] += 1
            print(f"{'found ' if why else 'MISSED'} {kernel} line {number}, {what}: `{line[:70]}`{f': {why[1][:160]}' if why else ''}", flush=True)
    for what, (found, of) in sorted(kinds.items()):
        print(f"{found:5d} of {of:5d}  {what}")
    print(f"{sum(found for found, _ in kinds.values())} of {len(planted)} planted errors found; of {places_of_all} places, no test executes {unused.total()}")
    for kernel, number in unused.most_common(given.unused):
        print(f"{number:5d}  {kernel}")


if __name__ == "__main__":
    main()
