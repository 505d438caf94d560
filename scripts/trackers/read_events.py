"""Reads the event files of a run with the `tensorboard` package, and compares them with the logs.

    pip install tensorboard
    python scripts/trackers/read_events.py runs/quickstart
    python scripts/trackers/read_events.py --fixture tests/fixtures/tensorboard.tfevents

The run must have been trained with `--set 'log.trackers=[tensorboard]'`. With `--fixture`, writes
the file that a test in src/metrics/tensorboard.rs compares with.
"""

import json
import struct
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


def write_fixture(path):
    def scalars(**values):
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        return Summary(value=values)

    train = {"train/loss": 1.25, "train/lr": 1e-5, "train/num_tokens": 416, "train/loss/ü": 0.5}
    evaluation = {"eval/loss": float("nan"), "eval/accuracy": 0.75}
    start = SessionLog(status=SessionLog.START)
    with open(path, "wb") as file:
        writer = RecordWriter(file)
        for event in [
            Event(wall_time=1_700_000_000.5, file_version="brain.Event:2"),
            Event(wall_time=1_700_000_000.5, step=301, session_log=start),
            Event(wall_time=1_700_000_001.0, step=301, summary=scalars(**train)),
            Event(wall_time=1_700_000_002.0, step=70_000, summary=scalars(**evaluation)),
        ]:
            writer.write(event.SerializeToString())
        writer.flush()


def values(kind, row):
    """The scalars of a row of `metrics.jsonl` or `eval.jsonl`, by tag."""
    found = {}

    def add(name, value):
        if isinstance(value, (bool, int, float)):
            found[name] = float(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                add(f"{name}/{key}", item)
        elif isinstance(value, list):
            for key, item in zip(["min", "mean", "max"], value):
                add(f"{name}/{key}", item)

    for key, value in row.items():
        if value is None and key in ("loss", "grad_norm"):
            found[f"{kind}/{key}"] = float("nan")
        elif key not in ("step", "eval", "rejected_by_file"):
            add(f"{kind}/{key}", value)
    return found


def expected(run):
    """All scalars of a run: lists of step and value, by tag."""
    series = {}
    for name in ["metrics.jsonl", "eval.jsonl"]:
        path = run / name
        for line in path.read_text().splitlines() if path.exists() else []:
            row = json.loads(line)
            kind = "eval" if name == "eval.jsonl" or row.get("eval") else "train"
            for tag, value in values(kind, row).items():
                value = struct.unpack("f", struct.pack("f", value))[0]
                series.setdefault(tag, []).append((row["step"], repr(value)))
    return series


def main(run):
    everything = {"scalars": 0, "tensors": 0}  # 0: keep every value
    events = EventAccumulator(str(run / "tensorboard"), size_guidance=everything)
    events.Reload()
    want = expected(run)
    have = {
        tag: [(event.step, repr(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    wrong = sorted(tag for tag in want.keys() | have.keys() if want.get(tag) != have.get(tag))
    for tag in wrong:
        print(f"{tag}: {len(have.get(tag, []))} values, the logs have {len(want.get(tag, []))}")
    print(f"{len(have)} tags, {sum(map(len, have.values()))} values, {len(wrong)} tags differ")
    return 1 if wrong or not have else 0


if __name__ == "__main__":
    if sys.argv[1] == "--fixture":
        write_fixture(sys.argv[2])
    else:
        sys.exit(main(Path(sys.argv[1])))
