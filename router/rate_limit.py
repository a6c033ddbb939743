"""Requests and tokens per minute of one tenant. Time is passed in."""

from __future__ import annotations

from router.config import TenantLimits


class TokenBucket:
    """Holds up to one minute's allowance and refills steadily."""

    __slots__ = ("_filled_s", "_level", "_per_min")

    def __init__(self, per_min: float, now_s: float) -> None:
        self._per_min = per_min
        self._level = per_min
        self._filled_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """0 when `amount` is there. An amount beyond a full bucket waits for a full one, else it could never pass."""
        self._refill(now_s)
        missing = min(amount, self._per_min) - self._level
        return max(0.0, missing * 60.0 / self._per_min)

    def take(self, amount: float) -> None:
        """May leave a debt, when `amount` is more than a bucket holds."""
        self._level -= amount

    def _refill(self, now_s: float) -> None:
        elapsed = max(0.0, now_s - self._filled_s)
        self._level = min(self._per_min, self._level + elapsed * self._per_min / 60.0)
        self._filled_s = now_s


class RateLimit:
    """Both buckets of one tenant; a request passes both or neither."""

    __slots__ = ("_requests", "_tokens")

    def __init__(self, limits: TenantLimits, now_s: float) -> None:
        per_min = limits.requests_per_min
        self._requests = None if per_min is None else TokenBucket(per_min, now_s)
        tokens_per_min = limits.tokens_per_min
        self._tokens = None if tokens_per_min is None else TokenBucket(tokens_per_min, now_s)

    def take(self, num_tokens: float, now_s: float) -> float:
        """Seconds until the request may come again; 0 when it was taken from both buckets."""
        wait_s = max(
            self._requests.wait_s(1, now_s) if self._requests else 0.0,
            self._tokens.wait_s(num_tokens, now_s) if self._tokens else 0.0,
        )
        if wait_s == 0.0:
            self.charge(1, num_tokens)
        return wait_s

    def charge(self, num_requests: float, num_tokens: float) -> None:
        """Negative amounts give back what a refused request took."""
        if self._requests:
            self._requests.take(num_requests)
        if self._tokens:
            self._tokens.take(num_tokens)
