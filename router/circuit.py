"""A circuit breaker for one worker. Knows nothing of requests; time is passed in."""

from __future__ import annotations

from enum import Enum

from router.config import CircuitConfig


class FailureKind(Enum):
    """What a gateway saw. Only the worker's own faults count: a bad request or an impatient client never does."""

    DIED = "died"  # the transport says that the process is gone
    CONNECT = "connect"
    TIMEOUT = "timeout"
    SERVER_ERROR = "server_error"
    CLIENT_ERROR = "client_error"
    ABORTED = "aborted"

    @property
    def is_workers_fault(self) -> bool:
        return self not in (FailureKind.CLIENT_ERROR, FailureKind.ABORTED)


class Circuit:
    """Closed: takes work. Open: none until the cool-down is over. Then half open: one trial decides."""

    __slots__ = ("_config", "_cooldown_s", "_failures", "_open_until_s", "_trial_until_s")

    def __init__(self, config: CircuitConfig) -> None:
        self._config = config
        self._failures = 0
        self._cooldown_s = config.cooldown_s
        self._open_until_s: float | None = None
        self._trial_until_s: float | None = None

    def can_take_work(self, now_s: float) -> bool:
        if self._open_until_s is None:
            return True
        if now_s < self._open_until_s:
            return False
        return self._trial_until_s is None or now_s >= self._trial_until_s

    def start_trial(self, now_s: float) -> None:
        """A request was placed. While half open it is the only one, until it succeeds, fails or takes too long."""
        if self._open_until_s is not None:
            self._trial_until_s = now_s + self._cooldown_s

    def record_success(self) -> None:
        self._failures = 0
        self._cooldown_s = self._config.cooldown_s
        self._open_until_s = self._trial_until_s = None

    def record_failure(self, kind: FailureKind, now_s: float) -> None:
        if not kind.is_workers_fault:
            self._trial_until_s = None  # the trial proved nothing: allow another
            return
        self._failures += 1
        was_open = self._open_until_s is not None
        if kind is FailureKind.DIED or was_open or self._failures >= self._config.failure_threshold:
            if was_open and self._trial_until_s is not None:
                self._cooldown_s = min(2 * self._cooldown_s, self._config.max_cooldown_s)
            self._open_until_s = now_s + self._cooldown_s
            self._trial_until_s = None

    @property
    def is_open(self) -> bool:
        return self._open_until_s is not None
