"""Faults that give a row another row's sampling settings."""

from __future__ import annotations

from dataclasses import replace

from cluster.api.ids import RequestId
from cluster.experiment.component import Component
from cluster.experiment.faults.fault import Fault
from cluster.experiment.targets.stack import StackParts
from cluster.serving.core import PreparedRequest, ServingCore
from cluster.serving.generation import Generation
from workers.build import EngineParts
from workers.scheduler import Schedule
from workers.sequence import Sequence
from workers.step import SampleInput, StepInput
from workers.step_builder import StepBuilder
from workers.stop_check import StopCheck


class ParamsByOldRow(StepBuilder):
    """Sampling parameters stay at the row where a sequence was in the step before, so compaction mixes them up."""

    def __init__(self) -> None:
        self._params_of_row: list[SampleInput] = []

    def build(self, step_id: int, schedule: Schedule) -> StepInput:
        step = super().build(step_id, schedule)
        old, self._params_of_row = self._params_of_row, [row.samples[0] for row in step.rows if row.samples]
        if len(old) > len(self._params_of_row):  # something left: the rows have moved up
            sampling = [row for row in step.rows if row.samples]
            for row, stale in zip(sampling, old, strict=False):
                row.samples = tuple(replace(sample, params=stale.params) for sample in row.samples)
        return step


class SeedOfFirstRow(StepBuilder):
    """All rows of a step draw with the first row's seed."""

    def build(self, step_id: int, schedule: Schedule) -> StepInput:
        step = super().build(step_id, schedule)
        seeds = [row.samples[0].params.seed for row in step.rows if row.samples]
        for row in step.rows:
            row.samples = tuple(replace(sample, params=replace(sample.params, seed=seeds[0])) for sample in row.samples)
        return step


class LastMaxTokens(StopCheck):
    """max_tokens of the request that came last ends all of them."""

    def __init__(self, eos_token_ids: frozenset[int], max_model_len: int) -> None:
        super().__init__(eos_token_ids, max_model_len)
        self._latest_arrival = 0
        self._max_tokens = 0

    def reason(self, seq: Sequence):  # type: ignore[no-untyped-def]
        if seq.arrival >= self._latest_arrival:
            self._latest_arrival, self._max_tokens = seq.arrival, seq.request.sampling.max_tokens
        if len(seq.output_token_ids) >= self._max_tokens:
            from cluster.api.output import FinishReason

            return FinishReason.LENGTH
        return super().reason(seq)


class StopStringsOfLastRequest(ServingCore):
    """Stop strings are kept in one place, where the next request's replace them."""

    _latest: tuple[str, ...] = ()

    def launch(
        self, prepared: PreparedRequest, request_id: RequestId, deadline_unix_s: float | None = None
    ) -> Generation:
        own = prepared.sampling.stop
        mixed = replace(prepared, sampling=replace(prepared.sampling, stop=self._latest))
        self._latest = own
        return super().launch(mixed, request_id, deadline_unix_s)


FAULTS = (
    Fault(
        "params_of_wrong_row",
        Component.SAMPLER,
        "sampling parameters of the wrong row after compaction",
        lambda: StackParts(engine=EngineParts(step_builder=ParamsByOldRow)),
    ),
    Fault(
        "seed_of_first_row",
        Component.SAMPLER,
        "all rows draw with one seed",
        lambda: StackParts(engine=EngineParts(step_builder=SeedOfFirstRow)),
    ),
    Fault(
        "max_tokens_of_last",
        Component.SAMPLER,
        "the last request's max_tokens ends all",
        lambda: StackParts(engine=EngineParts(stop_check=LastMaxTokens)),
    ),
    Fault(
        "stop_strings_of_last",
        Component.SAMPLER,
        "stop strings of the request before",
        lambda: StackParts(core=StopStringsOfLastRequest),
    ),
)
