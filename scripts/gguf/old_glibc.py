"""Lets the libraries of llama-cpp-py-sync load with a C library older than 2.38: of that version they
need four functions only, which the shared library SHIM then provides (set LD_PRELOAD to it).

    old_glibc.py SHIM
"""

import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCE = """
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
long __isoc23_strtol(const char *s, char **e, int b) { return strtol(s, e, b); }
unsigned long __isoc23_strtoul(const char *s, char **e, int b) { return strtoul(s, e, b); }
unsigned long long __isoc23_strtoull(const char *s, char **e, int b) { return strtoull(s, e, b); }
int __isoc23_sscanf(const char *s, const char *f, ...) {
    va_list a; va_start(a, f); int n = vsscanf(s, f, a); va_end(a); return n;
}
"""
VERNEED, WEAK = 0x6FFFFFFE, 2  # the section with needed versions, and the flag of one not needed


def make_weak(path):
    data = bytearray(path.read_bytes())
    start, count = struct.unpack_from("<Q", data, 0x28)[0], struct.unpack_from("<H", data, 0x3C)[0]
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + 64 * k) for k in range(count)]
    for section in (section for section in sections if section[1] == VERNEED):
        texts, at = sections[section[6]][4], section[4]
        for _ in range(section[7]):
            _, versions, _, of, following = struct.unpack_from("<HHIII", data, at)
            of += at
            for _ in range(versions):
                _, flags, _, name, step = struct.unpack_from("<IHHII", data, of)
                if data[texts + name :].startswith(b"GLIBC_2.38\0"):
                    struct.pack_into("<H", data, of + 4, flags | WEAK)
                of += step
            at += following
    path.write_bytes(data)


command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", sys.argv[1], "-"]
subprocess.run(command, input=SOURCE.encode(), check=True)
for library in Path(find_spec("llama_cpp_py_sync").origin).parent.glob("*.so*"):
    make_weak(library)
