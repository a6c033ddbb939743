"""What a caller sees of workers that die, refuse or go, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import pytest
from dispatch_rig import dispatch_rig, eventually, expected, make_request

from cluster.api.errors import DeadlineExceededError, InternalError, UnavailableError, WorkerLostError
from cluster.api.output import ChoiceDelta, FinishReason, RequestOutput
from cluster.mailbox import MAX_PENDING, Mailbox


async def test_an_undisturbed_request_is_told_whole_and_gives_its_place_back() -> None:
    async with dispatch_rig() as rig:
        request = make_request(n=2)
        tokens, outputs = await rig.collect(request)
        assert tokens == expected(request)
        assert [output.num_cached_tokens for output in outputs if output.num_cached_tokens is not None] == [16]
        assert rig.router.first_tokens == ["w0"]
        assert not rig.router.held


async def test_a_stream_goes_on_where_its_worker_died() -> None:
    """Three choices, of which one had ended: no token twice, none missing, the cache told once, ends told once."""
    async with dispatch_rig() as rig:
        request = make_request(n=3, max_tokens=20)
        rig.workers[0].engine.stop_after = 13  # choice 2 ends at 10
        tokens: list[list[int]] = [[], [], []]
        ends: list[int] = []
        cached = []
        async with aclosing(rig.dispatcher.generate(request)) as stream:
            async for output in stream:
                cached += [output.num_cached_tokens] if output.num_cached_tokens is not None else []
                for delta in output.deltas:
                    tokens[delta.index].extend(delta.token_ids)
                    ends += [delta.index] if delta.finish_reason else []
                if len(tokens[0]) == 13 and not rig.router.failed:
                    assert rig.router.held == {request.request_id: "w0"}
                    await rig.workers[0].kill()
        assert tokens == expected(request)
        assert sorted(ends) == [0, 1, 2]
        assert cached == [16]
        (resumed,) = rig.workers[1].engine.submitted
        assert [len(emitted) for emitted in resumed.emitted] == [13, 13, 10]
        assert rig.router.failed == ["w0"]
        assert rig.router.queries[-1].excluded == ("w0",)
        assert not rig.router.held


async def test_no_equal_worker_is_one_typed_error() -> None:
    async with dispatch_rig() as rig:
        rig.workers[1].numerics = "other"
        rig.workers[0].engine.stop_after = 5
        request = make_request()
        asked = asyncio.create_task(rig.collect(request))
        await eventually(lambda: bool(rig.router.first_tokens))
        await asyncio.sleep(0.1)
        await rig.workers[0].kill()
        with pytest.raises(WorkerLostError):
            await asked
        assert not rig.router.held


async def test_before_the_first_token_any_worker_will_do_and_its_numerics_count_from_then_on() -> None:
    async with dispatch_rig(3) as rig:
        rig.workers[1].numerics = rig.workers[2].numerics = "other"
        rig.workers[1].engine.stop_after = 4
        await rig.workers[0].kill()
        request = make_request()
        tokens = []
        async for output in rig.dispatcher.generate(request):
            tokens += [token for delta in output.deltas for token in delta.token_ids]
            if len(tokens) == 4:
                await rig.workers[1].kill()
        assert [tokens] == expected(request)
        assert [query.numerics for query in rig.router.queries] == [None, None, "other"]


@pytest.mark.parametrize("refusal", [UnavailableError("shutting down"), InternalError("the engine failed")])
async def test_a_worker_that_takes_nothing_more_costs_no_answer(refusal: Exception) -> None:
    async with dispatch_rig() as rig:
        rig.workers[0].engine.refusal = refusal  # type: ignore[assignment]
        request = make_request()
        tokens, _ = await rig.collect(request)
        assert tokens == expected(request)
        assert not rig.router.held


async def test_a_caller_that_leaves_aborts_its_own_request_only() -> None:
    """Also while its submission is being written: the stream to the worker is everybody's."""
    async with dispatch_rig(1) as rig:
        neighbours = [make_request((9, number), max_tokens=60) for number in range(8)]
        others = [asyncio.create_task(rig.collect(request)) for request in neighbours]
        for number in range(100):
            leaver = asyncio.create_task(rig.collect(make_request((5, number), max_tokens=500)))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            leaver.cancel()
        assert [(await task)[0] for task in others] == [expected(request) for request in neighbours]
        assert len(rig.clients) == 1
        await eventually(lambda: rig.workers[0].engine.num_running == 0 and not rig.router.held)
        assert not rig.router.failed


async def test_a_slow_reader_gives_its_place_back_when_the_worker_is_done() -> None:
    async with dispatch_rig(1, pause_s=0.0) as rig:
        rig.workers[0].engine.stop_after = 1
        request = make_request(max_tokens=300)
        async with aclosing(rig.dispatcher.generate(request)) as stream:
            first = await anext(stream)
            assert rig.router.held
            rig.workers[0].engine.stop_after = None
            await eventually(lambda: not rig.router.held)
            rest = [output async for output in stream]
        assert len(rest) < 10  # what had gathered came as one
        tokens = [token for output in [first, *rest] for delta in output.deltas for token in delta.token_ids]
        assert [tokens] == expected(request)


async def test_a_deadline_ends_a_request_whose_worker_is_silent() -> None:
    async with dispatch_rig(1) as rig:
        rig.workers[0].engine.is_paused = True
        request = replace(make_request(), deadline_unix_s=time.time() + 0.3)
        with pytest.raises(DeadlineExceededError):
            await rig.collect(request)
        engine = rig.workers[0].engine
        await eventually(lambda: len(engine.submitted) == 1 and engine.num_running == 0)
        assert not rig.router.held


async def test_a_gateway_that_goes_leaves_nothing_on_its_workers() -> None:
    async with dispatch_rig(1) as rig:
        rig.workers[0].engine.is_paused = True
        tasks = [asyncio.create_task(rig.collect(make_request((number,)))) for number in range(5)]
        await eventually(lambda: rig.workers[0].engine.num_running == 5)
        await rig.clients[0].close()  # what the kernel does for a killed process
        await eventually(lambda: rig.workers[0].engine.num_running == 0 and rig.workers[0].channel.num_requests == 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_lost_connections_are_dropped() -> None:
    async with dispatch_rig(2) as rig:
        await rig.collect(make_request())
        await rig.workers[0].kill()
        await rig.collect(make_request())
        *lost, last = rig.clients  # the first one twice when the loss was known before it was asked for again
        assert lost
        assert all(client.is_lost for client in lost)
        assert not last.is_lost
        assert len(rig.pool._clients) == 1


async def test_a_mailbox_merges_and_keeps_order() -> None:
    box = Mailbox()
    for position in range(3 * MAX_PENDING):
        deltas = tuple(ChoiceDelta(choice, (position,)) for choice in (0, 1))
        box.put(RequestOutput("r", deltas, num_cached_tokens=32 if position == 0 else None))  # type: ignore[arg-type]
    box.put(RequestOutput("r", (ChoiceDelta(1, (7,), finish_reason=FinishReason.STOP, stop_token_id=7),)))  # type: ignore[arg-type]
    box.close()
    merged = await box.take()
    assert merged is not None
    assert merged.num_cached_tokens == 32
    zero, one = merged.deltas
    assert zero.token_ids == tuple(range(3 * MAX_PENDING))
    assert one.token_ids == (*range(3 * MAX_PENDING), 7)
    assert (one.finish_reason, one.stop_token_id) == (FinishReason.STOP, 7)
    assert await box.take() is None
