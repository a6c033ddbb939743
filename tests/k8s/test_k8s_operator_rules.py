"""What the KubeRay operator refuses or silently needs, and no schema says."""

from __future__ import annotations

import re

import pytest
import yaml
from manifests import KUSTOMIZATIONS, Object, of_kind, ray_groups, ray_service, render

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MAX_SERVICE_NAME_CHARS = 47


@pytest.fixture(params=KUSTOMIZATIONS)
def service(request: pytest.FixtureRequest) -> Object:
    return ray_service(render(request.param))


def environment(group: Object) -> set[str]:
    return {item["name"] for item in group["template"]["spec"]["containers"][0].get("env", [])}


def test_the_name_leaves_room_for_what_the_operator_appends(service: Object) -> None:
    name = service["metadata"]["name"]
    assert len(name) <= MAX_SERVICE_NAME_CHARS
    assert DNS_1035.fullmatch(name)


def test_worker_groups_have_bounds(service: Object) -> None:
    for node_type, group in ray_groups(service):
        if node_type == "worker":
            assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_gcs_fault_tolerance_is_configured_in_one_place(service: Object) -> None:
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert "gcsFaultToleranceOptions" in service["spec"]["rayClusterConfig"]
    assert not environment(head) & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}
    assert not set(head["rayStartParams"]) & {"redis-password", "redis-username"}
    annotations = service["metadata"].get("annotations", {})
    assert not set(annotations) & {"ray.io/external-storage-namespace", "ray.io/ft-enabled"}


def test_the_head_service_has_no_name_of_its_own(service: Object) -> None:
    assert "headService" not in service["spec"]["rayClusterConfig"]["headGroupSpec"]


def test_token_authentication_has_a_ray_that_knows_it(service: Object) -> None:
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"]["mode"] == "token"
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0)


def test_the_ray_of_the_manifests_is_the_ray_that_is_installed(service: Object) -> None:
    ray = pytest.importorskip("ray")
    assert service["spec"]["rayClusterConfig"]["rayVersion"].split(".")[:2] == ray.__version__.split(".")[:2]


def test_ray_resources_are_given_in_one_way(service: Object) -> None:
    for _, group in ray_groups(service):
        assert "resources" not in group
        assert "labels" not in group["rayStartParams"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_ports_have_the_names_by_which_the_operator_finds_them(service: Object) -> None:
    """It copies `serve` and `serve-*` of the head into the Service and probes `serve` of the workers."""
    for _, group in ray_groups(service):
        ports = {port["name"]: port["containerPort"] for port in group["template"]["spec"]["containers"][0]["ports"]}
        assert (ports["serve"], ports["serve-grpc"]) == (8000, 9000)


def test_no_probe_is_written_by_hand(service: Object) -> None:
    """A probe of ours would replace the operator's, which asks the raylet and the gateway in the way it relies on."""
    for _, group in ray_groups(service):
        container = group["template"]["spec"]["containers"][0]
        assert not set(container) & {"livenessProbe", "readinessProbe", "startupProbe"}


def test_the_head_runs_no_gateway_and_takes_no_traffic(service: Object) -> None:
    assert service["spec"]["excludeHeadPodFromServeSvc"] is True
    assert service["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_workers_are_drained_before_they_end(service: Object) -> None:
    for node_type, group in ray_groups(service):
        if node_type == "head":
            continue
        spec = group["template"]["spec"]
        command = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:3] == ["python", "-m", "cluster.drain"]
        timeout_s = float(command[command.index("--timeout-s") + 1])
        assert timeout_s < spec["terminationGracePeriodSeconds"]
        (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
        assert command[command.index("--file") + 1] == application["args"]["drain_file"]


def test_disruption_budgets_count_pods() -> None:
    """Without a scale subresource the disruption controller can resolve no percentage and no maxUnavailable."""
    (budget,) = of_kind(render("base"), "PodDisruptionBudget")
    assert isinstance(budget["spec"]["minAvailable"], int)
    assert "maxUnavailable" not in budget["spec"]
    (workers,) = (group for node_type, group in ray_groups(ray_service(render("base"))) if node_type == "worker")
    assert budget["spec"]["minAvailable"] < workers["minReplicas"], "no node could ever be drained"
