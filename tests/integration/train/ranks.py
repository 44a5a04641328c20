"""One rank of several trainings, one after the other: starting processes takes the longest.

``python ranks.py JOBS RANK``; JOBS is a JSON file with, for each training, the cell's folder, how
many processes train it (the others wait for the next one), after how many steps they
are asked to stop, and parameters that are not the cell's own, as a submission may have. The exit
codes are left beside JOBS.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from tests.integration.train import cells


def main(jobs: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from hpcml.train.config import TrainingJob
    from hpcml.train.megatron import engine

    torch.set_num_threads(1)
    codes = []
    for number, job in enumerate(json.loads(jobs.read_text())):
        if rank >= job["processes"]:
            codes.append(0)
            continue
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(job["processes"]),
        }
        if job["processes"] > 1:
            # They meet in a file: a port that is free now may be taken when its turn comes.
            meeting = jobs.with_name(f"meeting.{number}").absolute()
            dist.init_process_group(
                "gloo", f"file://{meeting}", rank=rank, world_size=job["processes"]
            )
        cell = Path(job["cell"])
        training = TrainingJob.load(cell, cells.environment(cell, Path(job["data_root"])))
        config = dataclasses.replace(training.config, **job["parameters"])
        training = dataclasses.replace(training, config=config)
        codes.append(engine.run(training, cells.StopAfter(job["stop_after"])))
        assert not dist.is_initialized()
    jobs.with_name(f"codes.{rank}.json").write_text(json.dumps(codes))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
