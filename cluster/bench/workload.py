"""The workloads: what is asked, in what shape. Text is made from the seed, so a new seed finds no warm cache.

A  shared prefixes: 8 system prompts (about 600 tokens) × 12 questions, 32 output tokens, 8 at a time
B  unique: 48 prompts (about 300 tokens), 64 output tokens, 8 at a time
C  multi-turn: 12 conversations × 4 turns that grow with the server's own answers, 32 output tokens, 6 at a time
W  warm-up: 8 prompts of mixed length, 16 output tokens
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

WorkloadName = Literal["A", "B", "C", "W"]
Message = dict[str, str]

_WORD_LIST = """
account animal answer borrow bridge bring budget build careful carry change choose clear collect compare
computer contract country customer decide describe discover distant doctor early engine evening explain famous
follow forest garden gather gentle green history holiday honest improve include invite island kitchen language
late letter library listen market measure meeting message modern morning mountain music narrow network notice
number offer paper perfect picture prepare private product project promise protect public quality question
quiet rapid receive remember repeat replace report return river science secret select service silver simple
station story sudden summer table teacher ticket travel village weather window winter yellow
"""
_WORDS = _WORD_LIST.split()


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages added to the conversation before the next answer. `template` names the registered prompt they render."""

    messages: tuple[Message, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    turns: tuple[Turn, ...]
    user: int  # index of the user it belongs to
    system: str | None = None  # the shared system prompt, when the workload has one


def default_concurrency(name: WorkloadName) -> int:
    return {"A": 8, "B": 8, "C": 6, "W": 8}[name]


def build_workload(name: WorkloadName, seed: str, num_users: int) -> list[Conversation]:
    """Conversations in the order in which they are started; users are dealt out in turn."""
    rng = random.Random(f"watchword/{name}/{seed}")
    match name:
        case "A":
            return _shared_prefixes(rng, num_users)
        case "B":
            return [_single(_text(rng, 245), 64, index % num_users) for index in range(48)]
        case "C":
            return [_multi_turn(rng, index % num_users) for index in range(12)]
        case "W":
            return [_single(_text(rng, 20 + 60 * index), 16, index % num_users) for index in range(8)]


def _shared_prefixes(rng: random.Random, num_users: int) -> list[Conversation]:
    conversations = []
    for _ in range(8):
        system = _text(rng, 545)
        for user in range(12):
            question = {"role": "user", "content": f"User {user}: " + _text(rng, 20)}
            turn = Turn(({"role": "system", "content": system}, question), 32)
            conversations.append(Conversation((turn,), user % num_users, system))
    rng.shuffle(conversations)
    return conversations


def _multi_turn(rng: random.Random, user: int) -> Conversation:
    first = Turn(({"role": "system", "content": _text(rng, 50)}, {"role": "user", "content": _text(rng, 50)}), 32)
    rest = (Turn(({"role": "user", "content": _text(rng, 40)},), 32) for _ in range(3))
    return Conversation((first, *rest), user)


def _single(content: str, max_tokens: int, user: int) -> Conversation:
    return Conversation((Turn(({"role": "user", "content": content},), max_tokens),), user)


def _text(rng: random.Random, num_words: int) -> str:
    sentences = []
    while num_words > 0:
        length = min(num_words, rng.randint(6, 14))
        words = [rng.choice(_WORDS) for _ in range(length)]
        sentences.append(" ".join([words[0].capitalize(), *words[1:]]) + ".")
        num_words -= length
    return " ".join(sentences)
