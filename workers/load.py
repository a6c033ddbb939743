"""How busy and how fast an engine is, in the figures that the router plans with."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.api.ids import RequestId
from workers.scheduler import Schedule

_SMOOTHING = 0.1  # weight of the newest step: about the last ten count


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's part of a WorkerSnapshot; fields are described there."""

    num_running: int
    num_waiting: int
    pending_prefill_tokens: int
    num_free_blocks: int
    prefill_tokens_per_s: float
    decode_step_s: float
    request_ids: tuple[RequestId, ...]
    is_healthy: bool


class LoadMeter:
    """Exponentially smoothed speeds. A mixed step counts as prefill when most of its tokens are prompt tokens."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0
        self.num_steps = 0
        self.num_tokens = 0
        self.busy_s = 0.0

    def note_step(self, schedule: Schedule, duration_s: float) -> None:
        num_tokens = sum(row.num_tokens for row in schedule.rows)
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.busy_s += duration_s
        if num_tokens == len(schedule.rows):
            self.decode_step_s = _smooth(self.decode_step_s, duration_s)
        elif num_tokens > 2 * len(schedule.rows) and duration_s > 0:
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, num_tokens / duration_s)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
