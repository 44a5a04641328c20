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
export HPCML_PYTHON=python3
export PYTHONPATH='/srv/the runs/golden/01234567/code/0123456789'"${PYTHONPATH:+:$PYTHONPATH}"
# Packages in ~/.local must not shadow those of the environment.
export PYTHONNOUSERSITE=1

cd '/srv/the runs/golden/01234567' || exit 74
exec >> tasks/001."$HPCML_JOB_ID.out" 2>> tasks/001."$HPCML_JOB_ID.err"
task=$(($1 + VC_TASK_INDEX))
# The tasks of this lane, one after another.
result=0
while :; do

"$HPCML_PYTHON" -m hpcml.worker '/srv/the runs/golden/01234567' 1 "$task" &
worker=$!
if [ -n "$asked" ]; then forward "$asked"; fi

# `wait` returns early when a trap runs; only the worker's own exit code counts.
while asked=''; wait "$worker"; code=$?; [ -n "$asked" ]; do :; done
# A worker that is there handles signals. One that they ended had begun nothing: run it again.
if [ -n "$heard" ]; then
  case $code in 130 | 138 | 140 | 143) code=75 ;; esac
fi

if [ "$code" -eq 75 ]; then result=75; break; fi
if [ "$code" -ne 0 ]; then result=$code; fi
worker=''
task=$((task + $2))
if [ "$task" -ge 3 ]; then break; fi
# This pod was asked to leave: the next one goes on.
if [ -n "$heard" ]; then result=75; break; fi
done
exit "$result"
