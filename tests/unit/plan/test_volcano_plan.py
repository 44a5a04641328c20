"""Jobs of Volcano: their names, how tasks are spread over them, and what a server would refuse."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from hpcml.errors import UserError
from hpcml.plan import Snapshot, Submission, compile_plan
from hpcml.plan.snapshot import take
from hpcml.plan.volcano import LONGEST_NAME, Job, job_name, jobs_of
from hpcml.plan.webhook import check_job
from hpcml.recipe.load import load_recipe
from hpcml.render import parse_job, render_job, render_script
from hpcml.site.schema import Site
from hpcml.site.search import load_site
from tests.volcano_schema import problems

GOLDEN = Path(__file__).parents[2] / "golden"

SITE = """
name: kube
scheduler: volcano
python: python3
volcano:
  image: registry.example.org/torch:2.9
  volumes: [{path: ROOT, claim: shared}]
"""
RECIPE = """
name: some
kind: command
command: {run: [echo]}
"""


def submission(folder: Path, recipe: str = "", site: str = "") -> Submission:
    (folder / "site.yaml").write_text(SITE.replace("ROOT", str(folder)) + site)
    (folder / "recipe.yaml").write_text(RECIPE + recipe)
    found = load_site(folder / "site.yaml")
    plan = compile_plan(load_recipe(folder / "recipe.yaml"), found, folder / "runs")
    return Submission(plan, 1, tuple(range(len(plan.cells))), some_code())


@cache
def some_code() -> Snapshot:
    """The code of hpcml itself, which every submission here has."""
    return take(None, 1, Path("/runs"))


def manifests(chosen: Submission) -> list[dict[str, Any]]:
    return [parse_job(render_job(chosen, job)) for job in chosen.jobs]


# -- the server's schema ----------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("volcano*.jobs.yml")), ids=lambda p: p.stem)
def test_golden_jobs_are_valid(path: Path) -> None:
    jobs = list(yaml.safe_load_all(path.read_text()))
    assert jobs
    for job in jobs:
        assert problems(job) == []


def test_unknown_fields_and_wrong_values_are_seen(tmp_path: Path) -> None:
    """The validation itself can fail: at every depth, by name and by kind."""
    (job,) = manifests(submission(tmp_path))
    pod = job["spec"]["tasks"][0]["template"]["spec"]
    for place, name, value in (
        (job, "specs", {}),
        (job["spec"], "minavailable", 1),
        (pod, "restartpolicy", "Never"),
        (pod["containers"][0], "comand", []),
        (pod["containers"][0], "command", "a text"),
        (job["spec"], "maxRetry", "many"),
        (job["spec"]["policies"][0], "event", "PodExploded"),
    ):
        before = dict(place)
        place[name] = value
        assert problems(job), name
        place.clear()
        place.update(before)
    assert problems(job) == []


def test_a_thousand_cells_are_a_job(tmp_path: Path) -> None:
    swept = f"sweep: {{grid: {{n: {list(range(1000))}}}}}\n"
    (job,) = manifests(submission(tmp_path, swept))
    assert job["spec"]["tasks"][0]["replicas"] == 1000
    assert job["spec"]["minAvailable"] == 1
    assert problems(job) == []


def test_every_kind_of_quote_arrives_unchanged(tmp_path: Path) -> None:
    nasty = "'\"`$(x)${x}\\\n\t: # {{ a }} é\u2028\x85\ufeff"
    site = f"  annotations: {{note: {yaml.dump(nasty, default_style=chr(34))}}}\n"
    (job,) = manifests(submission(tmp_path, site=site))
    assert job["metadata"]["annotations"]["note"] == nasty
    assert problems(job) == []


# -- names ------------------------------------------------------------------------------------


@given(
    st.text("abcXYZ019._-", min_size=1, max_size=200),
    st.integers(1, 99_999),
    st.integers(0, 99_999),
)
def test_everything_derived_from_a_name_is_a_name(recipe: str, number: int, part: int) -> None:
    name = job_name(recipe, "0123abcd", Path("/runs/x"), f"{number}-{part}")
    for derived in (name, f"{name}-svc", f"{name}-task-999999", f"{name}-pvc-abcdefghijkl"):
        assert len(derived) <= LONGEST_NAME
        assert re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", derived)


def test_names_are_of_one_run_and_one_submission() -> None:
    names = {
        job_name(recipe, run_id, Path(folder), which)
        for recipe in ("x" * 200, "x" * 201)
        for run_id in ("0123abcd", "0123abce")
        for folder in ("/a", "/b")
        for which in ("1-0", "1-1", "2-0", "11-0")
    }
    # Names that differ beyond what fits lie in other run folders.
    assert len(names) == 16


# -- tasks and pods ---------------------------------------------------------------------------


@given(
    tasks=st.integers(1, 300),
    cap=st.none() | st.integers(1, 50),
    most=st.integers(1, 40),
    nodes=st.integers(1, 3),
)
def test_every_task_has_one_lane_and_no_more_run_together(
    tasks: int, cap: int | None, most: int, nodes: int
) -> None:
    site = Site.model_validate(
        {"name": "x", "scheduler": "volcano", "volcano": {"max_job_size": most}}
    )
    jobs = jobs_of("x", "0123abcd", Path("/runs/x"), 1, site, nodes, tasks, cap)
    lanes = [lane for job in jobs for lane in range(job.first, job.first + job.lanes)]
    assert sorted(lanes) == list(range(min(tasks, cap or tasks)))
    run = [task for lane in lanes for task in range(lane, tasks, jobs[0].stride)]
    assert sorted(run) == list(range(tasks))
    assert sum(job.tasks(tasks) for job in jobs) == tasks
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        assert job.pods == (job.lanes if nodes == 1 else nodes)
        assert job.pods <= most or nodes > 1


def test_pods_of_a_gang_start_together_and_others_alone(tmp_path: Path) -> None:
    swept = "sweep: {grid: {n: [1, 2, 3]}}\n"
    alone = manifests(submission(tmp_path, swept))
    gangs = manifests(submission(tmp_path, swept + "resources: {nodes: 4}\n"))
    assert [job["spec"]["minAvailable"] for job in alone] == [1]
    assert [job["spec"]["minAvailable"] for job in gangs] == [4, 4, 4]
    assert [job["spec"]["tasks"][0]["minAvailable"] for job in gangs] == [4, 4, 4]
    for job in alone + gangs:
        pod = job["spec"]["tasks"][0]["template"]["spec"]
        assert (pod["schedulerName"], pod["restartPolicy"]) == ("volcano", "Never")


def test_the_time_of_a_segment_is_for_work_and_for_saving(tmp_path: Path) -> None:
    (job,) = manifests(submission(tmp_path, "resources: {time: 1h}\n", "signal: {lead: 5m}\n"))
    pod = job["spec"]["tasks"][0]["template"]["spec"]
    assert pod["activeDeadlineSeconds"] == 3600 - 300
    assert pod["terminationGracePeriodSeconds"] == 300 + 10


def test_the_nodes_that_have_what_is_asked_for(tmp_path: Path) -> None:
    site = """
  queue: normal
  node_selector: {all: "yes"}
  pools: {big: {queue: large, node_selector: {size: big}}}
partitions:
  - {name: small, cpus: 4, memory: 8G}
  - {name: big, cpus: 64, memory: 256G, gpus: 8, max_nodes: 2}
"""
    (small,) = manifests(submission(tmp_path, "resources: {cpus: 4}\n", site))
    (big,) = manifests(submission(tmp_path, "resources: {gpus: 8}\n", site))
    assert small["spec"]["queue"] == "normal"
    assert big["spec"]["queue"] == "large"
    pods = [job["spec"]["tasks"][0]["template"]["spec"] for job in (small, big)]
    assert [pod["nodeSelector"] for pod in pods] == [
        {"all": "yes"},
        {"all": "yes", "size": "big"},
    ]
    with pytest.raises(UserError, match="asks for 3 nodes, it allows 2"):
        submission(tmp_path, "resources: {nodes: 3, gpus: 8}\n", site)


# -- what is refused before a server is asked -------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "site", "text"),
    [
        ("env_from: [HOME]\n", "", "put the values into a Secret"),
        ("env_from: [NOT_SET_ANYWHERE]\n", "", "put the values into a Secret"),
        ("container: {image: x, binds: [/data]}\n", "", "pods see what the site says"),
        ("container: {image: /images/x.sif}\n", "", "images from a registry"),
        ("container: {image: 'oras://x/y'}\n", "", "images from a registry"),
        ("container: {image: torch}\n", "", "images from a registry"),
    ],
)
def test_what_pods_cannot_do(tmp_path: Path, recipe: str, site: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        submission(tmp_path, recipe, site)


def test_a_pod_needs_an_image_and_the_runs_root(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    loaded = load_recipe(tmp_path / "recipe.yaml")
    for without, text in (
        ("  image: registry.example.org/torch:2.9\n", "pods need an image"),
        (f"  volumes: [{{path: {tmp_path}, claim: shared}}]\n", "is in no volume"),
    ):
        site.write_text(SITE.replace("ROOT", str(tmp_path)).replace(without, ""))
        with pytest.raises(UserError, match=text):
            compile_plan(loaded, load_site(site), tmp_path / "runs")
    site.write_text(
        SITE.replace("ROOT, claim: shared", f"{tmp_path}, claim: shared, read_only: true")
    )
    with pytest.raises(UserError, match="can write"):
        compile_plan(loaded, load_site(site), tmp_path / "runs")


def test_what_is_trained_on_must_be_seen_by_pods(tmp_path: Path) -> None:
    data = tmp_path / "elsewhere" / "data.txt"
    data.parent.mkdir()
    data.write_text("text\n")
    (tmp_path / "seen").mkdir()
    recipe = tmp_path / "seen" / "recipe.yaml"
    recipe.write_text(f"name: x\nkind: train\ntrain: {{data: {{files: ['{data}']}}}}\n")
    site = tmp_path / "site.yaml"
    site.write_text(SITE.replace("ROOT", str(tmp_path / "seen")))
    with pytest.raises(UserError, match=r"data.txt is in no volume"):
        compile_plan(load_recipe(recipe), load_site(site), tmp_path / "seen" / "runs")
    site.write_text(SITE.replace("ROOT", str(tmp_path)))
    assert compile_plan(load_recipe(recipe), load_site(site), tmp_path / "runs").pod


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("signal: {name: USR1}\n", "Kubernetes sends TERM"),
        ("container: {runtime: apptainer}\n", "a recipe's image is the pod's"),
        ("volcano: {pools: {x: {}}}\n", "partitions has no x"),
        ("volcano: {namespace: A_b}\n", "no name of a namespace"),
        ("volcano: {queue: 'a b'}\n", "no name in Kubernetes"),
        ("volcano: {volumes: [{path: /x}]}\n", "needs one of claim and host_path"),
        ("volcano: {volumes: [{path: x, claim: y}]}\n", "no absolute path"),
        ("volcano: {volumes: [{path: /x, claim: y}, {path: /x/, claim: z}]}\n", "two volumes"),
        ("volcano: {volumes: [{path: /x, claim: y, sub_path: ../z}]}\n", "no relative path"),
        ("volcano: {tolerations: [{operator: Equal, key: x}]}\n", "a value belongs to"),
        ("volcano: {labels: {x: 'a b'}}\n", "no value of a label"),
        ("volcano: {template: missing.j2}\n", "there is no file"),
    ],
)
def test_mistakes_in_a_site(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"name: x\nscheduler: volcano\npython: python3\n{text}")
    with pytest.raises(UserError, match=said):
        load_site(path)


def test_a_site_says_which_python_images_have(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text("name: x\nscheduler: volcano\n")
    with pytest.raises(UserError, match="the Python of the images"):
        load_site(path)


# -- what Volcano's webhook would refuse ------------------------------------------------------


def _set(job: dict[str, Any], path: str, value: Any) -> None:
    *places, last = path.split(".")
    for place in places:
        job = job[int(place)] if isinstance(job, list) else job[place]
    job[last] = value


TASK = "spec.tasks.0"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.policies", [{"event": "PodFailed", "action": "Explode"}], "no action 'Explode'"),
        ("spec.policies", [{"event": "PodFailed", "action": "SyncJob"}], "no action 'SyncJob'"),
        ("spec.policies", [{"event": "OutOfSync", "action": "RestartJob"}], "event 'OutOfSync'"),
        (
            "spec.policies",
            [{"event": "PodFailed", "action": "RestartJob"}] * 2,
            "the event PodFailed has two policies",
        ),
        ("spec.policies", [{"exitCode": 3, "action": "RestartJob"}] * 2, "3 has two policies"),
        ("spec.policies", [{"exitCode": 0, "action": "RestartJob"}], "0 is no exit code"),
        ("spec.policies", [{"action": "RestartJob"}], "either events or an exit code"),
        (
            "spec.policies",
            [{"event": "PodFailed", "exitCode": 3, "action": "RestartJob"}],
            "either events or an exit code",
        ),
        (
            "spec.policies",
            [{"events": ["*", "PodFailed"], "action": "RestartJob"}],
            "there can be no other event",
        ),
        (f"{TASK}.policies", [{"event": "Foo", "action": "RestartPod"}], "event 'Foo'"),
        ("spec.minAvailable", 2, "minAvailable: 2 of 1"),
        (f"{TASK}.minAvailable", 2, "minAvailable: 2 of 1"),
        (f"{TASK}.replicas", 3, "they have 3 pods together"),
        (f"{TASK}.name", "A b", "is no name of a task"),
        (f"{TASK}.name", "x" * 40, "its pod would be called"),
        (f"{TASK}.template.spec.schedulerName", "default-scheduler", "nobody keeps the gang"),
        (f"{TASK}.template.spec.restartPolicy", "OnFailure", "Volcano sees no failure"),
        ("spec.plugins", {"svcs": []}, "there is no svcs"),
        ("spec.volumes", [{"mountPath": "/x"}], "needs one of volumeClaim"),
        ("spec.volumes", [{"mountPath": "/x", "volumeClaimName": "y"}] * 2, "there twice"),
        ("spec.schedulerName", None, "schedulerName"),
        ("spec.tasks", [], "there is none"),
        ("metadata.name", "other", "must be"),
        ("metadata.namespace", "other", "must be"),
        ("kind", "Pod", "must be 'Job'"),
    ],
)
def test_the_webhooks_rules(tmp_path: Path, path: str, value: Any, said: str) -> None:
    chosen = submission(tmp_path)
    (job,), (manifest,) = chosen.jobs, manifests(chosen)
    check_job(manifest, job, chosen.plan.site)
    _set(manifest, path, value)
    with pytest.raises(UserError, match=re.escape(said)):
        check_job(manifest, job, chosen.plan.site)


def test_two_tasks_of_one_name(tmp_path: Path) -> None:
    chosen = submission(tmp_path)
    (job,), (manifest,) = chosen.jobs, manifests(chosen)
    manifest["spec"]["tasks"] *= 2
    with pytest.raises(UserError, match="two tasks task"):
        check_job(manifest, job, chosen.plan.site)


def test_a_template_of_a_site_is_checked_as_well(tmp_path: Path) -> None:
    template = tmp_path / "mine.yaml.j2"
    begin = '{% extends "volcano/job.yaml.j2" %}\n'
    for block, said in (
        ("{% block job %}\n  policies: [\n{% endblock %}", "no YAML"),
        ("{% block job %}{{ nothing }}{% endblock %}", "nothing"),
        ("{% block pod %}\n          restartPolicy: Always\n{% endblock %}", "must be 'Never'"),
    ):
        template.write_text(begin + block)
        with pytest.raises(UserError, match=said) as error:
            manifests(submission(tmp_path, site=f"  template: {template.name}\n"))
        assert str(template) in str(error.value) or template.name in str(error.value)


@pytest.mark.parametrize("block", ["task", "start", "finish"])
def test_a_script_of_a_site_keeps_what_runs_the_cells(tmp_path: Path, block: str) -> None:
    template = tmp_path / "mine.sh.j2"
    chosen = f'{{% extends "volcano/job.sh.j2" %}}\n{{% block {block} %}}'
    template.write_text(chosen + "true{% endblock %}")
    site = f"template: {template.name}\n"
    with pytest.raises(UserError, match=f"the block '{block}' must keep"):
        render_script(submission(tmp_path, site=site))
    template.write_text(chosen + "{{ super() }}{% endblock %}")
    assert "hpcml.worker" in render_script(submission(tmp_path, site=site))


def test_rendering_twice_gives_the_same(tmp_path: Path) -> None:
    chosen = submission(tmp_path)
    assert [render_job(chosen, job) for job in chosen.jobs] == [
        render_job(chosen, job) for job in chosen.jobs
    ]
    assert render_script(chosen) == render_script(chosen)


def test_a_job_has_its_place(tmp_path: Path) -> None:
    (job,) = submission(tmp_path).jobs
    assert isinstance(job, Job)
    assert (job.number, job.first, job.lanes, job.pods, job.stride) == (0, 0, 1, 1, 1)
