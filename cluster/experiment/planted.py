"""Plants faults one by one, looks for each with the oracles, and names its component without knowing which it is."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.experiment.bisect import PREFIX_CACHE, bisect, cleared_by, switches
from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.faults.stages import Stage
from cluster.experiment.finding import Finding, OracleName
from cluster.experiment.locate import Evidence, locate
from cluster.experiment.neighbours import depends_on_neighbours
from cluster.experiment.oracles import ExactnessOracle, Oracle, StructureOracle
from cluster.experiment.plan import Plan
from cluster.experiment.reuse_oracle import ReuseOracle
from cluster.experiment.runner import ExperimentResult, run_experiment
from cluster.experiment.targets.embedded import ALARM_COUNTERS
from cluster.experiment.targets.indexed_group import STALE_HITS
from cluster.experiment.targets.solo import SoloEngine
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.target import Target
from cluster.experiment.targets.weights import LoadedModel
from cluster.experiment.trial import make_target
from workers.config import EngineConfig, IsolationCheck

MakeParts = Callable[[], StackParts]
_BY_SIMPLICITY = (OracleName.MARKER, OracleName.EXACTNESS, OracleName.STRUCTURE, OracleName.COUNTER)


@dataclass(frozen=True, slots=True)
class Case:
    """What was found out about one fault. `requests`: how many it took the named oracle."""

    found_by: OracleName | None
    requests: int
    named: Component | None
    stage: str | None
    oracles: frozenset[OracleName]


class Investigator:
    """Finds and locates one unknown fault. Sees outputs, event log and counters; never a fault's name or code."""

    def __init__(self, loaded: LoadedModel, stages: Sequence[Stage]) -> None:
        self._loaded = loaded
        self._stages = tuple(stages)
        # One reference for all: settings do not change the bits, and its answers are remembered.
        self._solo = SoloEngine(loaded, stages[0].condition.engine, with_template=True)
        self._exactness = ExactnessOracle(self._solo)

    async def investigate(self, make_parts: MakeParts) -> Case:
        for stage in self._stages:
            unchecked = await self._run(stage, stage.plan, IsolationCheck.OFF, make_parts)
            checked = await self._run(stage, stage.plan, IsolationCheck.CHECK, make_parts)
            if unchecked.findings or checked.findings:
                return await self._locate(stage, unchecked, checked, make_parts)
        return Case(None, 0, None, None, frozenset())

    async def _locate(
        self, stage: Stage, unchecked: ExperimentResult, checked: ExperimentResult, make_parts: MakeParts
    ) -> Case:
        mode, base = (IsolationCheck.OFF, unchecked) if unchecked.findings else (IsolationCheck.CHECK, checked)
        plan = _up_to_first(stage.plan, base)

        async def run_with(config: EngineConfig) -> ExperimentResult:
            return await self._run(stage, plan, mode, make_parts, config)

        engine = stage.condition.engine
        rate = base.verdict.any_rate.value
        trials = await bisect(engine, switches(stage.num_blocks_roomy), run_with, seen_rate=rate, is_replay_exact=True)
        findings = (*unchecked.findings, *_of_structure(checked))
        cleared = cleared_by(trials)
        depends = await self._depends_on_neighbours(stage, base.findings, cleared, make_parts)
        named = locate(Evidence(findings, cleared, engine.layout, depends))
        oracles = frozenset(finding.oracle for finding in findings)
        found_by = next(oracle for oracle in _BY_SIMPLICITY if oracle in oracles)
        requests = min(_requests_until(result, found_by) for result in (unchecked, checked) if _has(result, found_by))
        return Case(found_by, requests, named, stage.condition.name, oracles)

    async def _depends_on_neighbours(
        self, stage: Stage, findings: Sequence[Finding], cleared: frozenset[str], make_parts: MakeParts
    ) -> bool | None:
        wrong = next((finding for finding in findings if finding.kind == "logits"), None)
        if wrong is None:
            return None
        # Other content hits other prefixes: where the cache is not to blame, it is kept from changing the steps.
        config = replace(
            stage.condition.engine, isolation_check=IsolationCheck.OFF, prefix_caching=PREFIX_CACHE in cleared
        )
        return await depends_on_neighbours(
            lambda: self._target(stage, config, make_parts), stage.plan, wrong, self._solo
        )

    def _target(self, stage: Stage, config: EngineConfig, make_parts: MakeParts) -> Target:
        return make_target(self._loaded, replace(stage.condition, engine=config), make_parts())

    async def _run(
        self,
        stage: Stage,
        plan: Plan,
        check: IsolationCheck,
        make_parts: MakeParts,
        config: EngineConfig | None = None,
    ) -> ExperimentResult:
        config = replace(config or stage.condition.engine, isolation_check=check)
        # Where the check stops a request, its answer must differ from the solo run's: that is no second finding.
        oracles: list[Oracle] = [StructureOracle(ALARM_COUNTERS | {STALE_HITS}), ReuseOracle()]
        if check is IsolationCheck.OFF:
            oracles.append(self._exactness)
        return await run_experiment(
            self._target(stage, config, make_parts),
            plan,
            oracles=oracles,
            requirements=stage.condition.requirements,
            condition=stage.condition.name,
        )


async def investigate_blind(
    investigator: Investigator, faults: Sequence[Fault], rng: random.Random, keep: Callable[[str, Case], None]
) -> None:
    """In shuffled order. The investigator gets the parts alone; `keep` puts the names back afterwards."""
    order = list(faults)
    rng.shuffle(order)
    for fault in order:
        keep(fault.name, await investigator.investigate(fault.make_parts))


def _up_to_first(plan: Plan, result: ExperimentResult) -> Plan:
    first = next(item.index for item in result.rounds if item.is_contaminated)
    return replace(plan, rounds=plan.rounds[: first + 1])


def _of_structure(result: ExperimentResult) -> tuple[Finding, ...]:
    return tuple(finding for finding in result.findings if finding.oracle in (OracleName.STRUCTURE, OracleName.COUNTER))


def _has(result: ExperimentResult, oracle: OracleName) -> bool:
    return any(finding.oracle is oracle for finding in result.findings)


def _requests_until(result: ExperimentResult, oracle: OracleName) -> int:
    count = 0
    for item in result.rounds:
        count += item.num_requests
        if any(finding.oracle is oracle for finding in item.findings):
            break
    return count
