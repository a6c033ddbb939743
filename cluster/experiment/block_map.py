"""Who had which block when: turns block events into spans, and the spans into a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.experiment import svg
from cluster.experiment.event_file import BlockEvent

_WIDTH, _LEFT, _BOTTOM = 1000.0, 60.0, 26.0
_MAX_STEPS = 400
_MAX_BLOCKS = 160
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")


@dataclass(frozen=True, slots=True)
class Span:
    """`holder` had the block (or left it in the cache, when `is_cached`) from step `start` up to `end`."""

    block: int
    start: int
    end: int
    holder: str
    is_cached: bool


def spans(events: Iterable[BlockEvent], last_step: int) -> list[Span]:
    """One life of an engine. A block that several requests share counts as its writer's."""
    found = []
    state: dict[int, tuple[int, str, int, bool]] = {}  # block -> (since, writer, holders, published)
    for event in events:
        since, writer, holders, published = state.get(event.block, (event.step, "", 0, False))
        if event.action in ("allocate", "evict"):
            if writer:
                found.append(Span(event.block, since, event.step, writer, holders == 0))
            holders, published = int(event.action == "allocate"), False
            state[event.block] = (event.step, event.request or "?" if holders else "", holders, published)
        elif event.action == "publish":
            state[event.block] = (since, writer, holders, True)
        elif event.action in ("reuse", "release"):
            change = 1 if event.action == "reuse" else -1
            is_turn = holders == 0 or holders + change == 0
            if is_turn and writer:
                found.append(Span(event.block, since, event.step, writer, holders == 0))
            is_gone = holders + change == 0 and not published
            state[event.block] = (
                event.step if is_turn else since,
                "" if is_gone else writer,
                holders + change,
                published,
            )
    for block, (since, writer, holders, _) in state.items():
        if writer:
            found.append(Span(block, since, last_step, writer, holders == 0))
    return found


def block_map(events: Sequence[BlockEvent]) -> str:
    """SVG of the first steps of the first life; hover names the holder."""
    first_life = [event for event in events if event.life == events[0].life and event.step <= _MAX_STEPS]
    if not first_life:
        return "<p>No block events.</p>"
    last_step = first_life[-1].step
    shown = [span for span in spans(first_life, last_step) if span.block < _MAX_BLOCKS]
    num_blocks = max((span.block for span in shown), default=0) + 1
    height = min(4.0 + 600.0 / num_blocks, 12.0)
    per_step = (_WIDTH - _LEFT) / max(last_step, 1)
    colours: dict[str, str] = {}
    shapes = []
    for span in shown:
        colour = colours.setdefault(span.holder, _COLOURS[len(colours) % len(_COLOURS)])
        state = "cached, from" if span.is_cached else "held by"
        title = f"block {span.block}, steps {span.start} to {span.end}: {state} {span.holder}"
        x, y = _LEFT + span.start * per_step, span.block * height
        opacity = 0.25 if span.is_cached else 1.0
        shapes.append(svg.rect(x, y, (span.end - span.start) * per_step, height - 0.6, colour, title, opacity))
    bottom = num_blocks * height
    shapes += [
        svg.line(_LEFT, bottom, _WIDTH, bottom),
        svg.text(_LEFT, bottom + 16, "step 0"),
        svg.text(_WIDTH, bottom + 16, f"step {last_step}", "end"),
        svg.text(4, 12, "block 0"),
        svg.text(4, bottom - 2, f"{num_blocks - 1}"),
    ]
    return svg.figure(_WIDTH, bottom + _BOTTOM, shapes, "which request held which block at which step")
