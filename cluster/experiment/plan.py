"""The rounds of an experiment, decided before it starts: a seed gives the plan, and a recorded plan can be replayed.

A plan knows text, users and arrival steps; it knows nothing of tokens, engines or servers.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

from cluster.experiment.markers import MarkerRegistry
from cluster.experiment.wordings import WORDINGS, Message, Wording
from cluster.experiment.workload import Workload

FILLER = "filler"
_USERS = ("ada", "bo", "chen", "dina")
_NEUTRAL_TEXT = (
    "river stone garden window paper table summer bread music lamp mountain letter cloud bridge forest shoe "
    "kitchen harbour wheel candle meadow pencil train orange"
)
_NEUTRAL_WORDS = _NEUTRAL_TEXT.split()


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a round. `role` is "A", "B", … for a marked request and "filler" for the others."""

    name: str  # unique within the plan
    role: str
    user: str
    marker: str
    language: str
    messages: tuple[Message, ...]
    max_tokens: int
    arrival_step: int  # counted from the start of the round, on the engine's step clock
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int = 4
    stream: bool = False
    abort_after_tokens: int | None = None
    num_choices: int = 1
    session: str | None = None  # conversation of the user's; None: the request names none
    region: str | None = None  # value of the registered template's shared variable; None: a raw request
    ignore_eos: bool = False
    reversed_after: int | None = (
        None  # the prompt's tokens from here on are sent in reverse: other content, same length
    )

    @property
    def owner(self) -> str:
        """Whose blocks these are: the user, or one conversation of the user's."""
        return self.user if self.session is None else f"{self.user}, {self.session}"

    @property
    def is_marked(self) -> bool:
        return self.role != FILLER


@dataclass(frozen=True, slots=True)
class Round:
    index: int
    requests: tuple[PlannedRequest, ...]  # in order of arrival

    @property
    def marked(self) -> tuple[PlannedRequest, ...]:
        return tuple(request for request in self.requests if request.is_marked)


@dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    workload: Workload
    rounds: tuple[Round, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        record = json.loads(text)
        rounds = tuple(
            Round(entry["index"], tuple(_request_from(fields) for fields in entry["requests"]))
            for entry in record["rounds"]
        )
        return cls(record["seed"], _workload_from(record["workload"]), rounds)


def make_plan(seed: int, num_rounds: int, workload: Workload) -> Plan:
    """Raises ValueError unless there is at least one round."""
    if num_rounds < 1:
        raise ValueError(f"rounds = {num_rounds}, wanted at least 1")
    rng = random.Random(seed)
    planner = _Planner(workload, rng, MarkerRegistry(rng))
    return Plan(seed, workload, tuple(planner.round(index) for index in range(num_rounds)))


class _Planner:
    def __init__(self, workload: Workload, rng: random.Random, registry: MarkerRegistry) -> None:
        self._workload = workload
        self._rng = rng
        self._registry = registry

    def round(self, index: int) -> Round:
        load = self._workload
        common = self._words(round(max(load.context_words) * load.prefix_similarity))
        wording = WORDINGS[load.wording_of(index)]
        roles = [FILLER] * load.num_fillers + [_role(number) for number in range(load.concurrency)]
        # A and B belong to one user in every other round: a leak between two conversations of one user counts too.
        # Where conversations are named, all are the same user's in every round: only the session tells them apart.
        users = _USERS if load.num_sessions else self._rng.sample(_USERS, len(_USERS))
        num_users = 1 if index % 2 or load.num_sessions else len(users)
        requests = []
        for number, role in enumerate(roles):
            name = f"r{index}.{role}" if role != FILLER else f"r{index}.filler{number}"
            requests.append(self._request(name, role, number, users[number % num_users], wording, common))
        return Round(index, tuple(requests))

    def _request(
        self, name: str, role: str, number: int, user: str, wording: Wording, common: list[str]
    ) -> PlannedRequest:
        load, rng = self._workload, self._rng
        marker = self._registry.issue(name)
        is_filler = role == FILLER
        aborts = is_filler and rng.random() < load.abort_fraction
        sampling: dict[str, Any] = _mixed_sampling(rng) if load.mixed_sampling else {}
        return PlannedRequest(
            name=name,
            role=role,
            user=user,
            marker=marker,
            language=wording.language,
            messages=self._messages(wording, marker, number, common),
            max_tokens=load.filler_max_tokens if is_filler else load.max_tokens,
            arrival_step=number * load.arrival_gap_steps,
            stream=number % 2 == 0 if load.stream is None else load.stream,
            abort_after_tokens=rng.randint(1, 8) if aborts else None,
            session=f"conversation {number % load.num_sessions}" if load.num_sessions else None,
            # In turn: two spellings of one region must meet, or a key without variables would not show.
            region=load.regions[number % len(load.regions)] if load.regions else None,
            ignore_eos=load.ignore_eos,
            **sampling,
        )

    def _messages(self, wording: Wording, marker: str, number: int, common: list[str]) -> tuple[Message, ...]:
        question = wording.question(self._rng)
        own = self._words(self._workload.context_words[number % 2] - len(common))
        context = " ".join(common + own)
        messages = list(wording.build(marker, question))
        if context:
            role, content = messages[0]
            messages[0] = (role, f"{context}. {content}")
        for turn in range(1, self._workload.num_turns):
            messages[-1:-1] = [("user", wording.question(self._rng)), ("assistant", f"{marker}. I see, part {turn}.")]
        return tuple(messages)

    def _words(self, count: int) -> list[str]:
        return [self._rng.choice(_NEUTRAL_WORDS) for _ in range(max(0, count))]


def _mixed_sampling(rng: random.Random) -> dict[str, Any]:
    return {
        "temperature": rng.choice((0.0, 0.0, 0.3, 0.8)),
        "top_p": rng.choice((1.0, 0.9)),
        "seed": rng.getrandbits(32),
        "stop": rng.choice(((), (), (".",), ("e", "a", "o", "s"))),
        "logprobs": rng.choice((0, 1, 4)),
        "num_choices": rng.choice((1, 1, 1, 2)),
    }


def _role(number: int) -> str:
    """A, B, … Z, then C26, C27, …"""
    return chr(ord("A") + number) if number < 26 else f"C{number}"


def _request_from(fields: dict[str, Any]) -> PlannedRequest:
    messages = tuple((role, content) for role, content in fields["messages"])
    return PlannedRequest(**{**fields, "messages": messages, "stop": tuple(fields["stop"])})


def _workload_from(fields: dict[str, Any]) -> Workload:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Workload(**{**fields, **lists})
