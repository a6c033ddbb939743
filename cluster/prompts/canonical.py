"""Canonical renderings: the tokens of a prompt that no private input can change.

String offsets lie, because chat templates move, trim and branch and because the last static token may merge with what
follows. So the prompt is rendered and tokenized with several probes in place of everything private, and the canonical
tokens are the common prefix of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.api.errors import InvalidRequestError
from cluster.prompts.boundaries import num_tokens_up_to_boundary
from cluster.prompts.chat_encoder import ChatEncoder
from cluster.prompts.lru import LruCache
from cluster.prompts.policy import Granularity
from cluster.prompts.probes import Probe, ProbeSet, probes_for
from cluster.prompts.sandbox import CutText, TemplateSandbox
from cluster.prompts.shared_start import SharedStart
from cluster.prompts.template import PromptTemplate, canonical_json
from cluster.prompts.tokenizer import Encoded

MIN_PROBES = 3
_MERGE_WINDOW_CHARS = 256
_CACHED_TEMPLATES = 65_536  # few numbers each; apart, so that no flood of values drives them out
_CACHED_RENDERINGS = 4096

ClockReading = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class CanonicalPrefix:
    """Tokens that no private input can change.

    `dependencies[i]` are the shared variables on which the prompt up to the end of full block i depends.
    `num_tokens_allowed` is where a shared run may end, by the template's granularity.
    """

    token_ids: tuple[int, ...] = ()
    num_tokens_allowed: int = 0
    dependencies: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class _Dated:
    """Something that was rendered, with what the clock showed to whoever asked it."""

    prefix: CanonicalPrefix
    clock: ClockReading


class CanonicalRenderer:
    """Makes canonical prefixes and keeps them until the clock that they read has moved on. Thread-safe."""

    def __init__(self, encoder: ChatEncoder, sandbox: TemplateSandbox, block_size: int) -> None:
        self._encoder = encoder
        self._sandbox = sandbox
        self._block_size = block_size
        self._probes: ProbeSet = probes_for(encoder.tokenizer.chat_template)
        self._of_templates: LruCache[_Dated] = LruCache(_CACHED_TEMPLATES)
        self._of_variables: LruCache[_Dated] = LruCache(_CACHED_RENDERINGS)

    def of_template(self, tenant: bytes, template: PromptTemplate) -> CanonicalPrefix:
        """What depends on the template alone: every variable counts as private."""
        return self._of_template(tenant, template).prefix

    def of_variables(self, tenant: bytes, template: PromptTemplate, values: Mapping[str, Any]) -> CanonicalPrefix:
        """What depends on the template and the values of its shared variables."""
        names = template.shared_names
        shared = {name: values[name] for name in names}
        key = (tenant, template.version, canonical_json(shared))
        return self._cached(self._of_variables, key, lambda: self._make(tenant, template, shared, names)).prefix

    def clock_of(self, tenant: bytes, template: PromptTemplate) -> ClockReading:
        """The readings that went into the template's own canonical prefix; empty when it reads no clock."""
        return self._of_template(tenant, template).clock

    def _of_template(self, tenant: bytes, template: PromptTemplate) -> _Dated:
        key = (tenant, template.version)
        return self._cached(self._of_templates, key, lambda: self._make(tenant, template, {}, ()))

    def _cached(self, cache: LruCache[_Dated], key: Hashable, make: Callable[[], _Dated]) -> _Dated:
        entry = cache.get(key)
        if entry is None or not self.is_current(entry.clock):
            entry = make()
            cache.put(key, entry)
        return entry

    def is_current(self, clock: ClockReading) -> bool:
        now = self._encoder.clock()
        return all(now.strftime(fmt) == shown for fmt, shown in clock)

    def _make(self, tenant: bytes, template: PromptTemplate, values: dict[str, Any], shared: tuple[str, ...]) -> _Dated:
        private = tuple(variable.name for variable in template.variables if variable.name not in shared)
        taints = [private, *((*private, name) for name in shared)]
        now = self._encoder.clock()
        whole, *per_variable = self._sandbox.cut(tenant, template.sources, values, taints, now)
        roles = [role for role, _ in template.messages]
        rendered = self._render(roles, whole, self._probes.full(is_cut=whole.is_cut))
        clock = self._clock_reading(whole, now)
        if len(rendered) < MIN_PROBES:
            return _Dated(CanonicalPrefix(), clock)
        start = SharedStart(self._encoder.tokenizer, self._encoder.tokenizer.encode_rendered(*rendered[0]))
        token_ids = self._common_tokens(rendered, start)
        starts = {
            name: self._start_of_dependence(roles, cut, token_ids, start)
            for name, cut in zip(shared, per_variable, strict=True)
        }
        allowed = self._num_allowed(template.granularity, whole, start.encoded, len(token_ids))
        return _Dated(CanonicalPrefix(token_ids, allowed, self._dependencies(starts, len(token_ids))), clock)

    def _render(self, roles: Sequence[str], cut: CutText, probes: Iterable[Probe]) -> list[tuple[str, str]]:
        """(text, mark) of the conversations that the chat template accepts."""
        complete = cut.texts[:-1] if cut.is_cut else cut.texts
        fixed = [{"role": role, "content": text} for role, text in zip(roles, complete, strict=False)]
        rendered: list[tuple[str, str]] = []
        for probe in probes:
            open_turn = [{"role": roles[len(complete)], "content": cut.texts[-1] + probe.content}] if cut.is_cut else []
            turns = [*fixed, *open_turn, *probe.tail]
            try:
                rendered.append(self._encoder.render(turns, probe.tools or None, probe.add_generation_prompt))
            except InvalidRequestError:
                continue  # this chat template never lets such a conversation happen
        return rendered

    def _common_tokens(self, rendered: Sequence[tuple[str, str]], start: SharedStart) -> tuple[int, ...]:
        """The common prefix of the renderings' tokens and of `start`'s.

        Behind the first difference only as much is tokenized as can still merge with what lies before it.
        """
        texts = [text for text, _ in rendered]
        length = num_equal(min(texts), max(texts)) + _MERGE_WINDOW_CHARS
        common = start.encoded.token_ids
        for text, mark in dict.fromkeys((text[:length], mark) for text, mark in rendered):
            if mark in text:  # escaped look-alikes: positions in the text are not those of the tokens
                token_ids = self._encoder.tokenizer.encode_rendered(text, mark).token_ids
            else:
                token_ids = start.token_ids(text, num_equal(text, start.encoded.text))
            common = common[: num_equal(common, token_ids)]
        return common

    def _start_of_dependence(
        self, roles: Sequence[str], cut: CutText, token_ids: tuple[int, ...], start: SharedStart
    ) -> int:
        """The number of leading tokens that one more tainted variable leaves alone."""
        if not cut.is_cut:
            return len(token_ids)
        rendered = self._render(roles, cut, self._probes.contents_only())
        if len(rendered) < MIN_PROBES:
            return 0
        return num_equal(token_ids, self._common_tokens(rendered, start))

    def _dependencies(self, starts: Mapping[str, int], num_tokens: int) -> tuple[tuple[str, ...], ...]:
        size = self._block_size
        return tuple(
            tuple(sorted(name for name, start in starts.items() if start < (index + 1) * size))
            for index in range(num_tokens // size)
        )

    def _num_allowed(self, granularity: Granularity, cut: CutText, rendering: Encoded, num_tokens: int) -> int:
        if granularity is Granularity.TEMPLATE:
            return 0 if cut.is_cut else num_tokens
        return num_tokens_up_to_boundary(rendering, num_tokens, granularity, self._encoder.tokenizer.control_token_ids)

    def _clock_reading(self, cut: CutText, now: Any) -> ClockReading:
        formats = {fmt for fmt, _ in cut.clock}
        if self._encoder.template is not None:
            formats |= self._encoder.template.clock_formats
        return tuple((fmt, now.strftime(fmt)) for fmt in sorted(formats))


def num_equal(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many leading items agree; compares slices, because a loop over tokens is slow in Python."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
