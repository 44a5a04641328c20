"""Two million rows: memory stays small, and so does the number of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

ROWS = 2_000_000

# The whole work of a worker, planning and merge included, with an engine that answers at once.
PROGRAM = """
import json, os, resource, sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
from hpcml.infer.runner import Runner
from tests.unit.infer.jobs import Never, StandIn, hold, make_job

folder, rows = Path(sys.argv[1]), int(sys.argv[2])
for first in range(0, rows, 100_000):
    numbers = range(first, first + 100_000)
    table = pa.table({"id": [f"k{n}" for n in numbers], "text": [f"what is {n}?" for n in numbers]})
    if not first:
        writer = pq.ParquetWriter(folder / "in.parquet", table.schema)
    writer.write_table(table)
writer.close()
job = make_job(folder)
held = hold(job)
code = Runner(job, Never(), lambda: StandIn(512)).run()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
files = sum(len(names) for _, _, names in os.walk(job.cell_dir))
print(json.dumps([code, peak, files, pq.read_metadata(job.cell_dir / "output.parquet").num_rows]))
os._exit(0)
"""


def test_two_million_rows(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, str(ROWS)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    code, peak, files, rows = json.loads(result.stdout.splitlines()[-1])
    assert (code, rows) == (0, ROWS)
    assert peak < 2**30
    assert files < 1000
