"""``python -m hpcml.infer``: work on the cell that the worker's folder belongs to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpcml.train.stop import StopRequest


def main() -> int:
    """Exit code: 0 nothing is left for this worker, 75 left before the end, 1 failed."""
    stop_file = os.environ.get("HPCML_STOP_FILE")
    stop = StopRequest(Path(stop_file) if stop_file else None)
    stop.install()  # before the imports below, which take a while
    worker_dir = os.environ.get("HPCML_CELL_DIR")
    if not worker_dir:
        print("hpcml.infer: HPCML_CELL_DIR is not set; the worker sets it", file=sys.stderr)
        return 1
    try:
        from hpcml.infer.engine import EngineConfig
        from hpcml.infer.job import InferenceError, InferenceJob
        from hpcml.infer.process import EngineProcess
        from hpcml.infer.runner import Runner
    except ImportError as error:
        print(
            f"hpcml.infer: batch inference needs numpy, pyarrow and jinja2 in this environment, "
            f"beside its engine: {error}",
            file=sys.stderr,
        )
        return 1
    try:
        job = InferenceJob.load(Path(worker_dir), os.environ)
        config = EngineConfig(
            job.engine,
            job.model,
            job.adapter,
            job.parameters,
            job.arguments,
            job.chat_template,
        )
        stop.hold()
        return Runner(job, stop, lambda: EngineProcess(config)).run()
    except InferenceError as error:
        print(f"hpcml.infer: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that wait for the filesystem must not delay the end
