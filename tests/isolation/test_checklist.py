"""`watchword check` against a live worker behind a real front door: one breakage, one red line."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live_rig import CONFIG, Live, live, served

from cache_service.block_key import BlockKeyer
from cache_service.key_audit import missing_fields
from cluster.api.channel import Quarantine
from cluster.api.errors import InvalidRequestError, UnavailableError
from cluster.api.ids import BlockKey
from cluster.api.scope import Scope, ScopeFields
from cluster.auth.key_store import create_key
from cluster.checks.checklist import run_checklist
from cluster.checks.live_server import LiveServer
from cluster.experiment.faults import layout
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.weights import LoadedModel
from cluster.sentinel.probe import ProbeReport, Result
from workers.config import Layout

FAULTS = {fault.name: fault for fault in layout.FAULTS}
GREEN = {
    "authentication",
    "monitoring",
    "key completeness",
    "workers",
    "positions per request",
    "mask for padding and packing",
    "reference counts",
    "eviction pressure",
    "restart",
}


class Deployment:
    """A live worker, a front door, and a sentinel that has had one clean run unless a test wants otherwise."""

    def __init__(self, tiny: LoadedModel, folder: Path) -> None:
        self._tiny, self._folder = tiny, folder
        self.stack = AsyncExitStack()
        self.both: Live

    async def start(self, *, has_probed: bool = True, **rig: Any) -> Live:
        self.both = await self.stack.enter_async_context(live(self._tiny, **rig))
        if has_probed:
            self.both.sentinel_metrics.note(ProbeReport(Result.CLEAN, ""), 0.1, time.time())
        return self.both

    async def red(self, **front: Any) -> set[str]:
        """The names of the lines that are red."""
        place = await self.stack.enter_async_context(served(self.both, self._folder, **front))
        lines = await run_checklist(place.url, place.operator_key, settle_s=0.0)
        assert {line.name for line in lines} == GREEN
        assert all(line.evidence for line in lines)
        return {f"{line.name}" for line in lines if not line.passed}


@pytest.fixture
async def deployment(tiny: LoadedModel, tmp_path: Path) -> Any:
    deployment = Deployment(tiny, tmp_path)
    async with deployment.stack:
        yield deployment


async def test_a_sound_deployment_is_green(deployment: Deployment) -> None:
    await deployment.start()
    assert await deployment.red() == set()


async def test_a_sound_padded_deployment_is_green(deployment: Deployment) -> None:
    await deployment.start(config=replace(CONFIG, layout=Layout.PADDED))
    assert await deployment.red() == set()


async def test_no_keys(deployment: Deployment) -> None:
    await deployment.start()
    assert await deployment.red(has_keys=False) == {"authentication"}


async def test_no_sentinel(deployment: Deployment) -> None:
    await deployment.start()
    assert await deployment.red(has_sentinel=False) == {"monitoring"}


async def test_a_sentinel_that_stopped_long_ago(deployment: Deployment) -> None:
    both = await deployment.start()
    both.sentinel_metrics.note(ProbeReport(Result.CLEAN, ""), 0.1, time.time() - 3600)
    assert await deployment.red() == {"monitoring"}


async def test_a_leak_found_by_the_sentinel(deployment: Deployment) -> None:
    both = await deployment.start()
    both.sentinel_metrics.note(ProbeReport(Result.LEAK, ""), 0.1, time.time())
    assert await deployment.red() == {"monitoring"}


class NoUser(BlockKeyer):
    def child(
        self, parent: BlockKey | None, fields: ScopeFields, token_ids: Any, adapter_digest: bytes | None = None
    ) -> BlockKey:
        return super().child(parent, replace(fields, user=b""), token_ids, adapter_digest)


class NoParent(BlockKeyer):
    def child(
        self, parent: BlockKey | None, fields: ScopeFields, token_ids: Any, adapter_digest: bytes | None = None
    ) -> BlockKey:
        return super().child(None, fields, token_ids, adapter_digest)


@pytest.mark.parametrize("keyer", [NoUser, NoParent])
async def test_an_incomplete_key(deployment: Deployment, keyer: type[BlockKeyer]) -> None:
    await deployment.start(gateway_keyer=keyer)
    assert await deployment.red() == {"key completeness"}


async def test_another_key_in_the_worker(deployment: Deployment) -> None:
    await deployment.start(parts=StackParts(keyer=NoUser))
    assert await deployment.red() == {"key completeness"}


async def test_a_cache_without_scopes(deployment: Deployment) -> None:
    """Everyone passes for the first caller, and the key's function is complete: seen from outside alone."""
    both = await deployment.start()
    identify = both.core.identify
    fixed: list[Any] = []

    def everyone_is_the_first(principal: Any, caller: Any, model: Any) -> Any:
        fixed.append(identify(principal, caller, model))
        return fixed[0]

    both.core.identify = everyone_is_the_first  # type: ignore[method-assign]
    assert await deployment.red() == {"key completeness"}


@pytest.mark.parametrize("name", ["positions_run_on", "positions_restart"])
async def test_positions(deployment: Deployment, name: str) -> None:
    await deployment.start(parts=FAULTS[name].make_parts())
    assert await deployment.red() == {"positions per request"}


@pytest.mark.parametrize(
    ("name", "batch_layout"),
    [
        ("mask_of_wrong_row", Layout.PACKED),
        ("table_of_wrong_row", Layout.PACKED),
        ("padding_not_masked", Layout.PADDED),
        ("padding_in_block_zero", Layout.PADDED),
        ("slot_minus_one", Layout.PADDED),
    ],
)
async def test_mask(deployment: Deployment, name: str, batch_layout: Layout) -> None:
    config = replace(CONFIG, layout=batch_layout)
    await deployment.start(config=config, parts=FAULTS[name].make_parts())
    assert await deployment.red() == {"mask for padding and packing"}


async def test_a_block_that_is_twice_in_the_free_list(deployment: Deployment) -> None:
    both = await deployment.start()
    free = both.worker.llm_engine.pool._free
    free[-1] = free[-2]
    assert await deployment.red() == {"reference counts"}


async def test_a_pool_too_small_for_a_full_batch(deployment: Deployment) -> None:
    await deployment.start(config=replace(CONFIG, num_blocks=50))
    assert await deployment.red() == {"eviction pressure"}


async def test_an_index_that_believes_in_an_earlier_life(deployment: Deployment) -> None:
    both = await deployment.start()
    both.router.stale.add(b"old life")
    assert await deployment.red() == {"restart"}


async def test_a_quarantined_worker(deployment: Deployment) -> None:
    both = await deployment.start()
    await both.control.call(both.info, Quarantine("a test"))
    red = await deployment.red()
    assert "workers" in red
    assert red <= {"workers", "key completeness"}, "a drained worker answers no prompt, so no hit can be seen either"


async def test_a_worker_that_is_gone(deployment: Deployment) -> None:
    both = await deployment.start()
    await both.worker.channel.stop(0.1)
    assert "workers" in await deployment.red()


async def test_it_needs_an_operators_key_and_a_server(deployment: Deployment, tmp_path: Path) -> None:
    both = await deployment.start()
    async with served(both, tmp_path) as place:
        with pytest.raises(InvalidRequestError, match="operator"):
            await run_checklist(place.url, "ww-0.wrong")
    with socket.socket() as deaf:  # keeps the port, so that nobody else answers there
        deaf.bind(("127.0.0.1", 0))
        with pytest.raises(UnavailableError, match="does not answer"):
            await run_checklist(f"http://127.0.0.1:{deaf.getsockname()[1]}", place.operator_key)


def test_every_field_of_a_key_is_asked_for() -> None:
    """The audit changes each field of the scope, so that a key that leaves one out cannot pass."""
    from cache_service.block_key import ModelIdentity

    model = ModelIdentity("m", b"w", "float32", "test", 16)
    assert missing_fields(BlockKeyer(b"s" * 32, model)) == ()
    for name in ScopeFields.__slots__:
        left_out: dict[str, Any] = {name: Scope.USER if name == "scope" else None}

        class WithoutIt(BlockKeyer):
            def child(
                self,
                parent: BlockKey | None,
                fields: ScopeFields,
                token_ids: Any,
                adapter_digest: bytes | None = None,
                changed: dict[str, Any] = left_out,
            ) -> BlockKey:
                return super().child(parent, replace(fields, **changed), token_ids, adapter_digest)

        assert name in missing_fields(WithoutIt(b"s" * 32, model))


async def test_the_command_prints_lines_and_exits_by_them(deployment: Deployment, tmp_path: Path) -> None:
    both = await deployment.start()
    async with served(both, tmp_path) as place:
        green = await run_command("check", "--url", place.url, "--api-key", place.operator_key, "--json")
        assert green[0] == 0, green
        assert {entry["name"] for entry in json.loads(green[1])["lines"]} == GREEN
        both.router.stale.add(b"old life")
        status, text = await run_command("check", "--url", place.url, "--api-key", place.operator_key)
        assert status == 1
        assert "an earlier life" in " ".join(text.split())


async def test_a_request_can_be_traced_by_the_id_of_its_answer(deployment: Deployment, tmp_path: Path) -> None:
    both = await deployment.start()
    async with served(both, tmp_path) as place, LiveServer(place.url, place.operator_key) as server:
        models = await server.get("/v1/models")
        body = {
            "model": models.body["data"][0]["id"],
            "messages": [{"role": "user", "content": "x" * 40}],
            "max_tokens": 2,
        }
        first, second = [(await server.post("/v1/chat/completions", body)).body["id"] for _ in range(2)]
        status, text = await run_command("trace", second, "--url", place.url, "--api-key", place.operator_key)
        assert status == 0, text
        assert "reuse" in text
        assert first.removeprefix("chatcmpl-") in text
        for path in (f"/v1/requests/{first}/trace", "/v1/evidence"):
            user_key = create_key(tmp_path / "keys.json", "acme", roles=frozenset(), user="alice")[1]
            assert (await server.get_as(user_key, path)).status == 403
        assert (await server.get("/v1/requests/chatcmpl-nobody/trace")).status == 404


async def run_command(*arguments: str) -> tuple[int, str]:
    """In a process of its own, as a person runs it."""
    command = (sys.executable, "-c", "from cluster.cli import main; main()", *arguments)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "COLUMNS": "160"}
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()
