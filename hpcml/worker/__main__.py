"""``python -m hpcml.worker RUN_DIR SUBMISSION TASK``: what the batch script starts on each node."""

import sys

from hpcml.worker.task import Task


def main() -> int:
    """Run the task named on the command line; returns its exit code."""
    run_dir, submission, task = sys.argv[1:]
    return Task(run_dir, int(submission), int(task)).run()


if __name__ == "__main__":
    sys.exit(main())
