"""The commands of the guide do what it says, one after another in an empty folder."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Hpcml

pytest.importorskip("torch", reason="the engine torch is not installed")

GUIDE = (REPOSITORY / "docs" / "guide.md").read_text()
_BLOCK = re.compile(r"(?:<!-- (file|needs): ([^>]+) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)


def test_the_guide(hpcml: Hpcml) -> None:
    for name in ("recipes", "site_configs"):
        (hpcml.folder / name).symlink_to(REPOSITORY / name)
    hpcml.environment["OMP_NUM_THREADS"] = "1"
    commands = 0
    for kind, word, language, text in _BLOCK.findall(GUIDE):
        if kind == "file":
            hpcml.write(word, text)
            continue
        assert language == "console", f"a block that is neither a file nor commands: {text}"
        for line in text.splitlines():
            prompt, *arguments = shlex.split(line)
            assert (prompt, arguments[0]) == ("$", "hpcml"), line
            if kind == "needs":
                # What needs more than is here is at least no slip.
                assert "Usage" in hpcml(arguments[1], "--help").stdout
            else:
                hpcml(*arguments[1:])
                commands += 1
    assert commands == 17
    made = [hpcml.folder / name for name in ("fit.html", "model", "tuned", "adapter")]
    assert all(path.exists() for path in made)
    assert len(list(hpcml.folder.glob("runs/ask/*/cells/*/output.parquet"))) == 1


def test_every_page_is_reached_from_the_readme() -> None:
    known = (REPOSITORY / "README.md").read_text() + GUIDE
    for page in sorted(Path(REPOSITORY / "docs").glob("*.md")):
        assert page.name in known, page
