"""GenerationService.Generate on a real channel: what is streamed, and what stops the engine."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_rig import EOS, ScriptedBackend, ask, collect, failure, front_door, until

from cluster.grpc_server import GrpcServerConfig
from cluster.prompts.policy import Share
from cluster.proto.watchword.v1 import generation_pb2 as pb
from cluster.proto.watchword.v1 import generation_pb2_grpc

# gRPC keeps one poller for the process, which complains about loops that are closed under it.
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_streams_text_and_ends_with_the_usage() -> None:
    async with front_door(ScriptedBackend(answer="watchword")) as rig:
        call = rig.stub.Generate(ask("hello"))
        text, responses = await collect(call)
        assert text == "watchword"
        assert responses[0].deltas[0].token_ids == [ord("w")]
        assert all(not response.HasField("usage") for response in responses[:-1])
        usage = responses[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 9, 16)
        assert responses[-2].deltas[0].finish_reason == pb.FINISH_REASON_STOP
        assert dict(await call.initial_metadata())["x-request-id"] == rig.backend.requests[0].request_id


async def test_the_first_response_tells_the_seed() -> None:
    async with front_door() as rig:
        _, responses = await collect(rig.stub.Generate(ask(seed=-7)))
        assert responses[0].seed == -7
        assert not any(response.HasField("seed") for response in responses[1:])
        _, drawn = await collect(rig.stub.Generate(ask()))
        assert drawn[0].seed == rig.backend.requests[1].sampling.seed


async def test_an_unset_temperature_is_not_zero() -> None:
    async with front_door() as rig:
        await collect(rig.stub.Generate(ask()))
        await collect(rig.stub.Generate(ask(temperature=0.0)))
        unset, zero = (request.sampling for request in rig.backend.requests)
        assert (unset.temperature, unset.is_greedy) == (1.0, False)
        assert (zero.temperature, zero.is_greedy) == (0.0, True)


async def test_every_sampling_field_arrives() -> None:
    given = {
        "max_tokens": 50,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "n": 2,
        "seed": 2**62,
        "stop": ["xyz"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logprobs": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {65: -100.0},
    }
    async with front_door() as rig:
        await collect(rig.stub.Generate(ask(**given)))
        sampling = rig.backend.requests[0].sampling
        for name, value in given.items():
            if name == "logit_bias":
                assert sampling.logit_bias == ((65, -100.0),)
            else:
                assert getattr(sampling, name) == (tuple(value) if isinstance(value, list) else value), name
        assert set(given) == {f.name for f in pb.SamplingParams.DESCRIPTOR.fields}, "a field has no test"


async def test_logprobs_and_several_choices() -> None:
    async with front_door(ScriptedBackend(answer="ab")) as rig:
        _, responses = await collect(rig.stub.Generate(ask(logprobs=2, n=2)))
        deltas = [delta for response in responses for delta in response.deltas]
        assert {delta.index for delta in deltas} == {0, 1}
        first = next(delta for delta in deltas if delta.logprobs).logprobs[0]
        assert (first.chosen.token_id, first.chosen.text, first.chosen.raw) == (97, "a", b"a")
        assert first.chosen.logprob == -0.5
        assert [top.token_id for top in first.top] == [97, EOS]


async def test_a_stop_string_ends_the_text_and_the_engine() -> None:
    async with front_door(ScriptedBackend(answer="abcd", is_endless=True, step_s=0.001)) as rig:
        text, responses = await collect(rig.stub.Generate(ask(stop=["cd"])))
        assert text == "ab"
        assert responses[-2].deltas[0].stop_string == "cd"
        await until(lambda: rig.backend.num_open == 0)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (pb.Prompt(text="hé"), tuple("hé".encode())),
        (pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2, 3])), (1, 2, 3)),
        (pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])), tuple(b"user: hi\n")),
    ],
)
async def test_prompts_of_each_kind(prompt: pb.Prompt, expected: tuple[int, ...]) -> None:
    async with front_door() as rig:
        await collect(rig.stub.Generate(pb.GenerateRequest(model="bytes", prompt=prompt)))
        assert rig.backend.requests[0].prompt_token_ids == expected


async def test_special_tokens_of_a_text_can_be_left_out() -> None:
    async with front_door() as rig:
        for prompt in (pb.Prompt(text="a"), pb.Prompt(text="a", add_special_tokens=False)):
            await rig.stub.Tokenize(pb.TokenizeRequest(model="bytes", prompt=prompt))
        assert rig.prompts.special_tokens == [True, False]


async def test_a_request_says_how_far_its_blocks_may_be_shared() -> None:
    async with front_door() as rig:
        for share in (None, "none", "user", "template", "variables"):
            await collect(rig.stub.Generate(pb.GenerateRequest(model="bytes", prompt=pb.Prompt(text="a"), share=share)))
        assert rig.prompts.shares == [None, *Share]


async def test_a_prompt_template_is_named_with_its_variables() -> None:
    ref = pb.PromptRef(id="support", version="3")
    ref.variables.update({"name": "Ada", "age": 36, "height": 1.5, "tags": ["a", None, True], "more": {"deep": 1}})
    chat = pb.Chat(prompt=ref, messages=[pb.ChatMessage(role="user", content="hi")])
    async with front_door() as rig:
        await collect(rig.stub.Generate(pb.GenerateRequest(model="bytes", prompt=pb.Prompt(chat=chat))))
        (given,) = rig.prompts.prompt_refs
        assert given is not None
        assert (given.id, given.version) == ("support", "3")
        assert given.variables == {
            "name": "Ada",
            "age": 36,
            "height": 1.5,
            "tags": ["a", None, True],
            "more": {"deep": 1},
        }
        assert isinstance(given.variables["age"], int)


async def test_cancelling_stops_the_engine() -> None:
    async with front_door(ScriptedBackend(is_endless=True, step_s=0.002)) as rig:
        call = rig.stub.Generate(ask())
        async for _ in call:
            break
        assert rig.backend.num_open == 1
        call.cancel()
        await until(lambda: rig.backend.num_open == 0)
        num_steps = rig.backend.num_steps
        await asyncio.sleep(0.05)
        assert rig.backend.num_steps == num_steps


async def test_a_closed_channel_stops_the_engine() -> None:
    async with front_door(ScriptedBackend(is_endless=True, step_s=0.002)) as rig:
        call = rig.stub.Generate(ask())
        async for _ in call:
            break
        await rig.channel.close()
        await until(lambda: rig.backend.num_open == 0)


async def test_cancelling_while_the_caller_reads_nothing_stops_the_engine() -> None:
    """The server then waits inside a write, held back by flow control, and not for the engine."""
    narrow = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
    async with (
        front_door(ScriptedBackend(is_endless=True, tokens_per_step=1000)) as rig,
        grpc.aio.insecure_channel(rig.address, options=narrow) as channel,
    ):
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(ask())
        await until(lambda: rig.backend.num_open == 1)
        last, stalled = -1, 0
        while stalled < 5:
            await asyncio.sleep(0.05)
            stalled = stalled + 1 if rig.backend.num_steps == last else 0
            last = rig.backend.num_steps
        assert rig.backend.num_open == 1
        call.cancel()
        await until(lambda: rig.backend.num_open == 0)


async def test_the_callers_deadline_stops_the_engine() -> None:
    async with front_door(ScriptedBackend(is_endless=True, step_s=0.005)) as rig:
        started = time.time()
        for timeout_s in (0.5, 5.0, 50.0):  # a slow machine may need longer than the first until the request is there
            error = await failure(rig.stub.Generate(ask(), timeout=timeout_s))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: rig.backend.num_open == 0)
            if rig.backend.requests:
                break
        deadline = rig.backend.requests[0].deadline_unix_s
        assert deadline is not None
        assert started < deadline < time.time() + timeout_s + 1


async def test_without_a_deadline_the_servers_own_limit_holds() -> None:
    config = GrpcServerConfig(request_timeout_s=0.2)
    async with front_door(ScriptedBackend(is_endless=True, step_s=0.005), config=config) as rig:
        error = await failure(rig.stub.Generate(ask()))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert error.details() == "the request ran past its deadline"
        await until(lambda: rig.backend.num_open == 0)


async def test_eight_streams_on_one_channel_stay_apart() -> None:
    class Echo(ScriptedBackend):
        async def generate(self, request, **kwargs):  # type: ignore[no-untyped-def]
            own = ScriptedBackend(answer=bytes(request.prompt_token_ids).decode(), step_s=0.001)
            async for output in own.generate(request, **kwargs):
                yield output

    async with front_door(Echo()) as rig:
        words = [f"marker-{index}-{'x' * index}" for index in range(8)]
        answers = await asyncio.gather(*(collect(rig.stub.Generate(ask(word))) for word in words))
        assert [text for text, _ in answers] == words


async def test_tokenize_and_get_model() -> None:
    async with front_door() as rig:
        reply = await rig.stub.Tokenize(pb.TokenizeRequest(model="bytes", prompt=pb.Prompt(text="abc")))
        assert (list(reply.token_ids), reply.max_model_len) == ([97, 98, 99], 512)
        model = await rig.stub.GetModel(pb.GetModelRequest(model="bytes"))
        assert (model.name, model.max_model_len, model.vocab_size) == ("bytes", 512, 257)
        assert list(model.eos_token_ids) == [EOS]
