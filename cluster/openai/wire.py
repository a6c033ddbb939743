"""What the three generation requests have in common on the wire, and how a body becomes one of them.

Strict: no number is read from a string or a boolean. Unknown fields pass, because clients gain new ones every month.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from cluster.api.errors import InvalidRequestError
from cluster.api.prompt import PromptRef
from cluster.prompts.policy import Share, parse_choice
from cluster.serving.generate_input import CallerFields, SamplingInput

WireModel = TypeVar("WireModel", bound=BaseModel)

_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "finite_number": "a finite number",
}
_MAX_PATH_CHARS = 80
_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", type(None): "null"}


class Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Wire):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationWire(Wire):
    """Fields with the same meaning in chat completions, completions and responses."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    skip_special_tokens: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    share: Any = None  # a word of Share

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def asked_share(self) -> Share | None:
        """How far the request lets its blocks be shared. Raises InvalidRequestError for an unknown word."""
        return None if self.share is None else parse_choice(Share, self.share, "share")

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options is only allowed with stream: true", param="stream_options")

    def caller_fields(self, header_user: str | None) -> CallerFields:
        return CallerFields(
            user=self.user,
            safety_identifier=self.safety_identifier,
            cache_salt=self.cache_salt,
            session_id=self.session_id,
            prompt_cache_key=self.prompt_cache_key,
            header_user=header_user,
        )

    def sampling_input(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingInput:
        return SamplingInput(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            n=self.n,
            seed=self.seed,
            stop=parse_stop(self.stop),
            stop_token_ids=self.stop_token_ids or (),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_parse_logit_bias(self.logit_bias),
        )


class PromptRefWire(Wire):
    id: str
    version: str | None = None
    variables: dict[str, Any] | None = None

    def to_ref(self) -> PromptRef:
        return PromptRef(self.id, self.version, self.variables or {})


def parse_body(kind: type[WireModel], body: Mapping[str, Any]) -> WireModel:
    """Raises InvalidRequestError for the first field of a wrong type; echoes numbers, never text."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = field_path(first["loc"])
        raise InvalidRequestError(_explain(path, first), param=path, code="invalid_type") from None


def field_path(location: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") -> "messages[0].role". Cut short: names inside an object are the caller's own text."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path if len(path) <= _MAX_PATH_CHARS else path[:_MAX_PATH_CHARS] + "…"


def json_name(value: object) -> str:
    """What a value is, for a message: its number if it is one, else its JSON type."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return "a very large number" if isinstance(value, int) and value.bit_length() > 100 else str(value)
    return _JSON_NAMES.get(type(value), "something else")


def parse_stop(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list) and all(isinstance(text, str) for text in stop):
        return tuple(stop)
    raise InvalidRequestError("stop must be a string or a list of strings", param="stop", code="invalid_type")


def _parse_logit_bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    parsed: dict[int, float] = {}
    for text, value in (bias or {}).items():
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            raise InvalidRequestError("the names in logit_bias must be token ids", param="logit_bias")
        parsed[int(text)] = value
    return parsed


def _explain(path: str, item: Any) -> str:
    if item["type"] == "missing":
        return f"{path} is required"
    expected = _EXPECTED.get(item["type"])
    if expected is None:
        return f"{path} is not valid: {item['msg']}"
    return f"{path} must be {expected}, got {json_name(item['input'])}"
