"""``python -m hpcml.worker RUN_DIR SUBMISSION TASK``: what the batch script starts on each node."""

import sys

from hpcml.worker.codes import CANNOT_WRITE
from hpcml.worker.task import run_task


def main() -> int:
    """Run the task named on the command line; returns its exit code.

    74 says that the run folder could not be read or written; why is on stderr. The cells of the
    task are then `lost`, and continue when the command is given again.
    """
    run_dir, submission, task = sys.argv[1:]
    try:
        return run_task(run_dir, int(submission), int(task))
    except OSError as error:
        where = error.filename or run_dir
        print(f"hpcml: {where}: {error.strerror}", file=sys.stderr)
        return CANNOT_WRITE


if __name__ == "__main__":
    sys.exit(main())
