"""Compares the rows that a tracker has of a run with the files of the run: each must be there once.

    python scripts/trackers/check_rows.py RUN_DIR wandb|mlflow|swanlab
    python scripts/trackers/check_rows.py --times RUN_DIR

The clients must have written to local files (`scripts/trackers/test.sh`). With `--times`, prints
the median step time in milliseconds.
"""

import collections
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "src/run/trackers"))
import follow


def of_wandb(run, key):
    from wandb.proto.wandb_internal_pb2 import Record

    for path in run.glob(f"trackers/wandb/*run-*-{key}/run-{key}.wandb"):
        for record in follow.records(path):
            items = Record.FromString(record).history.item
            row = {item.key or "/".join(item.nested_key): item.value_json for item in items}
            for name, value in row.items():
                if name.startswith(("train/", "eval/")):
                    yield name, int(json.loads(row["step"])), value


def of_swanlab(run, key):
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    for path in run.glob("trackers/swanlab/*/*.swanlab"):
        for record in map(Record.FromString, follow.records(path)):
            if record.scalar.key:
                yield record.scalar.key, record.scalar.step, record.scalar.value.number
            if record.media.key:
                yield record.media.key, record.media.step, None


def of_mlflow(run, key):
    from mlflow import MlflowClient

    client = MlflowClient()
    experiments = [one.experiment_id for one in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`trainer.id` = '{key}'")
    assert len(found) == 1, f"{len(found)} runs"
    for name in found[0].data.metrics:
        for point in client.get_metric_history(found[0].info.run_id, name):
            yield name, point.step, point.value
    for step in client.list_artifacts(found[0].info.run_id, "answers"):
        yield "eval/answers", int(step.path.rpartition("-")[2]), None


def number(value):
    try:
        return float(json.loads(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        return value


def main(run, tracker):
    key = json.loads((run / f"trackers/{tracker}.json").read_text())["id"]
    expected, answers = {}, set()
    for kind, file in (("train", "metrics.jsonl"), ("eval", "eval.jsonl")):
        for row in map(json.loads, (run / file).read_text().splitlines()):
            for name, value in follow.numbers(kind, row).items():
                expected[name, row["step"]] = value
            answers |= {row["step"]} if kind == "eval" else set()
    found, values = collections.Counter(), {}
    has_answers = set()
    for name, step, value in globals()[f"of_{tracker}"](run, key):
        if name.startswith("eval/answers"):
            has_answers.add(step)
        elif name.startswith(("train/", "eval/")) and not name.startswith("eval/images"):
            found[name, step] += 1
            values[name, step] = number(value)
    twice = [one for one, count in found.items() if count > 1]
    missing, other = expected.keys() - found.keys(), found.keys() - expected.keys()
    differ = [one for one in expected.keys() & found.keys()
              if not math.isclose(expected[one], values[one], rel_tol=1e-6)
              and not (math.isnan(expected[one]) and math.isnan(values[one]))]
    steps = len({step for name, step in found if name == "train/loss"})
    print(f"{tracker}: {len(found)} numbers of {steps} steps; missing {len(missing)}, "
          f"twice {len(twice)}, others {len(other)}, different {len(differ)}; "
          f"answers of {len(has_answers)} of {len(answers)} evaluations")
    for problem in (missing, twice, other, differ):
        print(*sorted(problem)[:5], file=sys.stderr)
    sys.exit(bool(missing or twice or other or differ or has_answers != answers))


if sys.argv[1] == "--times":
    rows = map(json.loads, (Path(sys.argv[2]) / "metrics.jsonl").read_text().splitlines())
    print(1000 * statistics.median(row["step_time_s"] for row in rows))
else:
    main(Path(sys.argv[1]), sys.argv[2])
