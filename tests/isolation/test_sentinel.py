"""The sentinel on a live worker: silent on a clean one, loud on a faulty one, and what it finds has consequences."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest
from live_rig import CONFIG, Live, counters, live

from cluster.api.channel import ControlCall, PurgeUser, Quarantine, SetMaxNumSeqs, Trace
from cluster.api.errors import InternalError, InvalidRequestError, UnavailableError, WatchwordError
from cluster.api.evidence import TracedEvent
from cluster.api.ids import new_request_id
from cluster.api.output import ChoiceDelta, FinishReason, RequestOutput, TokenLogprob
from cluster.api.principal import Role
from cluster.api.request import Request
from cluster.api.worker_state import WorkerInfo
from cluster.auth.authenticator import ANONYMOUS
from cluster.auth.key_store import create_key
from cluster.auth.names import SENTINEL_TENANT
from cluster.dispatch import WorkerPool
from cluster.experiment.faults import blocks, layout
from cluster.experiment.faults.fault import Fault
from cluster.experiment.faults.layout import ChangedBatch
from cluster.experiment.targets.stack import StackParts
from cluster.experiment.targets.weights import LoadedModel
from cluster.sentinel.governor import BatchGovernor, Step
from cluster.sentinel.probe import NUM_REQUESTS, MarkerProbe, Result
from cluster.serving.generate_input import CallerFields, ChatInput, GenerateInput, SamplingInput
from workers.engine import LLMEngine

PATIENCE_S = 120.0  # only a test that fails waits so long
BY_NAME: dict[str, Fault] = {fault.name: fault for fault in (*layout.FAULTS, *blocks.FAULTS)}


def a_probe(engine: LLMEngine) -> int:
    return NUM_REQUESTS


def a_full_batch(engine: LLMEngine) -> int:
    return engine.scheduler.max_num_seqs


async def test_a_clean_worker_gives_clean_probes_and_keeps_nothing_of_them(tiny: LoadedModel) -> None:
    async with live(tiny, company=a_probe) as both:
        before = both.worker.llm_engine.pool.num_free
        for _ in range(3):
            report = await both.sentinel.probe(both.info)
            assert report.result is Result.CLEAN, report
            assert report.num_tokens > 0
        assert both.worker.llm_engine.pool.num_free == before
        assert both.worker.llm_engine.cached_keys() == ()
        assert both.worker.llm_engine.is_healthy
        metrics = both.metrics.render().decode()
        assert 'watchword_contamination_probe_runs_total{result="clean"} 3.0' in metrics
        assert "watchword_contamination_leaks_total 0.0" in metrics
        assert "watchword_requests_total{" not in metrics, "no tenant's figures"


@pytest.mark.parametrize("name", ["mask_of_wrong_row", "table_of_wrong_row", "positions_run_on"])
async def test_a_faulty_worker_is_quarantined_by_its_first_probe(tiny: LoadedModel, name: str) -> None:
    async with live(tiny, parts=BY_NAME[name].make_parts(), company=a_probe) as both:
        await both.sentinel.look()
        assert not both.worker.llm_engine.is_healthy
        assert not both.worker.llm_engine.pool.cache.is_sharing
        assert counters(both)["quarantined"] == 1
        metrics = both.metrics.render().decode()
        assert "watchword_contamination_leaks_total 1.0" in metrics
        await both.sentinel.look()
        assert 'result="leak"} 1.0' in both.metrics.render().decode(), "it is no longer among those that take work"


class HeldAfterOneStep:
    """A change of batches that changes nothing, but lets no second step end until the door is open."""

    def __init__(self) -> None:
        self.is_holding, self.door = threading.Event(), threading.Event()
        self._num_steps = 0

    def __call__(self, batch: Any, cache: Any) -> Any:
        self._num_steps += 1
        if self._num_steps > 1:
            self.is_holding.set()
            assert self.door.wait(PATIENCE_S)
        return batch


async def test_a_quarantined_worker_fails_what_has_output_and_refuses_the_rest(tiny: LoadedModel) -> None:
    held = HeldAfterOneStep()
    async with live(tiny, parts=StackParts(wrap_model=lambda model: ChangedBatch(model, held))) as both:
        running = asyncio.create_task(read(await start(both)))
        assert await asyncio.to_thread(held.is_holding.wait, PATIENCE_S)  # so the first step has given a token
        quarantine = asyncio.create_task(both.control.call(both.info, Quarantine("a test")))
        async with asyncio.timeout(PATIENCE_S):
            while both.worker.engine._commands.empty():  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.001)
        held.door.set()
        assert await quarantine == 1
        assert await both.control.call(both.info, Quarantine("again")) == 0
        with pytest.raises(InternalError, match="isolation check"):
            await running
        with pytest.raises(UnavailableError):
            await read(await start(both))
        assert both.worker.llm_engine.pool.num_in_use == 0


async def read(answer: AsyncGenerator[Any, None]) -> None:
    async for _ in answer:
        pass


async def start(both: Live) -> AsyncGenerator[Any, None]:
    given = GenerateInput(
        model=both.model.info.name,
        prompt=ChatInput([{"role": "user", "content": "hello"}]),
        sampling=SamplingInput(max_tokens=4, ignore_eos=True),
        caller=CallerFields(user="alice"),
    )
    return aiter(await both.core.start(ANONYMOUS, given, new_request_id()))  # type: ignore[return-value]


# --- the oracles, on answers from a script


class ScriptedStreams:
    """Answers with a marker from a prompt: the request's own, or another's that runs at the same time.

    A probe's requests come in turn as company, whose answers begin when all have asked, and each alone.
    """

    is_lost = False

    def __init__(self, loaded: LoadedModel, *, crosses: bool = False, error: WatchwordError | None = None) -> None:
        self._tokenizer = loaded.prompts.tokenizer.backend
        self._crosses, self._error = crosses, error
        self._markers: list[str] = []
        self._arrival = asyncio.Condition()
        self.max_tokens: list[int] = []

    async def stream(self, request: Request, on_finished: Callable[[], None]) -> AsyncGenerator[RequestOutput, None]:
        self.max_tokens.append(request.sampling.max_tokens)
        if self._error is not None:
            yield RequestOutput(request.request_id, finished=True, error=self._error)
            return
        text = self._tokenizer.decode(list(request.prompt_token_ids))
        own = re.findall(r"passphrase is ([A-Z]+[0-9]+)", text)[-1]
        turn = len(self._markers) // NUM_REQUESTS
        async with self._arrival, asyncio.timeout(PATIENCE_S):
            self._markers.append(own)
            self._arrival.notify_all()
            if turn % 2 == 0:
                await self._arrival.wait_for(lambda: len(self._markers) >= (turn + 1) * NUM_REQUESTS)
        marker = next((each for each in self._markers if each != own), own) if self._crosses else own
        tokens = tuple(self._tokenizer.encode(marker).ids)
        logprobs = tuple(TokenLogprob(token, -0.5, ()) for token in tokens)
        yield RequestOutput(request.request_id, (ChoiceDelta(0, tokens, logprobs, FinishReason.LENGTH),), 0, True)

    async def close(self) -> None: ...


class ScriptedControl:
    """A worker's event log in which the requests share a step from a certain probe on, or never."""

    def __init__(self, *, shares_from: int | None = 1) -> None:
        self._shares_from = shares_from
        self._num_traces = 0
        self.calls: list[ControlCall] = []

    async def call(self, worker: WorkerInfo, call: ControlCall) -> Any:
        self.calls.append(call)
        if isinstance(call, Trace):
            self._num_traces += 1
            shares = self._shares_from is not None and self._num_traces >= self._shares_from
            steps = [7 if shares else number for number in range(len(call.request_ids))]
            return tuple(
                TracedEvent(step, 0.0, "write", number, 1, request_id, None, None)
                for number, (request_id, step) in enumerate(zip(call.request_ids, steps, strict=True))
            )
        return 1


async def run_scripted(
    tiny: LoadedModel, both: Live, streams: ScriptedStreams, control: ScriptedControl, **changes: Any
) -> tuple[Result, str]:
    probe = MarkerProbe(both.model, WorkerPool(lambda address, epoch: streams), control)
    report = await probe.run(replace(both.info, **changes))
    return report.result, report.detail


async def test_a_foreign_marker_is_a_leak_even_where_bits_cannot_be_compared(tiny: LoadedModel) -> None:
    async with live(tiny) as both:
        crossed = await run_scripted(
            tiny, both, ScriptedStreams(tiny, crosses=True), ScriptedControl(), numerics="inexact-1"
        )
        assert crossed == (Result.LEAK, "request 0 holds the marker of another (whole)")
        own = await run_scripted(tiny, both, ScriptedStreams(tiny), ScriptedControl(), numerics="inexact-1")
        assert own[0] is Result.CLEAN


async def test_a_probe_that_could_not_have_leaked_is_void_and_one_without_answer_failed(tiny: LoadedModel) -> None:
    async with live(tiny) as both:
        control = ScriptedControl(shares_from=None)
        assert (await run_scripted(tiny, both, ScriptedStreams(tiny), control))[0] is Result.VOID
        assert sum(isinstance(call, PurgeUser) for call in control.calls) == 9, "three users, three times"
        broken = ScriptedStreams(tiny, error=InternalError("the engine failed"))
        assert await run_scripted(tiny, both, broken, ScriptedControl()) == (Result.FAILED, "the engine failed")


async def test_requests_that_missed_each_other_are_sent_again_with_longer_answers(tiny: LoadedModel) -> None:
    async with live(tiny) as both:
        streams = ScriptedStreams(tiny)
        assert (await run_scripted(tiny, both, streams, ScriptedControl(shares_from=3)))[0] is Result.CLEAN
        together_and_alone = 2 * NUM_REQUESTS
        limit = both.model.info.max_model_len // 2
        expected = [min(16, limit), min(64, limit), min(256, limit)]
        assert streams.max_tokens == [each for each in expected for _ in range(together_and_alone)]
        assert len(set(expected)) > 1


def test_the_sentinels_tenant_is_nobody_elses(tmp_path: Any) -> None:
    with pytest.raises(InvalidRequestError, match="reserved"):
        create_key(tmp_path / "keys.json", SENTINEL_TENANT, roles=frozenset({Role.DELEGATE}))


# --- the batch governor


class LeaksInLargeBatches:
    """A mask fault that needs more than six rows."""

    def __init__(self, fault: Callable[[Any, Any], Any]) -> None:
        self._fault = fault

    def __call__(self, batch: Any, cache: Any) -> Any:
        return self._fault(batch, cache) if len(batch.block_tables) > 6 else batch


def governor(both: Live, limit: int) -> BatchGovernor:
    return BatchGovernor(both.probe, both.control, first=4, limit=limit)


async def test_the_batch_doubles_while_it_is_clean(tiny: LoadedModel) -> None:
    async with live(tiny, replace(CONFIG, max_num_seqs=16), company=a_full_batch) as both:
        both.worker.llm_engine.set_max_num_seqs(4)
        governed = governor(both, limit=16)
        sizes = []
        while not governed.is_settled(both.info):
            step, _ = await governed.advance(both.info)
            sizes.append((step, governed.size_of(both.info), both.worker.llm_engine.scheduler.max_num_seqs))
        assert sizes == [(Step.WIDENED, 8, 8), (Step.WIDENED, 16, 16), (Step.SETTLED, 16, 16)]
        assert both.worker.llm_engine.is_healthy


async def test_a_leak_at_a_larger_batch_brings_the_smaller_one_back_and_quarantine(tiny: LoadedModel) -> None:
    fault = LeaksInLargeBatches(layout._mask_of_wrong_row)
    parts = StackParts(wrap_model=lambda model: ChangedBatch(model, fault))
    async with live(tiny, replace(CONFIG, max_num_seqs=16), parts, company=a_full_batch) as both:
        both.worker.llm_engine.set_max_num_seqs(4)
        both.sentinel._governor = governor(both, limit=16)
        await both.sentinel.look()
        assert both.worker.llm_engine.scheduler.max_num_seqs == 4
        assert not both.worker.llm_engine.is_healthy
        assert 'result="leak"} 1.0' in both.metrics.render().decode()


async def test_a_batch_size_is_refused_beyond_what_was_tested(tiny: LoadedModel) -> None:
    async with live(tiny) as both:
        for size in (0, 9):
            with pytest.raises(UnavailableError):
                await both.control.call(both.info, SetMaxNumSeqs(size))
        assert await both.control.call(both.info, SetMaxNumSeqs(8)) == 8
