"""What has arrived for one request and its caller has not taken yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.api.output import ChoiceDelta, RequestOutput

MAX_PENDING = 64  # outputs; then they are merged, so that a caller who reads nothing costs little more than its tokens


class Mailbox:
    """One writer that never waits, one reader. Outputs that wait are handed over as one."""

    def __init__(self) -> None:
        self.is_finished = False  # the last output has arrived, whether or not it was taken
        self._pending: list[RequestOutput] = []
        self._is_closed = False
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._pending.append(output)
        self.is_finished = self.is_finished or output.finished
        if len(self._pending) > MAX_PENDING:
            self._pending = [merge(self._pending)]
        self._ready.set()

    def close(self) -> None:
        """Nothing more will come."""
        self._is_closed = True
        self._ready.set()

    async def take(self) -> RequestOutput | None:
        """All that has arrived; None once that is nothing and nothing will come."""
        await self._ready.wait()
        if not self._pending:
            return None
        output, self._pending = merge(self._pending), []
        if not self._is_closed:
            self._ready.clear()
        return output


def merge(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Consecutive outputs of one request as one: each choice's tokens in their order."""
    if len(outputs) == 1:
        return outputs[0]
    deltas: dict[int, list[ChoiceDelta]] = {}
    for output in outputs:
        for delta in output.deltas:
            deltas.setdefault(delta.index, []).append(delta)
    cached = (output.num_cached_tokens for output in outputs if output.num_cached_tokens is not None)
    return RequestOutput(
        outputs[0].request_id,
        tuple(_merge_deltas(parts) for parts in deltas.values()),
        num_cached_tokens=next(cached, None),
        finished=outputs[-1].finished,
        error=outputs[-1].error,
    )


def _merge_deltas(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    last = deltas[-1]
    return ChoiceDelta(
        last.index,
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for part in logprobs for entry in part) if logprobs else None,
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
    )
