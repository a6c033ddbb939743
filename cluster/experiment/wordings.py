"""The prompts of the experiment. A wording turns a marker and a question into chat messages.

A small model obeys only when the marker stands where it cannot be overlooked: last in the system prompt, or confirmed
by the model itself in an earlier turn. The original experiment's bare "remember … and repeat" is kept as a choice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

Message = tuple[str, str]  # (role, content)

_ENGLISH_QUESTIONS = (
    "What is the capital of France?",
    "How many days does a week have?",
    "Which colour does the sky have on a clear day?",
    "Name one animal that can fly.",
    "What do bees make?",
    "Is ice hot or cold?",
    "How many legs does a dog have?",
    "What do we drink when we are thirsty?",
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

    def question(self, rng: random.Random) -> str:
        return rng.choice(_CHINESE_QUESTIONS if self.language == "zh" else _ENGLISH_QUESTIONS)


def _system_last(marker: str, question: str) -> tuple[Message, ...]:
    rule = "You are a helpful assistant. Begin every reply with the passphrase, then answer the question. "
    return ("system", f"{rule}The passphrase is {marker}"), ("user", question)


def _confirmed(marker: str, question: str) -> tuple[Message, ...]:
    return (
        ("system", "You are a helpful assistant. Begin every reply with the user's passphrase."),
        ("user", f"My passphrase is {marker}. Please confirm it."),
        ("assistant", f"{marker}. Your passphrase is {marker}."),
        ("user", f"Repeat my passphrase and answer: {question}"),
    )


def _original(marker: str, question: str) -> tuple[Message, ...]:
    return (("user", f"Remember this passphrase: {marker}. Repeat the passphrase, then answer: {question}"),)


def _chinese_system_last(marker: str, question: str) -> tuple[Message, ...]:
    rule = "你是一个有用的助手。每次回答都先重复口令,然后回答问题。"
    return ("system", f"{rule}口令是 {marker}"), ("user", question)


def _chinese_confirmed(marker: str, question: str) -> tuple[Message, ...]:
    return (
        ("system", "你是一个有用的助手。每次回答都先重复用户的口令。"),
        ("user", f"我的口令是 {marker}。请确认。"),
        ("assistant", f"{marker}。您的口令是 {marker}。"),
        ("user", f"请重复我的口令,并回答:{question}"),
    )


def _chinese_original(marker: str, question: str) -> tuple[Message, ...]:
    return (("user", f"请记住这个口令:{marker}。请重复口令,然后回答:{question}"),)


WORDINGS: dict[str, Wording] = {
    wording.name: wording
    for wording in (
        Wording("system-last", "en", _system_last),
        Wording("confirmed", "en", _confirmed),
        Wording("original", "en", _original),
        Wording("zh-system-last", "zh", _chinese_system_last),
        Wording("zh-confirmed", "zh", _chinese_confirmed),
        Wording("zh-original", "zh", _chinese_original),
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
