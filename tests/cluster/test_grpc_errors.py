"""What a gRPC caller is told when something goes wrong, and what it is never told."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import pytest
from grpc_rig import MODEL, ForeignError, ScriptedBackend, ask, failure, front_door, until, watchword_errors

from cluster.api.errors import OverloadedError, WatchwordError
from cluster.auth.proxy import IdentityHeaders
from cluster.errors_table import row_of
from cluster.grpc_server import GrpcServerConfig
from cluster.proto.watchword.v1 import generation_pb2 as pb

# gRPC keeps one poller for the process, which complains about loops that are closed under it.
pytestmark = pytest.mark.asyncio(loop_scope="session")


class OfThisTest(logging.Filter):
    """Without what asyncio says of an earlier test's task when the garbage collector finds it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name != "asyncio"


def metadata_of(error: grpc.aio.AioRpcError) -> dict[str, str]:
    return dict(error.trailing_metadata())


@pytest.mark.parametrize("kind", watchword_errors(), ids=lambda kind: kind.__name__)
async def test_each_error_of_ours_has_its_status(kind: type[WatchwordError]) -> None:
    async with front_door(ScriptedBackend(error=kind("what happened", param="prompt"))) as rig:
        error = await failure(rig.stub.Generate(ask()))
        assert error.code().name == row_of(kind).grpc_status
        assert error.details() == "what happened"
        assert metadata_of(error)["watchword-error-code"] == kind.default_code
        assert metadata_of(error)["watchword-error-param"] == "prompt"
        assert rig.backend.num_open == 0


async def test_every_status_of_the_table_is_one_of_grpcs() -> None:
    for kind in watchword_errors():
        assert row_of(kind).grpc_status in grpc.StatusCode.__members__


async def test_an_overload_tells_when_to_come_back() -> None:
    async with front_door(ScriptedBackend(answer="", error=OverloadedError("full", retry_after_s=1.5))) as rig:
        error = await failure(rig.stub.Generate(ask()))
        assert metadata_of(error)["grpc-retry-pushback-ms"] == "1500"


async def test_a_foreign_exception_shows_neither_text_nor_traceback(caplog: pytest.LogCaptureFixture) -> None:
    secret = "the prompt was: my bank account"
    async with front_door(ScriptedBackend(error=ForeignError(secret))) as rig:
        with caplog.at_level(logging.DEBUG), caplog.filtering(OfThisTest()):
            call = rig.stub.Generate(ask())
            error = await failure(call)
        request_id = dict(await call.initial_metadata())["x-request-id"]
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == f"internal error; quote {request_id} when you report it"
    assert secret not in caplog.text
    assert "Traceback" not in caplog.text
    # The log must still be of use: it names the request, the kind of exception and where it was raised.
    assert request_id in caplog.text
    assert "ForeignError" in caplog.text
    assert "grpc_rig.py:" in caplog.text


def with_fields(**fields: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(model="bytes", prompt=ask().prompt, **fields)


BAD_REQUESTS = {
    "no prompt": (pb.GenerateRequest(model="bytes"), "prompt"),
    "empty text": (ask(""), "prompt"),
    "unknown model": (pb.GenerateRequest(model="gpt-9", prompt=pb.Prompt(text="a")), "model"),
    "no model": (pb.GenerateRequest(prompt=pb.Prompt(text="a")), "model"),
    "negative temperature": (ask(temperature=-0.1), "temperature"),
    "temperature NaN": (ask(temperature=float("nan")), "temperature"),
    "temperature infinite": (ask(temperature=float("inf")), "temperature"),
    "top_p zero": (ask(top_p=0.0), "top_p"),
    "max_tokens zero": (ask(max_tokens=0), "max_tokens"),
    "max_tokens beyond the context": (ask(max_tokens=MODEL.max_model_len), "max_tokens"),
    "min_tokens above max_tokens": (ask(max_tokens=2, min_tokens=3), "min_tokens"),
    "n zero": (ask(n=0), "n"),
    "n too large": (ask(n=1_000_000), "n"),
    "empty stop string": (ask(stop=[""]), "stop"),
    "stop token outside the vocabulary": (ask(stop_token_ids=[257]), "stop_token_ids"),
    "too many logprobs": (ask(logprobs=1000), "logprobs"),
    "logit bias outside the vocabulary": (ask(logit_bias={257: 1.0}), "logit_bias"),
    "logit bias NaN": (ask(logit_bias={5: float("nan")}), "logit_bias"),
    "prompt longer than the context": (ask("a" * MODEL.max_model_len), "messages"),
    "token outside the vocabulary": (
        pb.GenerateRequest(model="bytes", prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[257]))),
        "prompt",
    ),
    "contradictory users": (
        pb.GenerateRequest(model="bytes", prompt=ask().prompt, user="a", safety_identifier="b"),
        "user",
    ),
    "empty salt": (pb.GenerateRequest(model="bytes", prompt=ask().prompt, cache_salt=""), "cache_salt"),
    "unknown share": (with_fields(share="public"), "share"),
    "user with a NUL": (pb.GenerateRequest(model="bytes", prompt=ask().prompt, user="a\0b"), "user"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_request_is_refused_by_the_name_of_its_field(name: str) -> None:
    request, param = BAD_REQUESTS[name]
    async with front_door() as rig:
        error = await failure(rig.stub.Generate(request))
        expected = grpc.StatusCode.NOT_FOUND if "model" in name else grpc.StatusCode.INVALID_ARGUMENT
        assert (error.code(), metadata_of(error)["watchword-error-param"]) == (expected, param)
        assert rig.backend.requests == []


async def test_a_number_that_is_none_in_prompt_variables_is_refused() -> None:
    ref = pb.PromptRef(id="support")
    ref.variables.update({"age": float("nan")})
    request = pb.GenerateRequest(model="bytes", prompt=pb.Prompt(chat=pb.Chat(prompt=ref)))
    async with front_door() as rig:
        error = await failure(rig.stub.Generate(request))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_what_is_not_built_is_refused_and_not_ignored() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    chat.chat_template_kwargs.update({"enable_thinking": True})
    async with front_door() as rig:
        error = await failure(rig.stub.Generate(pb.GenerateRequest(model="bytes", prompt=pb.Prompt(chat=chat))))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert metadata_of(error)["watchword-error-param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\x03\xed\xa0\x80"], ids=["noise", "latin", "surrogate"]
)
@pytest.mark.parametrize("method", ["Generate", "Tokenize", "GetModel"])
async def test_bytes_that_are_no_message_are_an_invalid_argument(
    method: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with front_door() as rig:
        path = f"/watchword.v1.GenerationService/{method}"
        kind = rig.channel.unary_stream if method == "Generate" else rig.channel.unary_unary
        with caplog.filtering(OfThisTest()):
            error = await failure(kind(path)(data))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caplog.records == []


async def test_an_unknown_method_is_unimplemented() -> None:
    async with front_door() as rig:
        error = await failure(rig.channel.unary_unary("/watchword.v1.GenerationService/Delete")(b""))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_message_above_the_limit_is_refused_unread() -> None:
    async with front_door(config=GrpcServerConfig(max_request_bytes=1 << 20)) as rig:
        error = await failure(rig.stub.Generate(ask("a" * (2 << 20))))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert rig.backend.requests == []


KEYED_CALLS = {
    "Generate": lambda rig, metadata: rig.stub.Generate(ask(), metadata=metadata),
    "Tokenize": lambda rig, metadata: rig.stub.Tokenize(
        pb.TokenizeRequest(model="bytes", prompt=pb.Prompt(text="a")), metadata=metadata
    ),
    "GetModel": lambda rig, metadata: rig.stub.GetModel(pb.GetModelRequest(model="bytes"), metadata=metadata),
}


@pytest.mark.parametrize("method", KEYED_CALLS)
async def test_with_keys_configured_every_call_needs_one(method: str, keys_path: Path, credential: str) -> None:
    async with front_door(keys_path=keys_path) as rig:
        call = KEYED_CALLS[method]
        for metadata in (
            (),
            (("authorization", "Bearer wrong.secret"),),
            (("authorization", credential),),
            (("authorization", f"Basic {credential}"),),
            (("authorization", f"Bearer {credential}x"),),
            (("authorization", f"Bearer {credential}"), ("authorization", "Bearer wrong.secret")),
        ):
            error = await failure(call(rig, metadata))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert credential.partition(".")[2] not in str(error)
        good = call(rig, (("authorization", f"Bearer {credential}"),))
        await (good.read() if method == "Generate" else good)


async def test_an_unauthenticated_caller_learns_nothing_of_its_request() -> None:
    """Bad message, bad key: the key is judged first."""
    async with front_door(keys_path=Path("/nonexistent/keys.json")) as rig:
        error = await failure(rig.stub.GetModel(pb.GetModelRequest(model="gpt-9")))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_worker_is_shown_to_operators_only(keys_path: Path, credential: str) -> None:
    async def shown(metadata: tuple[tuple[str, str], ...], **options: object) -> str | None:
        async with front_door(**options) as rig:  # type: ignore[arg-type]
            call = rig.stub.Generate(ask(), metadata=metadata)
            async for _ in call:
                pass
            return dict(await call.trailing_metadata()).get("x-watchword-worker")

    as_user = (("authorization", f"Bearer {credential}"),)
    assert await shown(()) == "worker-7"  # no keys: the caller is the operator
    assert await shown(as_user, keys_path=keys_path) is None
    config = GrpcServerConfig(debug_metadata=True)
    assert await shown(as_user, keys_path=keys_path, config=config) == "worker-7"


async def test_identity_metadata_counts_only_from_a_configured_proxy() -> None:
    async def user_hash(trusted: tuple[str, ...], metadata: tuple[tuple[str, str], ...]) -> bytes:
        headers = IdentityHeaders(trusted, ("x-openwebui-user-id",))
        async with front_door(identity_headers=headers) as rig:
            await rig.stub.Generate(ask(), metadata=metadata).read()
            await until(lambda: rig.backend.requests)
            return rig.backend.requests[0].user_hash

    alice = (("x-openwebui-user-id", "alice"),)
    assert await user_hash(("127.0.0.1",), alice) != await user_hash(("127.0.0.1",), ())
    assert await user_hash(("10.0.0.0/8",), alice) == await user_hash(("10.0.0.0/8",), ())
