"""Which fields KubeRay 1.2's custom resources have, as far as our files use the objects they stand in.

No package holds the definitions themselves. Pods are checked against Kubernetes' own schema instead.
"""

from __future__ import annotations

from typing import Any


def _object(required: str, optional: str = "", **known: Any) -> dict[str, Any]:
    names = [*required.split(), *optional.split(), *known]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": {name: known.get(name, {}) for name in names},
    }


_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_POD = {"type": "object", "required": ["spec"]}

_AUTOSCALER = _object(
    "",
    "resources image imagePullPolicy securityContext env envFrom volumeMounts",
    idleTimeoutSeconds=_COUNT,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
)
_HEAD = _object(
    "template rayStartParams", "serviceType headService enableIngress", template=_POD, rayStartParams=_STRINGS
)
_WORKERS = _object(
    "groupName template rayStartParams maxReplicas minReplicas",
    "scaleStrategy suspend",
    template=_POD,
    rayStartParams=_STRINGS,
    **dict.fromkeys(("replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds"), _COUNT),
)
_CLUSTER_SPEC = _object(
    "headGroupSpec",
    "headServiceAnnotations suspend managedBy gcsFaultToleranceOptions",
    headGroupSpec=_HEAD,
    workerGroupSpecs={"type": "array", "items": _WORKERS},
    rayVersion={"type": "string"},
    enableInTreeAutoscaling={"type": "boolean"},
    autoscalerOptions=_AUTOSCALER,
)
_JOB_SPEC = _object(
    "",
    "clusterSelector submissionMode submitterPodTemplate submitterConfig entrypointNumCpus entrypointNumGpus "
    "entrypointResources metadata jobId suspend managedBy",
    entrypoint={"type": "string"},
    runtimeEnvYAML={"type": "string"},
    rayClusterSpec=_CLUSTER_SPEC,
    shutdownAfterJobFinishes={"type": "boolean"},
    **dict.fromkeys(("ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit"), _COUNT),
)


def _kind(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    version = {"const": "ray.io/v1"}
    return _object("apiVersion kind metadata spec", apiVersion=version, kind={"const": kind}, spec=spec)


SCHEMAS = {"RayCluster": _kind("RayCluster", _CLUSTER_SPEC), "RayJob": _kind("RayJob", _JOB_SPEC)}
