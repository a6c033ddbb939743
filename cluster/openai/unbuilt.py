"""Fields of OpenAI's and its peers' APIs that Watchword knows but does not build: refused by name, never ignored.

Each maps to the values that ask for nothing; they pass, because clients send them by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.api.errors import UnsupportedError

_OFF = (None, False)
_TEXT_FORMAT = (None, {"type": "text"})

COMMON: dict[str, tuple[Any, ...]] = {
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "use_beam_search": _OFF,
    "length_penalty": (None, 1, 1.0),
    "include_stop_str_in_output": _OFF,
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "kv_transfer_params": (None,),
    "store": _OFF,
    "service_tier": (None, "auto", "default"),
    "priority": (None, 0),
    "return_token_ids": _OFF,
    "return_tokens_as_token_ids": _OFF,
}

CHAT: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": _TEXT_FORMAT,
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
    "moderation": (None,),
    "echo": _OFF,
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "mm_processor_kwargs": (None,),
    "add_generation_prompt": (None, True),
    "continue_final_message": _OFF,
    "thinking_token_budget": (None,),
}

COMPLETION: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "echo": _OFF,
    "suffix": (None, ""),
    "best_of": (None, 1),
    "response_format": _TEXT_FORMAT,
    "prompt_embeds": (None,),
}

RESPONSES: dict[str, tuple[Any, ...]] = {
    **COMMON,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "max_tool_calls": (None,),
    "text": (None, {}, {"format": {"type": "text"}}),
    "reasoning": (None, {}),
    "include": (None, []),
    "background": _OFF,
    "previous_response_id": (None,),
    "conversation": (None,),
    "context_management": (None, []),
    "truncation": (None, "disabled"),
    "moderation": (None,),
}


TOKENIZE: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, True),
    "continue_final_message": _OFF,
}


def refuse_unbuilt(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises UnsupportedError that names the first field (in the table's order) that asks for something not built."""
    for name, passing in table.items():
        if name in body and not any(_is_same(body[name], value) for value in passing):
            raise UnsupportedError(f"{name} is not supported yet; leave it out", param=name, code="unsupported_field")


def _is_same(value: Any, passing: Any) -> bool:
    # 1 == True in Python, but "best_of: true" is not "best_of: 1".
    return value == passing and isinstance(value, bool) == isinstance(passing, bool)
