"""One running request: text of every choice, its end, its cost, and that no two requests ever mix."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from front_door import EOS, MODEL, FakeBackend, build_core
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.api.errors import DeadlineExceededError, InternalError, RequestAbortedError, UnavailableError
from cluster.api.ids import new_request_id
from cluster.api.output import ChoiceDelta, FinishReason, RequestOutput
from cluster.api.request import Request
from cluster.auth.authenticator import ANONYMOUS
from cluster.backend import Placement
from cluster.metrics import GatewayMetrics
from cluster.serving.generate_input import CallerFields, GenerateInput, SamplingInput, TextInput, TokensInput
from cluster.serving.generation import Generation
from cluster.serving.text_delta import TextDelta


def text_input(text: str, *, user: str | None = None, **sampling: Any) -> GenerateInput:
    return GenerateInput(MODEL, TextInput(text), SamplingInput(**sampling), CallerFields(user=user))


async def start(backend: Any, given: GenerateInput, **options: Any) -> Generation:
    core = build_core(backend, metrics=options.pop("metrics", None))
    return await core.start(ANONYMOUS, given, new_request_id(), **options)


async def run(backend: Any, given: GenerateInput) -> list[TextDelta]:
    return [delta async for delta in await start(backend, given)]


class ScriptedBackend:
    """Yields what it is told, whatever that is."""

    def __init__(self, *outputs: Any) -> None:
        self._outputs = outputs

    async def is_ready(self) -> bool:
        return True

    async def generate(
        self, request: Request, *, affinity_key: str | None = None, placement: Placement | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        for make in self._outputs:
            yield make(request)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(alphabet="aé你🦊", min_size=1, max_size=20), min_size=2, max_size=6), st.integers(0, 1000))
def test_concurrent_users_get_exactly_their_own_text(texts: list[str], seed: int) -> None:
    """Pieces end inside characters, and the requests take turns at every await."""

    async def all_at_once() -> list[str]:
        backend = FakeBackend(max_piece=3, seed=seed)
        core = build_core(backend)
        inputs = [text_input(text, user=f"user-{index}") for index, text in enumerate(texts)]
        generations = [await core.start(ANONYMOUS, given, new_request_id()) for given in inputs]

        async def read(generation: Generation) -> str:
            return "".join([delta.text async for delta in generation])

        return await asyncio.gather(*map(read, generations))

    assert asyncio.run(all_at_once()) == texts


@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_a_prompt_that_ends_inside_a_character_is_never_emitted(cut: int) -> None:
    fox = "🦊".encode()
    backend = FakeBackend(answer=lambda request, choice: fox[cut:] + b" hi")
    given = GenerateInput(MODEL, TokensInput((*b"secret ", *fox[:cut])))
    text = "".join(delta.text for delta in await run(backend, given))
    assert text.endswith(" hi")
    assert "secret" not in text
    assert "🦊" not in text


async def test_logprobs_are_held_back_with_their_text() -> None:
    backend = FakeBackend(max_piece=1, answer=lambda request, choice: "aé--STOP".encode())
    deltas = await run(backend, text_input("x", stop=("--STOP",), logprobs=1))
    shown = ""
    for delta in deltas:
        assert delta.logprobs is not None
        shown += delta.text
        assert all(logprob.text_offset < len(shown) for logprob in delta.logprobs)
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs or ()]
    assert [logprob.chosen.raw for logprob in logprobs] == [b"a", b"\xc3", b"\xa9"]
    assert [logprob.text_offset for logprob in logprobs] == [0, 1, 1]
    assert shown == "aé"


async def test_every_token_has_a_logprob_when_nothing_is_cut() -> None:
    deltas = await run(FakeBackend(), text_input("aé--STO", stop=("--STOP",), logprobs=0))
    assert sum(len(delta.logprobs or ()) for delta in deltas) == len("aé--STO".encode())
    assert "".join(delta.text for delta in deltas) == "aé--STO"


async def test_choices_end_on_their_own_and_the_engine_runs_until_the_last() -> None:
    backend = FakeBackend(answer=lambda request, choice: b"STOP and more" if choice == 0 else b"a long answer, whole")
    generation = await start(backend, text_input("x", stop=("STOP",), n=2))
    texts, ends = ["", ""], {}
    async for delta in generation:
        texts[delta.index] += delta.text
        if delta.finish_reason is not None:
            ends[delta.index] = delta.stop_reason
    assert texts == ["", "a long answer, whole"]
    assert ends == {0: "STOP", 1: EOS}
    assert backend.num_aborted == 0
    assert generation.usage.completion_tokens == len("STOP") + len("a long answer, whole") + 1


async def test_closing_early_aborts_and_is_idempotent() -> None:
    backend = FakeBackend(max_piece=1)
    generation = await start(backend, text_input("hello"))
    assert (await anext(generation)).text
    await generation.aclose()
    await generation.aclose()
    assert (backend.num_aborted, backend.num_running) == (1, 0)
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_cancelling_the_reader_aborts() -> None:
    backend = FakeBackend(max_piece=1, hold=asyncio.Event())
    generation = await start(backend, text_input("hello"))

    async def read() -> None:
        async for _ in generation:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (backend.num_aborted, backend.num_running) == (1, 0)


async def test_a_deadline_is_kept_even_if_the_engine_is_silent() -> None:
    backend = FakeBackend(max_piece=1, hold=asyncio.Event())
    generation = await start(backend, text_input("hello"), deadline_unix_s=time.time() + 0.05)
    with pytest.raises(DeadlineExceededError):
        _ = [delta async for delta in generation]
    assert backend.num_aborted == 1
    assert backend.requests[0].deadline_unix_s is not None


async def test_a_stream_that_just_ends_is_an_error() -> None:
    half = ScriptedBackend(lambda request: RequestOutput(request.request_id, (ChoiceDelta(0, (97,)),)))
    with pytest.raises(InternalError):
        await run(half, text_input("x"))
    early = ScriptedBackend(lambda request: RequestOutput(request.request_id, (ChoiceDelta(0, (97,)),), finished=True))
    with pytest.raises(InternalError):
        await run(early, text_input("x"))


async def test_an_error_in_an_output_is_raised() -> None:
    backend = ScriptedBackend(lambda request: RequestOutput(request.request_id, error=UnavailableError("gone")))
    with pytest.raises(UnavailableError):
        await run(backend, text_input("x"))


async def test_an_engines_abort_is_an_error_and_not_an_answer() -> None:
    aborted = ChoiceDelta(0, (), finish_reason=FinishReason.ABORT)
    backend = ScriptedBackend(lambda request: RequestOutput(request.request_id, (aborted,), finished=True))
    with pytest.raises(RequestAbortedError):
        await run(backend, text_input("x"))


async def test_an_output_of_another_request_is_never_taken() -> None:
    foreign = ScriptedBackend(lambda request: RequestOutput(new_request_id(), (ChoiceDelta(0, (97,)),)))
    with pytest.raises(AssertionError):
        await run(foreign, text_input("x"))


async def test_a_generation_that_nobody_reads_leaves_no_count_behind() -> None:
    metrics = GatewayMetrics()
    await (await start(FakeBackend(), text_input("x"), metrics=metrics)).aclose()
    assert b"watchword_num_requests{" not in metrics.render()
    _ = [delta async for delta in await start(FakeBackend(), text_input("x"), metrics=metrics)]
    assert b'watchword_num_requests{model_name="tiny"} 0.0' in metrics.render()
    assert b'watchword_requests_total{model_name="tiny",outcome="stop"} 1.0' in metrics.render()
