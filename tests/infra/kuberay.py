"""The fields of KubeRay's RayCluster and RayJob (ray.io/v1, operator 1.5) and of the pods in them that infra/ may use.

A field that is not here is refused, as the API server would: a manifest with a misspelt one would only be noticed there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)]
Quantity = Annotated[str, Field(pattern=r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti)?$")]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(gt=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: Name | None = None
    generateName: str | None = Field(None, pattern=r"^[a-z0-9][-a-z0-9]*-$", max_length=50)
    namespace: Name
    labels: dict[str, str] = {}


class Key(Strict):
    name: Name
    key: str


class Source(Strict):
    secretKeyRef: Key


class Variable(Strict):
    name: str
    value: str | None = None
    valueFrom: Source | None = None


class SecretName(Strict):
    name: Name


class Environment(Strict):
    secretRef: SecretName


class Resources(Strict):
    requests: dict[str, Quantity]
    limits: dict[str, Quantity]


class Mount(Strict):
    name: Name
    mountPath: str = Field(pattern="^/")


class Capabilities(Strict):
    drop: list[str]


class ContainerSecurity(Strict):
    allowPrivilegeEscalation: Literal[False]
    capabilities: Capabilities


class Container(Strict):
    name: Name
    image: str
    command: list[str] = []
    envFrom: list[Environment]
    env: list[Variable] = []
    resources: Resources
    volumeMounts: list[Mount] = []
    securityContext: ContainerSecurity


class PodSecurity(Strict):
    runAsUser: Positive
    runAsNonRoot: Literal[True]
    fsGroup: Positive


class Claim(Strict):
    claimName: Name


class Memory(Strict):
    medium: Literal["Memory"]
    sizeLimit: Quantity


class Volume(Strict):
    name: Name
    persistentVolumeClaim: Claim | None = None
    emptyDir: Memory | None = None


class Pod(Strict):
    containers: list[Container] = Field(min_length=1)
    securityContext: PodSecurity
    volumes: list[Volume] = []
    automountServiceAccountToken: bool = True

    @model_validator(mode="after")
    def _mounts_are_volumes(self) -> Pod:
        there = {volume.name for volume in self.volumes}
        wanted = {mount.name for container in self.containers for mount in container.volumeMounts}
        if wanted - there:
            raise ValueError(f"mounts without a volume: {sorted(wanted - there)}")
        return self


class Template(Strict):
    spec: Pod
    metadata: dict[str, dict[str, str]] = {}


class Head(Strict):
    serviceType: Literal["ClusterIP"]  # never a load balancer: the Jobs API runs what it is given
    rayStartParams: dict[str, str]
    template: Template


class Workers(Strict):
    groupName: Name
    replicas: Count
    minReplicas: Count
    maxReplicas: Count
    rayStartParams: dict[str, str]
    template: Template

    @model_validator(mode="after")
    def _in_order(self) -> Workers:
        if not self.minReplicas <= self.replicas <= self.maxReplicas:
            raise ValueError("minReplicas ≤ replicas ≤ maxReplicas does not hold")
        return self


class Auth(Strict):
    mode: Literal["token"]


class Autoscaler(Strict):
    idleTimeoutSeconds: Positive
    upscalingMode: Literal["Default", "Aggressive", "Conservative"]


class ClusterSpec(Strict):
    rayVersion: str
    authOptions: Auth
    enableInTreeAutoscaling: bool = False
    autoscalerOptions: Autoscaler | None = None
    headGroupSpec: Head
    workerGroupSpecs: list[Workers]


class JobSpec(Strict):
    entrypoint: str
    activeDeadlineSeconds: Positive
    backoffLimit: Count
    shutdownAfterJobFinishes: Literal[True]
    ttlSecondsAfterFinished: Count
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]
    rayClusterSpec: ClusterSpec


class RayCluster(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: JobSpec


class Selector(Strict):
    matchLabels: dict[str, str]


class DeploymentSpec(Strict):
    replicas: Count
    selector: Selector
    template: Template


class Deployment(Strict):
    apiVersion: Literal["apps/v1"]
    kind: Literal["Deployment"]
    metadata: Metadata
    spec: DeploymentSpec


class VolumeClaim(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["PersistentVolumeClaim"]
    metadata: Metadata
    spec: dict[str, Any]


KINDS = {kind.__name__: kind for kind in (RayCluster, RayJob, Deployment)} | {"PersistentVolumeClaim": VolumeClaim}
