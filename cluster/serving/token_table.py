"""Token id -> bytes of text, as a table made once from a tokenizer's vocabulary.

With the bytes at hand, detokenizing is concatenation: exact, O(1) per token and independent of the prompt, so that no
prompt text can ever be emitted again (a decoder that needs the prompt as context does that when the prompt ends inside
a character).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable:
    """`token_bytes[i]` is what token i adds to the text; ids beyond the vocabulary (padding rows) add nothing."""

    def __init__(self, token_bytes: Iterable[bytes], special_ids: Iterable[int]) -> None:
        self._bytes = tuple(token_bytes)
        self._special = frozenset(special_ids)
        self.max_token_bytes = max(map(len, self._bytes), default=0)

    def __len__(self) -> int:
        return len(self._bytes)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> TokenTable:
        """Raises ValueError for a decoder kind whose tokens have no bytes of their own."""
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        to_bytes = _byte_rule(json.loads(tokenizer.to_str())["decoder"])
        table = [b""] * (max(vocab.values(), default=-1) + 1)
        for text, token_id in vocab.items():
            # Added tokens stand in the vocabulary as they are, not in the byte alphabet.
            table[token_id] = text.encode() if token_id in added else to_bytes(text)
        return cls(table, (token_id for token_id, token in added.items() if token.special))

    def bytes_of(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def text_of(self, token_id: int) -> str:
        """For display; a token that is a part of a character shows as U+FFFD."""
        return self.bytes_of(token_id).decode("utf-8", errors="replace")

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of a whole sequence. Invalid UTF-8 shows as U+FFFD."""
        kept = (i for i in token_ids if not (skip_special_tokens and i in self._special))
        return b"".join(map(self.bytes_of, kept)).decode("utf-8", errors="replace")


def _byte_rule(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    kinds = _decoder_kinds(decoder)
    if "ByteLevel" in kinds:
        alphabet = _byte_level_alphabet()
        return lambda text: b"".join(alphabet.get(char) or char.encode() for char in text)
    if kinds & {"Metaspace", "ByteFallback", "Replace"}:
        return _sentencepiece_bytes
    raise ValueError(f"tokenizer decoder of kind {sorted(kinds) or None} is not supported: use ByteLevel or Metaspace")


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    if decoder["type"] == "Sequence":
        return {kind for part in decoder["decoders"] for kind in _decoder_kinds(part)}
    return {decoder["type"]}


def _sentencepiece_bytes(text: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(byte[1], 16)]) if byte else text.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, bytes]:
    """Byte-level BPE writes each byte as one printable character: Latin-1 where printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet.update((chr(0x100 + index), bytes([byte])) for index, byte in enumerate(others))
    return alphabet
