"""The whole program: how it ends, and what it says when it cannot go on."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from hpcml import cli
from hpcml.cli import sweep
from hpcml.cli.output import no_reason_to_stop
from hpcml.errors import UserError
from hpcml.runs.status import collect
from tests.unit.runs.fakes import FakeRun, make_cells

REPOSITORY = Path(__file__).resolve().parents[3]
PYTHON = [sys.executable, "-m", "hpcml"]


def run(command: list[str], folder: Path, **options: object) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        command,
        cwd=folder,
        env=environment,
        stderr=subprocess.PIPE,
        **{"stdout": subprocess.PIPE, **options},
    )


def one_message(result: subprocess.CompletedProcess[bytes]) -> str:
    said = result.stderr.decode()
    assert said.startswith("hpcml: "), said
    assert said.count("\n") == 1, said
    return said


class Broken(io.StringIO):
    """A stream on a full disk."""

    def __init__(self, code: int) -> None:
        super().__init__()
        self.code = code

    def write(self, text: str) -> int:
        raise OSError(self.code, os.strerror(self.code))


class TestOutput:
    @pytest.mark.parametrize("arguments", [["status"], ["results", "--csv"]])
    def test_a_terminal_that_knows_few_characters(
        self, root: Path, tmp_path: Path, arguments: list[str]
    ) -> None:
        FakeRun(root, make_cells(2, text=["日本", "ü"])).done(0, loss=1.0)
        command = ["env", "PYTHONIOENCODING=latin-1", *PYTHON]
        result = run([*command, *arguments], tmp_path)
        assert result.returncode == 0, result.stderr
        assert (b"??" in result.stdout) or (rb"\u65e5\u672c" in result.stdout)

    @pytest.mark.parametrize("arguments", [["status"], ["results"], ["results", "--csv"], ["-h"]])
    def test_a_full_disk(self, root: Path, tmp_path: Path, arguments: list[str]) -> None:
        FakeRun(root, make_cells(2)).done(0, loss=1.0)
        with open("/dev/full", "w") as full:
            result = run([*PYTHON, *arguments], tmp_path, stdout=full)
        assert "No space left on device" in one_message(result)
        assert result.returncode == 2

    def test_a_closed_stream(self, root: Path, tmp_path: Path) -> None:
        FakeRun(root, make_cells(2))
        for closed, said in (("1>&-", b"hpcml: the output cannot be"), ("1>&- 2>&-", b"")):
            result = run(["sh", "-c", f'exec "$@" {closed}', "sh", *PYTHON, "status"], tmp_path)
            assert result.returncode == 2
            assert result.stderr.startswith(said)
            assert b"Traceback" not in result.stderr

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EBADF])
    def test_it_is_no_reason_to_stop(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        monkeypatch.setattr(sys, "stdout", Broken(code))
        monkeypatch.setattr(sys, "stderr", Broken(code))
        from hpcml.cli.tables import console

        with no_reason_to_stop():
            print("x", flush=True)
            click.echo("x")
            click.echo("x", err=True)
            console().print("x")
        assert isinstance(sys.stdout, Broken)

    def test_what_can_be_written_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        with no_reason_to_stop():
            print("out")
            click.echo("err", err=True)
        assert capsys.readouterr() == ("out\n", "err\n")

    def test_no_table_is_no_reason_for_another_exit_code(
        self, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def full(*_: object) -> None:
            raise UserError("cannot write results.parquet: the disk is full")

        monkeypatch.setattr("hpcml.runs.tables.write_parquet", full)
        fake = FakeRun(root, make_cells(2))
        fake.done(0)
        assert sweep._finish(fake.folder, collect(fake.folder)) == 1
        fake.done(1)
        assert sweep._finish(fake.folder, collect(fake.folder)) == 0
        out, err = capsys.readouterr()
        assert "2 cells: 2 done" in out
        assert "the disk is full" in err


class TestErrors:
    @pytest.fixture
    def fail(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> Callable[[BaseException], tuple[int, str]]:
        def call(error: BaseException) -> tuple[int, str]:
            def command(*_: object, **__: object) -> None:
                raise error

            monkeypatch.setattr(cli.hpcml_command, "main", command)
            code = cli.main()
            return code, capsys.readouterr().err

        return call

    def test_codes_and_messages(
        self, fail: Callable[[BaseException], tuple[int, str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert fail(UserError("a\x1b[31m\nb")) == (2, "hpcml: a\\x1b[31m\nb\n")
        assert fail(click.UsageError("no \x07")) == (2, "Error: no \\x07\n")
        assert fail(KeyboardInterrupt()) == (130, "hpcml: interrupted\n")
        assert fail(click.Abort()) == (130, "hpcml: interrupted\n")
        monkeypatch.setattr("hpcml.cli.output.discard", lambda stream: None)
        assert fail(BrokenPipeError()) == (141, "")
        assert fail(OSError(errno.EIO, "bad", "/x")) == (2, "hpcml: /x: bad\n")
        _, said = fail(UserError("x" * 10_000))
        assert len(said) < 1100
        monkeypatch.setattr(sys, "stderr", Broken(errno.ENOSPC))
        assert fail(UserError("nobody can be told"))[0] == 2

    def test_a_folder_that_was_removed(self, tmp_path: Path) -> None:
        (tmp_path / "gone").mkdir()
        for arguments in ("status", "site list", "sweep r.yaml", "results", "schema recipe"):
            script = f'mkdir -p gone; cd gone; rmdir ../gone; exec "$@" {arguments}'
            result = run(["sh", "-c", script, "sh", *PYTHON], tmp_path)
            assert result.returncode == 2
            assert "the folder that you are in" in one_message(result)


INTERRUPTED = """
import builtins, os, signal, sys, time
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
if {moment!r} == "exit":
    leave = os._exit
    def late(code):
        os._exit = leave
        interrupt()
    os._exit = late
else:
    real = builtins.__import__
    def imported(name, *rest):
        if name == {moment!r}:
            interrupt()
        return real(name, *rest)
    builtins.__import__ = imported
sys.argv = ["hpcml", "--version"]
from hpcml.__main__ import main
main()
"""


@pytest.mark.parametrize("moment", ["click", "hpcml.errors", "exit"])
def test_ctrl_c_is_never_a_traceback(tmp_path: Path, moment: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED.format(moment=moment))
    result = run([sys.executable, str(script)], tmp_path)
    assert result.returncode == 130
    assert result.stderr == b"hpcml: interrupted\n"


def test_the_installed_command_is_the_guarded_one() -> None:
    assert "hpcml = hpcml.__main__:main\n" in (REPOSITORY / "setup.cfg").read_text()
