"""Moves where a checkpoint stands in its data, as if the run had come that far: `move_data_state.py CHECKPOINT ROW`.

The rows that it holds (carried, and in packs that wait) move along, and the manifest gets the new checksum. For benches of resuming:
the weights are those of the step that the checkpoint was made at.
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
