"""POST /v1/completions: the answer, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.openai.collected_choice import CollectedChoice
from cluster.openai.json_text import to_json
from cluster.openai.reply_parts import event_head, event_tail, finish_json, text_logprobs, usage_json
from cluster.serving.text_delta import TextDelta, Usage


class CompletionReply:
    """Collects deltas into one text_completion object."""

    def __init__(self, reply_id: str, model: str, created_unix_s: int, num_choices: int) -> None:
        self._head = {"id": reply_id, "object": "text_completion", "created": created_unix_s, "model": model}
        self._choices = [CollectedChoice() for _ in range(num_choices)]

    def add(self, delta: TextDelta) -> None:
        self._choices[delta.index].add(delta)

    def finish(self, usage: Usage) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "text": choice.text,
                "logprobs": text_logprobs(choice.logprobs),
                "finish_reason": finish_json(choice.finish_reason),
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {**self._head, "choices": choices, "usage": usage_json(usage)}


class CompletionChunks:
    """Turns deltas into framed text_completion events. What repeats in every one is serialised once."""

    def __init__(self, reply_id: str, model: str, created_unix_s: int, num_choices: int, *, wants_usage: bool) -> None:
        head = {"id": reply_id, "object": "text_completion", "created": created_unix_s, "model": model}
        self._head = event_head(head)
        self._tail = event_tail(None) if wants_usage else "]}\n\n"
        self._wants_usage = wants_usage

    def start(self) -> Iterator[str]:
        return iter(())

    def chunk(self, delta: TextDelta, running_usage: Usage | None = None) -> str | None:
        """None when there is nothing to tell yet: all text of the delta is held back."""
        if not delta.text and not delta.logprobs and delta.finish_reason is None:
            return None
        choice = (
            f'{{"index":{delta.index},"text":{to_json(delta.text)},"logprobs":{to_json(text_logprobs(delta.logprobs))},'
            f'"finish_reason":{to_json(finish_json(delta.finish_reason))}}}'
        )
        tail = self._tail if running_usage is None else event_tail(running_usage)
        return f"{self._head}{choice}{tail}"

    def finish(self, usage: Usage) -> Iterator[str]:
        if self._wants_usage:
            yield self._head + event_tail(usage)
