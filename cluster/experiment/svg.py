"""A few SVG shapes as text. Enough for two plots, and nothing to install or fetch."""

from __future__ import annotations

from html import escape


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", opacity: float = 1.0) -> str:
    tip = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}" '
        f'fill="{fill}" fill-opacity="{opacity}">{tip}</rect>'
    )


def frame(x: float, y: float, width: float, height: float, stroke: str, title: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{stroke}" fill-opacity="0.15" '
        f'stroke="{stroke}" stroke-width="1.5"><title>{escape(title)}</title></rect>'
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = "#888", width: float = 1.0) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" stroke-width="{width}"/>'


def circle(x: float, y: float, radius: float, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}"/>'


def ring(x: float, y: float, radius: float, stroke: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="#fff" stroke="{stroke}" stroke-width="1.5"/>'


def text(x: float, y: float, content: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-family="system-ui, sans-serif" fill="#333" '
        f'text-anchor="{anchor}">{escape(content)}</text>'
    )


def figure(width: float, height: float, shapes: list[str], label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="100%" role="img" aria-label="{escape(label)}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(shapes)}</svg>'
    )
