"""Token bytes from a vocabulary: equal to what the tokenizer itself decodes."""

from __future__ import annotations

import pytest
from prompt_rig import installed_table, installed_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.serving.token_table import TokenTable

TEXTS = [
    "hello world",
    "  two  spaces\n\ttab",
    "Zürich kostet 5 €",
    "你好，世界",
    "🦊 fox 👩‍👩‍👧",
    "a\u0301 e\u0301",
    "",
    "~!@#$%^&*()",
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens([AddedToken("Ġplain é", special=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """A Llama-like decoder: spaces are written ▁, unknown characters as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁", "wor", "ld", "é"]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_decode_as_the_tokenizer_does(text: str) -> None:
    tokenizer = byte_level()
    table = TokenTable.from_tokenizer(tokenizer)
    ids = tokenizer.encode(text).ids
    assert table.decode(ids) == tokenizer.decode(ids) == text
    for start in range(len(ids)):
        for end in range(start, len(ids) + 1):
            assert table.decode(ids[start:end]) == tokenizer.decode(ids[start:end])


def test_added_tokens_stand_as_they_are_and_control_tokens_can_be_left_out() -> None:
    tokenizer = byte_level()
    table = TokenTable.from_tokenizer(tokenizer)
    end, plain = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("Ġplain é")
    assert (table.is_special(end), table.is_special(plain)) == (True, False)
    assert table.bytes_of(plain) == "Ġplain é".encode()
    assert table.decode([end, plain]) == "<|end|>Ġplain é"
    assert table.decode([end, plain], skip_special_tokens=True) == "Ġplain é"


def test_sentencepiece_tokens_keep_the_space_that_a_whole_decoding_strips() -> None:
    """An answer continues a prompt: its first word's space belongs to it."""
    tokenizer = sentencepiece()
    table = TokenTable.from_tokenizer(tokenizer)
    ids = [
        tokenizer.token_to_id(piece)
        for piece in ("▁hello", "▁", "wor", "ld", "é", "<0xF0>", "<0x9F>", "<0xA6>", "<0x8A>")
    ]
    assert tokenizer.decode(ids) == "hello worldé🦊"
    assert table.decode(ids) == " hello worldé🦊"
    assert table.decode(ids[:-1]) == " hello worldé\ufffd"


def test_ids_outside_the_vocabulary_add_nothing() -> None:
    table = TokenTable.from_tokenizer(byte_level())
    assert table.bytes_of(len(table)) == b""
    assert table.bytes_of(-1) == b""


def test_a_decoder_without_bytes_is_refused_by_name() -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        TokenTable.from_tokenizer(tokenizer)


@pytest.mark.parametrize("text", TEXTS)
def test_the_installed_models_tokens_decode_as_its_tokenizer_does(text: str) -> None:
    tokenizer = installed_tokenizer().backend
    table = installed_table()
    ids = tokenizer.encode(f"<|im_start|>{text}<|im_end|>", add_special_tokens=False).ids
    for skip in (False, True):
        assert table.decode(ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert len(table) == tokenizer.get_vocab_size(with_added_tokens=True)
