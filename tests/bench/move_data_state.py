"""Moves the data position of a checkpoint to another row, for benchmarks of resuming:

  python tests/bench/move_data_state.py CHECKPOINT ROW

Shifts the row numbers of the checkpoint's pending rows and packs too, and updates the checksum in
the manifest. The weights do not change.
"""
import hashlib
import json
import sys
from pathlib import Path


def main():
    step, row = Path(sys.argv[1]), int(sys.argv[2])
    path = step / "trainer_state.json"
    state = json.loads(path.read_text())
    data = state["data"]
    shift = row - data["next"]
    data["next"] += shift
    data["rows_read"] += shift
    data["carry"] = [at + shift for at in data["carry"]]
    data["ready"] = [[at + shift for at in pack] for pack in data["ready"]]
    text = json.dumps(state)
    path.write_text(text)
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"][path.name] = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (step / "manifest.json").write_text(json.dumps(manifest))


if __name__ == "__main__":
    main()
