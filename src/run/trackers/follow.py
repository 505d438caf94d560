"""Sends the rows of a run to Weights & Biases, MLflow or SwanLab through their own clients.

    python follow.py RUN_DIR wandb|mlflow|swanlab [--once]

`trainer` starts it. It only reads the files of the run, so training never waits for it. It ends
after the end of its standard input, with `--once` after the last row. It may be killed at any time:
the next process finds out which rows the client has, and sends the others.
"""

import contextlib, fcntl, itertools, json, os, re, select, signal, struct, sys, time, uuid
from pathlib import Path

ANSWERS = 8  # of each evaluation


def note(text):
    print(text, file=sys.stderr, flush=True)


def numbers(kind, row):
    """The numbers of a row, with the names that they have in TensorBoard."""
    found = {}

    def add(name, value):
        if isinstance(value, dict):
            for key, part in value.items():
                add(f"{name}/{key}", part)
        elif isinstance(value, list):  # the values of ranks
            for key, part in zip(("min", "mean", "max"), value):
                add(f"{name}/{key}", part)
        elif isinstance(value, (bool, int, float)):
            found[name] = float(value)

    for key, value in row.items():
        if value is None and key in ("loss", "grad_norm"):
            found[f"{kind}/{key}"] = float("nan")
        elif key not in ("step", "eval", "rejected_by_file"):
            add(f"{kind}/{key}", value)
    return found


class Lines:
    """The complete rows that a file has got since the last call."""

    def __init__(self, path):
        self.path, self.at = path, 0

    def read(self, most=1 << 20):
        try:
            with open(self.path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self.at:
                    self.at = 0  # a resumed run has removed rows
                file.seek(self.at)
                data = file.read(most)
                while b"\n" not in data and (more := file.read(most)):
                    data += more  # a long row
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self.at += end
        return [json.loads(line) for line in data[:end].splitlines()]


def image_paths(row, sets):
    """The image files of a row `FILE:LINE` of a JSONL file."""
    file, _, line = row.rpartition(":")
    paths = lambda one: one["path"] if isinstance(one["path"], list) else [one["path"] or ""]
    has_file = lambda path: file == path or path and file.startswith(path.rstrip("/") + "/")
    roots = [one["image_root"] for one in sets if any(map(has_file, paths(one)))]
    with open(file, encoding="utf-8") as data:
        found = json.loads(next(itertools.islice(data, int(line) - 1, None)))
    listed = found.get("images") or found.get("image") or []
    images = listed if isinstance(listed, list) else [listed]
    for message in found.get("messages") or []:
        parts = message.get("content")
        for part in parts if isinstance(parts, list) else []:
            images.append(part.get("image") or (part.get("image_url") or {}).get("url"))
    root = Path((roots and roots[0]) or Path(file).parent)
    images = [one for one in images if isinstance(one, str) and not one.startswith("data:")]
    return [str(root / one.removeprefix("file://")) for one in images]


class Answers:
    """The first answers of each evaluation, with their images."""

    def __init__(self, run, sets):
        self.lines, self.sets, self.found = Lines(run / "predictions.jsonl"), sets, {}

    def of(self, step):
        while part := self.lines.read():  # an evaluation writes its answers before its own row
            for row in part:
                rows = self.found.setdefault(row["step"], [])
                if len(rows) < ANSWERS:
                    rows.append(row)
        rows = self.found.get(step, [])
        self.found = {later: rows for later, rows in self.found.items() if later > step}
        for row in rows:
            row["images"] = []
            if row.get("num_media"):
                try:
                    row["images"] = [one for one in image_paths(row["row"], self.sets)[:1]]
                    open(row["images"][0], "rb").close()
                except Exception as error:
                    note(f"no image of {row['row']} at step {step}: {error!r}")
                    row["images"] = []
        return rows


def records(path):
    """The records of a LevelDB log, in which the clients keep what they have been given."""
    block, data = 32768, Path(path).read_bytes()
    at, whole = 7, b""  # after the header of the file
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        part, at = data[at + 7 : at + 7 + length], at + 7 + length
        if len(part) < length or kind not in (1, 2, 3, 4):
            return  # the end of a file whose process was killed
        whole = part if kind in (1, 2) else whole + part
        if kind in (1, 4):
            yield whole


def wait_until_closed(folder):
    """Waits for the helpers of a killed client, which still write what it gave them."""

    def is_open(process):
        links = []
        with contextlib.suppress(OSError):  # it has ended, or is that of another user
            for one in os.listdir(f"/proc/{process}/fd"):
                with contextlib.suppress(OSError):
                    links.append(os.readlink(f"/proc/{process}/fd/{one}"))
        return any(link.startswith(f"{folder}/") for link in links)

    for _ in range(300):
        if not any(is_open(one) for one in os.listdir("/proc") if one.isdigit()):
            return
        time.sleep(0.1)


class Wandb:
    """A row is one step of the client's history: `2 * step`, and for evaluations one more. The
    client takes no step twice."""

    project = "WANDB_PROJECT"

    def __init__(self, info, project, state, folder):
        import wandb

        self.client, kept = wandb, folder / "wandb"
        kept.mkdir(exist_ok=True)
        wait_until_closed(kept.resolve())
        settings = wandb.Settings(console="off", quiet=True)
        options = dict(project=project, name=info["name"], id=state["id"], resume="allow")
        self.run = wandb.init(**options, dir=str(folder), settings=settings)
        self.next = self.stored(kept, state["id"]) if self.run.offline else self.run.step
        self.run.config.update(info["config"] | {"run": info["run"]}, allow_val_change=True)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def stored(self, kept, key):
        from wandb.proto.wandb_internal_pb2 import Record

        last = -1
        for path in kept.glob(f"*run-*-{key}/run-{key}.wandb"):
            for record in records(path):
                for item in Record.FromString(record).history.item:
                    if item.key == "_step" or list(item.nested_key) == ["_step"]:
                        last = max(last, int(item.value_json))
        return last + 1

    def send(self, rows):
        for kind, step, values, answers in rows:
            at = 2 * step + (kind == "eval")
            if at >= self.next:
                if answers:
                    values = values | {"eval/answers": self.table(answers)}
                self.run.log({"step": step} | values, step=at, commit=True)
                self.next = at + 1

    def table(self, answers):
        table = self.client.Table(columns=["row", "expected", "answered", "image"])
        for one in answers:
            image = first_image(one, lambda path: self.client.Image(path))
            table.add_data(one["row"], one["expected"], one["answered"], image)
        return table

    def finish(self, is_whole):
        self.run.finish(exit_code=0 if is_whole else 1)


def first_image(answer, read):
    try:
        return read(answer["images"][0]) if answer["images"] else None
    except Exception as error:  # without Pillow the clients take no images
        note(f"no image of {answer['row']}: {error!r}")
        return None


class ByKey:
    """A client that keeps the steps of each metric apart."""

    def __init__(self):
        self.last = {}

    def new(self, step, values):
        return {key: value for key, value in values.items() if step > self.last_step(key)}

    def last_step(self, key):
        return self.last.get(key, -1)


class Mlflow(ByKey):
    """Each call returns when the server has the rows. The last step of each metric comes from it."""

    project = "MLFLOW_EXPERIMENT_NAME"

    def __init__(self, info, project, state, folder):
        from mlflow import MlflowClient
        from mlflow import entities

        super().__init__()
        self.client, self.entities = MlflowClient(), entities
        found = self.client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self.client.create_experiment(project)
        tag = f"tags.`trainer.id` = '{state['id']}'"
        runs = self.client.search_runs([experiment], tag, max_results=1)
        self.is_new = not runs
        if self.is_new:
            tags = {"trainer.id": state["id"]} | {k: str(v) for k, v in info["run"].items()}
            self.run = self.client.create_run(experiment, run_name=info["name"], tags=tags)
        else:
            self.run = runs[0]
        self.run = self.run.info.run_id
        self.client.update_run(self.run, status="RUNNING")
        self.client.log_dict(self.run, info["config"], "config.json")
        for key, value in sorted(numbers_and_texts(info["config"])):
            try:
                self.client.log_param(self.run, name_of(key), str(value)[:500])
            except Exception as error:  # a parameter that a resumed run has changed
                note(f"parameter {key}: {error}")

    def last_step(self, key):
        if key not in self.last:
            history = [] if self.is_new else self.client.get_metric_history(self.run, key)
            self.last[key] = max((one.step for one in history), default=-1)
        return self.last[key]

    def send(self, rows):
        metrics, now = [], int(time.time() * 1000)
        for kind, step, values, answers in rows:
            values = self.new(step, {name_of(key): value for key, value in values.items()})
            if answers and values:
                self.answers(step, answers)
            for key, value in values.items():
                metrics.append(self.entities.Metric(key, value, now, step))
                self.last[key] = step
        for at in range(0, len(metrics), 1000):  # the most that a server takes at once
            self.client.log_batch(self.run, metrics=metrics[at : at + 1000])

    def answers(self, step, answers):
        folder = f"answers/step-{step:08}"
        for path in itertools.chain(*(one["images"] for one in answers)):
            self.client.log_artifact(self.run, path, folder)
        self.client.log_dict(self.run, {"answers": answers}, f"{folder}/answers.json")

    def finish(self, is_whole):
        self.client.set_terminated(self.run, "FINISHED" if is_whole else "FAILED")


def name_of(key):
    return re.sub(r"[^\w .:/-]", "_", key)


def numbers_and_texts(value, name=""):
    """The settings of a config by their dotted keys."""
    if isinstance(value, (dict, list)) and value:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from numbers_and_texts(part, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


class Swanlab(ByKey):
    """Online, the client takes no step of a metric twice; otherwise its files are read."""

    project = "SWANLAB_PROJ_NAME"

    def __init__(self, info, project, state, folder):
        import swanlab

        super().__init__()
        self.client, kept = swanlab, folder / "swanlab"
        kept.mkdir(exist_ok=True)
        options = dict(project=project, experiment_name=info["name"], logdir=str(kept))
        config = info["config"] | {"run": info["run"]}
        if swanlab.Settings().mode in ("local", "offline"):
            self.stored(kept)
        swanlab.init(**options, id=state["id"], resume="allow", config=config)

    def stored(self, kept):
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record

        for path in kept.glob("*/*.swanlab"):
            for record in map(Record.FromString, records(path)):
                for part in (record.scalar, record.media):
                    self.last[part.key] = max(part.step, self.last.get(part.key, -1))

    def send(self, rows):
        for kind, step, values, answers in rows:
            if answers:
                values = values | {"eval/answers": [self.answer(one) for one in answers]}
                images = [first_image(one, lambda path: self.client.Image(path)) for one in answers]
                if images := [image for image in images if image]:
                    values["eval/images"] = images
            if values := self.new(step, values):
                self.client.log(values, step=step)

    def answer(self, one):
        return self.client.Text(f"{one['row']}\nexpected: {one['expected']}\n{one['answered']}")

    def finish(self, is_whole):
        if is_whole:
            self.client.finish()
        else:
            self.client.finish(state="crashed", error="the training process has ended early")


def save(folder, name, value):
    """Replaces a file of an open folder, which may have been moved since it was opened."""
    with open(f"{name}.tmp", "w", opener=lambda *args: os.open(*args, 0o666, dir_fd=folder)) as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{name}.tmp", name, src_dir_fd=folder, dst_dir_fd=folder)


def main(run, name, is_once):
    run, client = Path(run), {"wandb": Wandb, "mlflow": Mlflow, "swanlab": Swanlab}[name]
    folder = run / "trackers"
    for number in (signal.SIGINT, signal.SIGHUP):  # they are meant for the training process
        signal.signal(number, signal.default_int_handler if is_once else signal.SIG_IGN)
    # A client that reads a password must not get what the training process writes.
    end = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.nice(0 if is_once else 10)
    opened = os.open(folder, os.O_RDONLY)
    lock = open(folder / f"{name}.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        note(f"another process sends this run to {name}: waiting for its end")
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:  # a file system without locks
        note(f"no lock: {error}")

    def is_moved():
        """Whether a new run has moved the files of this one, which are not found by path then."""
        now = folder / f"{name}.lock"
        return not now.exists() or not os.path.samestat(os.fstat(lock.fileno()), now.stat())

    if is_moved():
        return note("the files of the run were moved")
    info = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    path = folder / f"{name}.json"
    if not path.exists():
        save(opened, path.name, {"id": uuid.uuid4().hex[:21], "train": 0, "eval": 0})
    state = json.loads(path.read_text(encoding="utf-8"))
    project = info["project"] or os.environ.get(client.project) or "trainer"
    tracker = client(info, project, state, folder)
    data = info["data"]
    answers = Answers(run, data["eval"] + data["train"])  # rows of either may be held out
    train, evals = Lines(run / "metrics.jsonl"), Lines(run / "eval.jsonl")
    seen, later, word, is_ended = -1, [], b"", is_once
    while True:
        rows = [("train", row["step"], row) for row in train.read()]
        seen = max([seen, *(step for _, step, _ in rows)])
        while part := evals.read():
            later += [("eval", row["step"], row) for row in part]
        if is_moved():
            moved = "the files of the run were moved: `trainer track` of their folder sends the rest"
            note(moved)
            break
        is_last = is_ended and not rows
        # Rows in the order of their steps; an evaluation comes after the step that it follows.
        rows += [row for row in later if is_last or row[1] <= seen]
        later = [row for row in later if not is_last and row[1] > seen]
        rows.sort(key=lambda row: (row[1], row[0] == "eval"))
        if rows:
            rows = [(kind, step, numbers(kind, row), answers.of(step) if kind == "eval" else [])
                    for kind, step, row in rows]
            tracker.send(rows)
            for kind, step, *_ in rows:
                state[kind] = max(state[kind], step)
            save(opened, path.name, state)
        elif is_last:
            break
        elif select.select([end], [], [], 1.0)[0]:
            word += (part := os.read(end, 64))
            is_ended = not part
    is_whole = (run / "final").exists() if is_once else word == b"finished\n"
    tracker.finish(is_whole)
    print(f"{name}: sent {state['train']} steps", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], "--once" in sys.argv)
