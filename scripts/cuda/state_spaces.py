#!/usr/bin/env python3
"""Checks the state spaces of the memory accesses in PTX that nvcc wrote:

    scripts/cuda/state_spaces.py FILE.ptx...

An address in shared memory must not reach an access to global memory, nor the reverse, and every
access must name its state space. Neither nvcc nor ptxas warns about the first, which intrinsics for
global memory (`__stwb`, `__ldcs`, ..) cause; on a GPU it is a lost store or a fault. Prints each such
access, and exits with 1 if there are any.
"""

import re
import sys

SPACES = ("global", "shared")
# Instructions that carry an address from an operand to the result. Those of 32 bits carry offsets in
# shared memory.
CARRY = ("mov", "add", "sub", "mad", "selp", "cvt", "cvta", "and", "or", "xor", "shfl")
ACCESS = ("ld", "ldu", "st", "atom", "red", "cp", "prefetch")
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z]\w*(?:[.:][\w:.]+)?)\s+(.*?);")
DECLARED = re.compile(r"\s*(?:\.(?:extern|visible|weak)\s+)*\.(shared|global)\s[^;=]*?([\w$]+)(?:\[\d*\])*\s*[;=]")
FUNCTION = re.compile(r"\.(?:entry|func)\s+(?:\(.*\)\s*)?([\w$]+)")
NAME = re.compile(r"%?[\w$]+")


def space_of(parts):
    """The state spaces in an opcode, in the order of its addresses."""
    names = [part.split("::")[0] for part in parts]
    return [name for name in names if name in SPACES + ("local", "param", "const")]


def faults_of(lines, symbols):
    """Yields the line and what is wrong for one function. `lines` has (number, opcode, operands)."""
    origin = dict(symbols)  # of a register or symbol: the space that it is an address in
    before = -1
    while len(origin) != before:
        before = len(origin)
        for _, opcode, operands in lines:
            parts = opcode.split(".")
            if parts[0] not in CARRY:
                continue
            names = NAME.findall(operands)
            to, sources = names[0], names[1:]
            # The factors of `mad` are an index and the size of an element.
            sources = sources[2:] if parts[0] == "mad" else sources
            of_sources = [origin[name] for name in sources if name in origin]
            explicit = [space for space in space_of(parts) if space in SPACES] if parts[0] == "cvta" else []
            # `cvta.to.global` of an address that is known to be in shared memory does not change that.
            found = (of_sources or explicit or [None])[0]
            if found and to.startswith("%") and to not in origin:
                origin[to] = found
    for number, opcode, operands in lines:
        parts = opcode.split(".")
        if parts[0] not in ACCESS:
            continue
        spaces = space_of(parts)
        addresses = re.findall(r"\[([^\[\]]*)\]", operands)
        if addresses and not spaces:
            yield number, f"`{opcode}` names no state space"
        for space, address in zip(spaces, addresses):
            for name in NAME.findall(address)[:1]:
                if space in SPACES and origin.get(name, space) != space:
                    yield number, f"`{opcode}` has an address in {origin[name]} memory"


def main():
    bad = accesses = 0
    for path in sys.argv[1:]:
        symbols, functions = {}, []
        with open(path) as file:
            for number, line in enumerate(file, 1):
                declared, instruction = DECLARED.match(line), INSTRUCTION.match(line)
                if named := FUNCTION.search(line):
                    functions.append((named[1], []))
                elif declared:
                    symbols[declared[2]] = declared[1]
                elif instruction and functions:
                    accesses += instruction[1].split(".")[0] in ACCESS
                    functions[-1][1].append((number, *instruction.groups()))
        for name, lines in functions:
            for at, fault in faults_of(lines, symbols):
                bad += 1
                print(f"error: {path}:{at}: {name}: {fault}")
    if not accesses:
        sys.exit("error: found no memory accesses, expected files of PTX")
    print(f"state spaces of {accesses} memory accesses checked")
    sys.exit(1 if bad else 0)


main()
