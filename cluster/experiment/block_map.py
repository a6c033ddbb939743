"""Who had which block when: turns block events into spans, and the spans into a picture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cluster.experiment import svg
from cluster.experiment.event_file import BlockEvent

_WIDTH, _LEFT, _TOP, _BOTTOM = 1000.0, 60.0, 18.0, 26.0
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


@dataclass(frozen=True, slots=True)
class Mark:
    """Something found wrong at one block in one step; `block` None: in the step as a whole."""

    step: int
    block: int | None
    what: str


def block_map(events: Sequence[BlockEvent], marks: Sequence[Mark] = ()) -> str:
    """SVG of the first steps of the first life; hover names the holder. Red frames and lines are the marks."""
    first_life = [event for event in events if event.life == events[0].life and event.step <= _MAX_STEPS]
    if not first_life:
        return "<p>No block events.</p>"
    last_step = first_life[-1].step
    shown = [span for span in spans(first_life, last_step) if span.block < _MAX_BLOCKS]
    num_blocks = max((span.block for span in shown), default=0) + 1
    scale = _Scale((_WIDTH - _LEFT) / max(last_step, 1), max(3.0, min(480.0 / num_blocks, 12.0)), num_blocks, last_step)
    # After a restart steps count from 1 again, and a mark does not say of which life it is.
    is_one_life = events[-1].life == events[0].life
    shapes = [
        *_rounds(first_life, scale),
        *_spans(shown, scale),
        *(_marks(marks, scale) if is_one_life else ()),
        *_axes(scale),
    ]
    return svg.figure(_WIDTH, scale.bottom + _BOTTOM, shapes, "which request held which block at which step")


@dataclass(frozen=True, slots=True)
class _Scale:
    per_step: float
    per_block: float
    num_blocks: int
    last_step: int

    def x(self, step: int) -> float:
        return _LEFT + step * self.per_step

    def y(self, block: int) -> float:
        return _TOP + block * self.per_block

    @property
    def bottom(self) -> float:
        return self.y(self.num_blocks)


def _rounds(events: Sequence[BlockEvent], scale: _Scale) -> Iterator[str]:
    """A band behind every other round, named at the top: requests are called rN.…"""
    begins: dict[str, int] = {}
    for event in events:
        name = (event.request or "").partition(".")[0]
        if name.startswith("r") and name[1:].isdigit():
            begins.setdefault(name, event.step)
    ends = [*list(begins.values())[1:], scale.last_step]
    for (name, begin), end in zip(begins.items(), ends, strict=False):
        width = scale.x(end) - scale.x(begin)
        if int(name[1:]) % 2:
            yield svg.rect(scale.x(begin), _TOP, width, scale.bottom - _TOP, "#f2f2f2")
        if width > 70:
            yield svg.text(scale.x(begin) + width / 2, _TOP - 5, f"round {name[1:]}", "middle", 11)


def _spans(shown: Sequence[Span], scale: _Scale) -> Iterator[str]:
    colours: dict[str, str] = {}
    for span in shown:
        colour = colours.setdefault(span.holder, _COLOURS[len(colours) % len(_COLOURS)])
        state = "cached, from" if span.is_cached else "held by"
        title = f"block {span.block}, steps {span.start} to {span.end}: {state} {span.holder}"
        width = scale.x(span.end) - scale.x(span.start)
        opacity = 0.25 if span.is_cached else 1.0
        yield svg.rect(scale.x(span.start), scale.y(span.block), width, scale.per_block - 0.6, colour, title, opacity)


def _marks(marks: Sequence[Mark], scale: _Scale) -> Iterator[str]:
    for mark in marks:
        if mark.step > scale.last_step or (mark.block or 0) >= scale.num_blocks:
            continue
        top, height = (_TOP, scale.bottom - _TOP) if mark.block is None else (scale.y(mark.block), scale.per_block)
        width = max(scale.per_step, 3.0)
        yield svg.frame(scale.x(mark.step), top, width, height, "#c0281c", f"step {mark.step}: {mark.what}")


def _axes(scale: _Scale) -> Iterator[str]:
    yield svg.line(_LEFT, scale.bottom, _WIDTH, scale.bottom)
    for step in _ticks(scale.last_step):
        yield svg.line(scale.x(step), scale.bottom, scale.x(step), scale.bottom + 4)
        anchor = "end" if scale.x(step) > _WIDTH - 20 else "middle"
        yield svg.text(scale.x(step), scale.bottom + 17, f"step {step}" if step == 0 else str(step), anchor, 11)
    for block in _ticks(scale.num_blocks - 1):
        y = scale.y(block) + scale.per_block / 2
        yield svg.text(_LEFT - 6, y + 4, f"block {block}" if block == 0 else str(block), "end", 11)


def _ticks(last: int) -> list[int]:
    """Round numbers from 0 on, at most a dozen."""
    step = next(size * 10**power for power in range(9) for size in (1, 2, 5) if last <= 11 * size * 10**power)
    return list(range(0, last + 1, step))
