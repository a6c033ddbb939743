"""The live workers: who may take work right now. Membership is heartbeats and epochs, never a guess."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.api.ids import WorkerId
from cluster.api.routing import RouteQuery
from cluster.api.worker_state import WorkerInfo, WorkerSnapshot
from router.circuit import Circuit, FailureKind
from router.config import RouterConfig
from router.policy import Candidate
from router.worker_load import WorkerLoad


@dataclass(slots=True)
class WorkerRecord:
    """One life of one worker. `load` is of this epoch alone."""

    info: WorkerInfo
    load: WorkerLoad
    circuit: Circuit
    last_seen_s: float
    is_draining: bool = False
    is_healthy: bool = True
    num_free_blocks: int = 0
    snapshot: WorkerSnapshot | None = None


class Registry:
    """Workers by id. A new epoch replaces the old one whole; reports of another epoch than the current are refused.
    Within an epoch only what is loaded at run time may change: adapters."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._records: dict[WorkerId, WorkerRecord] = {}

    def __len__(self) -> int:
        return len(self._records)

    def get(self, worker_id: WorkerId) -> WorkerRecord | None:
        return self._records.get(worker_id)

    def records(self) -> list[WorkerRecord]:
        return list(self._records.values())

    def register(self, info: WorkerInfo, now_s: float) -> WorkerRecord | None:
        """Returns the record of the epoch that this one replaces, if any. The same epoch again is a heartbeat."""
        current = self._records.get(info.worker_id)
        if current is not None and current.info.epoch == info.epoch:
            current.last_seen_s = now_s
            if info.adapters != current.info.adapters:
                current.info = replace(current.info, adapters=info.adapters)
            return None
        candidate = Candidate(
            worker_id=info.worker_id,
            max_num_seqs=info.max_num_seqs,
            num_blocks=info.num_blocks,
            prefill_tokens_per_s=self._known_rate(),
        )
        self._records[info.worker_id] = WorkerRecord(
            info,
            WorkerLoad(candidate, info.epoch),
            Circuit(self._config.circuit),
            now_s,
            is_draining=not info.is_warm,
            num_free_blocks=info.num_blocks,
        )
        return current

    def report(self, snapshot: WorkerSnapshot, now_s: float) -> WorkerRecord | None:
        """Takes a heartbeat. None when the worker or its epoch is unknown: it should register (again)."""
        record = self._records.get(snapshot.worker_id)
        if record is None or record.info.epoch != snapshot.epoch:
            return None
        record.last_seen_s = now_s
        record.snapshot = snapshot
        record.is_draining = snapshot.is_draining
        record.is_healthy = snapshot.is_healthy
        record.num_free_blocks = snapshot.num_free_blocks
        if snapshot.max_num_seqs not in (0, record.info.max_num_seqs):
            record.info = replace(record.info, max_num_seqs=snapshot.max_num_seqs)
            record.load.candidate.max_num_seqs = snapshot.max_num_seqs
        candidate = record.load.candidate
        if snapshot.prefill_tokens_per_s > 0:
            candidate.prefill_tokens_per_s = snapshot.prefill_tokens_per_s
        if snapshot.decode_step_s > 0:
            candidate.decode_step_s = snapshot.decode_step_s
        return record

    def record_failure(self, worker_id: WorkerId, epoch: str, kind: FailureKind, now_s: float) -> WorkerRecord | None:
        """None when the failure is of an epoch that is over."""
        record = self._records.get(worker_id)
        if record is None or record.info.epoch != epoch:
            return None
        record.circuit.record_failure(kind, now_s)
        return record

    def remove(self, worker_id: WorkerId) -> WorkerRecord | None:
        return self._records.pop(worker_id, None)

    def remove_silent(self, now_s: float) -> list[WorkerRecord]:
        """Drops workers whose heartbeat is older than ten times its time to live; they must register again."""
        limit = 10 * self._config.heartbeat_ttl_s
        silent = [record for record in self._records.values() if now_s - record.last_seen_s > limit]
        for record in silent:
            del self._records[record.info.worker_id]
        return silent

    def is_heard(self, record: WorkerRecord, now_s: float) -> bool:
        return now_s - record.last_seen_s <= self._config.heartbeat_ttl_s

    def is_live(self, record: WorkerRecord, now_s: float) -> bool:
        return self.is_heard(record, now_s) and not record.is_draining and record.is_healthy

    def eligible(self, query: RouteQuery, now_s: float) -> list[WorkerRecord]:
        """Live workers that can serve `query`, whether or not they have room or their circuit is closed."""
        model, tokens, numerics, excluded = query.model, query.num_prompt_tokens, query.numerics, query.excluded
        oldest_s = now_s - self._config.heartbeat_ttl_s
        eligible = []
        for record in self._records.values():
            info = record.info
            # `is_live`, written out: this loop runs for every worker at every decision.
            if record.last_seen_s < oldest_s or record.is_draining or not record.is_healthy:
                continue
            if info.model != model or tokens > info.max_model_len or info.worker_id in excluded:
                continue
            if numerics is None or info.numerics == numerics:
                eligible.append(record)
        return eligible

    def _known_rate(self) -> float:
        """A newcomer is taken to be as fast as its peers until it has measured itself."""
        rates = [record.load.candidate.prefill_tokens_per_s for record in self._records.values()]
        return sum(rates) / len(rates) if rates else self._config.default_prefill_tokens_per_s
