"""What a site's file may say of its Volcano: a batch scheduler on Kubernetes."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from hpcml.recipe.container import ImageName
from hpcml.recipe.units import Memory
from hpcml.recipe.validation import Block

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
_KEY = re.compile(
    r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
)
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")


def _namespace(text: str) -> str:
    if len(text) > 63 or not _LABEL.fullmatch(text):
        raise ValueError(f"{text!r} is no name of a namespace: a-z, 0-9 and -, at most 63 of them")
    return text


def _name(text: str) -> str:
    if len(text) > 253 or not _NAME.fullmatch(text):
        raise ValueError(f"{text!r} is no name in Kubernetes: a-z, 0-9, - and ., at most 253")
    return text


def _key(text: str) -> str:
    if len(text) > 317 or not _KEY.fullmatch(text):
        raise ValueError(f"{text!r} is no key in Kubernetes, such as example.com/pool")
    return text


def _label_value(text: str) -> str:
    if not _LABEL_VALUE.fullmatch(text):
        raise ValueError(f"{text!r} is no value of a label: at most 63 letters, digits, ., _ and -")
    return text


def _path(text: str) -> str:
    if not text.startswith("/") or re.search(r"[:\0-\x1f\x7f]", text):
        raise ValueError(f"{text!r} is no absolute path without colons and control characters")
    return text


Name = Annotated[str, AfterValidator(_name)]
Key = Annotated[str, AfterValidator(_key)]
Labels = dict[Key, Annotated[str, AfterValidator(_label_value)]]
AbsolutePath = Annotated[str, AfterValidator(_path)]


class Toleration(Block):
    """A taint of nodes that pods may ignore."""

    key: Key | None = Field(None, description="The taint's key. Without it all are tolerated.")
    operator: Literal["Exists", "Equal"] = Field(
        "Exists", description="`Exists`, whatever the taint's value, or `Equal`."
    )
    value: str | None = Field(None, description="With `Equal`: the taint's value.")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="The taint's effect. Without it every effect."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Toleration:
        if (self.operator == "Equal") != (self.value is not None):
            raise ValueError("a value belongs to `operator: Equal`, and only to that")
        if self.operator == "Equal" and self.key is None:
            raise ValueError("`operator: Equal` needs a key")
        return self


class Volume(Block):
    """What pods see at a path: a claim, or a folder of the node."""

    path: AbsolutePath = Field(description="Where pods see it.")
    claim: Name | None = Field(
        None, description="A PersistentVolumeClaim of the namespace (ReadWriteMany, if written)."
    )
    host_path: AbsolutePath | None = Field(
        None, description="A folder of every node, such as a mount of a parallel filesystem."
    )
    sub_path: str | None = Field(None, description="A folder within it, instead of all of it.")
    read_only: bool = Field(False, description="Whether pods can only read it.")

    @model_validator(mode="after")
    def _one_source(self) -> Volume:
        if (self.claim is None) == (self.host_path is None):
            raise ValueError(f"the volume at {self.path} needs one of claim and host_path")
        if self.sub_path and (self.sub_path.startswith("/") or ".." in self.sub_path.split("/")):
            raise ValueError(f"{self.sub_path!r} is no relative path without ..")
        return self


class Pool(Block):
    """How jobs get to the nodes of one entry of `partitions`, where that differs."""

    queue: Name | None = Field(None, description="The queue, instead of `volcano.queue`.")
    node_selector: Labels = Field(
        default_factory=dict, description="Labels that nodes must have, beside the site's."
    )
    tolerations: list[Toleration] = Field(
        default_factory=list, description="Taints that are tolerated, beside the site's."
    )


def _volumes(volumes: list[Volume]) -> list[Volume]:
    paths = [volume.path.rstrip("/") for volume in volumes]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"there are two volumes at {path}")
    return volumes


class Volcano(Block):
    """How this Volcano is used."""

    namespace: Annotated[str, AfterValidator(_namespace)] = Field(
        "default", description="The namespace of all jobs."
    )
    queue: Name = Field("default", description="The queue of Volcano.")
    priority_class: Name | None = Field(None, description="The PriorityClass of jobs and pods.")
    kubeconfig: str | None = Field(
        None,
        description="The file that says where the server is. `~` and `$VARIABLES` are replaced. "
        "Default: as kubectl does, `$KUBECONFIG` or `~/.kube/config`; within a pod, its account.",
    )
    context: str | None = Field(None, description="A context of that file. Default: its current.")
    image: ImageName | None = Field(
        None, description="The image of pods whose recipe names none (its `container.image`)."
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        None, description="When nodes fetch it. Default: Kubernetes' own."
    )
    image_pull_secrets: list[Name] = Field(
        default_factory=list, description="Secrets by which nodes fetch it."
    )
    service_account: Name | None = Field(None, description="The account of pods.")
    user: Literal["submitter", "image"] = Field(
        "submitter",
        description="Who a pod's processes are: the numeric user and group of whoever submits, so "
        "that files belong to them, or whoever the image says.",
    )
    volumes: Annotated[list[Volume], AfterValidator(_volumes)] = Field(
        default_factory=list,
        description="What pods see. One of them must hold the runs root, at the path that it has "
        "where hpcml is called.",
    )
    shared_memory: Memory | None = Field(
        None, description="Size of `/dev/shm`, which counts as memory of the pod. Default: 64M."
    )
    secrets: list[Name] = Field(
        default_factory=list,
        description="Secrets whose entries are environment variables of every pod; they take the "
        "place of a recipe's `env_from`.",
    )
    gpu: Key = Field("nvidia.com/gpu", description="What GPUs are called as a resource.")
    rdma: dict[Key, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict,
        description="Further resources of each pod of a job on several nodes, such as "
        "`{rdma/hca: 1}`; such pods also get the capability IPC_LOCK.",
    )
    node_selector: Labels = Field(default_factory=dict, description="Labels that nodes must have.")
    tolerations: list[Toleration] = Field(
        default_factory=list, description="Taints that are tolerated."
    )
    pools: dict[str, Pool] = Field(
        default_factory=dict,
        description="For entries of `partitions`, by name: how jobs get to those nodes.",
    )
    labels: Labels = Field(default_factory=dict, description="Labels of jobs and pods.")
    annotations: dict[Key, str] = Field(
        default_factory=dict, description="Annotations of jobs and pods."
    )
    max_job_size: Annotated[int, Field(ge=1)] = Field(
        1000, description="The most pods of one job; larger arrays are several jobs."
    )
    keep: Annotated[int, Field(ge=0)] = Field(
        86400, description="Seconds after which the server removes a job that has ended."
    )
    template: str | None = Field(
        None,
        description="A template of the site's own for the job, relative to this file. It begins "
        'with `{% extends "volcano/job.yaml.j2" %}` and overrides single blocks.',
    )
