"""Markers are unique, and the search sees them in every disguise without raising false alarms."""

from __future__ import annotations

import random

import pytest

from cluster.experiment.markers import Form, MarkerRegistry, split_halves


@pytest.fixture
def registry() -> MarkerRegistry:
    registry = MarkerRegistry(random.Random(1))
    registry.register("XKCD7391", "alice")
    registry.register("QWRT5208", "bob")
    return registry


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("The passphrase is XKCD7391.", Form.WHOLE),
        ("xkcd7391", Form.CASE),
        ("X K C D 7 3 9 1", Form.SPACED),
        ("XKCD-\n7391", Form.SPACED),
        ("x.k.c.d.7.3.9.1", Form.SPACED),
        ("It begins with XKCD and, as I recall, ends with 7391.", Form.SPLIT),
    ],
)
def test_search_sees_every_disguise(registry: MarkerRegistry, text: str, form: Form) -> None:
    (sighting,) = registry.search(text)
    assert (sighting.marker, sighting.owner, sighting.form) == ("XKCD7391", "alice", form)


@pytest.mark.parametrize("text", ["", "Paris is the capital.", "XKCD7392", "7391 XKCD", "XKC 7391", "口令是"])
def test_search_sees_nothing_where_there_is_nothing(registry: MarkerRegistry, text: str) -> None:
    assert registry.search(text) == ()


def test_own_marker_is_ignored_and_the_partners_is_not(registry: MarkerRegistry) -> None:
    found = registry.search("XKCD7391 and QWRT5208", ignore=["QWRT5208"])
    assert [sighting.marker for sighting in found] == ["XKCD7391"]


def test_markers_of_a_long_run_never_meet_by_chance() -> None:
    """20,000 answers that repeat their own marker, searched for all 20,000 markers: no false alarm."""
    registry = MarkerRegistry(random.Random(7))
    markers = [registry.issue(f"r{index}") for index in range(20_000)]
    assert len(set(markers)) == len(markers)
    alarms = [registry.search(f"{marker}. It is {marker}, and 365 days.", ignore=[marker]) for marker in markers]
    assert not any(alarms)


def test_markers_have_six_to_ten_characters() -> None:
    registry = MarkerRegistry(random.Random(3))
    lengths = {len(registry.issue("x")) for _ in range(500)}
    assert lengths == {6, 7, 8, 9, 10}


def test_same_seed_same_markers() -> None:
    first, second = (MarkerRegistry(random.Random(5)) for _ in range(2))
    assert [first.issue("a") for _ in range(50)] == [second.issue("b") for _ in range(50)]


@pytest.mark.parametrize("text", ["", "XK7391", "XKCD", "xkcd7391", "XKCDEF7391", "XKCD 7391", "7391XKCD"])
def test_malformed_markers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no marker"):
        split_halves(text)
