"""Whose settings the router has after a redeployment."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import ray

from router.actor import beside, ensure_router
from router.config import RouterConfig, TenantLimits
from router.settings import RouterSettings

FIRST = RouterSettings(deployed_unix_s=100.0)
SECOND = RouterSettings(RouterConfig(congestion_per_s=0.5), deployed_unix_s=200.0)


class _Actor:
    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.num_failures = 0
        self.settings = self

    def remote(self) -> asyncio.Future[RouterSettings]:
        return asyncio.ensure_future(self._answer())

    async def _answer(self) -> RouterSettings:
        if self.num_failures:
            self.num_failures -= 1
            raise ray.exceptions.RayActorError()
        return self._settings


class Names:
    """What Ray keeps: one actor under the name, which a killed one holds for a moment longer."""

    def __init__(self, settings: RouterSettings) -> None:
        self.actor = _Actor(settings)
        self.num_made = 0
        self._is_dying = False

    async def ensure(self, settings: RouterSettings, patience_s: float = 60.0) -> RouterSettings:
        await ensure_router("app", settings, create=self.create, kill=self.kill, patience_s=patience_s)
        return self.actor._settings

    def create(self, app_name: str, settings: RouterSettings) -> Any:
        if self._is_dying:
            self._is_dying = False
            self.actor.num_failures = 1
            dead, self.actor = self.actor, _Actor(settings)
            self.num_made += 1
            return dead
        return self.actor

    def kill(self, actor: Any) -> None:
        assert actor is self.actor, "a router that somebody else made meanwhile is left alone"
        self._is_dying = True


async def test_a_changed_setting_takes_effect() -> None:
    names = Names(FIRST)
    assert await names.ensure(SECOND) == SECOND
    assert names.num_made == 1


async def test_the_same_settings_leave_the_router_alone() -> None:
    names = Names(FIRST)
    assert await names.ensure(replace(FIRST, deployed_unix_s=300.0)) == FIRST
    assert names.num_made == 0


async def test_a_gateway_of_an_older_deployment_changes_nothing() -> None:
    """Serve may restart one in the middle of a rolling update."""
    names = Names(SECOND)
    assert await names.ensure(FIRST) == SECOND
    assert names.num_made == 0


async def test_several_gateways_of_one_deployment_make_one_router() -> None:
    names = Names(FIRST)
    await asyncio.gather(*(names.ensure(SECOND) for _ in range(3)))
    assert names.actor._settings == SECOND
    assert names.num_made == 1


async def test_a_router_that_does_not_answer_is_asked_again_and_never_killed_for_it() -> None:
    names = Names(FIRST)
    names.actor.num_failures = 2
    assert await names.ensure(SECOND) == SECOND
    hanging = Names(FIRST)
    hanging.actor.num_failures = 10**9
    assert await hanging.ensure(SECOND, patience_s=0.3) == FIRST


@pytest.mark.parametrize(
    "changed",
    [
        replace(FIRST, policy="round_robin"),
        replace(FIRST, index_namespace="other"),
        replace(FIRST, tenant_limits=((b"t", TenantLimits(weight=2.0)),)),
    ],
)
def test_every_setting_counts(changed: RouterSettings) -> None:
    assert replace(changed, deployed_unix_s=101.0).replaces(FIRST)


def test_the_router_is_put_beside_its_maker_and_may_move_when_that_node_is_gone() -> None:
    node_id = "ab" * 28
    options = beside(node_id)
    assert options["scheduling_strategy"].node_id == node_id
    assert options["scheduling_strategy"].soft
    assert options["memory"] > 0, "Ray puts an actor that needs nothing anywhere"
