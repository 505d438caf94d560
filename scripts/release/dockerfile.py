#!/usr/bin/env python3
"""Runs the steps of the Dockerfile without Docker, as root, in folders that have the files of the base images.

    debootstrap --variant=minbase bookworm build && cp -a build runtime
    scripts/release/dockerfile.py build runtime FEATURES=

The folders replace BUILD_IMAGE and RUNTIME_IMAGE, and are changed. Needs `dockerfile-parse` from PyPI, whose
parser replaces the variables too.
"""

import glob
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from dockerfile_parse import DockerfileParser

context = Path(__file__).resolve().parents[2]
roots = [Path(root).resolve() for root in sys.argv[1:3]]
arguments = dict(argument.split("=", 1) for argument in sys.argv[3:])
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
IN_ROOT = 'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot "$0" /bin/sh -c "$1"'


def run(root, command, environment, folder):
    command = f"cd {shlex.quote(folder)} && {command}"
    subprocess.run(["unshare", "--mount", "sh", "-c", IN_ROOT, root, command], env=environment, check=True)


def copy(source, to, is_file):
    if source.is_dir():  # as Docker does, the content of a folder is copied
        at_root = set((context / ".dockerignore").read_text().split())
        skip = lambda folder, names: at_root & set(names) if Path(folder) == context else []  # noqa: E731
        shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True, ignore=skip)
    else:
        (to.parent if is_file else to).mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, to)


parser = DockerfileParser(str(context / "Dockerfile"), build_args=arguments)
stages, entry = {}, None
for step in parser.structure:
    name, value = step["instruction"], step["value"]
    if name == "COMMENT" or (name == "ARG" and not stages):
        continue
    print(f"== {name} {value}", flush=True)
    if name == "FROM":
        root, environment, folder = roots[len(stages)], {"PATH": PATH, "HOME": "/root"}, "/"
        stages[value.split(" AS ")[-1]] = root
        continue
    for key, text in environment.items():
        if name in ("ENV", "COPY", "WORKDIR"):
            value = value.replace(f"${{{key}}}", text).replace(f"${key}", text)
    match name:
        case "ARG":
            key, _, default = value.partition("=")
            environment[key] = arguments.get(key, default)
        case "ENV":
            environment |= dict(pair.split("=", 1) for pair in shlex.split(value))
        case "WORKDIR":
            folder = value
            (root / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "RUN":
            run(root, value, environment, folder)
        case "COPY":
            *sources, to = value.split()
            base = context
            if sources[0].startswith("--from="):
                base = stages[sources.pop(0).removeprefix("--from=")]
            into = os.path.join(folder, to)
            for source in sources:
                for path in glob.glob(str(base / source.lstrip("/"))) or sys.exit(f"error: there is no {source}"):
                    copy(Path(path), root / into.lstrip("/"), not into.endswith("/"))
        case "ENTRYPOINT":
            entry = shlex.join(json.loads(value))
        case _:
            sys.exit(f"error: no rule for the instruction {name}")
run(root, f"{entry} --version", environment, folder)
