#!/usr/bin/env bash
# Rendered by hpcml. Do not edit: every submission renders its own.
set -u

# A signal may come before the worker is there; then it is handed over afterwards.
worker=''
asked=''
heard=''
repeater=''
deliver() {
  kill -s "$1" "$worker" 2>/dev/null
}
forward() {
  asked=$1
  if [ -z "$worker" ]; then return; fi
  heard=$1
  deliver "$1"
  # A container that is starting loses signals; the worker minds only the first that it gets.
  if [ -z "$repeater" ]; then
    while sleep 2 && deliver "$heard"; do :; done &
    repeater=$!
  fi
}
trap 'forward USR1' USR1
trap 'forward USR2' USR2
trap 'forward TERM' TERM
trap 'forward INT' INT

export HPCML_DATA_ROOT='/srv/the runs/.data'
export HPCML_PYTHON=python3
module load apptainer

# Which task of the submission this is, and the process that runs it.
task=$HPCML_TASK
export HPCML_JOB_ID="local-$$"

# What the image needs to know, also where options of the site clean its environment.
enter='
export APPTAINER_NO_EVAL=1 SINGULARITY_NO_EVAL=1
unset PYTHONHOME
for name in $(compgen -e); do
  case $name in
    HPCML_* | SLURM_* | *_VISIBLE_DEVICES | GPU_DEVICE_ORDINAL | ZE_AFFINITY_MASK)
      export "APPTAINERENV_$name=${!name}"
      ;;
  esac
done
exec "$@"
'
bash -c "$enter" bash \
  apptainer exec --pwd '/srv/the runs/golden/01234567' \
  --mount 'type=bind,"source=/srv/the runs","destination=/srv/the runs"' \
  --cleanenv --bind="$TMPDIR:/scratch" \
  docker://python:3.12-slim \
  env 'PYTHONPATH=/srv/the runs/golden/01234567/code/0123456789' PYTHONNOUSERSITE=1 \
  "$HPCML_PYTHON" -m hpcml.worker '/srv/the runs/golden/01234567' 1 "$task" &
worker=$!
if [ -n "$asked" ]; then forward "$asked"; fi

# `wait` returns early when a trap runs; only the worker's own exit code counts.
while asked=''; wait "$worker"; code=$?; [ -n "$asked" ]; do :; done
if [ -n "$repeater" ]; then kill "$repeater" 2>/dev/null; fi
# A worker that is there handles signals. One that they ended had begun nothing: run it again.
# (Exit code 2 is how the container's own program ends then.)
if [ -n "$heard" ]; then
  case $code in 2 | 130 | 138 | 140 | 143) code=75 ;; esac
fi

exit "$code"
