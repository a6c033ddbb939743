"""POST /v1/chat/completions: the answer, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.openai.collected_choice import CollectedChoice
from cluster.openai.json_text import to_json
from cluster.openai.reply_parts import chat_logprobs, event_head, event_tail, finish_json, usage_json
from cluster.serving.text_delta import TextDelta, Usage


class ChatReply:
    """Collects deltas into one chat.completion object."""

    def __init__(self, reply_id: str, model: str, created_unix_s: int, num_choices: int) -> None:
        self._head = {"id": reply_id, "object": "chat.completion", "created": created_unix_s, "model": model}
        self._choices = [CollectedChoice() for _ in range(num_choices)]

    def add(self, delta: TextDelta) -> None:
        self._choices[delta.index].add(delta)

    def finish(self, usage: Usage) -> dict[str, Any]:
        choices = [self._choice_json(index, choice) for index, choice in enumerate(self._choices)]
        return {**self._head, "choices": choices, "usage": usage_json(usage)}

    def _choice_json(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs),
            "finish_reason": finish_json(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }


class ChatChunks:
    """Turns deltas into framed chat.completion.chunk events. What repeats in every one is serialised once."""

    def __init__(self, reply_id: str, model: str, created_unix_s: int, num_choices: int, *, wants_usage: bool) -> None:
        head = {"id": reply_id, "object": "chat.completion.chunk", "created": created_unix_s, "model": model}
        self._head = event_head(head)
        # With include_usage every chunk has the field; it is null until the last.
        self._tail = event_tail(None) if wants_usage else "]}\n\n"
        self._wants_usage = wants_usage
        self._num_choices = num_choices

    def start(self) -> Iterator[str]:
        """The role of each choice, before its text."""
        for index in range(self._num_choices):
            yield self._chunk(index, '{"role":"assistant","content":""}', "null", "null", None)

    def chunk(self, delta: TextDelta, running_usage: Usage | None = None) -> str | None:
        """None when there is nothing to tell yet: all text of the delta is held back."""
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return None
        content = f'{{"content":{to_json(delta.text)}}}' if delta.text or delta.finish_reason is None else "{}"
        logprobs = "null" if delta.logprobs is None else to_json(chat_logprobs(delta.logprobs))
        reason = "null" if delta.finish_reason is None else to_json(delta.finish_reason.value)
        return self._chunk(delta.index, content, logprobs, reason, running_usage)

    def finish(self, usage: Usage) -> Iterator[str]:
        if self._wants_usage:
            yield self._head + event_tail(usage)

    def _chunk(self, index: int, delta: str, logprobs: str, reason: str, usage: Usage | None) -> str:
        tail = self._tail if usage is None else event_tail(usage)
        choice = f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}}}'
        return f"{self._head}{choice}{tail}"
