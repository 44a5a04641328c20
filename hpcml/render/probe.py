"""The batch script by which a site is tried."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2

from hpcml.errors import UserError
from hpcml.render.environment import QuotingError, shell_environment
from hpcml.site.schema import Site


def render_probe(
    site: Site,
    directives: Sequence[tuple[str, str | None]],
    nodes: int,
    folder: Path,
    python: str,
    runtime: str,
) -> str:
    """The script of a probe job.

    Args:
        site: the site that is tried.
        directives: the options of sbatch.
        nodes: how many nodes it gets.
        folder: where it works; ``probe.py`` lies in it.
        python: the Python of the site.
        runtime: the command that starts containers, or nothing.

    Raises:
        UserError: the site's own template has a fault, or a value cannot be written in a script.
    """
    override = Path(site.template) if site.template else None
    try:
        return (
            shell_environment(override)
            .get_template("slurm/probe.sh.j2")
            .render(
                parent=override.name if override else "slurm/job.sh.j2",
                # What the parent knows of a plan, for the blocks that stay its own.
                plan={
                    "directives": directives,
                    "resources": {"nodes": nodes},
                    "container": None,
                },
                site=site,
                submission=0,
                run_dir=folder,
                code=folder,
                enter=None,
                inside=[],
                propose=[],
                with_srun=nodes > 1,
                srun_options=[],
                data_root=folder / "data",
                python=python,
                log_pattern=str(folder / "job").replace("%", "%%"),
                runtime=runtime,
            )
        )
    except jinja2.TemplateError as error:
        where = getattr(error, "filename", None) or site.template or "slurm/probe.sh.j2"
        line = getattr(error, "lineno", None)
        raise UserError(f"{where}:{line or '?'}: in the site's template: {error.message}") from None
    except QuotingError as error:
        raise UserError(f"site {site.name}: {error}") from None
