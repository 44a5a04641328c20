"""The batch script of one submission."""

from __future__ import annotations

from pathlib import Path

import jinja2

from hpcml.errors import UserError
from hpcml.plan import Submission
from hpcml.render import container
from hpcml.render.environment import QuotingError, shell_environment


def render_script(submission: Submission) -> str:
    """The batch script that runs every task of ``submission``, as it will be executed.

    Raises:
        UserError: the site's own template has a fault, or a value cannot be written in a script.
    """
    plan = submission.plan
    site = plan.site
    override = Path(site.template) if site.template else None
    environment = shell_environment(override)
    name = override.name if override else f"{site.scheduler}/job.sh.j2"
    code = plan.folder / "code" / submission.snapshot.digest
    image = plan.container
    pyxis = image is not None and image.runtime == "pyxis"
    try:
        return environment.get_template(name).render(
            plan=plan,
            site=site,
            submission=submission.number,
            run_dir=plan.folder,
            code=code,
            # How the worker gets into an image, if there is one.
            enter=container.prepare(image) if image else None,
            inside=container.command(image, plan.folder, code) if image else [],
            with_srun=pyxis or plan.resources.nodes > 1,
            srun_options=container.srun_options(image, plan.folder) if image and pyxis else [],
            data_root=plan.root / ".data",
            python=plan.python,
            # %A and %a are the array's number and the index; other percent signs are text.
            log_pattern=f"{plan.folder}/tasks/{submission.number:03}.".replace("%", "%%") + "%A_%a",
        )
    except jinja2.TemplateError as error:
        where = getattr(error, "filename", None) or name
        line = getattr(error, "lineno", None)
        raise UserError(f"{where}:{line or '?'}: in the site's template: {error.message}") from None
    except QuotingError as error:
        raise UserError(f"site {site.name}: {error}") from None
