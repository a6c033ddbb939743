"""An engine in this process, behind the same serving core as a server's, on a step clock."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from cluster.api.ids import BlockKey, RequestId
from cluster.experiment.event_file import BlockEvent
from cluster.experiment.observation import Observation, Reuse, RoundObservation, Violation
from cluster.experiment.plan import PlannedRequest, Round
from cluster.experiment.targets.house_rules import warm_up
from cluster.experiment.targets.round_driver import FAILED_ASSERTION, RoundDriver
from cluster.experiment.targets.stack import Stack, StackParts, build_stack
from cluster.experiment.targets.target import ReuseControl, TargetInfo
from cluster.experiment.targets.weights import LoadedModel
from workers.config import EngineConfig
from workers.event_log import BlockRecord

CONTROL_TEXT = "river stone garden window paper table summer bread music lamp " * 4

# Counters that stay at zero on a clean engine: each one is a second line of defence that had to act.
ALARM_COUNTERS = frozenset({"verify_failures", "checksum_failures", "publish_conflicts"})


_MAX_EVENTS = 400_000

# What a broken invariant raises inside a step, whether it is asserted or merely breaks something.
ENGINE_FAILURES = (AssertionError, IndexError, KeyError, ValueError)


class EmbeddedTarget:
    """Implements Target. A failed assertion of the engine is a violation; the next round gets a fresh engine."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        parts: StackParts | None = None,
        *,
        with_template: bool = False,
    ) -> None:
        self.loaded = loaded
        self.config = config
        self._parts = parts
        self._with_template = with_template
        self._stack = build_stack(loaded, config, parts, with_template=with_template)
        self._request_numbers = itertools.count()
        self.names: dict[RequestId, str] = {}  # engine's id -> plan's name
        self.events: deque[BlockEvent] = deque(maxlen=_MAX_EVENTS)  # of all lives, for reports and traces
        self._life = 0
        self._num_seen_records = 0
        self._writers: dict[tuple[int, int, int], str | None] = {}  # of a block in one of its lives

    @property
    def info(self) -> TargetInfo:
        config = self.config
        settings = {
            "batching": config.batching.value,
            "layout": config.layout.value,
            "prefix_caching": "on" if config.prefix_caching else "off",
            "block_size": str(config.block_size),
            "num_blocks": str(config.num_blocks),
            "max_num_seqs": str(config.max_num_seqs),
            "isolation_check": config.isolation_check.value,
        }
        return TargetInfo("embedded", self.loaded.name, sees_steps=True, settings=settings)

    async def run_round(self, planned: Round) -> RoundObservation:
        stack = self._stack
        before = self._counters(stack)
        num_violations = len(stack.engine.violations)
        crash: list[Violation] = []
        driver = RoundDriver(stack.core, stack.backend, self._new_id)
        by_name: Mapping[str, Observation] = {}
        try:
            self._warm_up(stack)
            by_name = await driver.run(planned.requests)
        except ENGINE_FAILURES as error:
            crash = [Violation("assertion", None, stack.engine.step_id, None, f"{type(error).__name__}: {error}")]
            by_name = driver.observe_all()
        events = self._keep_records(stack)
        seen = RoundObservation(
            planned.index,
            by_name,
            shared_step=self._shared_step(planned, stack),
            num_evictions=self._increment(stack, before, "evictions"),
            num_preemptions=self._increment(stack, before, "preemptions"),
            violations=tuple(self._violations(stack, num_violations) + crash + _failed_assertions(by_name)),
            reuses=tuple(self._reuses(events)),
            counters={name: self._increment(stack, before, name) for name in before},
        )
        stack.backend.forget()
        if crash:
            self.restart()
        return seen

    async def reuse_control(self) -> ReuseControl:
        """The engine's own hit counter, after the same prompt twice from one user; 0 when the engine fails."""
        messages = (("user", CONTROL_TEXT),)
        for number in range(2):
            request = PlannedRequest(f"control{number}", "control", "control", "", "en", messages, 2, 0)
            before = self._counters(self._stack)
            try:
                await RoundDriver(self._stack.core, self._stack.backend, self._new_id).run([request])
            except ENGINE_FAILURES:
                return ReuseControl(0, expected=self.config.prefix_caching)
        hits = self._increment(self._stack, before, "hits")
        return ReuseControl(hits * self.config.block_size, expected=self.config.prefix_caching)

    async def answer(self, request: PlannedRequest) -> Observation:
        """One request by itself on this engine, with whatever is cached; keeps no record of it."""
        stack = self._stack
        seen = await RoundDriver(stack.core, stack.backend, self._new_id).run([request])
        stack.backend.forget()
        return seen[request.name]

    async def close(self) -> None: ...

    def restart(self) -> None:
        """A new life: empty pool, new epoch, same weights."""
        self._life += 1
        self._stack = build_stack(self.loaded, self.config, self._parts, with_template=self._with_template)
        self._num_seen_records = 0

    async def prompt_keys(self, request: PlannedRequest) -> tuple[tuple[BlockKey, ...], int]:
        """Keys of the request's full blocks, as a router sees them, and how many of them can ever be hit."""
        stack = self._stack
        prepared = await RoundDriver(stack.core, stack.backend, self._new_id).prepare(request)
        prompt = prepared.prompt
        keys = stack.core.models[0].keyer.prompt_keys(prompt.token_ids, prompt.spans)
        return keys, (len(prompt.token_ids) - 1) // self.config.block_size

    @property
    def stack(self) -> Stack:
        return self._stack

    def _warm_up(self, stack: Stack) -> None:
        """Once in an engine's life, before its first round."""
        if stack.catalog is not None and stack.engine.step_id == 0:
            warm_up(stack.engine, stack.catalog)

    def _new_id(self, name: str) -> RequestId:
        request_id = RequestId(f"{next(self._request_numbers):08d}")
        self.names[request_id] = name
        return request_id

    def _counters(self, stack: Stack) -> dict[str, int]:
        counters = stack.engine.pool.cache.counters
        named = {name: getattr(counters, name) for name in ("hits", "misses", "evictions", *ALARM_COUNTERS)}
        return {**named, "preemptions": stack.engine.scheduler.num_preemptions}

    def _increment(self, stack: Stack, before: Mapping[str, int], name: str) -> int:
        return self._counters(stack)[name] - before[name]

    def _violations(self, stack: Stack, num_known: int) -> list[Violation]:
        return [
            Violation(
                kind=found.kind.value,
                request=None if found.request_id is None else self.names.get(found.request_id),
                step=found.step_id,
                block=found.block_id,
                detail=f"{found.kind.value} at step {found.step_id}, block {found.block_id}",
            )
            for found in stack.engine.violations[num_known:]
        ]

    def _shared_step(self, planned: Round, stack: Stack) -> bool:
        """Every marked request got a token in one step with another marked one, or with any other if it is alone."""
        marked = {request.name for request in planned.marked}
        others = marked if len(marked) > 1 else {request.name for request in planned.requests}
        steps = [{self.names[request_id] for request_id in step} for step in stack.backend.steps]
        return all(any(name in step and len(step & others) > 1 for step in steps) for name in marked)

    def _keep_records(self, stack: Stack) -> list[BlockEvent]:
        """What was recorded since the last call."""
        log = stack.engine.event_log
        fresh = log.num_recorded - self._num_seen_records
        self._num_seen_records = log.num_recorded
        events = [self._event(record) for record in list(log)[-fresh:]] if fresh else []
        self.events.extend(events)
        return events

    def _reuses(self, events: Iterable[BlockEvent]) -> Iterator[Reuse]:
        """Blocks that a request took from another one, its own choices apart."""
        for event in events:
            if event.action == "write":
                self._writers.setdefault(event.place, event.request)
            elif event.action == "reuse" and event.request is not None:
                writer = self._writers.get(event.place)
                if writer != event.request:
                    yield Reuse(event.request, writer, event.scope, event.step, event.block)

    def _event(self, record: BlockRecord) -> BlockEvent:
        name = None if record.request_id is None else self.names.get(record.request_id, "warm-up")
        scope = None if record.scope is None else record.scope.name
        return BlockEvent(
            self._life,
            record.step_id,
            record.time_s,
            record.action.value,
            record.block_id,
            record.generation,
            name,
            scope,
        )


def _failed_assertions(by_name: Mapping[str, Observation]) -> list[Violation]:
    """A consumer's own check that failed, outside the engine."""
    return [
        Violation("assertion", name, None, None, seen.error)
        for name, seen in by_name.items()
        if seen.error is not None and seen.error.startswith(FAILED_ASSERTION)
    ]
