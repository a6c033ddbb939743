"""Renders the kustomizations and reads KubeRay's schema. Needs kubectl, but no cluster."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KUSTOMIZATIONS = ("base", "overlays/cpu-demo", "overlays/gpu")
SCHEMA_FILE = Path(__file__).with_name("rayservice-v1.schema.json")

Object = dict[str, Any]


@cache
def render(name: str) -> tuple[Object, ...]:
    """The objects of one kustomization, as `kubectl apply -k` would send them."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    result = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "k8s" / name)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return tuple(yaml.safe_load_all(result.stdout))


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [item for item in objects if item["kind"] == kind]


def ray_service(objects: tuple[Object, ...]) -> Object:
    (service,) = of_kind(objects, "RayService")
    return service


def ray_groups(service: Object) -> Iterator[tuple[str, Object]]:
    """(head or worker, group spec) of the Ray cluster."""
    cluster = service["spec"]["rayClusterConfig"]
    yield "head", cluster["headGroupSpec"]
    for group in cluster["workerGroupSpecs"]:
        yield "worker", group


def pod_templates(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """(a name to show, pod template) of everything that makes pods, RayService included."""
    for item in objects:
        if item["kind"] in ("Deployment", "StatefulSet"):
            yield item["metadata"]["name"], item["spec"]["template"]
    for node_type, group in ray_groups(ray_service(objects)):
        yield f"ray-{node_type}", group["template"]


def serve_config(objects: tuple[Object, ...]) -> Object:
    config: Object = yaml.safe_load(ray_service(objects)["spec"]["serveConfigV2"])
    return config


@cache
def strict_schema() -> Object:
    """The CRD's schema, refusing fields that it does not name, as the API server does with strict validation."""
    return _strict(json.loads(SCHEMA_FILE.read_text()))


def _strict(node: Any) -> Any:
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    strict = {name: _strict(value) for name, value in node.items()}
    names_fields = isinstance(node.get("properties"), dict) and node.get("type") == "object"
    if names_fields and not node.get("x-kubernetes-preserve-unknown-fields"):
        strict["additionalProperties"] = False
    return strict
