#!/usr/bin/env python3
"""Prints the bill of materials of the binary (CycloneDX 1.6), and writes the licences of its parts.

    scripts/release/sbom.py FEATURES LICENCES >trainer.cdx.json

It has the packages that are compiled into the binary with these features on Linux on x86-64: no build
scripts, no procedural macros, and nothing that only tests use. The same commit gives the same bytes.
"""

import datetime
import json
import os
import re
import subprocess
import sys
from pathlib import Path

TARGET = "x86_64-unknown-linux-gnu"
features, licences = sys.argv[1:]


def run(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


SELECTED = ["--locked", "--features", features]
# `cargo metadata` unites the features of builds and tests; `cargo tree` has those of the binary.
tree = run(
    *["cargo", "tree", *SELECTED, "--package", "trainer", "--target", TARGET],
    *["--edges", "normal,no-proc-macro", "--prefix", "depth", "--format", "{p}"],
)
depends = {}
above = []
for line in tree.splitlines():
    depth, name, version = re.match(r"(\d+)(\S+) v(\S+)", line).groups()
    above[int(depth) :] = [(name, version)]
    depends.setdefault((name, version), set())
    if len(above) > 1:
        depends[above[-2]].add((name, version))

metadata = json.loads(run("cargo", "metadata", *SELECTED, "--format-version", "1", "--filter-platform", TARGET))
packages = {(package["name"], package["version"]): package for package in metadata["packages"]}
checksums = {
    (name, version): checksum
    for name, version, checksum in re.findall(
        r'name = "(.+)"\nversion = "(.+)"\nsource = .+\nchecksum = "(.+)"', Path("Cargo.lock").read_text()
    )
}


def component(key):
    name, version = key
    package = packages[key]
    part = {"type": "library", "bom-ref": f"{name}@{version}", "name": name, "version": version}
    if package["description"]:
        part["description"] = " ".join(package["description"].split())
    if key in checksums:
        part["hashes"] = [{"alg": "SHA-256", "content": checksums[key]}]
    # Packages published years ago have `/` in place of `OR`.
    part["licenses"] = [{"expression": re.sub(r"\s*/\s*", " OR ", package["license"])}]
    if package["source"]:  # our own packages are in no registry
        part["purl"] = f"pkg:cargo/{name}@{version}"
    if package["repository"]:
        part["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
    return part


root = next(iter(depends))
program = component(root) | {"type": "application"}
rustc = dict(line.split(": ", 1) for line in run("rustc", "-vV").splitlines() if ": " in line)["release"]
standard_library = {
    "type": "library",
    "bom-ref": f"std@{rustc}",
    "name": "std",
    "version": rustc,
    "description": "The standard library of Rust",
    "licenses": [{"expression": "MIT OR Apache-2.0"}],
    "cpe": f"cpe:2.3:a:rust-lang:rust:{rustc}:*:*:*:*:*:*:*",
}
parts = sorted(key for key in depends if key != root)
time = datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.timezone.utc)
bill = {
    "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
    "bomFormat": "CycloneDX",
    "specVersion": "1.6",
    "version": 1,
    "metadata": {
        "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "component": program,
        "properties": [{"name": "trainer:features", "value": features or "default"}, {"name": "trainer:target", "value": TARGET}],
    },
    "components": [component(key) for key in parts] + [standard_library],
    "dependencies": [
        {
            "ref": f"{key[0]}@{key[1]}",
            "dependsOn": sorted(f"{name}@{version}" for name, version in depends[key])
            + ([standard_library["bom-ref"]] if key == root else []),
        }
        for key in [root, *parts]
    ],
}
json.dump(bill, sys.stdout, indent=1, ensure_ascii=False)
print()

# The licences of most parts require that their texts come with the binary.
texts = {}
for key in parts:
    package = packages[key]
    folder = Path(package["manifest_path"]).parent
    # Also those of C libraries in a folder of the package.
    found = sorted(path for path in folder.rglob("*") if re.match(r"(?i)(un)?licen[cs]e|copying|notice", path.name) and path.is_file())
    for text in [path.read_text(errors="replace").strip() for path in found] or [f"Licence: {package['license']}"]:
        texts.setdefault(text, []).append(" ".join(key))
with open(licences, "w") as file:
    for text, names in texts.items():
        print("=" * 100, *names, "", text, "", sep="\n", file=file)
