"""Lines judged by what any client can see: who is let in, what is reported, who hits whose cache."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from typing import Any

from cluster.checks.inside import Evidence, key_faults
from cluster.checks.line import CheckLine, line
from cluster.checks.live_server import LiveServer, Reply

_GUARDED = ("/v1/models", "/metrics", "/v1/evidence")
_METRICS = (
    "watchword_isolation_violations_total",
    "watchword_contamination_probe_runs_total",
    "watchword_contamination_leaks_total",
    "watchword_worker_quarantined",
    "watchword_worker_up",
    "watchword_requests_total",
)
_RUNS = "watchword_contamination_probe_runs_total"
SETTLE_S = 0.7
_TRIES = 4
_STALE_PERIODS = 3


async def authentication(server: LiveServer, evidence: Evidence) -> CheckLine:
    faults = []
    if evidence["gateway"]["lets_anyone_in"]:
        faults.append("there are no API keys: whoever reaches the address is operator")
    refused = 0
    for path in _GUARDED:
        for what, key in (("no key", None), ("a wrong key", f"ww-{secrets.token_hex(8)}.{secrets.token_urlsafe(32)}")):
            status = (await server.get_as(key, path)).status
            if status == 401:
                refused += 1
            else:
                faults.append(f"{path} answered {status} to {what}")
    return line("authentication", faults, f"{refused} of {2 * len(_GUARDED)} calls without a valid key got 401")


async def monitoring(server: LiveServer, evidence: Evidence, patience_s: float = 60.0) -> CheckLine:
    """Waits a while for the first clean run of a sentinel that has only just started."""
    give_up_s = time.monotonic() + patience_s
    reply = await server.get("/metrics")
    while _waits_for_sentinel(reply, evidence) and time.monotonic() < give_up_s:
        await asyncio.sleep(1.0)
        reply = await server.get("/metrics")
    if reply.status != 200:
        return line("monitoring", [f"/metrics answered {reply.status}"], "")
    faults = [f"{name} is not among the metrics" for name in _METRICS if name not in reply.text]
    period_s = evidence["gateway"]["sentinel_period_s"]
    if period_s is None:
        faults.append("the sentinel is off")
    else:
        faults += _sentinel_faults(reply.text, period_s)
    if leaks := _total(reply.text, "watchword_contamination_leaks_total"):
        faults.append(f"the sentinel has found {leaks:.0f} leaks")
    runs = _total(reply.text, _RUNS)
    return line("monitoring", faults, f"all metrics are there, {runs:.0f} sentinel runs without a leak")


def _waits_for_sentinel(reply: Reply, evidence: Evidence) -> bool:
    is_on = evidence["gateway"]["sentinel_period_s"] is not None
    return is_on and reply.status == 200 and _total(reply.text, _RUNS) == 0


def _sentinel_faults(metrics: str, period_s: float) -> list[str]:
    age_s = time.time() - _total(metrics, "watchword_contamination_probe_last_run_seconds")
    clean = _total(metrics, 'watchword_contamination_probe_runs_total{result="clean"}')
    if not clean:
        return ["the sentinel has not finished a clean run"]
    return [f"the sentinel's last run was {age_s:.0f} s ago"] if age_s > _STALE_PERIODS * period_s + 60 else []


def _total(metrics: str, name: str) -> float:
    pattern = re.escape(name) + (r"(?:\{[^}]*\})?" if "{" not in name else "")
    return sum(float(value) for value in re.findall(rf"^{pattern} (\S+)$", metrics, flags=re.MULTILINE))


async def key_completeness(server: LiveServer, evidence: Evidence, settle_s: float) -> CheckLine:
    """The same prompt as others: nobody but the same user, salt and session may hit; the same user must."""
    faults = key_faults(evidence)
    models = await server.get("/v1/models")
    if models.status != 200:
        return line("key completeness", [*faults, f"/v1/models answered {models.status}"], "")
    model = models.body["data"][0]["id"]
    asker = _Asker(server, model)
    own = {"user": _fresh_name(), "cache_salt": _fresh_name(), "session_id": _fresh_name()}
    await asker.cached_tokens(own)
    hit = 0
    for _ in range(_TRIES):
        await asyncio.sleep(settle_s)
        hit = await asker.cached_tokens(own)
        if hit:
            break
    if not hit:
        faults.append("a repeated prompt of one user was not served from its cache: nothing else could be seen")
    # Of a prompt that nobody has sent yet, only a template's head can be cached.
    floor = await _Asker(server, model).cached_tokens({"user": _fresh_name()})
    for name in own:
        seen = await asker.cached_tokens(own | {name: _fresh_name()})
        if seen > floor:
            faults.append(f"another {name} got {seen} cached tokens of the same prompt")
    shown = f"every field counts; {hit} cached tokens for the same caller, {floor} for another user, salt or session"
    return line("key completeness", faults, shown)


def _fresh_name() -> str:
    """Of nobody who has a cache yet, this check's own earlier runs included."""
    return f"check-{secrets.token_hex(6)}"


class _Asker:
    """Sends one fresh prompt, again and again, under changing identities."""

    def __init__(self, server: LiveServer, model: str) -> None:
        self._server = server
        self._model = model
        words = " ".join(secrets.token_hex(3) for _ in range(24))
        self._message = {"role": "user", "content": f"{words} Say yes."}

    async def cached_tokens(self, identity: dict[str, str]) -> int:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [self._message],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_cache_key": "check",  # the same worker for all, or a miss would prove nothing
            **identity,
        }
        reply = await self._server.post("/v1/chat/completions", body)
        if reply.status != 200:
            return 0
        return int(reply.body["usage"]["prompt_tokens_details"]["cached_tokens"])
