"""Adapters of a cluster: announced when every worker has the same content, given to those that lack it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from cluster.adapters import AdapterManager, AnnouncedAdapters
from cluster.api.channel import ControlCall, LoadAdapter, UnloadAdapter
from cluster.api.errors import InvalidRequestError, NotFoundError, UnavailableError, WatchwordError
from cluster.api.ids import TenantId, WorkerId
from cluster.api.principal import Principal, Role
from cluster.api.worker_state import WorkerInfo
from cluster.http.adapter_routes import AdapterRoutes
from cluster.http.config import HttpConfig
from cluster.http.error_reply import error_response


def worker(name: str, **adapters: bytes) -> WorkerInfo:
    return WorkerInfo(
        WorkerId(name), "epoch", "address", "tiny", "same", 16, 100, 8, 512, adapters=tuple(adapters.items())
    )


class Workers:
    """Loads what lies in `contents`; `silent` workers do not answer."""

    def __init__(self, num_workers: int = 2) -> None:
        self.members: tuple[WorkerInfo, ...] = tuple(worker(f"w{number}") for number in range(num_workers))
        self.contents = {"/adapters/poet": b"verse", "/adapters/clerk": b"prose"}
        self.silent: set[str] = set()
        self.calls: list[tuple[str, ControlCall]] = []

    async def call(self, worker: WorkerInfo, call: ControlCall) -> Any:
        self.calls.append((worker.worker_id, call))
        if worker.worker_id in self.silent:
            raise UnavailableError(f"{worker.worker_id} did not carry out a control call")
        held = dict(worker.adapters)
        if isinstance(call, LoadAdapter):
            digest = self.contents.get(call.folder)
            if digest is None:
                return "no such folder"
            if call.expected_digest not in (None, digest):
                return "the files differ"
            answer: Any = digest
            held[call.name] = digest
        else:
            assert isinstance(call, UnloadAdapter)
            answer = int(held.pop(call.name, None) is not None)
        changed = replace(worker, adapters=tuple(held.items()))
        self.members = tuple(changed if one.worker_id == worker.worker_id else one for one in self.members)
        return answer


def manager(workers: Workers, folder: Path) -> tuple[AdapterManager, AnnouncedAdapters]:
    announced = AnnouncedAdapters(lambda: workers.members)
    return AdapterManager(workers, folder / "adapters.json", "tiny", announced), announced


def test_a_name_is_announced_when_every_worker_has_the_same_content() -> None:
    for members, expected in (
        ((), {}),
        ((worker("a", poet=b"1"),), {"poet": b"1"}),
        ((worker("a", poet=b"1"), worker("b")), {}),
        ((worker("a", poet=b"1"), worker("b", poet=b"2")), {}),
        ((worker("a", poet=b"1", clerk=b"3"), worker("b", poet=b"1")), {"poet": b"1"}),
    ):
        announced = AnnouncedAdapters(lambda members=members: members)
        assert dict(announced) == expected


async def test_loading_gives_it_to_all_and_replacing_must_be_meant(tmp_path: Path) -> None:
    workers = Workers()
    adapters, announced = manager(workers, tmp_path)
    assert await adapters.load("poet", "/adapters/poet", replaces=False) == b"verse"
    assert dict(announced) == {"poet": b"verse"}
    with pytest.raises(InvalidRequestError, match="load_inplace replaces it"):
        await adapters.load("poet", "/adapters/poet", replaces=False)
    workers.contents["/adapters/poet"] = b"rhyme"
    assert await adapters.load("poet", "/adapters/poet", replaces=True) == b"rhyme"
    assert dict(announced) == {"poet": b"rhyme"}
    await adapters.unload("poet")
    assert dict(announced) == {}
    with pytest.raises(NotFoundError):
        await adapters.unload("poet")
    assert (tmp_path / "adapters.json").stat().st_mode & 0o077 == 0


async def test_what_one_worker_cannot_take_is_not_announced_until_it_can(tmp_path: Path) -> None:
    workers = Workers()
    adapters, announced = manager(workers, tmp_path)
    with pytest.raises(InvalidRequestError, match="no such folder"):
        await adapters.load("poet", "/adapters/none", replaces=False)
    workers.silent = {"w1"}
    with pytest.raises(UnavailableError):
        await adapters.load("poet", "/adapters/poet", replaces=False)
    assert dict(workers.members[0].adapters) == {"poet": b"verse"}
    assert dict(announced) == {}
    workers.silent = set()
    await adapters.sync()
    assert dict(announced) == {"poet": b"verse"}
    num_calls = len(workers.calls)
    await adapters.sync()
    assert len(workers.calls) == num_calls, "everybody has everything"


async def test_a_new_worker_is_given_the_content_that_was_meant_or_nothing(tmp_path: Path) -> None:
    workers = Workers()
    await manager(workers, tmp_path)[0].load("poet", "/adapters/poet", replaces=False)
    adapters, announced = manager(workers, tmp_path)  # another gateway
    workers.members += (worker("new"),)
    await adapters.sync()
    assert dict(announced) == {"poet": b"verse"}
    workers.contents["/adapters/poet"] = b"somebody changed the files"
    workers.members += (worker("newer"),)
    await adapters.sync()
    assert dict(workers.members[-1].adapters) == {}
    assert dict(announced) == {}
    num_calls = len(workers.calls)
    await adapters.sync()
    assert len(workers.calls) == num_calls, "files that were refused are not read again every second"
    await adapters.load("poet", "/adapters/poet", replaces=True)
    assert dict(announced) == {"poet": b"somebody changed the files"}


Post = Callable[..., Awaitable[httpx.Response]]


def poster(adapters: AdapterManager, *, is_operator: bool) -> Post:
    async def refuse(_: Request, error: Exception) -> Response:
        assert isinstance(error, WatchwordError)
        return error_response(error)

    routes = AdapterRoutes(adapters, HttpConfig(version="1")).routes()
    app = Starlette(routes=routes, exception_handlers={WatchwordError: refuse})
    principal = Principal(TenantId("t"), frozenset({Role.OPERATOR} if is_operator else ()), "k", ())

    async def with_principal(scope: Any, receive: Any, send: Any) -> None:
        scope.setdefault("state", {})["principal"] = principal
        await app(scope, receive, send)

    async def post(path: str, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(with_principal), base_url="http://gateway"
        ) as client:
            return await client.post(path, json=body)

    return post


async def test_the_routes_answer_as_vllm_does_and_to_operators_alone(tmp_path: Path) -> None:
    workers = Workers()
    adapters, announced = manager(workers, tmp_path)
    load = {"lora_name": "poet", "lora_path": "/adapters/poet"}
    refused = await poster(adapters, is_operator=False)("/v1/load_lora_adapter", **load)
    assert (refused.status_code, workers.calls) == (403, [])
    post = poster(adapters, is_operator=True)
    answer = await post("/v1/load_lora_adapter", **load)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
    assert dict(announced) == {"poet": b"verse"}
    for body in (
        {},
        {"lora_name": "x"},
        {**load, "lora_path": 3},
        {**load, "more": 1},
        {**load, "load_inplace": "yes"},
        load,
    ):
        assert (await post("/v1/load_lora_adapter", **body)).status_code == 400, body
    assert (await post("/v1/load_lora_adapter", **load, load_inplace=True)).status_code == 200
    answer = await post("/v1/unload_lora_adapter", lora_name="poet")
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
    assert (await post("/v1/unload_lora_adapter", lora_name="poet")).status_code == 404
    assert (await poster(adapters, is_operator=False)("/v1/unload_lora_adapter", lora_name="x")).status_code == 403
