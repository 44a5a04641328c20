"""``python -m hpcml.train``: train the cell in ``$HPCML_CELL_DIR``, one process per rank."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from hpcml.train.stop import StopRequest
from hpcml.worker.codes import AGAIN, OUT_OF_MEMORY

_ENGINES = {
    "torch": ("hpcml.train.torch_engine", "torch, transformers, accelerate and peft"),
    "deepspeed": ("hpcml.train.deepspeed_engine", "deepspeed besides what torch needs"),
    "megatron": ("hpcml.train.megatron.engine", "torch, transformers, megatron-core and psutil"),
}
"""For each engine the module whose ``run`` trains a cell, and what has to be installed."""


def main() -> int:
    """Exit code: 0 done, 75 saved after being asked to stop, 71 out of memory, 1 failed."""
    stop_file = os.environ.get("HPCML_STOP_FILE")
    stop = StopRequest(Path(stop_file) if stop_file else None)
    stop.install()  # before the imports below, which take seconds
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        os.environ.setdefault("RAYON_NUM_THREADS", threads)  # the tokenizer's threads

    from hpcml.data.corpus import DataError
    from hpcml.train.checkpoint import CheckpointError
    from hpcml.train.config import TrainingError, TrainingJob

    cell_dir = os.environ.get("HPCML_CELL_DIR")
    if not cell_dir:
        print("hpcml.train: HPCML_CELL_DIR is not set; the worker sets it", file=sys.stderr)
        return 1
    try:
        job = TrainingJob.load(Path(cell_dir), os.environ)
        if job.engine not in _ENGINES:
            raise TrainingError(
                f"no engine is called {job.engine!r}; there are {', '.join(_ENGINES)}"
            )
        module, needs = _ENGINES[job.engine]
        try:
            engine = importlib.import_module(module)
        except ImportError as error:
            raise TrainingError(
                f"the engine {job.engine} needs {needs} in this environment: {error} "
                f"(pip install 'hpcml[{job.engine}]')"
            ) from error
        code: int = engine.run(job, stop)
        return code
    except (TrainingError, DataError, CheckpointError) as error:
        print(f"hpcml.train: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, MemoryError) as error:
        if lacks_memory(error):
            said = " ".join(str(error).split())
            print(
                "hpcml.train: a smaller per_device_train_batch_size, or gradient_checkpointing, "
                f"needs less memory\nhpcml.train: {said or 'no memory is left'}",
                file=sys.stderr,
            )
            return OUT_OF_MEMORY
        if stop.requested and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            # Another rank left while this one waited for it: all were asked to. The last
            # checkpoint stands.
            print(f"hpcml.train: a rank left before this one could save: {error}", file=sys.stderr)
            return AGAIN
        raise


def lacks_memory(error: BaseException) -> bool:
    """Whether memory, of a GPU or of the machine, was too small.

    torch has a type for its own allocator on GPUs alone; libraries of CUDA and the allocator on
    CPUs say it in words.
    """
    said = str(error).lower()
    return isinstance(error, MemoryError) or any(
        words in said for words in ("out of memory", "can't allocate memory")
    )


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is on disk. An orderly end of the interpreter would let threads of torch's process
    # groups abort it now and then, and the exit code is what the worker goes by.
    os._exit(code)
