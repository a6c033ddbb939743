"""POST /v1/responses: the answer, whole or as the typed events of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.api.output import FinishReason
from cluster.openai.json_text import to_json
from cluster.openai.response_wire import ResponsesRequest
from cluster.serving.text_delta import TextDelta, Usage


class ResponseReply:
    """Collects deltas into one response object; its parts are the payloads of the events."""

    def __init__(self, request_id: str, wire: ResponsesRequest, created_unix_s: int) -> None:
        self.item_id = f"msg_{request_id}"
        self._wire = wire
        self._id = f"resp_{request_id}"
        self._created_unix_s = created_unix_s
        self._text: list[str] = []
        self._is_cut = False

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def status(self) -> str:
        return "incomplete" if self._is_cut else "completed"

    def add(self, delta: TextDelta) -> None:
        self._text.append(delta.text)
        self._is_cut = delta.finish_reason is FinishReason.LENGTH

    def finish(self, usage: Usage) -> dict[str, Any]:
        return self.snapshot(self.status, [self.item(self.status)], usage)

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def item(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part()]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def snapshot(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        wire = self._wire
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_unix_s,
            "status": status,
            "background": False,
            "error": None,
            "frequency_penalty": wire.frequency_penalty or 0.0,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": wire.instructions,
            "max_output_tokens": wire.max_output_tokens,
            "max_tool_calls": None,
            "model": wire.model,
            "output": output,
            "parallel_tool_calls": False,
            "presence_penalty": wire.presence_penalty or 0.0,
            "previous_response_id": None,
            "prompt": None if wire.prompt is None else {"id": wire.prompt.id, "version": wire.prompt.version},
            "prompt_cache_key": wire.prompt_cache_key,
            "reasoning": None,
            "safety_identifier": wire.safety_identifier,
            "store": False,
            "temperature": 1.0 if wire.temperature is None else wire.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": 0,
            "top_p": 1.0 if wire.top_p is None else wire.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage_json(usage),
            "user": wire.user,
            "metadata": wire.metadata or {},
        }


class ResponseEvents:
    """Numbers and orders the events. `chunk` may be called for every delta, `finish` once."""

    def __init__(self, reply: ResponseReply) -> None:
        self._reply = reply
        self._sequence_number = -1

    def start(self) -> Iterator[str]:
        reply = self._reply
        yield self._event("response.created", response=reply.snapshot("in_progress", [], None))
        yield self._event("response.in_progress", response=reply.snapshot("in_progress", [], None))
        yield self._event("response.output_item.added", output_index=0, item=reply.item("in_progress"))
        yield self._event("response.content_part.added", **self._place(), part=reply.part())

    def chunk(self, delta: TextDelta, running_usage: Usage | None = None) -> str | None:
        self._reply.add(delta)
        if not delta.text:
            return None
        return self._event("response.output_text.delta", **self._place(), delta=delta.text, logprobs=[])

    def finish(self, usage: Usage) -> Iterator[str]:
        reply = self._reply
        yield self._event("response.output_text.done", **self._place(), text=reply.text, logprobs=[])
        yield self._event("response.content_part.done", **self._place(), part=reply.part())
        yield self._event("response.output_item.done", output_index=0, item=reply.item(reply.status))
        yield self._event(f"response.{reply.status}", response=reply.finish(usage))

    def fail(self, error: dict[str, Any]) -> str:
        """The API's own way to tell an error in the middle of a stream."""
        return self._event("error", code=error["code"], message=error["message"], param=error["param"])

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._reply.item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        self._sequence_number += 1
        data = to_json({"type": kind, "sequence_number": self._sequence_number, **fields})
        # Both the named event and the type inside are part of the API.
        return f"event: {kind}\ndata: {data}\n\n"


def _usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
