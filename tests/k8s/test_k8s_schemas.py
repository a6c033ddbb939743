"""Every rendered object is what the API server's schemas allow, unknown fields included."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from manifests import KUSTOMIZATIONS, ROOT, SCHEMA_FILE, pod_templates, ray_service, render, strict_schema

KUBERNETES = "1.37"
OF_KUBERAY = ("RayService",)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_core_objects_match_the_schemas_of_kubernetes(name: str) -> None:
    core = [item for item in render(name) if item["kind"] not in OF_KUBERAY]
    assert len(core) > 10
    for item in core:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_the_ray_service_matches_the_crd(name: str) -> None:
    jsonschema.validate(ray_service(render(name)), strict_schema())


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_the_pod_templates_are_pods(name: str) -> None:
    """The CRD repeats the pod schema of the Kubernetes that KubeRay was built with; this is the current one."""
    for title, template in pod_templates(render(name)):
        metadata = {"name": title, **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "rayClusterConfg"), {}),
        (("spec", "rayClusterConfig", "gcsFaultToleranceOptions", "redisAdress"), "a"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "groupname"), "a"),
        (("spec", "rayClusterConfig", "workerGroupSpecs", 0, "minReplicas"), "two"),
        (("spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0, "port"), 1),
        (("spec", "serveConfigV2"), {"applications": []}),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else "",
)
def test_the_crd_check_sees_a_slip_of_the_pen(path: tuple[str | int, ...], value: object) -> None:
    service = copy.deepcopy(ray_service(render("base")))
    node = service
    for step in path[:-1]:
        node = node[step]  # type: ignore[index]
    node[path[-1]] = value  # type: ignore[index]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(service, strict_schema())


def test_the_core_check_sees_a_slip_of_the_pen() -> None:
    broken = copy.deepcopy(next(item for item in render("base") if item["kind"] == "PodDisruptionBudget"))
    broken["spec"]["minAvailble"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.mark.shared
def test_the_trimmed_schema_says_what_the_crd_says() -> None:
    shared = Path(os.environ.get("WATCHWORD_SHARED", ROOT.parent / "shared"))
    crd_file = shared / "k8s" / "ray.io_rayservices.yaml"
    if not crd_file.exists():
        pytest.skip(f"no {crd_file}")
    crd = yaml.load(crd_file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (item for item in crd["spec"]["versions"] if item["name"] == "v1")
    whole = _without_descriptions(version["schema"]["openAPIV3Schema"])
    del whole["properties"]["status"]
    trimmed = json.loads(SCHEMA_FILE.read_text())
    parts = trimmed.pop("$defs")
    del trimmed["$comment"]
    assert _expanded(trimmed, parts) == whole


def _without_descriptions(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_descriptions(item) for item in node]
    if not isinstance(node, dict):
        return node
    is_text = {name for name in node if name == "description" and isinstance(node[name], str)}
    return {name: _without_descriptions(value) for name, value in node.items() if name not in is_text}


def _expanded(node: Any, parts: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_expanded(item, parts) for item in node]
    if not isinstance(node, dict):
        return node
    if isinstance(node.get("$ref"), str):
        return _expanded(parts[node["$ref"].removeprefix("#/$defs/")], parts)
    return {name: _expanded(value, parts) for name, value in node.items()}
