#!/bin/sh
# Trackers with their real clients, which write to local files: an imitated run whose process is
# killed again and again, after which each row must be there once; and the step time of the
# quickstart with and without the tracker, in turns.
# Needs Python with `venv` and a network, or a package index, from which the clients are installed.
#
#   scripts/trackers/test.sh wandb            (or mlflow, swanlab)
#
# STEPS (10000), KILLS (20), TURNS (5) and TRAINER (the binary) change the test.
set -eu
tracker=${1:?name of a tracker}
trainer=${TRAINER:-target/release/trainer}
steps=${STEPS:-10000} kills=${KILLS:-20} turns=${TURNS:-5}
folder=${TMPDIR:-/tmp}/trackers-$tracker
mkdir -p "$folder"

python=$folder/venv/bin/python
if [ ! -x "$python" ]; then
    python3 -m venv "$folder/venv"
    case $tracker in
        mlflow) "$python" -m pip install --quiet mlflow-skinny sqlalchemy alembic pillow ;;
        *) "$python" -m pip install --quiet "$tracker" protobuf pillow ;;
    esac
fi
export TRAINER_PYTHON="$python" WANDB_MODE=offline SWANLAB_MODE=offline
export MLFLOW_TRACKING_URI="sqlite:///$folder/mlflow.db"
rm -rf "$folder/run" "$folder/turn" "$folder/mlflow.db"

if [ "$tracker" = mlflow ]; then # its database does not survive that its creation is killed
    "$python" -c 'from mlflow import MlflowClient; MlflowClient().search_experiments()'
fi

echo "$tracker: a run of $steps steps is imitated, and the process is killed $kills times"
"$python" scripts/trackers/imitate.py "$folder/run" "$tracker" "$steps" "$kills"
"$python" scripts/trackers/check_rows.py "$folder/run" "$tracker"

turn=0
while [ "$turn" -lt "$turns" ]; do
    for trackers in "[]" "[$tracker]"; do
        "$trainer" sft --config configs/quickstart.yaml --set "output_dir=$folder/turn" \
            --set train.max_steps=1000 --set "log.trackers=$trackers" --set 'data.eval=[]' \
            --set eval.every_steps=0 --set checkpoint.every_steps=0 >/dev/null 2>&1
        "$python" scripts/trackers/check_rows.py --times "$folder/turn" >>"$folder/times$trackers"
        rm -rf "$folder/turn"
    done
    turn=$((turn + 1))
done
for trackers in "[]" "[$tracker]"; do
    sort -n "$folder/times$trackers" | awk -v name="$trackers" \
        '{v[NR] = $1} END {print name, "median step time of the median turn:", v[int((NR + 1) / 2)], "ms"}'
done
rm -f "$folder"/times*
