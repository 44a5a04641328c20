"""The cluster behaves as the clusters that people have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpcml.launch.slurm.query import accounting

from .fixtures import SlurmCluster, host_python_binds


@pytest.mark.slurm_alone
def test_eight_idle_nodes(slurm_cluster: SlurmCluster) -> None:
    nodes = slurm_cluster.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%N %T %c %G").stdout
    assert nodes.splitlines() == [f"n{number} idle 64 gpu:h100:8" for number in range(1, 9)]


def test_tasks_run_on_nodes_with_names_of_their_own(slurm_cluster: SlurmCluster) -> None:
    names = slurm_cluster.run("srun", "-N2", "hostname").stdout.split()
    assert len(set(names)) == 2
    assert set(names) < set(slurm_cluster.nodes)


MEETING = """
import socket, sys, time

first = sys.argv[1]
if socket.gethostname() == first:
    with socket.create_server(("", 29500)) as server:
        print(server.accept()[1][0])
else:
    while True:
        try:
            socket.create_connection((first, 29500)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
"""


def test_nodes_reach_each_other_by_name(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    command = f"{sys.executable} {tmp_path}/meeting.py $(scontrol show hostnames | head -1)"
    seen = slurm_cluster.run("srun", "-N2", "-t1", "sh", "-c", f"exec {command}").stdout.strip()
    assert seen in [f"10.77.0.{number}" for number in range(1, 9)]


def test_tmp_is_the_nodes_own_except_what_is_shared(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    mark = Path("/tmp", f"mark-of-{tmp_path.name}")
    (tmp_path / "shared").touch()
    slurm_cluster.run("srun", "-w", "n1", "touch", mark)
    assert not mark.exists()
    assert slurm_cluster.run("srun", "-w", "n2", "ls", mark, check=False).returncode
    for node in ("n1", "n2"):
        assert slurm_cluster.run("srun", "-w", node, "ls", tmp_path).stdout == "shared\n"
    slurm_cluster.run("srun", "-w", "n1", "rm", mark)


def test_gpus_are_assigned(slurm_cluster: SlurmCluster) -> None:
    echo = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert slurm_cluster.run("srun", "--gres=gpu:2", *echo).stdout.strip().count(",") == 1


def test_array_is_accounted(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = slurm_cluster.submit(
        "--array=0-19", script="echo $SLURM_ARRAY_TASK_ID > $SLURM_ARRAY_TASK_ID", folder=tmp_path
    )
    slurm_cluster.wait_accounted(job, ["COMPLETED"] * 20)
    assert all((tmp_path / str(task)).read_text() == f"{task}\n" for task in range(20))


def test_failure_is_accounted(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = slurm_cluster.submit(script="exit 3", folder=tmp_path)
    slurm_cluster.wait_accounted(job, ["FAILED"])
    assert slurm_cluster.sacct(job)[0]["ExitCode"] == "3:0"


def test_job_over_its_memory_is_killed(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = f"{sys.executable} -c 'x = bytearray(300 << 20); __import__(\"time\").sleep(60)'"
    job = slurm_cluster.submit("--mem=100", script=script, folder=tmp_path)
    slurm_cluster.wait_accounted(job, ["FAILED"])
    (output,) = tmp_path.glob("*.out")
    assert "exceeded memory limit" in output.read_text()


def test_limits_of_partitions_are_enforced(slurm_cluster: SlurmCluster) -> None:
    refused = slurm_cluster.run("sbatch", "-p", "debug", "-t", "6", "--wrap", "true", check=False)
    assert refused.returncode
    assert "time limit" in refused.stderr.lower()


def test_requeued_job_runs_again_soon(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = "echo ${SLURM_RESTART_COUNT-none} >> starts; sleep 60"
    job = slurm_cluster.submit(script=script, folder=tmp_path)
    starts = tmp_path / "starts"
    slurm_cluster.wait_until(starts.exists, 60)
    slurm_cluster.run("scontrol", "requeue", job)
    slurm_cluster.wait_until(lambda: starts.exists() and "1" in starts.read_text().split(), 60)
    slurm_cluster.run("scancel", job)


@pytest.mark.slurm_alone
def test_job_of_a_lost_node_is_requeued(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = slurm_cluster.submit(script="hostname >> nodes; sleep 60", folder=tmp_path)
    node = slurm_cluster.wait(job, "RUNNING")["NodeList"]
    nodes = tmp_path / "nodes"
    slurm_cluster.wait_until(nodes.exists, timeout=10)
    slurm_cluster.stop_daemon(node, kill=True)
    slurm_cluster.set_node(node, "down")  # what the controller would find out within minutes
    slurm_cluster.wait_until(lambda: len(nodes.read_text().split()) == 2, timeout=30)
    first, second = nodes.read_text().split()
    assert first == node != second
    slurm_cluster.wait_accounted(job, ["NODE_FAIL", "RUNNING"], "-D")


@pytest.mark.slurm_alone
def test_preempted_job_gets_its_signal_first(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    script = (
        "trap 'echo signal >> events' USR1; "
        "echo start ${SLURM_RESTART_COUNT-none} >> events; "
        "for i in $(seq 600); do sleep 0.1; done"
    )
    options = ("-w", "n1", "--exclusive")
    low = slurm_cluster.submit(
        *options, "-p", "preempt", "--signal=B:USR1@5", script=script, folder=tmp_path
    )
    events = tmp_path / "events"
    slurm_cluster.wait(low, "RUNNING")
    slurm_cluster.wait_until(events.exists, timeout=10)
    high = slurm_cluster.submit(*options, script="sleep 1", folder=tmp_path)
    slurm_cluster.wait(high, "COMPLETED")
    # Only a job that is still there at the end of the time of grace is requeued.
    slurm_cluster.wait_until(lambda: "start 1" in events.read_text(), timeout=30)
    assert events.read_text().splitlines() == ["start none", "signal", "start 1"]
    # The accounting has two attempts of it; the newest one counts.
    slurm_cluster.wait_accounted(low, ["PREEMPTED", "RUNNING"], "-D")
    assert accounting([int(low)]) == {(int(low), None): "RUNNING"}
    slurm_cluster.run("scancel", low)


@pytest.mark.slurm_alone
def test_jobs_outlive_the_controller(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job = slurm_cluster.submit(script="sleep 60", folder=tmp_path)
    slurm_cluster.wait(job, "RUNNING")
    slurm_cluster.stop_daemon("slurmctld")
    assert "DOWN" in slurm_cluster.run("scontrol", "ping", check=False).stdout
    slurm_cluster.start_daemon("slurmctld")
    assert slurm_cluster.wait(job, "RUNNING")["Restarts"] == "0"


def test_container_keeps_its_gpus(slurm_cluster: SlurmCluster, apptainer: Path) -> None:
    command = ("apptainer", "exec", apptainer, "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; hostname")
    gpus, node = slurm_cluster.run("srun", "--gres=gpu:2", *command).stdout.split()
    assert gpus.count(",") == 1
    assert node in slurm_cluster.nodes


def test_container_runs_the_tests_python(slurm_cluster: SlurmCluster, apptainer: Path) -> None:
    pytest.importorskip("torch")
    container = ("apptainer", "exec", *host_python_binds(), str(apptainer))
    python = (sys.executable, "-c", "import torch; print(int(torch.ones(3).sum()))")
    assert slurm_cluster.run("srun", *container, *python).stdout == "3\n"
