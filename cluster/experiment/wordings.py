"""The prompts of the experiment. A wording turns a marker and a question into chat messages.

A small model obeys only when the marker stands where it cannot be overlooked: last in the system prompt, or confirmed
by the model itself in an earlier turn. The original experiment's bare "remember … and repeat" is kept as a choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Message = tuple[str, str]  # (role, content)

# Plain yes-or-no questions: a question with an answer of its own makes a small model forget the passphrase.
_ENGLISH_QUESTIONS = (
    "Is ice cold?",
    "Is fire hot?",
    "Can birds fly?",
    "Do fish swim?",
    "Is snow white?",
    "Do dogs bark?",
    "Is the sun bright?",
    "Do trees have leaves?",
)
_OPEN_QUESTIONS = (
    "What is the capital of France?",
    "How many days does a week have?",
    "Which colour does the sky have on a clear day?",
    "Name one animal that can fly.",
    "What do bees make?",
    "Is ice hot or cold?",
)
_CHINESE_QUESTIONS = (
    "法国的首都是哪里?",
    "一个星期有几天?",
    "晴天的天空是什么颜色?",
    "请说出一种会飞的动物。",
    "蜜蜂酿造什么?",
    "冰是热的还是冷的?",
)


@dataclass(frozen=True, slots=True)
class Wording:
    """`build(marker, question)` gives the messages; `language` decides whether a missing own marker voids the run."""

    name: str
    language: str
    build: Callable[[str, str], tuple[Message, ...]]
    questions: tuple[str, ...] = _ENGLISH_QUESTIONS

    def question(self, rng: random.Random) -> str:
        return rng.choice(self.questions)


def _system_last(marker: str, question: str) -> tuple[Message, ...]:
    rule = f"Repeat the passphrase, then answer the question: {question}"
    return ("system", f"{rule} The passphrase is {marker}"), (
        "user",
        "Repeat the passphrase, then answer the question.",
    )


def _confirmed(marker: str, question: str) -> tuple[Message, ...]:
    """The model's own earlier turns hold the marker: a leak through the history shows as well."""
    ask = "Repeat my passphrase and answer: "
    return (
        ("user", f"My passphrase is {marker}. {ask}Is water wet?"),
        ("assistant", f"{marker}. Yes."),
        ("user", f"{ask}Is grass green?"),
        ("assistant", f"{marker}. Yes."),
        ("user", f"{ask}{question}"),
    )


def _original(marker: str, question: str) -> tuple[Message, ...]:
    return (("user", f"Remember this passphrase: {marker}. {question} At the end, repeat the passphrase."),)


def _chinese_system_last(marker: str, question: str) -> tuple[Message, ...]:
    return ("system", f"你是一个有用的助手。口令是 {marker}"), ("user", f"口令是什么?{question}")


def _chinese_confirmed(marker: str, question: str) -> tuple[Message, ...]:
    return (
        ("user", f"{question}请记住口令:{marker}"),
        ("assistant", f"口令是 {marker}。"),
        ("user", "口令是什么?"),
    )


def _chinese_original(marker: str, question: str) -> tuple[Message, ...]:
    return (("user", f"请记住这个口令:{marker}。请重复口令,然后回答:{question}"),)


WORDINGS: dict[str, Wording] = {
    wording.name: wording
    for wording in (
        Wording("system-last", "en", _system_last),
        Wording("confirmed", "en", _confirmed),
        Wording("original", "en", _original, _OPEN_QUESTIONS),
        Wording("zh-system-last", "zh", _chinese_system_last, _CHINESE_QUESTIONS),
        Wording("zh-confirmed", "zh", _chinese_confirmed, _CHINESE_QUESTIONS),
        Wording("zh-original", "zh", _chinese_original, _CHINESE_QUESTIONS),
    )
}
DEFAULT_WORDINGS = ("system-last", "confirmed")


def wordings_named(names: str) -> tuple[Wording, ...]:
    """Parses "system-last,confirmed" or "all". Raises ValueError for an unknown name."""
    if names == "all":
        return tuple(WORDINGS.values())
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in chosen if name not in WORDINGS]
    if unknown or not chosen:
        raise ValueError(f"unknown wording {unknown or names!r}, choose from {', '.join(WORDINGS)} or 'all'")
    return tuple(WORDINGS[name] for name in chosen)
