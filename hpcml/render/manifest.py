"""The jobs of one submission, as Volcano gets them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import yaml

from hpcml.errors import UserError
from hpcml.plan import Submission
from hpcml.plan.volcano import LAST_WORDS, NO_LIMIT, Job, mark_of
from hpcml.plan.webhook import check_job
from hpcml.render.environment import QuotingError, yaml_environment

#: The label of all jobs and pods of a run.
RUN_LABEL = "hpcml-run"

# Written in C, and needed for each of perhaps a thousand jobs.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def render_job(submission: Submission, job: Job) -> str:
    """The manifest of one job of ``submission``, as it will be submitted.

    Raises:
        UserError: the site's own template has a fault, a value cannot be written in YAML, or
            Volcano would refuse the job.
    """
    plan = submission.plan
    site, pod = plan.site, plan.pod
    assert pod is not None
    settings = site.volcano
    override = Path(settings.template) if settings.template else None
    name = override.name if override else "volcano/job.yaml.j2"
    labels = {
        **settings.labels,
        "app.kubernetes.io/managed-by": "hpcml",
        RUN_LABEL: mark_of(plan.folder),
    }
    script = plan.folder / "scripts" / f"{submission.number:03}.sh"
    words = ["bash", str(script), str(job.first), str(job.stride)]
    time = plan.resources.time
    try:
        text = (
            yaml_environment(override)
            .get_template(name)
            .render(
                plan=plan,
                site=site,
                volcano=settings,
                job=job,
                pod=pod,
                gang=plan.resources.nodes > 1,
                labels=labels,
                annotations={
                    **settings.annotations,
                    "hpcml-folder": str(plan.folder),
                    "hpcml-submission": f"{submission.number}",
                },
                pod_annotations=settings.annotations,
                # Kubernetes replaces $(NAME), and takes $$ for a dollar.
                command=[word.replace("$", "$$") for word in words],
                active=max(1, time - plan.lead) if time else None,
                grace=plan.lead + LAST_WORDS,
                no_limit=NO_LIMIT,
            )
        )
    except jinja2.TemplateError as error:
        where = getattr(error, "filename", None) or name
        line = getattr(error, "lineno", None)
        raise UserError(f"{where}:{line or '?'}: in the site's template: {error.message}") from None
    except QuotingError as error:
        raise UserError(f"site {site.name}: {error}") from None
    check_job(parse_job(text, site.volcano.template or site.name), job, site)
    return text


def parse_job(text: str, where: str = "the job") -> dict[str, Any]:
    """A rendered manifest as the client sends it.

    Raises:
        UserError: a template of the site made it something else than a mapping in YAML.
    """
    try:
        manifest = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{where}: what it renders is no YAML: {error}") from None
    if not isinstance(manifest, dict):
        raise UserError(f"{where}: what it renders is no mapping in YAML")
    return manifest
