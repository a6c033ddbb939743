"""All that a router actor is told when it is made: what a redeployment may change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from router.config import RouterConfig, TenantLimits


@dataclass(frozen=True)
class RouterSettings:
    """`tenant_limits` are by tenant hash. `deployed_unix_s` orders deployments: of two, the later one's settings count.

    Holds paths of secrets, never secrets. Without `secret_file` it answers no gateway.
    """

    config: RouterConfig = field(default_factory=RouterConfig)
    policy: str = "watchword"
    redis_url_file: Path | None = None
    index_namespace: str = "watchword"
    secret_file: Path | None = None
    channel_host: str = "127.0.0.1"  # "node": the address of the Ray node that it runs on
    tenant_limits: tuple[tuple[bytes, TenantLimits], ...] = ()
    deployed_unix_s: float = 0.0

    def replaces(self, current: RouterSettings) -> bool:
        """Whether a router with `current` has to go. Two deployments that say the same leave it alone."""
        is_same = replace(self, deployed_unix_s=0.0) == replace(current, deployed_unix_s=0.0)
        return not is_same and self.deployed_unix_s > current.deployed_unix_s
