"""Sends a workload with bounded concurrency and keeps the time of every piece of text. Streaming only."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from cluster.bench.workload import Conversation, Message, Turn


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """`base_url` ends in /v1. `templates` maps a system prompt to the id under which it was registered."""

    base_url: str
    model: str
    api_key: str | None = None
    sends_user: bool = True
    templates: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds of the performance counter."""

    started: float
    error: str | None = None
    text_times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    worker: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.text_times[0] - self.started

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.text_times, self.text_times[1:], strict=False)]


@dataclass(slots=True)
class BenchResult:
    """`cpu_s`: what this process itself took meanwhile; on a small machine the server goes without it."""

    records: list[RequestRecord]
    wall_s: float
    cpu_s: float


async def run_workload(
    target: BenchTarget,
    conversations: list[Conversation],
    concurrency: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Runs all conversations, `concurrency` at a time; a failed turn ends its conversation."""
    todo = list(reversed(conversations))
    num_turns = sum(len(conversation.turns) for conversation in conversations)
    records: list[RequestRecord] = []
    timeout = aiohttp.ClientTimeout(total=600)
    # A connection for each request: some servers close theirs after a stream without saying so.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def work() -> None:
            while todo:
                conversation = todo.pop()
                messages: list[Message] = []
                for turn in conversation.turns:
                    messages = messages + list(turn.messages)
                    record = await _send(session, target, conversation, messages, turn)
                    records.append(record)
                    if on_progress is not None:
                        on_progress(len(records), num_turns)
                    if record.error is not None:
                        break
                    messages = [*messages, {"role": "assistant", "content": record.text}]

        started, cpu_before = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work() for _ in range(concurrency)))
        return BenchResult(records, time.perf_counter() - started, time.process_time() - cpu_before)


async def _send(
    session: aiohttp.ClientSession,
    target: BenchTarget,
    conversation: Conversation,
    messages: list[Message],
    turn: Turn,
) -> RequestRecord:
    body = _body(target, conversation, messages, turn)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    record = RequestRecord(time.perf_counter())
    try:
        async with session.post(f"{target.base_url}/chat/completions", json=body, headers=headers) as response:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return record
            record.worker = response.headers.get("x-watchword-worker")
            async for line in response.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    _take_chunk(record, json.loads(line[6:]))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"[:200]
    if record.error is None and not record.text_times:
        record.error = "no text"
    return record


def _body(target: BenchTarget, conversation: Conversation, messages: list[Message], turn: Turn) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "messages": messages,
        "max_tokens": turn.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra_body,
    }
    if target.sends_user:
        body["user"] = f"bench-user-{conversation.user}"
    template = target.templates.get(conversation.system or "")
    if template is not None:
        body["prompt"] = {"id": template}
        body["messages"] = [message for message in messages if message["role"] != "system"]
    return body


def _take_chunk(record: RequestRecord, chunk: dict[str, Any]) -> None:
    if chunk.get("error"):
        record.error = str(chunk["error"])[:200]
        return
    usage = chunk.get("usage")
    if usage:
        record.prompt_tokens = usage["prompt_tokens"]
        record.output_tokens = usage["completion_tokens"]
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in chunk.get("choices") or ():
        text = (choice.get("delta") or {}).get("content")
        if text:
            record.text_times.append(time.perf_counter())
            record.text += text
