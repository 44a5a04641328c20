"""``hpcml report``: a run as one page for the browser."""

from __future__ import annotations

from pathlib import Path

import click

from hpcml.cli.options import root_option, run_argument


@click.command("report")
@run_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where the page goes. [default: report.html in the run folder]",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print a summary in Markdown.")
@click.option(
    "--png",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the main plots as a picture.",
)
@root_option
def command(
    run: str | None,
    output: Path | None,
    as_markdown: bool,
    png: Path | None,
    root: Path | None,
) -> None:
    """Write a report of a run: one HTML file that needs no network, and print its path.

    RUN is a run folder, a run id or its beginning, or a recipe's name; without it, the newest run.
    It can be written at any time, also while the run is going on.
    """
    from hpcml.errors import UserError
    from hpcml.files import plain_errors
    from hpcml.launch.watch import watch
    from hpcml.report.data import gather
    from hpcml.report.page import page
    from hpcml.runs.disk import replace
    from hpcml.runs.find import find_run

    if as_markdown + (png is not None) + (output is not None) > 1:
        raise UserError("-o, --markdown and --png exclude each other; give one of them")
    folder = find_run(run, root)
    watcher = watch(folder)
    watcher.ask()
    status = watcher.refresh()
    if watcher.trouble:
        click.echo(f"hpcml: {watcher.trouble}", err=True)
    report = gather(folder, status)
    if as_markdown:
        from hpcml.report.markdown import markdown

        click.echo(markdown(report), nl=False)
        return
    if png is not None:
        from hpcml.report.picture import picture

        target, content = png, picture(report)
    else:
        target, content = output or folder.path / "report.html", page(report)
    with plain_errors(f"write {target}"):
        replace(target, content)
    click.echo(target)
