"""Ends of sentences and paragraphs, counted in tokens."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Set

from cluster.prompts.policy import Granularity
from cluster.prompts.tokenizer import Encoded

# A sentence ends after its closing quotes and brackets, and at every line break.
_SENTENCE = re.compile(r"[.!?…]+[\"'”’»)\]]*(?=\s|$)|[。！？；]+[”’」』）]*|\n+")
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_PATTERNS = {Granularity.SENTENCE: _SENTENCE, Granularity.PARAGRAPH: _PARAGRAPH}


def num_tokens_up_to_boundary(
    rendering: Encoded, num_tokens: int, granularity: Granularity, control_token_ids: Set[int]
) -> int:
    """How many of the first `num_tokens` tokens end at or before the last boundary within them.

    Every token is a boundary for BLOCK; a control token (the end of a message) is one for all granularities.
    """
    pattern = _PATTERNS.get(granularity)
    if pattern is None or num_tokens == 0:
        return num_tokens
    ends = [end for _, end in rendering.offsets[:num_tokens]]
    allowed = max((i + 1 for i in range(num_tokens) if rendering.token_ids[i] in control_token_ids), default=0)
    for match in pattern.finditer(rendering.text):
        if match.end() > ends[-1]:
            break
        allowed = max(allowed, bisect_right(ends, match.end()))
    return allowed
