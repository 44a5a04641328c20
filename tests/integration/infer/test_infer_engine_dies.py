"""A row that kills the engine's process costs itself, and nobody else anything."""

from __future__ import annotations

import json

from .conftest import Asking

# In the engine's process, in the middle of its work, as a fault of a kernel would be.
DEADLY = """
import sys
if "hpcml.infer.process" in sys.orig_argv:
    import os, signal
    from hpcml.infer.engines import prompting
    tokens_of = prompting.tokens_of
    def dying(tokenizer, request, *others):
        if "deadly" in request.text:
            os.kill(os.getpid(), signal.SIGSEGV)
        return tokens_of(tokenizer, request, *others)
    prompting.tokens_of = dying
"""


def test_a_deadly_row(asking: Asking) -> None:
    rows = [{"id": f"{n}", "question": f"red house {n}"} for n in range(40)]
    rows[21]["question"] = "deadly"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    asking.hpcml.write("in.jsonl", lines)
    asking.hpcml.write("deadly/sitecustomize.py", DEADLY)
    path = asking.hpcml.environment["PYTHONPATH"]
    asking.hpcml.environment["PYTHONPATH"] = f"{asking.hpcml.folder / 'deadly'}:{path}"
    asking.recipe(input={"files": "in.jsonl", "key": "id"}, max_failed=0.1)
    asking()
    causes = {row["key"]: row["cause"] for row in asking.output() if row["cause"]}
    assert causes == {"21": "engine_died"}
    shown = asking.hpcml("results", "ask").stdout
    assert "engine_died" in shown
    log = asking.hpcml("logs", "ask", "0", "--worker", "0").stdout
    assert log.count("the engine died (signal 11)") == 2
