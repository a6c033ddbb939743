"""ServingCore: from a principal's input to a running Generation. HTTP and gRPC are thin layers over it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from cache_service.block_key import BlockKeyer
from cluster.api.errors import (
    ContextLengthError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)
from cluster.api.ids import RequestId
from cluster.api.principal import Principal
from cluster.api.prompt import BuiltPrompt, CallerIdentity
from cluster.api.request import Request
from cluster.api.sampling import SamplingParams
from cluster.auth.caller import affinity_key, resolve_identity
from cluster.backend import Backend, ModelInfo, Placement
from cluster.prompts.policy import Share
from cluster.serving.generate_input import CallerFields, ChatInput, GenerateInput, PromptInput, TextInput, TokensInput
from cluster.serving.generation import Generation
from cluster.serving.observer import GenerationObserver, NullObserver
from cluster.serving.prompt_builder import PromptBuilder
from cluster.serving.sampling_rules import SamplingLimits, check_prompt_length, decide_sampling
from cluster.serving.token_table import TokenTable

# Below this many characters, rendering and tokenizing take less time than a thread switch is worth. Registered
# templates always take the switch: they are rendered in a sandbox that may have to be waited for.
_INLINE_CHARS = 8192


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model and what turns its prompts into tokens, tokens into text, and blocks into keys."""

    info: ModelInfo
    prompts: PromptBuilder
    tokens: TokenTable
    keyer: BlockKeyer
    # Names that requests may use, now: it may be another mapping with each look
    adapter_digests: Mapping[str, bytes] = field(default_factory=lambda: MappingProxyType({}))
    created_unix_s: int = 0


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Everything is decided; nothing has been started."""

    model: ServedModel
    adapter: str | None
    identity: CallerIdentity
    prompt: BuiltPrompt
    sampling: SamplingParams
    affinity_key: str | None
    skip_special_tokens: bool


class ServingCore:
    """Knows the served models and the backend that runs them. Holds no state of requests."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        backend: Backend,
        *,
        require_user: bool = False,
        limits: SamplingLimits | None = None,
        observer: GenerationObserver | None = None,
    ) -> None:
        self.backend = backend
        self._by_name = {model.info.name: (model, None) for model in models}
        self.models = tuple(models)
        self._require_user = require_user
        self._limits = limits or SamplingLimits()
        self._observer = observer or NullObserver()

    def find_model(self, name: str) -> tuple[ServedModel, str | None]:
        """The model and the adapter that `name` stands for. Raises NotFoundError (model_not_found)."""
        found: tuple[ServedModel, str | None] | None = self._by_name.get(name)
        if found is None:
            found = next(((model, name) for model in self.models if name in model.adapter_digests), None)
        if found is None:
            shown = name if len(name) <= 64 else name[:64] + "…"
            adapters = [adapter for model in self.models for adapter in model.adapter_digests]
            known = ", ".join(sorted([*self._by_name, *adapters]))
            raise NotFoundError(
                f"the model {shown!r} does not exist; there is: {known}", param="model", code="model_not_found"
            )
        return found

    def identify(self, principal: Principal, caller: CallerFields, model: ServedModel) -> CallerIdentity:
        """Raises InvalidRequestError for contradictory or malformed identity fields."""
        return resolve_identity(principal, caller, model.keyer, require_user=self._require_user)

    async def prepare(self, principal: Principal, given: GenerateInput) -> PreparedRequest:
        """Validates, renders and tokenizes. Raises InvalidRequestError, ContextLengthError, NotFoundError."""
        model, adapter = self.find_model(given.model)
        identity = self.identify(principal, given.caller, model)
        prompt = await self._build(model, identity, given.prompt, given.share)
        check_prompt_length(len(prompt.token_ids), model.info)
        return PreparedRequest(
            model=model,
            adapter=adapter,
            identity=identity,
            prompt=prompt,
            sampling=decide_sampling(given.sampling, len(prompt.token_ids), model.info, self._limits),
            affinity_key=affinity_key(principal, given.caller, model.keyer),
            skip_special_tokens=given.skip_special_tokens,
        )

    async def start(
        self,
        principal: Principal,
        given: GenerateInput,
        request_id: RequestId,
        deadline_unix_s: float | None = None,
    ) -> Generation:
        """Prepares, and hands the request to the backend at the first iteration of the result."""
        return self.launch(await self.prepare(principal, given), request_id, deadline_unix_s)

    def launch(
        self, prepared: PreparedRequest, request_id: RequestId, deadline_unix_s: float | None = None
    ) -> Generation:
        model, prompt = prepared.model, prepared.prompt
        digest = None
        if prepared.adapter is not None:
            digest = model.adapter_digests.get(prepared.adapter)
            if digest is None:
                raise UnavailableError("the adapter was unloaded while the request was prepared", retry_after_s=1.0)
        request = Request(
            request_id=request_id,
            model=model.info.name,
            prompt_token_ids=prompt.token_ids,
            sampling=prepared.sampling,
            spans=prompt.spans,
            block_keys=model.keyer.prompt_keys(prompt.token_ids, prompt.spans, digest),
            tenant_hash=prepared.identity.tenant,
            user_hash=prepared.identity.user,
            account_hash=prepared.identity.account,
            adapter=prepared.adapter,
            adapter_digest=digest,
            deadline_unix_s=deadline_unix_s,
            use_prefix_cache=prompt.use_prefix_cache,
        )
        placement = Placement()
        outputs = self.backend.generate(request, affinity_key=prepared.affinity_key, placement=placement)
        return Generation(
            request,
            outputs,
            placement,
            model.tokens,
            self._observer,
            skip_special_tokens=prepared.skip_special_tokens,
        )

    async def tokenize(
        self, principal: Principal, model_name: str, prompt: PromptInput, caller: CallerFields
    ) -> BuiltPrompt:
        """The prompt that `prepare` would build; may be empty or longer than the context."""
        model, _ = self.find_model(model_name)
        return await self._build(model, self.identify(principal, caller, model), prompt)

    async def _build(
        self, model: ServedModel, identity: CallerIdentity, prompt: PromptInput, share: Share | None = None
    ) -> BuiltPrompt:
        num_chars = _num_chars(prompt)
        _refuse_hopeless(num_chars, model)
        is_templated = isinstance(prompt, ChatInput) and prompt.prompt_ref is not None
        if not is_templated and num_chars <= _INLINE_CHARS:
            return _build_now(model, identity, prompt, share)
        return await asyncio.to_thread(_build_now, model, identity, prompt, share)


def _build_now(model: ServedModel, identity: CallerIdentity, prompt: PromptInput, share: Share | None) -> BuiltPrompt:
    if isinstance(prompt, ChatInput):
        if prompt.template_kwargs:
            raise UnsupportedError("template arguments are not supported yet", param="chat_template_kwargs")
        return model.prompts.chat(identity, prompt.messages, prompt_ref=prompt.prompt_ref, share=share)
    if isinstance(prompt, TextInput):
        return model.prompts.text(identity, prompt.text, add_special_tokens=prompt.add_special_tokens, share=share)
    for token_id in prompt.token_ids:
        if not 0 <= token_id < model.info.vocab_size:
            raise InvalidRequestError(
                f"prompt token id is {token_id}, must be in [0, {model.info.vocab_size - 1}]", param="prompt"
            )
    return model.prompts.tokens(identity, prompt.token_ids, share=share)


def _refuse_hopeless(num_chars: int, model: ServedModel) -> None:
    """Text that cannot fit even in the longest tokens is not worth the seconds that tokenizing it takes."""
    most = model.info.max_model_len * max(1, model.tokens.max_token_bytes)
    if num_chars > most:
        raise ContextLengthError(
            f"the prompt has {num_chars} characters; the model's context of {model.info.max_model_len} tokens "
            f"cannot hold more than {most}",
            param="messages",
        )


def _num_chars(prompt: PromptInput) -> int:
    if isinstance(prompt, TextInput):
        return len(prompt.text)
    if isinstance(prompt, TokensInput):
        return len(prompt.token_ids)
    return sum(len(str(message.get("content"))) for message in prompt.messages)
