#!/usr/bin/env bash
# Rendered by hpcml. Do not edit: every submission renders its own.
set -u

# A signal may come before the worker is there; then it is handed over afterwards.
worker=''
asked=''
heard=''
deliver() {
  kill -s "$1" "$worker" 2>/dev/null
}
forward() {
  asked=$1
  if [ -z "$worker" ]; then return; fi
  heard=$1
  deliver "$1"
}
trap 'forward USR1' USR1
trap 'forward USR2' USR2
trap 'forward TERM' TERM
trap 'forward INT' INT

export HPCML_DATA_ROOT='/srv/the runs/.data'
export HPCML_PYTHON=/usr/bin/python3
export PYTHONPATH='/srv/the runs/golden/01234567/code/0123456789'"${PYTHONPATH:+:$PYTHONPATH}"
# Packages in ~/.local must not shadow those of the environment.
export PYTHONNOUSERSITE=1
export PLAIN=x
export NASTY='a '"'"'b'"'"' $(c) "d"'
module load cuda/12.8 || true
export X=$((1 + 1))

ulimit -c 0

# Which task of the submission this is, and the process that runs it.
task=$HPCML_TASK
export HPCML_JOB_ID="local-$$"

"$HPCML_PYTHON" -m hpcml.worker '/srv/the runs/golden/01234567' 1 "$task" &
worker=$!
if [ -n "$asked" ]; then forward "$asked"; fi

# `wait` returns early when a trap runs; only the worker's own exit code counts.
while asked=''; wait "$worker"; code=$?; [ -n "$asked" ]; do :; done
# A worker that is there handles signals. One that they ended had begun nothing: run it again.
if [ -n "$heard" ]; then
  case $code in 130 | 138 | 140 | 143) code=75 ;; esac
fi

echo 'the end of golden'
exit "$code"

