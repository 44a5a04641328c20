"""The batch script of one submission."""

from __future__ import annotations

from pathlib import Path

import jinja2

from hpcml.errors import UserError
from hpcml.plan import Submission
from hpcml.render import container
from hpcml.render.environment import QuotingError, shell_environment
from hpcml.site.schema import Site


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
        text = environment.get_template(name).render(
            plan=plan,
            site=site,
            submission=submission.number,
            run_dir=plan.folder,
            code=code,
            # How the worker gets into an image, if there is one.
            enter=container.prepare(image) if image else None,
            inside=container.command(image, plan.folder, code) if image else [],
            propose=_propose(submission, code),
            with_srun=pyxis or plan.resources.nodes > 1,
            srun_options=container.srun_options(image, plan.folder) if image and pyxis else [],
            # Of Volcano: where a lane ends, and where its pods write.
            tasks=submission.tasks,
            task_log=f"tasks/{submission.number:03}.",
            gpus=",".join(map(str, range(plan.resources.gpus * plan.pack))),
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
    if override is not None:
        _check_parts(text, site)
    return text


def _propose(submission: Submission, code: Path) -> list[str]:
    """What stands before the worker in a round of a search, which others may not have proposed.

    It becomes what follows it, so that signals and the exit code are as without it.
    """
    plan = submission.plan
    if plan.search is None or plan.site.scheduler == "local":
        return []
    python = plan.python if plan.pod else plan.host_python
    module = [python, "-m", "hpcml.worker.rounds", str(plan.folder), str(submission.rung)]
    # Where there is an image, it has a variable of its own.
    return ["env", f"PYTHONPATH={code}", *module] if plan.container else module


# Without these a script runs no cells, or every task the same ones: what reads the index, what
# starts the worker, and with Volcano what goes on to the next task of a lane. By their blocks.
_NEEDED = {
    "local": {"start": "hpcml.worker"},
    "slurm": {"task": "SLURM_ARRAY_TASK_ID", "start": "hpcml.worker"},
    "volcano": {"task": "while :", "start": "hpcml.worker", "finish": 'exit "$result"'},
}


def _check_parts(text: str, site: Site) -> None:
    for block, part in _NEEDED[site.scheduler].items():
        if part not in text:
            raise UserError(
                f"{site.template}: the script has no {part}, so that its tasks would not run "
                f"their cells; the block {block!r} must keep that of hpcml: {{{{ super() }}}}"
            )
