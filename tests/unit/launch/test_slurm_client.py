"""Calling Slurm's commands: programs that answer as they do in bad times."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcml.launch.cluster import PartlySubmitted
from hpcml.launch.slurm import client, query
from hpcml.launch.slurm.reasons import end_words, words
from hpcml.launch.slurm.scheduler import SlurmScheduler, command
from hpcml.plan.arrays import split


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the PATH for commands that look like Slurm's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def put(folder: Path, name: str, lines: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(0o755)


def test_only_what_says_where_the_cluster_is_reaches_slurm(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(fake, "squeue", "env")
    monkeypatch.setenv("SBATCH_PARTITION", "x")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setenv("_SLURM_SPANK_OPTION_pyxis_container_image", "x")
    monkeypatch.setenv("SLURM_CONF", "/there/slurm.conf")
    monkeypatch.setenv("SLURM_JWT", "who asks")
    names = {line.partition("=")[0] for line in client.run(["squeue"]).splitlines()}
    assert not names & {"SBATCH_PARTITION", "SLURM_JOB_ID", "SLURMD_NODENAME"}
    assert not any("SPANK" in name for name in names)
    assert {"SLURM_CONF", "SLURM_JWT", "SLURM_BITSTR_LEN", "PATH"} <= names


def test_what_a_cell_found_is_no_part_of_what_it_submits(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(fake, "sbatch", "env")
    code = "/runs/outer/1/code/abc"
    monkeypatch.setenv("HPCML_RUN_DIR", "/runs/outer/1")
    monkeypatch.setenv("HPCML_CELL_DIR", "/runs/outer/1/cells/a")
    monkeypatch.setenv("HPCML_SITE", "mine")
    monkeypatch.setenv("PYTHONPATH", f"/mine:{code}")
    for name in ("RANK", "TMPDIR", "CUDA_VISIBLE_DEVICES", "HPCML_JOB_ID", "HPCML_STEPS"):
        monkeypatch.setenv(name, "7")
    lines = client.run(["sbatch"]).splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    assert not found.keys() & {"RANK", "TMPDIR", "CUDA_VISIBLE_DEVICES"}
    assert {name for name in found if name.startswith("HPCML_")} == {"HPCML_SITE"}
    assert found["PYTHONPATH"] == "/mine"
    # Outside of cells a person's variables are theirs.
    monkeypatch.delenv("HPCML_CELL_DIR")
    assert "TMPDIR=7" in client.run(["sbatch"]).splitlines()


@pytest.mark.parametrize(
    ("lines", "kind", "text"),
    [
        ("echo bad partition >&2; exit 1", client.SlurmError, "bad partition"),
        ("echo on stdout; exit 1", client.SlurmError, "on stdout"),
        ("exit 3", client.SlurmError, "exit code 3"),
        ("echo Socket timed out on send/recv >&2; exit 1", client.NoAnswer, "timed out"),
        ("sleep 5", client.NoAnswer, "no answer"),
    ],
)
def test_failures(fake: Path, lines: str, kind: type[Exception], text: str) -> None:
    put(fake, "sbatch", lines)
    with pytest.raises(client.SlurmError, match=text) as error:
        client.run(["sbatch"], timeout=1)
    assert type(error.value) is kind


def test_a_missing_command_is_named(fake: Path) -> None:
    with pytest.raises(client.SlurmError, match="no command squeuu"):
        client.run(["squeuu"])


def test_the_newest_state_counts(fake: Path) -> None:
    """sacct with duplicates, other kinds of lines, and a state with a name after it."""
    put(fake, "sacct", "printf '7_0|PREEMPTED\\n7_0|RUNNING\\n7_[1-2]|CANCELLED by 5\\nx|y\\n\\n'")
    assert query.accounting([7]) == {
        (7, 0): "RUNNING",
        (7, 1): "CANCELLED",
        (7, 2): "CANCELLED",
    }


def test_lines_that_are_none_of_squeue(fake: Path) -> None:
    put(
        fake,
        "squeue",
        "echo 'CLUSTER: west'\necho\n"
        "printf '7_3\\x1fRUNNING\\x1fNone\\x1f/a b|c/001.sh 0\\n'\n"
        "printf '8\\x1fPENDING\\x1f(Nodes: a|b)\\x1f/x.sh\\n'",
    )
    queue = query.queue("me", ["west"])
    assert queue.find(7, 3) == ("RUNNING", "None", "/a b|c/001.sh 0")
    assert queue.find(7, 4) is None
    assert queue.find(8, 0) == ("PENDING", "(Nodes: a|b)", "/x.sh")


class TestScheduler:
    """Submitting parts, each written down before and after."""

    def submit(self, folder: Path, tasks: int, links: int = 1, cap: int | None = None) -> list:
        self.journal: list[tuple[str, dict]] = []
        scheduler = SlurmScheduler(
            Path("/run/001.sh"),
            links,
            lambda event, durable=True, **fields: self.journal.append((event, fields)),
            lock=0,
        )
        return scheduler.submit(folder, split(tasks, 2, cap))

    def test_parts_and_links(self, fake: Path, tmp_path: Path) -> None:
        put(fake, "sbatch", f'echo "$@" >> {tmp_path}/calls; wc -l < {tmp_path}/calls')
        jobs = self.submit(tmp_path, 3, links=2)
        assert (tmp_path / "calls").read_text().splitlines() == [
            "--parsable --array=0-1 /run/001.sh 0",
            "--parsable --array=0-1 --dependency=afterany:1 /run/001.sh 0",
            "--parsable --array=0 /run/001.sh 2",
            "--parsable --array=0 --dependency=afterany:3 /run/001.sh 2",
        ]
        assert [job.job_id for job in jobs] == ["2", "4"]
        assert [event for event, _ in self.journal] == ["submitting", "submitted"] * 4
        assert [fields["job"] for event, fields in self.journal if event == "submitted"] == [
            1,
            2,
            3,
            4,
        ]

    @pytest.mark.parametrize(
        ("lines", "event", "text"),
        [
            ("echo limit >&2; exit 1", "refused", "limit"),
            ("echo Socket timed out >&2; exit 1", "unclear", "looks for it first"),
            ("echo hello", "unclear", "hello"),
            ("echo 5; echo 6", "unclear", "named no single job"),
        ],
    )
    def test_a_part_fails(
        self, fake: Path, tmp_path: Path, lines: str, event: str, text: str
    ) -> None:
        """The first part is submitted, the second is not, the third is not tried."""
        count = f"echo x >> {tmp_path}/calls; n=$(wc -l < {tmp_path}/calls)"
        put(fake, "sbatch", f"{count}\nif [ $n = 1 ]; then echo 4; exit; fi\n{lines}")
        with pytest.raises(PartlySubmitted, match=text) as error:
            self.submit(tmp_path, 6)
        assert "2 of 6 tasks" in str(error.value)
        assert [name for name, _ in self.journal] == [
            "submitting",
            "submitted",
            "submitting",
            event,
        ]
        assert (tmp_path / "calls").read_text() == "x\nx\n"


def test_stages_wait_for_the_end_of_jobs() -> None:
    (part,) = split(1, 10, None)
    assert command(Path("/r/1.sh"), part, 5, [7, 8])[3] == "--dependency=afterany:5:7:8"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Resources", "waits for nodes"),
        ("(Priority)", "higher priority"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "down, drained"),
        ("QOSMaxCpuPerJobLimit", "will never start"),
        ("AssocGrpCpuLimit", "a limit"),
        ("DependencyNeverSatisfied", "will never start"),
        ("SomethingNew", "waits (SomethingNew)"),
        ("", "waits"),
    ],
)
def test_reasons_in_words(reason: str, said: str) -> None:
    assert said in words(reason, 12)


def test_ends_in_words() -> None:
    assert end_words("NODE_FAIL") == "its job lost its node"
    assert end_words("NEW") == "its job ended as NEW"
