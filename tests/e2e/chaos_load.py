"""Load whose every answer is known beforehand, and the verdict over what came back.

Each question carries a marker that no other one has. Its right answer is what the server said when it was asked alone,
at temperature 0. Under chaos every request must end in exactly that answer or in one typed error after a prefix of it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

MODEL = "smollm2-135m-instruct"
ABOUT = ("Is ice cold?", "Is fire hot?", "Can birds fly?", "Do fish swim?", "Is snow white?", "Do dogs bark?")
TYPED_ERRORS = {"worker_lost", "overloaded", "unavailable", "deadline_exceeded"}
PATIENCE_S = 240.0  # what does not come in this time hangs, however slow the machine
CONNECTION_ERRORS = (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError)


@dataclass(frozen=True)
class Question:
    marker: str
    about: str
    answer: str = ""

    @property
    def messages(self) -> list[dict[str, str]]:
        """The small model repeats a marker that it has confirmed before."""
        ask = "Repeat my passphrase and answer: "
        turns = (
            ("user", f"My passphrase is {self.marker}. {ask}Is water wet?"),
            ("assistant", f"{self.marker}. Yes."),
            ("user", f"{ask}Is grass green?"),
            ("assistant", f"{self.marker}. Yes."),
            ("user", f"{ask}{self.about}"),
        )
        return [{"role": role, "content": content} for role, content in turns]


@dataclass
class Outcome:
    """`end`: done, error (typed, by the server), broken (the connection went) or left (the client went)."""

    question: Question
    end: str = "running"
    text: str = ""
    code: str = ""
    retry_after: str | None = None
    server_id: str = ""  # the server's own name for the request
    worker: str = ""  # that it began on, where the server shows it


@dataclass
class Behaviour:
    """What clients do besides reading to the end."""

    leave_share: float = 0.0  # of the requests: gone after a few chunks
    request_id: str | None = None  # sent as X-Request-ID by everybody


@dataclass
class Load:
    """`streaming` are requests of which at least one token has been read and the last one has not."""

    url: str
    key: str
    max_tokens: int = 20
    outcomes: list[Outcome] = field(default_factory=list)
    streaming: set[int] = field(default_factory=set)

    @property
    def share_ended(self) -> float:
        return sum(outcome.end != "running" for outcome in self.outcomes) / max(1, len(self.outcomes))

    async def run(
        self, questions: Sequence[Question], num_requests: int, concurrency: int, behaviour: Behaviour | None = None
    ) -> list[Outcome]:
        """Every question is asked equally often, in random order, by users of its own."""
        behaviour = behaviour or Behaviour()
        draw = random.Random(7)
        todo = [questions[number % len(questions)] for number in range(num_requests)]
        draw.shuffle(todo)
        numbered = iter(list(enumerate(todo)))
        self.outcomes = [Outcome(question) for question in todo]
        # A connection each, so that gateways which share the port share the load.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def client() -> None:
                for number, _ in numbered:
                    leave_after = draw.randint(1, 6) if draw.random() < behaviour.leave_share else None
                    await self._ask(session, number, leave_after, behaviour.request_id)

            await asyncio.gather(*(client() for _ in range(concurrency)))
        return self.outcomes

    async def _ask(
        self, session: aiohttp.ClientSession, number: int, leave_after: int | None, request_id: str | None
    ) -> None:
        outcome = self.outcomes[number]
        headers = {"Authorization": f"Bearer {self.key}"} | ({"X-Request-ID": request_id} if request_id else {})
        body = {
            "model": MODEL,
            "messages": outcome.question.messages,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,  # all streams are equally long
            "stream": True,
            "user": f"user-{number}",
        }
        try:
            async with session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
                outcome.server_id = response.headers.get("x-watchword-request-id", "")
                outcome.worker = response.headers.get("x-watchword-worker", "")
                if response.status != 200:
                    outcome.retry_after = response.headers.get("retry-after")
                    outcome.end, outcome.code = "error", (await response.json())["error"]["code"]
                    return
                await self._read(response, outcome, number, leave_after)
        except CONNECTION_ERRORS:
            outcome.end = "broken"
        finally:
            self.streaming.discard(number)

    async def _read(
        self, response: aiohttp.ClientResponse, outcome: Outcome, number: int, leave_after: int | None
    ) -> None:
        num_chunks = 0
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            payload = line[6:].strip()
            if payload == b"[DONE]":
                outcome.end = "done" if outcome.end == "running" else outcome.end
                return
            chunk = json.loads(payload)
            if "error" in chunk:
                outcome.end, outcome.code = "error", chunk["error"]["code"]
                continue
            text = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            outcome.text += text
            if text:
                num_chunks += 1
                self.streaming.add(number)
            if leave_after is not None and num_chunks >= leave_after:
                outcome.end = "left"
                return  # closes the connection
        outcome.end = "broken" if outcome.end == "running" else outcome.end


def make_questions(count: int) -> list[Question]:
    draw = random.Random(2024)
    questions = []
    for number in range(count):
        marker = "".join(draw.choice("BCDFGHJKLMNPQRSTVWXZ") for _ in range(3)) + str(100 + 17 * number)
        questions.append(Question(marker, ABOUT[number % len(ABOUT)]))
    return questions


async def answer_alone(url: str, key: str, questions: Sequence[Question], max_tokens: int = 20) -> list[Question]:
    """The questions with the answers that the server gives when it has nothing else to do."""
    load = Load(url, key, max_tokens)
    outcomes = await load.run(questions, len(questions), concurrency=1)
    assert all(outcome.end == "done" for outcome in outcomes), Counter(outcome.end for outcome in outcomes)
    answered = [replace(o.question, answer=o.text) for o in outcomes]
    # The paired check: a foreign marker could be seen, since the model does repeat markers.
    num_marked = sum(question.marker in question.answer for question in answered)
    assert num_marked >= len(answered) // 4, f"only {num_marked} of {len(answered)} answers repeat their marker"
    return answered


def faults_of(outcomes: Sequence[Outcome]) -> list[str]:
    """What is wrong with any of them, in words."""
    faults = []
    markers = {outcome.question.marker for outcome in outcomes}
    for number, outcome in enumerate(outcomes):
        own, answer = outcome.question.marker, outcome.question.answer
        if outcome.end == "running":
            faults.append(f"{number}: no end at all")
        if outcome.end == "done" and outcome.text != answer:
            faults.append(f"{number}: said {outcome.text!r}, alone it said {answer!r}")
        if outcome.end != "done" and not answer.startswith(outcome.text):
            faults.append(f"{number}: {outcome.end} after {outcome.text!r}, which is no part of {answer!r}")
        if outcome.end == "error" and outcome.code not in TYPED_ERRORS:
            faults.append(f"{number}: error {outcome.code!r}")
        foreign = [marker for marker in markers - {own} if marker in outcome.text]
        if foreign:
            faults.append(f"{number}: foreign markers {foreign}")
    return faults


def ends_of(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return dict(Counter(f"{o.end}:{o.code}" if o.code else o.end for o in outcomes))


async def reach(load: Load, share: float, num_streaming: int) -> None:
    """Until that share of the requests has ended and so many stream."""
    while load.share_ended < share or len(load.streaming) < num_streaming:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value of `condition`, which may block for a moment: it runs in a thread."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not (value := await asyncio.to_thread(condition)):
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not happen within {timeout_s} s"
        await asyncio.sleep(0.05)
    return value
