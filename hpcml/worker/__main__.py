"""``python -m hpcml.worker RUN_DIR SUBMISSION TASK``: what the batch script starts on each node."""

import sys

from hpcml.worker.task import run_task


def main() -> int:
    """Run the task named on the command line; returns its exit code."""
    run_dir, submission, task = sys.argv[1:]
    return run_task(run_dir, int(submission), int(task))


if __name__ == "__main__":
    sys.exit(main())
