"""Text to token ids and back. Control tokens are honoured only in text that a template vouches for."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from cluster.api.errors import InvalidRequestError
from cluster.prompts.control_tokens import ControlTokens
from cluster.prompts.tokenizer_files import TokenizerFiles, default_cache_dir, read_tokenizer_files


@dataclass(frozen=True, slots=True)
class Encoded:
    """`offsets[i]` is the range of characters of `text` that token i covers; made only when asked for."""

    token_ids: tuple[int, ...]
    text: str
    _encoding: Encoding
    _num_prefix: int = 0  # tokens that stand before the text and cover none of it

    @property
    def offsets(self) -> list[tuple[int, int]]:
        offsets = [(0, 0)] * self._num_prefix + list(self._encoding.offsets)
        return offsets + [(len(self.text), len(self.text))] * (len(self.token_ids) - len(offsets))


class Tokenizer:
    """One model's tokenizer, in two editions: one that knows control tokens, and one that knows only stand-ins.

    The second edition is the same tokenizer with every control token renamed to a random text, so that a look-alike
    in a caller's text is ordinary text to it, while everything else is cut exactly as by the first.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self.chat_template = files.chat_template
        self.special_tokens = dict(files.special_tokens)
        self.eos_token_id = files.eos_token_id
        self.backend: Backend = Backend.from_str(files.backend_json)
        self.backend.no_padding()
        self.backend.no_truncation()
        added = self.backend.get_added_tokens_decoder()
        controls = {token.content: (token_id, token) for token_id, token in added.items() if token.special}
        self.control_tokens = ControlTokens(controls)
        self.control_token_ids = frozenset(token_id for token_id, _ in controls.values())
        self.vocab_size = self.backend.get_vocab_size(with_added_tokens=True)
        self._stand_ins = _stand_ins(controls)
        self._plain = _plain_edition(files.backend_json, controls, self._stand_ins)
        self._plain_to_true = _translation(self._plain, added, self._stand_ins)
        # A control token that the model's own vocabulary could still spell; none of the common families can.
        self._unspeakable = self.control_token_ids - self._plain_to_true.keys()
        self._prefix_ids, self._suffix_ids = self._frame()
        unknown = getattr(self.backend.model, "unk_token", None)
        self._unknown_token = (unknown, controls[unknown][0]) if unknown in controls else None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Encoded:
        """Ordinary tokenization: control tokens in `text` become control tokens. For text that a template made."""
        encoding = self.backend.encode(_checked(text), add_special_tokens=add_special_tokens)
        return Encoded(tuple(encoding.ids), text, encoding)

    def encode_plain(self, text: str, *, add_special_tokens: bool = False) -> Encoded:
        """As `encode`, but nothing in `text` is a control token. For text that a caller sent."""
        encoding = self._plain.encode(_checked(text), add_special_tokens=False)
        if not self._unspeakable.isdisjoint(encoding.ids):
            raise InvalidRequestError("the text holds characters for which this model has no token")
        table = self._plain_to_true
        token_ids = tuple(table.get(token_id, token_id) for token_id in encoding.ids)
        if not add_special_tokens:
            return Encoded(token_ids, text, encoding)
        return Encoded(self._prefix_ids + token_ids + self._suffix_ids, text, encoding, len(self._prefix_ids))

    def encode_rendered(self, text: str, mark: str) -> Encoded:
        """Tokenizes what a template made of values that `ControlTokens.escape(…, mark)` went through.

        Control tokens that stand in `text` are real, those broken by `mark` are plain text.
        """
        if mark not in text:
            return self._without_unknowns(self.encode(text))
        pieces: list[str] = []
        position = 0
        for match in self.control_tokens.find(text):
            pieces += [text[position : match.start()].replace(mark, ""), self._stand_ins[match.group()]]
            position = match.end()
        pieces.append(text[position:].replace(mark, ""))
        return self.encode_plain("".join(pieces))

    def _without_unknowns(self, encoded: Encoded) -> Encoded:
        """Where the token for unknown characters is also a control token, such characters would let it in."""
        unknown = self._unknown_token
        if unknown is not None and encoded.token_ids.count(unknown[1]) > encoded.text.count(unknown[0]):
            raise InvalidRequestError("the text holds characters for which this model has no token")
        return encoded

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def _frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer itself puts before and after a text (a beginning-of-sequence token, say)."""
        bare = self.backend.encode("a", add_special_tokens=False).ids
        framed = self.backend.encode("a", add_special_tokens=True).ids
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return tuple(framed[:start]), tuple(framed[start + len(bare) :])
        return (), ()


def load_tokenizer(path: str | Path, gguf_file: str | None = None, *, cache_dir: Path | None = None) -> Tokenizer:
    """From a Hugging Face folder, or from `gguf_file` in a folder (or a GGUF file given as `path`)."""
    path = Path(path)
    if gguf_file is None and path.suffix == ".gguf":
        path, gguf_file = path.parent, path.name
    return Tokenizer(read_tokenizer_files(path, gguf_file, cache_dir or default_cache_dir()))


def _checked(text: str) -> str:
    """Refuses lone surrogates here, where the caller can be told, instead of deep inside the tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"text is not valid Unicode: lone surrogate at character {error.start}") from None
    return text


def _stand_ins(controls: dict[str, Any]) -> dict[str, str]:
    """Random, so that no caller can write one; two private-use characters keep them apart from words."""
    return {text: f"\U000ffffc{secrets.token_hex(16)}\U000ffffd" for text in controls}


def _plain_edition(backend_json: str, controls: dict[str, Any], stand_ins: dict[str, str]) -> Backend:
    description = json.loads(backend_json)
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] not in controls]
    plain = Backend.from_str(json.dumps(description))
    plain.no_padding()
    plain.no_truncation()
    plain.add_special_tokens(
        [
            AddedToken(
                stand_ins[text],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
                special=True,
            )
            for text, (_, token) in controls.items()
        ]
    )
    return plain


def _translation(plain: Backend, added: dict[int, Any], stand_ins: dict[str, str]) -> dict[int, int]:
    """Ids of the plain edition's added tokens → the true ids of what they stand for."""
    table: dict[int, int] = {}
    for true_id, token in added.items():
        plain_id = plain.token_to_id(stand_ins.get(token.content, token.content))
        assert plain_id is not None
        table[plain_id] = true_id
    return table
