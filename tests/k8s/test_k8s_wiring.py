"""The objects fit together: names, secrets, selectors, ports, and the settings inside the Serve configuration."""

from __future__ import annotations

from typing import Any

import pytest
from manifests import KUSTOMIZATIONS, Object, of_kind, pod_templates, ray_groups, ray_service, render, serve_config

from cluster.config import load_config

SECRETS = {
    "watchword": {"cluster.secret", "keys.json", "redis-url"},
    "watchword-redis-gcs": {"password"},
    "watchword-redis-index": {"password"},
}
SECRET_FOLDER = "/etc/watchword/secrets/"


@pytest.fixture(params=KUSTOMIZATIONS)
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return render(request.param)


def selects(selector: Object, labels: dict[str, str]) -> bool:
    for name, value in selector.get("matchLabels", {}).items():
        if labels.get(name) != value:
            return False
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return True


def pods(objects: tuple[Object, ...]) -> dict[str, dict[str, str]]:
    return {name: template["metadata"]["labels"] for name, template in pod_templates(objects)}


def test_every_selector_selects_something(objects: tuple[Object, ...]) -> None:
    labels = pods(objects).values()
    for service in of_kind(objects, "Service"):
        assert any(selects({"matchLabels": service["spec"]["selector"]}, pod) for pod in labels)
    for kind in ("NetworkPolicy", "PodDisruptionBudget"):
        for item in of_kind(objects, kind):
            selector = item["spec"].get("podSelector", item["spec"].get("selector"))
            assert any(selects(selector, pod) for pod in labels), item["metadata"]["name"]


def test_every_pod_is_closed_by_default(objects: tuple[Object, ...]) -> None:
    (deny,) = (p for p in of_kind(objects, "NetworkPolicy") if p["metadata"]["name"] == "watchword-default-deny")
    assert set(deny["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    assert not set(deny["spec"]) & {"ingress", "egress"}
    assert all(selects(deny["spec"]["podSelector"], labels) for labels in pods(objects).values())


def allowed(objects: tuple[Object, ...], source: dict[str, str], target: dict[str, str], port: int) -> bool:
    """Whether a pod of this namespace with labels `source` may open `port` of one with labels `target`."""

    def opens(side: str, own: dict[str, str], other: dict[str, str]) -> bool:
        key, peers = ("ingress", "from") if side == "Ingress" else ("egress", "to")
        for policy in of_kind(objects, "NetworkPolicy"):
            if side not in policy["spec"]["policyTypes"] or not selects(policy["spec"]["podSelector"], own):
                continue
            for rule in policy["spec"].get(key, []):
                ports = rule.get("ports")
                fits_port = ports is None or any(item["port"] == port for item in ports)
                if fits_port and any(_is_peer(peer, other) for peer in rule[peers]):
                    return True
        return False

    is_ours = target.get("app.kubernetes.io/part-of") == "watchword"
    sends = opens("Egress", source, target) if source.get("app.kubernetes.io/part-of") == "watchword" else True
    return sends and (not is_ours or opens("Ingress", target, source))


def _is_peer(peer: Object, labels: dict[str, str]) -> bool:
    if "podSelector" in peer and "namespaceSelector" not in peer:
        return selects(peer["podSelector"], labels)
    return peer.get("namespaceSelector") == {} and selects(peer.get("podSelector", {}), labels)


def test_who_may_talk_to_whom(objects: tuple[Object, ...]) -> None:
    found = pods(objects)
    head, worker = found["ray-head"], found["ray-worker"]
    gcs, index = found["watchword-redis-gcs"], found["watchword-redis-index"]
    cleanup = {**head, "ray.io/node-type": "redis-cleanup"}
    stranger = {"app": "somebody"}
    operator = {"app.kubernetes.io/name": "kuberay-operator"}
    table: list[tuple[dict[str, str], dict[str, str], int, bool]] = [
        (head, worker, 40123, True),
        (worker, head, 6379, True),
        (worker, worker, 40123, True),
        (head, gcs, 6379, True),
        (cleanup, gcs, 6379, True),
        (worker, gcs, 6379, False),
        (worker, index, 6379, True),
        (head, index, 6379, True),
        (stranger, worker, 8000, True),
        (stranger, worker, 9000, True),
        (stranger, worker, 40123, False),
        (stranger, head, 8265, False),
        (stranger, head, 6379, False),
        (stranger, gcs, 6379, False),
        (stranger, index, 6379, False),
        (operator, head, 8265, True),
        (operator, head, 10001, False),
        (worker, stranger, 443, False),
        (index, worker, 8000, False),
    ]
    for source, target, port, expected in table:
        assert allowed(objects, source, target, port) is expected, (source, target, port)


def test_secrets_are_files_and_the_documented_ones(objects: tuple[Object, ...]) -> None:
    assert of_kind(objects, "Secret") == [], "a secret in the repository is none"
    mounted = {
        volume["secret"]["secretName"]
        for _, template in pod_templates(objects)
        for volume in template["spec"]["volumes"]
        if "secret" in volume
    }
    assert mounted == set(SECRETS)
    for _, template in pod_templates(objects):
        for volume in template["spec"]["volumes"]:
            assert "secret" not in volume or volume["secret"]["defaultMode"] & 0o007 == 0
        for container in template["spec"]["containers"]:
            assert not any("valueFrom" in item for item in container.get("env", []))
    password = ray_service(objects)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisPassword"]
    reference = password["valueFrom"]["secretKeyRef"]
    assert reference["key"] in SECRETS[reference["name"]]


def test_redis_addresses_are_services_of_this_installation(objects: tuple[Object, ...]) -> None:
    address = ray_service(objects)["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"]
    names = {service["metadata"]["name"] for service in of_kind(objects, "Service")}
    assert address.removeprefix("redis://").removesuffix(":6379") in names


def test_what_ray_must_never_forget_is_never_evicted(objects: tuple[Object, ...]) -> None:
    configs = {item["metadata"]["name"]: item["data"]["valkey.conf"] for item in of_kind(objects, "ConfigMap")}
    assert "maxmemory-policy noeviction" in configs["watchword-redis-gcs"]
    assert "appendonly yes" in configs["watchword-redis-gcs"]
    assert "maxmemory-policy allkeys-lru" in configs["watchword-redis-index"]


def test_pods_run_with_the_least_rights(objects: tuple[Object, ...]) -> None:
    """The `restricted` Pod Security Standard, plus a root file system that cannot be written."""
    for name, template in pod_templates(objects):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert security["readOnlyRootFilesystem"] is True
            assert {"/tmp"} <= {mount["mountPath"] for mount in container["volumeMounts"]}
            assert "memory" in container["resources"]["limits"]


def test_every_mount_has_its_volume(objects: tuple[Object, ...]) -> None:
    claims = {item["metadata"]["name"] for item in of_kind(objects, "PersistentVolumeClaim")}
    for name, template in pod_templates(objects):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["name"] for container in template["spec"]["containers"] for mount in container["volumeMounts"]}
        templated = {"data"} if name == "watchword-redis-gcs" else set()
        assert mounts == set(volumes) | templated, name
        for volume in volumes.values():
            assert "persistentVolumeClaim" not in volume or volume["persistentVolumeClaim"]["claimName"] in claims


def app_arguments(objects: tuple[Object, ...]) -> dict[str, Any]:
    (application,) = serve_config(objects)["applications"]
    arguments: dict[str, Any] = application["args"]
    return arguments


def test_ray_serve_accepts_the_serve_configuration(objects: tuple[Object, ...]) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    config = schema.ServeDeploySchema.model_validate(serve_config(objects))
    (application,) = config.applications
    assert application.import_path == "cluster.app:build"
    assert config.proxy_location == "Disabled", "Serve's proxies would take the gateway's port"


def test_watchword_accepts_the_arguments(objects: tuple[Object, ...]) -> None:
    config = load_config(app_arguments(objects), environ={})
    assert (config.host, config.http_port, config.grpc_port) == ("0.0.0.0", 8000, 9000)
    assert config.worker_host == "node", "gateways reach workers in other pods"
    for path in (config.secret_file, config.keys_file, config.redis_url_file):
        assert path is not None
        assert str(path).removeprefix(SECRET_FOLDER) in SECRETS["watchword"]


def test_each_worker_pod_has_room_for_one_gateway_and_one_engine(objects: tuple[Object, ...]) -> None:
    config = load_config(app_arguments(objects), environ={})
    (workers,) = (group for node_type, group in ray_groups(ray_service(objects)) if node_type == "worker")
    assert config.gateways == config.workers == workers["replicas"]
    (application,) = serve_config(objects)["applications"]
    assert {item["name"]: item["max_replicas_per_node"] for item in application["deployments"]} == {
        "Gateway": 1,
        "Worker": 1,
    }
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert config.threads <= int(limits["cpu"])
    assert config.kv_memory_gib < int(limits["memory"].removesuffix("Gi"))
    assert (config.device == "cuda") == ("nvidia.com/gpu" in limits)


def test_the_deployments_that_the_manifests_name_exist(objects: tuple[Object, ...]) -> None:
    pytest.importorskip("ray")
    from cluster.app import build

    application = build(app_arguments(objects))
    names = set()
    queue = [application]
    while queue:
        bound = queue.pop()._bound_deployment
        names.add(bound.name)
        queue += [
            value for value in (*bound.init_args, *bound.init_kwargs.values()) if hasattr(value, "_bound_deployment")
        ]
    (configured,) = serve_config(objects)["applications"]
    assert {item["name"] for item in configured["deployments"]} <= names
