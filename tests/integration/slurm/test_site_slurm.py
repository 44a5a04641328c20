"""`hpcml site detect` and `hpcml site check` on a real Slurm."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcml.site.search import load_site
from tests.cluster.fixtures import SlurmCluster
from tests.conftest import Hpcml, wait_until


def lines(seen: str) -> dict[str, str]:
    """The lines of a check by name: the word and what was seen."""
    found = {}
    for line in seen.splitlines():
        if line.startswith(("ok", "FAIL", "skipped")):
            found[line[9:25].strip()] = f"{line[:9].strip()} {line[25:]}"
    return found


@pytest.fixture
def site(hpcml: Hpcml, slurm_cluster: SlurmCluster) -> Path:
    """The detected site, for runs in a folder that the nodes see."""
    path = hpcml.folder / "site.yaml"
    hpcml("site", "detect", "--name", "here", "--output", path)
    change(path, runs=str(hpcml.folder / "runs"))
    return path


def change(path: Path, **keys: Any) -> None:
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **keys}, sort_keys=False))


def left_over(slurm_cluster: SlurmCluster) -> list[str]:
    return [job["id"] for job in slurm_cluster.squeue() if job["name"].startswith("hpcml_check")]


def test_a_recipe_runs_on_the_detected_site(
    hpcml: Hpcml, site: Path, slurm_cluster: SlurmCluster
) -> None:
    found = load_site(site).site
    assert [each.name for each in found.partitions] == ["gpu", "debug", "preempt"]
    gpu = found.partitions[0]
    assert (gpu.cpus, gpu.gpus, gpu.gpu_type, gpu.max_nodes) == (64, 8, "h100", 8)
    assert gpu.max_time == 86400
    assert found.slurm.max_array_size == 1001
    assert found.slurm.accounting
    recipe = hpcml.write(
        "recipe.yaml",
        "name: detected\nkind: command\nresources: {gpus: 1, time: 2m}\ncommand:\n"
        f"  run: [{sys.executable}, -c, 'import os; "
        'print(os.environ["CUDA_VISIBLE_DEVICES"])\']\n',
    )
    hpcml("sweep", recipe, "--site", site)
    (run,) = (hpcml.folder / "runs" / "detected").iterdir()
    wait_until(lambda: list(run.glob("cells/*/result.json")), 120, "the cell")
    (log,) = run.glob("cells/*/log.1.out")
    assert log.read_text().strip().isdigit()


def test_an_existing_file_is_left_alone(hpcml: Hpcml, site: Path) -> None:
    before = site.read_text()
    assert "exists already" in hpcml("site", "detect", "--output", site, code=2).stderr
    assert site.read_text() == before


def test_each_line_of_a_partition_is_good(
    hpcml: Hpcml, site: Path, slurm_cluster: SlurmCluster
) -> None:
    change(site, container=None)
    done = hpcml("site", "check", site, "--partition", "debug")
    seen = lines(done.stdout)
    for name in ("squeue", "sacct", "scontrol", "python", "files", "login and node", "two nodes"):
        assert seen[name].startswith("ok"), done.stdout
    for name in ("network", "clocks", "GPUs", "signal", "requeue"):
        assert seen[name].startswith("ok"), done.stdout
    assert "flock" in seen["two nodes"]
    assert "CUDA_VISIBLE_DEVICES=" in seen["GPUs"]
    assert "SLURM_RESTART_COUNT=1" in seen["requeue"]
    assert seen["containers"].startswith("skipped")
    assert not left_over(slurm_cluster)
    assert list((hpcml.folder / "runs").iterdir()) == []


def test_what_fails_is_said_with_what_to_change(
    hpcml: Hpcml, site: Path, slurm_cluster: SlurmCluster
) -> None:
    partitions = [
        {"name": "nowhere", "cpus": 1, "memory": "1G"},
        {"name": "debug", "cpus": 1, "memory": "1G", "max_nodes": 1},
    ]
    script = hpcml.write("no-python", '#!/bin/sh\necho "$0 is broken" >&2\nexit 3\n')
    script.chmod(0o755)
    change(
        site,
        partitions=partitions,
        python=str(script),
        container=None,
        slurm={"coming_back": "chain", "max_array_size": 999},
    )
    done = hpcml("site", "check", site, code=1)
    assert "nowhere" in lines(done.stdout)["submit"]
    assert "is broken" in done.stdout
    assert "set python to" in done.stdout
    assert not left_over(slurm_cluster)


def test_term_as_the_signal_and_a_requeue_that_is_refused(
    hpcml: Hpcml, site: Path, slurm_cluster: SlurmCluster
) -> None:
    refuse = (
        'scontrol() { if [ "$1" = requeue ]; then echo "Access denied" >&2; return 1; fi; '
        'command scontrol "$@"; }'
    )
    hpcml.write(
        "own.sh.j2",
        '{% extends "slurm/job.sh.j2" %}\n{% block setup %}\n{{ super() }}\nulimit -c 0\n'
        "{% endblock %}\n",
    )
    change(site, setup=[refuse], signal={"name": "TERM"}, template="own.sh.j2", container=None)
    seen = lines(hpcml("site", "check", site, "-p", "debug", code=1).stdout)
    assert seen["signal"].startswith("ok TERM")
    assert seen["requeue"] == "FAIL Access denied; set slurm.coming_back: chain"


def test_a_folder_that_the_nodes_do_not_see(
    hpcml: Hpcml, site: Path, slurm_cluster: SlurmCluster
) -> None:
    # Nodes have a /tmp of their own, and this folder is not shared with them.
    with tempfile.TemporaryDirectory(prefix="hpcml-not-shared-", dir="/tmp") as root:
        done = hpcml("site", "check", site, "-p", "debug", "--root", root, code=1)
        assert list(Path(root).iterdir()) == []
    assert lines(done.stdout)["runs root"].startswith("FAIL the job ran"), done.stdout
    assert "set runs to" in done.stdout


def test_options_of_the_site_are_used(
    hpcml: Hpcml, site: Path, slurm_cluster: SlurmCluster
) -> None:
    change(site, slurm={"options": {"account": "no_such_account"}})
    done = hpcml("site", "check", site, "-p", "debug", code=1)
    assert "Invalid account" in lines(done.stdout)["submit"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_check_leaves_nothing(
    hpcml: Hpcml, site: Path, slurm_cluster: SlurmCluster, number: int
) -> None:
    # Held in the queue, so that it is there for as long as nobody ends it.
    change(site, slurm={"options": {"begin": "now+1hour"}})
    process = hpcml.start("site", "check", site, "-p", "debug")
    wait_until(lambda: left_over(slurm_cluster), 60, "the job")
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert not left_over(slurm_cluster)
    assert list((hpcml.folder / "runs").iterdir()) == []


def test_nothing_is_submitted_without_jobs(
    hpcml: Hpcml, site: Path, slurm_cluster: SlurmCluster
) -> None:
    done = hpcml("site", "check", site, "--no-jobs")
    assert "partition" not in done.stdout
    assert lines(done.stdout)["sbatch"].startswith("ok")


def test_a_job_that_does_not_start_in_time(
    hpcml: Hpcml, site: Path, slurm_cluster: SlurmCluster
) -> None:
    change(site, slurm={"options": {"begin": "now+1hour"}})
    done = hpcml("site", "check", site, "-p", "debug", "--wait", "1s", code=1)
    assert "did not start in 1 s" in lines(done.stdout)["start"]
    assert not left_over(slurm_cluster)
