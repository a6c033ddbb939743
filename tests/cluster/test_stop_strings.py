"""Where a stop string cuts, and that nothing after it is ever shown, however the text arrives in pieces."""

from __future__ import annotations

from front_door import EOS, byte_table
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.api.output import ChoiceDelta, FinishReason
from cluster.serving.choice_text import ChoiceText
from cluster.serving.stop_strings import StopMatch, StopStringMatcher

TABLE = byte_table()
# A small alphabet makes overlaps, borders and near misses common; it has characters of 1, 2 and 4 bytes.
texts = st.text(alphabet="aé🦊", max_size=30)
stop_lists = st.lists(st.text(alphabet="aé🦊", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(1, 7), max_size=60)


def expected_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first at which a stop string is complete ends it, the longest is removed."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces_of(data: bytes, sizes: list[int]) -> list[bytes]:
    pieces = []
    for size in [*sizes, len(data)]:
        if data:
            pieces.append(data[:size])
            data = data[size:]
    return pieces


@settings(max_examples=400, deadline=None)
@given(texts, stop_lists, cuts)
def test_streamed_text_equals_whole_text_equals_the_expected_cut(text: str, stops: list[str], sizes: list[int]) -> None:
    whole = run(text, stops, [10_000])
    streamed = run(text, stops, sizes)
    assert "".join(streamed[0]) == "".join(whole[0])
    assert ("".join(streamed[0]), streamed[1]) == expected_cut(text, stops)
    assert streamed[2] == whole[2]


def run(text: str, stops: list[str], sizes: list[int]) -> tuple[list[str], str | int | None, int]:
    """Shown pieces, stop reason, counted tokens; one token is one byte."""
    choice = ChoiceText(0, TABLE, tuple(stops), min_tokens=0, skip_special_tokens=True)
    data = text.encode()
    shown: list[str] = []
    reason: str | int | None = None
    position = 0
    for piece in pieces_of(data, sizes) or [b""]:
        position += len(piece)
        is_last = position == len(data)
        tokens = (*piece, EOS) if is_last else tuple(piece)
        delta = ChoiceDelta(0, tokens, None, FinishReason.STOP if is_last else None, EOS if is_last else None)
        told = choice.feed(delta)
        if told is not None:
            shown.append(told.text)
            reason = told.stop_reason if told.finish_reason else reason
    assert choice.is_finished
    return shown, None if reason == EOS else reason, choice.num_tokens


@settings(max_examples=400, deadline=None)
@example("aébb", ["aébb", "é"], [100])  # the one that is complete first counts, not the one that starts first
@example("aéb", ["b", "éb"], [100])
@given(texts, stop_lists, cuts)
def test_the_cut_does_not_depend_on_how_many_characters_a_token_has(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    matcher = StopStringMatcher(stops)
    shown, position = "", 0
    for size in [*sizes, len(text)]:
        result = matcher.feed(text[position : position + size])
        position += size
        if isinstance(result, StopMatch):
            assert (shown + result.text, result.stop) == expected_cut(text, stops)
            return
        shown += result
    assert (shown + matcher.flush(), None) == expected_cut(text, stops)


@settings(max_examples=200, deadline=None)
@given(texts, stop_lists, cuts)
def test_held_text_is_always_the_start_of_a_stop_string(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopStringMatcher(stops)
    position = 0
    shown = ""
    for size in [*sizes, len(text)]:
        result = matcher.feed(text[position : position + size])
        position += size
        if isinstance(result, StopMatch):
            return
        shown += result
        assert matcher.held == "" or any(stop.startswith(matcher.held) for stop in stops)
        assert shown + matcher.held == text[:position]


def test_the_counted_tokens_end_with_the_stop_string() -> None:
    """The engine may have sent more in the same message."""
    assert run("one STOP and much more", ["STOP"], [100]) == (["one "], "STOP", len("one STOP"))


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    choice = ChoiceText(0, TABLE, ("x",), min_tokens=4, skip_special_tokens=True)
    first = choice.feed(ChoiceDelta(0, tuple(b"axb")))
    assert first is not None
    assert (first.text, first.finish_reason) == ("axb", None)
    second = choice.feed(ChoiceDelta(0, tuple(b"cxd")))
    assert second is not None
    assert (second.text, second.finish_reason, choice.num_tokens) == ("c", FinishReason.STOP, 5)


def test_a_character_that_never_completes_shows_as_a_replacement() -> None:
    choice = ChoiceText(0, TABLE, (), min_tokens=0, skip_special_tokens=True)
    first = choice.feed(ChoiceDelta(0, tuple("é".encode()[:1])))
    last = choice.feed(ChoiceDelta(0, (), None, FinishReason.LENGTH))
    assert first is not None
    assert last is not None
    assert (first.text, last.text) == ("", "\ufffd")


def test_control_tokens_are_left_out_unless_asked_for() -> None:
    for skip, expected in ((True, "ab"), (False, "a<|start|>b")):
        choice = ChoiceText(0, TABLE, (), min_tokens=0, skip_special_tokens=skip)
        told = choice.feed(ChoiceDelta(0, (ord("a"), 257, ord("b")), None, FinishReason.LENGTH))
        assert told is not None
        assert told.text == expected
