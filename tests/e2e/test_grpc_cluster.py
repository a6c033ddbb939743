"""gRPC on a real channel: stream, cancel, deadline, status codes."""

from __future__ import annotations

import grpc
import pytest
from e2e_server import wait_until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.proto.watchword.v1 import generation_pb2 as pb
from cluster.proto.watchword.v1 import generation_pb2_grpc as pb_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.weights]

MODEL = "smollm2-135m-instruct"


@pytest.fixture
def stub(cluster):
    with grpc.insecure_channel(cluster.server.grpc_address) as channel:
        yield pb_grpc.GenerationServiceStub(channel)


def metadata(cluster):
    return (("authorization", f"Bearer {cluster.keys.alice}"),)


def request(text: str, **options) -> pb.GenerateRequest:
    message = pb.GenerateRequest(model=MODEL)
    message.prompt.chat.messages.add(role="user", content=text)
    for name, value in options.items():
        setattr(message.sampling, name, value)
    return message


def test_grpc_and_http_give_the_same_answer(cluster, stub):
    deltas = list(stub.Generate(request("Name a river.", max_tokens=16, temperature=0.0), metadata=metadata(cluster)))
    text = "".join(delta.text for reply in deltas for delta in reply.deltas)
    client = cluster.client(cluster.keys.alice)
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Name a river."}], max_tokens=16, temperature=0
    )
    assert text == reply.choices[0].message.content


def test_deadline_and_cancel_stop_the_engine(cluster, stub):
    from test_chat import is_idle

    long = request("Tell a long story.", max_tokens=1500, ignore_eos=True)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(long, metadata=metadata(cluster), timeout=1.0))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    call = stub.Generate(long, metadata=metadata(cluster))
    next(call)
    call.cancel()
    wait_until(lambda: is_idle(cluster), "the end of what was cancelled", 10)


def test_errors_have_their_status_and_no_traceback(cluster, stub):
    for message, meta, code in [
        (request("x"), (), grpc.StatusCode.UNAUTHENTICATED),
        (request("x", temperature=-1.0), metadata(cluster), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.GenerateRequest(model="nobody"), metadata(cluster), grpc.StatusCode.INVALID_ARGUMENT),
    ]:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(message, metadata=meta))
        assert caught.value.code() in (code, grpc.StatusCode.NOT_FOUND)
        assert "Traceback" not in caught.value.details()


def test_health_says_serving(cluster):
    with grpc.insecure_channel(cluster.server.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = health.Check(health_pb2.HealthCheckRequest(service="watchword.v1.GenerationService"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
