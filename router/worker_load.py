"""The load of one life of one worker as the router accounts for it: reservations, their progress, others' work."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cluster.api.ids import RequestId
from router.policy import Candidate


@dataclass(slots=True)
class Reservation:
    """One placed request. `prefill_tokens` is what is believed to be left before its first token."""

    request_id: RequestId
    load: WorkerLoad
    prefill_tokens: float
    context_tokens: int
    tenant_hash: bytes
    created_s: float
    num_matched_blocks: int = 0
    first_token_s: float | None = None


class WorkerLoad:
    """Sums over the live reservations of a worker, kept in step with `candidate`, which policies read.

    The engine prefills first come, first served: between reports, the oldest prefill is assumed to advance at the
    measured rate, but never past its end, because its first token would have been announced.
    """

    __slots__ = (
        "_anchor_s",
        "_foreign_running",
        "_foreign_tokens",
        "_prefilling",
        "candidate",
        "epoch",
        "mean_decode_s",
        "reservations",
    )

    def __init__(self, candidate: Candidate, epoch: str = "") -> None:
        self.candidate = candidate
        self.epoch = epoch
        self.reservations: dict[RequestId, Reservation] = {}
        self.mean_decode_s = 0.0  # smoothed time from first token to release; 0 while unknown
        self._prefilling: dict[RequestId, Reservation] = {}  # oldest first
        self._foreign_tokens = 0.0  # prefill that a snapshot showed and no reservation explains
        self._foreign_running = 0
        self._anchor_s = 0.0  # the oldest prefill advances since then

    def add(self, reservation: Reservation) -> None:
        if not self._prefilling:
            self._anchor_s = reservation.created_s
        self.reservations[reservation.request_id] = reservation
        self._prefilling[reservation.request_id] = reservation
        candidate = self.candidate
        candidate.reserved_prefill_tokens += reservation.prefill_tokens
        candidate.pending_prefill_tokens += reservation.prefill_tokens
        candidate.num_context_tokens += reservation.context_tokens
        candidate.num_running += 1
        candidate.num_prefilling += 1

    def end_prefill(self, request_id: RequestId, now_s: float) -> None:
        """The first token has come, or never will. Does nothing for a request that is not in its prefill."""
        reservation = self._prefilling.get(request_id)
        if reservation is None:
            return
        if next(iter(self._prefilling)) == request_id:
            self._anchor_s = now_s
        del self._prefilling[request_id]
        candidate = self.candidate
        candidate.num_prefilling -= 1
        candidate.reserved_prefill_tokens -= reservation.prefill_tokens
        if not self._prefilling:
            candidate.reserved_prefill_tokens = self._foreign_tokens  # also sheds the rounding errors of the sum
        reservation.prefill_tokens = 0.0

    def remove(self, request_id: RequestId, now_s: float) -> Reservation | None:
        """Forget a request. None when it is not here: a release may come twice."""
        reservation = self.reservations.pop(request_id, None)
        if reservation is None:
            return None
        self.end_prefill(request_id, now_s)
        self.candidate.num_context_tokens -= reservation.context_tokens
        self.candidate.num_running -= 1
        if reservation.first_token_s is not None:
            self._learn_decode(now_s - reservation.first_token_s)
        return reservation

    def refresh(self, now_s: float) -> Candidate:
        """Brings the candidate's estimates to `now_s`."""
        candidate = self.candidate
        if not candidate.num_running and not self._foreign_tokens:
            candidate.pending_prefill_tokens = candidate.slot_wait_s = 0.0
            return candidate
        total = candidate.reserved_prefill_tokens
        if total > 0.0:
            bound = self._foreign_tokens
            for oldest in self._prefilling.values():
                bound += oldest.prefill_tokens
                break
            progress = (now_s - self._anchor_s) * candidate.prefill_tokens_per_s
            if progress > 0.0:
                total -= progress if progress < bound else bound
        candidate.pending_prefill_tokens = total if total > 0.0 else 0.0
        excess = candidate.num_running + 1 - candidate.max_num_seqs
        candidate.slot_wait_s = excess * self.mean_decode_s / candidate.max_num_seqs if excess > 0 else 0.0
        return candidate

    def heal(self, pending_prefill_tokens: float, alive: Collection[RequestId], num_foreign: int, now_s: float) -> None:
        """Takes the engine's own count of prefill left. Shortfalls come off the oldest prefill, surplus is others'."""
        known = [r for r in self._prefilling.values() if r.request_id in alive]
        surplus = sum(r.prefill_tokens for r in known) - pending_prefill_tokens
        candidate = self.candidate
        for reservation in known:
            if surplus <= 0.0:
                break
            taken = min(surplus, reservation.prefill_tokens)
            reservation.prefill_tokens -= taken
            surplus -= taken
        self._foreign_tokens = max(0.0, -surplus)
        candidate.reserved_prefill_tokens = self._foreign_tokens + sum(
            r.prefill_tokens for r in self._prefilling.values()
        )
        candidate.num_running += num_foreign - self._foreign_running
        self._foreign_running = num_foreign
        self._anchor_s = now_s
        self.refresh(now_s)

    def check_integrity(self) -> None:
        """Conservation: the sums equal what the reservations say."""
        candidate = self.candidate
        assert candidate.num_running == len(self.reservations) + self._foreign_running
        assert candidate.num_prefilling == len(self._prefilling)
        assert candidate.num_context_tokens == sum(r.context_tokens for r in self.reservations.values())
        expected = sum(r.prefill_tokens for r in self._prefilling.values()) + self._foreign_tokens
        assert abs(candidate.reserved_prefill_tokens - expected) < 1e-3

    def _learn_decode(self, duration_s: float) -> None:
        self.mean_decode_s += (duration_s - self.mean_decode_s) * (0.1 if self.mean_decode_s else 1.0)
