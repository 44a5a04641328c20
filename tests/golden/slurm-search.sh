#!/usr/bin/env bash
#SBATCH --job-name=golden
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=00:10:00
#SBATCH --signal=B:USR1@60
#SBATCH --open-mode=append
#SBATCH --requeue
# What a job is not in, it cannot lose: the folder of the command may be missing on the node.
#SBATCH --chdir=/srv/runs/golden/01234567
#SBATCH --output=/srv/runs/golden/01234567/tasks/001.%A_%a.out
#SBATCH --error=/srv/runs/golden/01234567/tasks/001.%A_%a.err
# Rendered by hpcml. Do not edit: every submission renders its own.
set -u

# A signal may come before the worker is there; then it is handed over afterwards.
worker=''
asked=''
heard=''
repeater=''
deliver() {
  # srun hands this one to its tasks; TERM would make it kill them, and so would a second INT.
  kill -s USR1 "$worker" 2>/dev/null
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

# TERM without the site's signal before it is scancel, or a preemption after which Slurm itself
# requeues: a requeue from here would bring a cancelled job back.
first=''
trap 'first=${first:-USR1}; forward USR1' USR1
trap 'first=${first:-TERM}; forward TERM' TERM

export HPCML_DATA_ROOT=/srv/runs/.data
export HPCML_PYTHON=python3

# Which task of the submission this is: each of its arrays begins at an offset of its own.
task=$((${1:-0} + SLURM_ARRAY_TASK_ID))
# Not SLURM_JOB_ID, which for the last task of an array is the number of the whole array.
job="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
export HPCML_JOB_ID=$job
export HPCML_NODE_COUNT=$SLURM_JOB_NUM_NODES
HPCML_MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HPCML_LAUNCH=$(date +%s.%N)
export HPCML_MASTER_ADDR HPCML_LAUNCH

# One worker per node. srun does not inherit cpus-per-task since Slurm 22.05. When a worker has died,
# the first one waits a minute for its report; srun must not end it before.
# What the cells of this round try is proposed first, outside of any image.
env PYTHONPATH=/srv/runs/golden/01234567/code/0123456789 /usr/bin/python3 -m hpcml.worker.rounds /srv/runs/golden/01234567 1 \
srun --nodes=2 --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  --kill-on-bad-exit=0 --wait=120 \
  '--container-image=nvcr.io#nvidia/pytorch:25.06-py3' \
  --container-mounts=/srv/runs:/srv/runs \
  --container-workdir=/srv/runs/golden/01234567 \
  env PYTHONPATH=/srv/runs/golden/01234567/code/0123456789 PYTHONNOUSERSITE=1 \
  "$HPCML_PYTHON" -m hpcml.worker /srv/runs/golden/01234567 1 "$task" &
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

# From here and not from the payload: an image need not have scontrol.
if [ "$code" -eq 75 ] && [ "$first" != TERM ]; then scontrol requeue "$job"; fi
exit "$code"
