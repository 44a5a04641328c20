#!/usr/bin/env bash
#SBATCH --job-name=golden
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=00:10:00
#SBATCH --signal=B:USR1@60
#SBATCH --open-mode=append
#SBATCH --no-requeue
# What a job is not in, it cannot lose: the folder of the command may be missing on the node.
#SBATCH --chdir='/srv/the runs/golden/01234567'
#SBATCH --output='/srv/the runs/golden/01234567/tasks/001.%A_%a.out'
#SBATCH --error='/srv/the runs/golden/01234567/tasks/001.%A_%a.err'
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
export HPCML_PYTHON=/opt/python/bin/python3
export PYTHONPATH='/srv/the runs/golden/01234567/code/0123456789'"${PYTHONPATH:+:$PYTHONPATH}"
# Packages in ~/.local must not shadow those of the environment.
export PYTHONNOUSERSITE=1
module purge

# Which task of the submission this is: each of its arrays begins at an offset of its own.
task=$((${1:-0} + SLURM_ARRAY_TASK_ID))
# Not SLURM_JOB_ID, which for the last task of an array is the number of the whole array.
job="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
export HPCML_JOB_ID=$job
export HPCML_NODE_COUNT=$SLURM_JOB_NUM_NODES
HPCML_MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HPCML_LAUNCH=$(date +%s.%N)
export HPCML_MASTER_ADDR HPCML_LAUNCH

"$HPCML_PYTHON" -m hpcml.worker '/srv/the runs/golden/01234567' 1 "$task" &
worker=$!
if [ -n "$asked" ]; then forward "$asked"; fi

# `wait` returns early when a trap runs; only the worker's own exit code counts.
while asked=''; wait "$worker"; code=$?; [ -n "$asked" ]; do :; done
# A worker that is there handles signals. One that they ended had begun nothing: run it again.
if [ -n "$heard" ]; then
  case $code in 130 | 138 | 140 | 143) code=75 ;; esac
fi

exit "$code"
