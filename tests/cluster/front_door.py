"""A front door over a deterministic backend: one token per byte, and the answer echoes the end of the prompt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from cache_service.block_key import BlockKeyer, ModelIdentity
from cluster.api.errors import WatchwordError
from cluster.api.output import ChoiceDelta, FinishReason, RequestOutput, TokenLogprob
from cluster.api.prompt import BuiltPrompt, CallerIdentity, PromptRef
from cluster.api.request import Request
from cluster.api.scope import ScopeSpan
from cluster.auth.authenticator import Authenticator
from cluster.backend import ModelInfo, Placement
from cluster.http.config import HttpConfig
from cluster.http.front import Front
from cluster.http_app import build_http_app
from cluster.metrics import GatewayMetrics
from cluster.prompts.policy import Share
from cluster.serving.core import ServedModel, ServingCore
from cluster.serving.token_table import TokenTable

EOS = 256
START = 257
VOCAB_SIZE = 300
MAX_MODEL_LEN = 512
MODEL = "tiny"
BLOCK_SIZE = 16

Answer = Callable[[Request, int], bytes]


def byte_table() -> TokenTable:
    """Token i is byte i; 256 is the end of a sequence, 257 another control token."""
    return TokenTable([*(bytes([i]) for i in range(256)), b"<|end|>", b"<|start|>"], special_ids=[EOS, START])


def keyer() -> BlockKeyer:
    return BlockKeyer(b"s" * 32, ModelIdentity(MODEL, b"w", "float32", "test", BLOCK_SIZE))


class BytePrompts:
    """A PromptBuilder: every part of a message is its UTF-8 bytes. Keeps how far each prompt was to be shared."""

    def __init__(self, has_start: bool = False) -> None:
        self.has_start = has_start
        self.shares: list[Share | None] = []

    def chat(
        self,
        identity: CallerIdentity,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt_ref: PromptRef | None = None,
        share: Share | None = None,
    ) -> BuiltPrompt:
        head = f"[{prompt_ref.id}]" if prompt_ref else ""
        text = head + "".join(f"{item['role']}:{item['content']}\n" for item in messages)
        return self.text(identity, text, share=share)

    def text(
        self, identity: CallerIdentity, text: str, *, add_special_tokens: bool = True, share: Share | None = None
    ) -> BuiltPrompt:
        start = (START,) if add_special_tokens and self.has_start else ()
        return self.tokens(identity, (*start, *text.encode()), share=share)

    def tokens(self, identity: CallerIdentity, token_ids: Sequence[int], *, share: Share | None = None) -> BuiltPrompt:
        self.shares.append(share)
        spans = (ScopeSpan(None, identity.private),)
        return BuiltPrompt(tuple(token_ids), spans, use_prefix_cache=share is not Share.NONE)


def echo(request: Request, choice: int) -> bytes:
    """The prompt's last line, without its role."""
    text = bytes(i for i in request.prompt_token_ids if i < 256).rstrip(b"\n")
    return text.rpartition(b"\n")[2].rpartition(b":")[2]


@dataclass
class FakeBackend:
    """Emits `answer` in pieces of random size. Counts what runs and what was cut short."""

    answer: Answer = echo
    max_piece: int = 4
    seed: int = 0
    ready: bool = True
    pause_s: float = 0.0
    hold: asyncio.Event | None = None  # the first piece comes at once, the second when this is set
    error: WatchwordError | Exception | None = None
    error_after: int = 0  # pieces before the error
    cached_tokens: int = 0
    requests: list[Request] = field(default_factory=list)
    affinities: list[str | None] = field(default_factory=list)
    num_running: int = 0
    num_aborted: int = 0

    async def is_ready(self) -> bool:
        return self.ready

    async def generate(
        self, request: Request, *, affinity_key: str | None = None, placement: Placement | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        self.requests.append(request)
        self.affinities.append(affinity_key)
        if placement is not None:
            placement.worker_id = f"worker-{len(self.requests) % 2}"
        self.num_running += 1
        is_finished = False
        try:
            pieces = list(self._pieces(request))
            for number, deltas in enumerate(pieces):
                if self.error is not None and number >= self.error_after:
                    raise self.error
                if self.hold is None or number > 1:
                    await asyncio.sleep(self.pause_s)
                elif number == 1:
                    await self.hold.wait()
                is_finished = number == len(pieces) - 1
                yield RequestOutput(
                    request.request_id, deltas, self.cached_tokens if number == 0 else None, finished=is_finished
                )
        finally:
            self.num_running -= 1
            self.num_aborted += not is_finished

    def _pieces(self, request: Request) -> list[tuple[ChoiceDelta, ...]]:
        draw = random.Random(f"{self.seed}{request.prompt_token_ids}")
        outputs = [self._output(request, choice) for choice in range(request.sampling.n)]
        pieces = []
        while any(tokens for tokens, _ in outputs):
            deltas = []
            for choice, (tokens, end) in enumerate(outputs):
                if not tokens:
                    continue
                size = min(draw.randint(1, self.max_piece), len(tokens))
                part, rest = tokens[:size], tokens[size:]
                outputs[choice] = (rest, end)
                deltas.append(self._delta(request, choice, part, end if not rest else None))
            pieces.append(tuple(deltas))
        return pieces

    def _output(self, request: Request, choice: int) -> tuple[tuple[int, ...], FinishReason]:
        tokens = (*self.answer(request, choice), EOS)
        if request.sampling.ignore_eos:
            tokens = tokens[:-1] * request.sampling.max_tokens
        for position, token_id in enumerate(tokens):
            if token_id in request.sampling.stop_token_ids:
                tokens = tokens[: position + 1]
                break
        if len(tokens) > request.sampling.max_tokens:
            return tokens[: request.sampling.max_tokens], FinishReason.LENGTH
        return tokens, FinishReason.STOP

    def _delta(
        self, request: Request, choice: int, tokens: tuple[int, ...], reason: FinishReason | None
    ) -> ChoiceDelta:
        num_top = request.sampling.logprobs
        logprobs = None
        if num_top is not None:
            logprobs = tuple(TokenLogprob(i, -0.5, tuple((i + k, -0.5 - k) for k in range(num_top))) for i in tokens)
        stop_token_id = tokens[-1] if reason is FinishReason.STOP else None
        return ChoiceDelta(choice, tokens, logprobs, reason, stop_token_id)


def build_core(
    backend: FakeBackend,
    *,
    require_user: bool = False,
    metrics: GatewayMetrics | None = None,
    prompts: BytePrompts | None = None,
) -> ServingCore:
    info = ModelInfo(MODEL, MAX_MODEL_LEN, VOCAB_SIZE, frozenset({EOS}), adapters=("tiny-poet",))
    prompts = prompts or BytePrompts()
    model = ServedModel(info, prompts, byte_table(), keyer(), {"tiny-poet": b"digest"}, created_unix_s=7)
    observer = metrics.generation if metrics is not None else None
    return ServingCore([model], backend, require_user=require_user, observer=observer)


def build_app(
    backend: FakeBackend,
    *,
    keys_path: Path | None = None,
    require_user: bool = False,
    prompts: BytePrompts | None = None,
    **config: Any,
) -> Front:
    metrics = GatewayMetrics()
    core = build_core(backend, require_user=require_user, metrics=metrics, prompts=prompts)
    authenticator = Authenticator(keys_path, allow_anonymous=True)
    return build_http_app(core, authenticator, metrics, HttpConfig(version="1.2.3", **config))


def client_of(app: Front, key: str | None = None, peer: str = "127.0.0.1") -> httpx.AsyncClient:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=app, client=(peer, 12345))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)


def chat_body(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
