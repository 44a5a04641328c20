"""`hpcml site` and sites of one's own, used for real."""

from __future__ import annotations

import sys

from tests.conftest import Hpcml

SITE = """
name: box
scheduler: local
env: {GREETING: "hello $(world) 'x'"}
setup:
  - export FROM_SETUP=$((1 + 2))
template: box.sh.j2
"""
TEMPLATE = """{% extends "local/job.sh.j2" %}
{% block setup %}
{{ super() }}
export FROM_TEMPLATE={{ "a b" }}
{% endblock %}
"""


def test_list_show_check(hpcml: Hpcml) -> None:
    assert "* local" in hpcml("site", "list").stdout
    assert "scheduler: local" in hpcml("site", "show", "local").stdout
    seen = hpcml("site", "check").stdout
    assert "FAIL" not in seen
    assert "runs root" in seen


def test_check_fails_where_something_is_missing(hpcml: Hpcml) -> None:
    site = hpcml.write("bad.yaml", "name: bad\nscheduler: local\nsetup: [no_such_command_here]\n")
    seen = hpcml("site", "check", site, code=1).stdout
    assert "no_such_command_here" in seen


def test_environment_setup_and_template_of_a_site(hpcml: Hpcml) -> None:
    site = hpcml.write("box.yaml", SITE)
    hpcml.write("box.sh.j2", TEMPLATE)
    names = "GREETING FROM_SETUP FROM_TEMPLATE"
    recipe = hpcml.write(
        "recipe.yaml",
        "name: environment\nkind: command\ncommand:\n"
        f"  run: [{sys.executable}, -c, 'import os; "
        f'print([os.environ[n] for n in "{names}".split()])\']\n',
    )
    hpcml("sweep", recipe, "--site", site)
    (cell,) = hpcml.cell_dirs()
    assert (cell / "log.1.out").read_text() == "[\"hello $(world) 'x'\", '3', 'a b']\n"


def test_a_broken_template_names_its_line(hpcml: Hpcml) -> None:
    site = hpcml.write("box.yaml", SITE)
    hpcml.write("box.sh.j2", '{% extends "local/job.sh.j2" %}\n{% block setup %}\n{{ nothing }}')
    recipe = hpcml.write("recipe.yaml", "name: x\nkind: command\ncommand: {run: [echo]}\n")
    said = hpcml("sweep", recipe, "--site", site, code=2).stderr
    assert "box.sh.j2" in said
    assert not (hpcml.folder / "runs").exists()
