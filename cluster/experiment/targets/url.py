"""Any OpenAI-compatible server over HTTP: ours, vLLM, llama.cpp. Uses only what such a server shows to a client."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cluster.experiment.observation import Observation, RoundObservation
from cluster.experiment.plan import FILLER, PlannedRequest, Round
from cluster.experiment.targets.target import ReuseControl, TargetInfo

_STEP_S = 0.02  # what one engine step of a planned arrival is taken for on a server whose steps cannot be seen
_ROUND_TIMEOUT_S = 300.0
_CONTROL_WORDS = "river stone garden window paper table summer bread music lamp " * 12


@dataclass(slots=True)
class _Reply:
    """A reply while it arrives. Times are seconds on the monotonic clock."""

    sent_s: float
    text: str = ""
    ranks: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    first_s: float | None = None
    end_s: float | None = None
    was_aborted: bool = False


class UrlTarget:
    """`base_url` with or without a trailing /v1. The model is the first one that the server lists unless named."""

    def __init__(self, base_url: str, api_key: str | None = None, model: str | None = None) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    @property
    def info(self) -> TargetInfo:
        return TargetInfo(name=self._base_url, model=self._model or "?", sees_steps=False, settings={})

    async def connect(self) -> None:
        """Opens the connection pool and asks for the model. Raises ConnectionError when nobody answers."""
        timeout = aiohttp.ClientTimeout(total=_ROUND_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        if self._model is not None:
            return
        try:
            async with self._session.get(f"{self._base_url}/v1/models") as response:
                body = await response.json(content_type=None)
                if response.status != 200:
                    raise ConnectionError(f"{self._base_url}/v1/models answered {response.status}: {body}")
        except aiohttp.ClientError as error:
            raise ConnectionError(f"no server at {self._base_url}: {error}") from error
        self._model = body["data"][0]["id"]

    async def run_round(self, planned: Round) -> RoundObservation:
        replies = await asyncio.gather(*(self._send_planned(request) for request in planned.requests))
        by_name = {
            request.name: _observe(request.name, reply)
            for request, reply in zip(planned.requests, replies, strict=True)
        }
        marked = [reply for request, reply in zip(planned.requests, replies, strict=True) if request.role != FILLER]
        return RoundObservation(planned.index, by_name, shared_step=_overlapped(marked))

    async def reuse_control(self) -> ReuseControl:
        """The same long prompt twice, as one user; the second answer should report cached tokens."""
        body = self._body([("user", _CONTROL_WORDS)], max_tokens=2, user="control")
        for _ in range(2):
            reply = _Reply(time.monotonic())
            await self._post(body, reply, None)
        details = reply.usage.get("prompt_tokens_details") or {}
        return ReuseControl(details.get("cached_tokens"), expected=True)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _send_planned(self, request: PlannedRequest) -> _Reply:
        await asyncio.sleep(request.arrival_step * _STEP_S)
        # An abort can only be made visible on a stream: the client hangs up in the middle of it.
        stream = request.stream or request.abort_after_tokens is not None
        body = self._body(list(request.messages), request.max_tokens, request.user) | {
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed,
            "n": request.num_choices,
            "logprobs": True,
            "top_logprobs": request.logprobs,
            "stream": stream,
        }
        if request.session is not None:
            body["session_id"] = request.session
        if request.stop:
            body["stop"] = list(request.stop)
        if stream:
            body["stream_options"] = {"include_usage": True}
        reply = _Reply(time.monotonic())
        await self._post(body, reply, request.abort_after_tokens)
        return reply

    def _body(self, messages: list[tuple[str, str]], max_tokens: int, user: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": role, "content": content} for role, content in messages],
            "max_tokens": max_tokens,
            "user": user,
        }

    async def _post(self, body: dict[str, Any], reply: _Reply, abort_after_tokens: int | None) -> None:
        assert self._session is not None, "connect() first"
        try:
            async with self._session.post(f"{self._base_url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    reply.error = f"{response.status}: {await response.text()}"
                elif body.get("stream"):
                    await _read_stream(response, reply, abort_after_tokens)
                else:
                    _take(await response.json(content_type=None), reply)
        except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        reply.end_s = time.monotonic()


async def _read_stream(response: aiohttp.ClientResponse, reply: _Reply, abort_after_tokens: int | None) -> None:
    num_chunks = 0
    async for chunk in _events(response):
        if reply.first_s is None:
            reply.first_s = time.monotonic()
        _take(chunk, reply)
        num_chunks += 1
        if abort_after_tokens is not None and num_chunks >= abort_after_tokens:
            reply.was_aborted = True
            return  # leaving the response unread closes the connection


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        data = line.decode("utf-8", "replace").strip()
        if data.startswith("data:") and data != "data: [DONE]":
            yield json.loads(data.removeprefix("data:"))


def _take(body: dict[str, Any], reply: _Reply) -> None:
    """Adds a whole response or one chunk of a stream to the reply."""
    if "error" in body:
        reply.error = json.dumps(body["error"], ensure_ascii=False)
    reply.usage = body.get("usage") or reply.usage
    for choice in body.get("choices") or ():
        content = choice.get("message") or choice.get("delta") or {}
        reply.text += content.get("content") or ""
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            ranked = [entry["token"], *(top["token"] for top in entry.get("top_logprobs") or ())]
            reply.ranks.extend([""] * (len(ranked) - len(reply.ranks)))
            for rank, token in enumerate(ranked):
                reply.ranks[rank] += token


def _observe(name: str, reply: _Reply) -> Observation:
    details = reply.usage.get("prompt_tokens_details") or {}
    return Observation(
        name=name,
        text=reply.text,
        logprob_texts=tuple(reply.ranks),
        error=reply.error,
        finish_reason=reply.finish_reason,
        num_cached_tokens=details.get("cached_tokens"),
        num_prompt_tokens=reply.usage.get("prompt_tokens"),
        was_aborted=reply.was_aborted,
        first_token_s=None if reply.first_s is None else reply.first_s - reply.sent_s,
    )


def _overlapped(replies: list[_Reply]) -> bool:
    """All replies were being made at one moment, as far as a client can tell: the weaker, outside view."""
    last_start = max(reply.first_s or reply.sent_s for reply in replies)
    first_end = min(reply.end_s or reply.sent_s for reply in replies)
    return last_start < first_end
