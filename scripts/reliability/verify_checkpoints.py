"""Compares each complete checkpoint of a run with its manifest, and prints the newest step.

    python3 scripts/reliability/verify_checkpoints.py OUTPUT_DIR

Exits with 1 and names the file if a checkpoint in its final place differs from its manifest.
"""

import hashlib
import json
import sys
from pathlib import Path

newest = 0
for folder in sorted(Path(sys.argv[1]).glob("checkpoints/step-*")):
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, entry in manifest["files"].items():
            content = (folder / name).read_bytes()
            assert len(content) == entry["bytes"], f"{name} has {len(content)} bytes"
            pieces, offset = entry.get("pieces") or [entry], 0
            for piece in pieces:
                part = content[offset : offset + piece["bytes"]]
                assert hashlib.sha256(part).hexdigest() == piece["sha256"], f"{name} has another checksum"
                offset += piece["bytes"]
    except (AssertionError, OSError, ValueError, KeyError) as error:
        print(f"{folder.name}: {error}", file=sys.stderr)
        sys.exit(1)
    newest = max(newest, int(folder.name[5:]))
print(newest)
