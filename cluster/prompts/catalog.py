"""What the gateway knows of registered templates beyond their text: canonical blocks, and which of them are pinned."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_service.block_key import BlockKeyer
from cluster.api.errors import InvalidRequestError, OverloadedError, PermissionDeniedError
from cluster.api.ids import TenantId
from cluster.api.prompt import BuiltPrompt
from cluster.api.scope import Scope, ScopeFields, ScopeSpan
from cluster.prompts.block_trie import BlockTrie
from cluster.prompts.canonical import CanonicalPrefix, CanonicalRenderer, ClockReading
from cluster.prompts.chat_encoder import ChatEncoder
from cluster.prompts.folder import read_folder
from cluster.prompts.lru import LruCache
from cluster.prompts.policy import Share, SharingPolicy
from cluster.prompts.sandbox import RenderedTexts, TemplateSandbox
from cluster.prompts.store import RegisteredTemplate, TemplateStore
from cluster.prompts.template import PromptTemplate, canonical_json

_log = logging.getLogger(__name__)
_CACHED_TEXTS = 4096
_RETRY_FAILED_S = 3600.0  # a template may have broken its time limit because the machine was busy
_Key = tuple[bytes | None, str, str]  # (owner, id, version) of a template
_PUBLIC_TENANT = b"public"  # whose turn it is in the sandbox; no hash of a tenant is this short


@dataclass(frozen=True, slots=True)
class PinBudget:
    """Blocks of each worker's pool that templates may hold for good: a quarter at most, and a quota per tenant."""

    max_blocks: int = 512
    max_blocks_per_tenant: int = 128

    def __post_init__(self) -> None:
        if self.max_blocks < 0 or self.max_blocks_per_tenant < 0:
            raise ValueError(f"a pin budget cannot be negative: {self}")


@dataclass(frozen=True, slots=True)
class PinnedRun:
    """The leading blocks of a template that every worker holds, and the scope they are keyed under."""

    fields: ScopeFields
    token_ids: tuple[int, ...]  # whole blocks
    clock: ClockReading = ()
    has_failed: bool = False


@dataclass(frozen=True)
class _Plan:
    """Decided anew whenever a template or the clock changes; never modified."""

    runs: Mapping[_Key, PinnedRun]
    tries: Mapping[bytes | None, BlockTrie]
    by_digest: Mapping[tuple[bytes | None, bytes], PinnedRun]  # tenants may register equal sources


class TemplateCatalog:
    """Registers templates, renders them and grants the blocks that depend on them alone. Thread-safe; blocking."""

    def __init__(
        self,
        store: TemplateStore,
        encoder: ChatEncoder,
        keyer: BlockKeyer,
        *,
        sandbox: TemplateSandbox | None = None,
        budget: PinBudget | None = None,
        policy: SharingPolicy | None = None,
    ) -> None:
        self.store = store
        self.keyer = keyer
        self.sandbox = sandbox or TemplateSandbox()
        self.budget = budget or PinBudget()
        self.policy = policy or SharingPolicy()
        self.canonical = CanonicalRenderer(encoder, self.sandbox, keyer.block_size)
        self.encoder = encoder
        self._texts: LruCache[RenderedTexts] = LruCache(_CACHED_TEXTS)
        self._runs: dict[_Key, PinnedRun] = {}  # of the templates that have been prepared
        self._prepared_s: dict[_Key, float] = {}
        self._plan = _Plan({}, {}, {})
        self._planned_change: int | None = None  # of the store; None: make a new plan
        self._lock = threading.RLock()

    # --- registration

    def put(self, tenant: TenantId, template_id: str, body: Any, *, is_operator: bool = False) -> RegisteredTemplate:
        """Checks and stores a template. Raises InvalidRequestError with the field at fault."""
        template = PromptTemplate.from_dict(body)
        if template.is_public and not is_operator:
            raise PermissionDeniedError("only an operator can declare a public prompt template", param="public")
        owner = None if template.is_public else tenant
        self._check_sources(owner, template)
        registered = self.store.put(owner, template_id, template)
        with contextlib.suppress(OverloadedError):  # the tenant is rendering something else: prepared a moment later
            self.prepare(registered)
        return registered

    def delete(self, tenant: TenantId, template_id: str, *, is_public: bool = False) -> None:
        self.store.delete(None if is_public else tenant, template_id)
        self._forget_plan()

    def load_folder(self, folder: Path | None) -> list[RegisteredTemplate]:
        """Registers what the operator keeps as files, and deletes what an earlier start registered from files that
        are gone. A bad file is named and changes nothing. None: there is no folder any more."""
        files = [] if folder is None else list(read_folder(folder))
        for file in files:
            try:
                self._check_sources(file.tenant, file.template)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"{file.path}: {error.message}") from error
        registered = [self.store.put(file.tenant, file.id, file.template, is_from_folder=True) for file in files]
        self.store.delete_from_folder({(file.tenant, file.id) for file in files})
        self._forget_plan()
        return registered

    def _check_sources(self, tenant: TenantId | None, template: PromptTemplate) -> None:
        turn = _PUBLIC_TENANT if tenant is None else tenant.encode()
        needed = self.sandbox.describe(turn, template.sources, self.encoder.clock())
        declared = {variable.name for variable in template.variables}
        for name in needed:
            if name not in declared:
                raise InvalidRequestError(f"the template uses undeclared variable {name!r}", param=f"variables.{name}")

    # --- use

    def render(self, registered: RegisteredTemplate, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The template's messages with these (checked) values."""
        template = registered.template
        key = (registered.tenant, registered.version, canonical_json(values))
        rendered = self._texts.get(key)
        if rendered is None or not self.canonical.is_current(rendered.clock):
            now = self.encoder.clock()
            rendered = self.sandbox.render(_turn(registered), template.sources, values, now)
            self._texts.put(key, rendered)
        return [
            {"role": role, "content": text} for (role, _), text in zip(template.messages, rendered.texts, strict=True)
        ]

    def pinned_run(self, registered: RegisteredTemplate) -> PinnedRun | None:
        """The blocks under TEMPLATE or PUBLIC scope; None when the template has none or is over budget."""
        return self._current_plan().runs.get(_key(registered))

    def has_template_blocks(self, registered: RegisteredTemplate) -> bool:
        """Whether any full block depends on the template alone, pinned or not."""
        return bool(self._run(registered).token_ids)

    def match_raw(self, tenant: bytes, token_ids: Sequence[int]) -> tuple[ScopeFields, int] | None:
        """The pinned blocks with which any prompt of this tenant begins: the longest, the tenant's own first."""
        plan = self._current_plan()
        best: tuple[ScopeFields, int] | None = None
        for owner in (tenant, None):
            trie = plan.tries.get(owner)
            match = trie.longest_match(token_ids) if trie is not None else None
            if match is not None and (best is None or match[1] > best[1]):
                best = (plan.by_digest[owner, match[0]].fields, match[1])
        return best

    def variables_prefix(self, registered: RegisteredTemplate, values: Mapping[str, Any]) -> CanonicalPrefix:
        return self.canonical.of_variables(_turn(registered), registered.template, values)

    def fields(self, registered: RegisteredTemplate) -> ScopeFields:
        """The scope of what depends on this template alone."""
        digest = self.keyer.digest("template", registered.version.encode())
        if registered.tenant is None:
            return ScopeFields(Scope.PUBLIC, None, template=digest)
        return ScopeFields(Scope.TEMPLATE, registered.tenant, template=digest)

    # --- pinning

    def warm_up_requests(self, registered: RegisteredTemplate) -> list[BuiltPrompt]:
        """What to run on every worker, as a warm-up, so that it holds the template's blocks. Empty if over budget.

        The last span names the tenant and user to run it as.
        """
        run = self.pinned_run(registered)
        return [] if run is None else [self._warm_up(run)]

    def all_warm_ups(self) -> list[BuiltPrompt]:
        """For a new worker, before it takes traffic; what has not been prepared is prepared first."""
        for registered in self.unprepared():
            self.prepare(registered)
        return self.prepared_warm_ups()

    def prepared_warm_ups(self) -> list[BuiltPrompt]:
        return [self._warm_up(run) for run in self._current_plan().runs.values()]

    def prepare(self, registered: RegisteredTemplate) -> None:
        """Finds the blocks that depend on the template alone. Takes as long as its author makes it take, so it is no
        part of any request: until then nothing of the template is shared. Raises OverloadedError (no process free).
        """
        run = self._run(registered)
        with self._lock:
            self._runs[_key(registered)] = run
            self._prepared_s[_key(registered)] = time.monotonic()
        self._forget_plan()

    def unprepared(self) -> list[RegisteredTemplate]:
        """Templates that nobody here has prepared yet, or whose clock has moved on since."""
        return [registered for registered in self.store.latest() if not self._is_prepared(registered)]

    def _is_prepared(self, registered: RegisteredTemplate) -> bool:
        run = self._runs.get(_key(registered))
        if run is None or not self.canonical.is_current(run.clock):
            return False
        return not run.has_failed or time.monotonic() - self._prepared_s[_key(registered)] < _RETRY_FAILED_S

    def refresh_clocks(self) -> tuple[list[BuiltPrompt], list[BuiltPrompt]]:
        """(outdated, new) warm-ups of templates whose clock has moved on: unpin the former, run the latter.

        Until this is called, what lies behind the old date is simply a miss.
        """
        old = self._current_plan().runs
        for registered in self.unprepared():
            self.prepare(registered)
        new = self._current_plan().runs
        outdated = [self._warm_up(run) for key, run in old.items() if new.get(key) != run]
        fresh = [self._warm_up(run) for key, run in new.items() if old.get(key) != run]
        return outdated, fresh

    def _warm_up(self, run: PinnedRun) -> BuiltPrompt:
        nobody = self.keyer.identity("warm-up")
        rest = ScopeFields(Scope.USER, run.fields.tenant or nobody, user=nobody)
        num_blocks = len(run.token_ids) // self.keyer.block_size
        return BuiltPrompt(run.token_ids, (ScopeSpan(num_blocks, run.fields), ScopeSpan(None, rest)))

    def _forget_plan(self) -> None:
        with self._lock:
            self._planned_change = None

    def _current_plan(self) -> _Plan:
        """While another thread makes a new plan, the old one serves: what it no longer grants is merely a miss."""
        if not self._lock.acquire(blocking=False):
            return self._plan
        try:
            change = self.store.poll()
            if change != self._planned_change:
                self._plan = self._make_plan()
                self._planned_change = change
            return self._plan
        finally:
            self._lock.release()

    def _make_plan(self) -> _Plan:
        runs: dict[_Key, PinnedRun] = {}
        prepared: dict[_Key, PinnedRun] = {}
        tries: dict[bytes | None, BlockTrie] = {}
        by_digest: dict[tuple[bytes | None, bytes], PinnedRun] = {}
        spent: dict[bytes | None, int] = {}
        for registered in self.store.latest():
            run = self._runs.get(_key(registered))
            if run is None:
                continue
            prepared[_key(registered)] = run
            num_blocks = len(run.token_ids) // self.keyer.block_size
            if num_blocks == 0:
                continue
            owner = registered.tenant
            is_over = sum(spent.values()) + num_blocks > self.budget.max_blocks
            if is_over or spent.get(owner, 0) + num_blocks > self.budget.max_blocks_per_tenant:
                _log.warning("prompt template over the pin budget: its %d blocks fall to user scope", num_blocks)
                continue
            digest = run.fields.template
            assert digest is not None
            if (owner, digest) not in by_digest:  # the same source under two ids is one run
                spent[owner] = spent.get(owner, 0) + num_blocks
            runs[_key(registered)] = run
            by_digest[owner, digest] = run
            tries.setdefault(owner, BlockTrie(self.keyer.block_size)).add(digest, run.token_ids)
        self._runs = prepared
        self._prepared_s = {key: self._prepared_s[key] for key in prepared}
        return _Plan(runs, tries, by_digest)

    def _run(self, registered: RegisteredTemplate) -> PinnedRun:
        template = registered.template
        fields = self.fields(registered)
        if template.share.width < Share.TEMPLATE.width or not self.policy.may_use_templates_of(registered.tenant):
            return PinnedRun(fields, ())
        try:
            prefix = self.canonical.of_template(_turn(registered), template)
        except InvalidRequestError:  # the template breaks a limit without its values; requests still can use it
            return PinnedRun(fields, (), has_failed=True)
        size = self.keyer.block_size
        num_tokens = prefix.num_tokens_allowed // size * size
        clock = self.canonical.clock_of(_turn(registered), template)
        return PinnedRun(fields, prefix.token_ids[:num_tokens], clock)


def _key(registered: RegisteredTemplate) -> _Key:
    return registered.tenant, registered.id, registered.version


def _turn(registered: RegisteredTemplate) -> bytes:
    return registered.tenant or _PUBLIC_TENANT
