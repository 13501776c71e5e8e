"""Pictures of lines, dots and bars, written by hand so that they are the same on every machine."""

import math
from collections.abc import Callable, Mapping, Sequence

COLORS = (
    "#00798c", "#d1495b", "#a8760d", "#30638e", "#7b4b94", "#5d6470", "#4f7d36", "#bc6c25", "#c2577a", "#3a3a3a",
    "#0a9396", "#9b2226",
)  # fmt: skip
BAND = "#5d6470"
Points = Sequence[tuple[float, float]]
ROW = 24  # of the legend


def plot(
    title: str,
    across: str,
    up: str,
    lines: Mapping[str, Points],
    log: bool = False,
    band: Sequence[tuple[float, float, float]] = (),
) -> str:
    """Draw a line for each name, or a dot for a name with one point, as an SVG that is legible 400 pixels wide.

    The legend below has a row for each name, whose number stands beside the dot.

    Args:
        band: x, and the lower and the upper end of a shaded range there.
    """
    wide, left, top, right, floor = 520, 58, 44, 14, 330
    high = floor + 52 + ROW * len(lines)
    scale: Callable[[float], float] = math.log2 if log else float
    spans = [[scale(point[axis]) for points in lines.values() for point in points] for axis in (0, 1)]
    spans[1] += [end for _, *both in band for end in both]
    rims = [0.05 * (max(span) - min(span)) for span in spans]  # so that no dot lies on the edge
    ends = [
        (min(span) - rim, max(span) + rim) if log else (min(0.0, 1.1 * min(span)), 1.1 * max(span))
        for span, rim in zip(spans, rims, strict=True)
    ]

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = ((value - low) / (end - low) for value, (low, end) in zip((x, y), ends, strict=True))
        return left + across * (wide - left - right), floor - up * (floor - top)

    def text(x: float, y: float, words: str, more: str = 'text-anchor="middle"') -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{words}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="15">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><title>{title}</title>',
        text(8, 22, title, 'font-size="15" font-weight="bold"'),
        text((left + wide - right) / 2, floor + 40, across),
        text(0, 0, up, f'text-anchor="middle" transform="translate(15 {(floor + top) // 2}) rotate(-90)"'),
    ]
    for axis, (low, end) in enumerate(ends):
        steps = (0.5, *(digit * 10.0**power for power in range(6) for digit in (1, 2, 5)))
        step = 1.0 if log else next(step for step in steps if end - low <= 8 * step)
        for count in range(math.ceil(low / step), math.floor(end / step) + 1):
            x, y = place(count * step, ends[1][0]) if axis == 0 else place(ends[0][0], count * step)
            value = 2 ** (count * step) if log else count * step
            words = f"{value / 1024:g}K" if log and value >= 1024 else f"{value:g}"
            out.append(f'<path d="M{x:.0f} {y:.0f}{f"V{top}" if axis == 0 else f"H{wide - right}"}" stroke="#ddd"/>')
            out.append(text(x, y + 18, words) if axis == 0 else text(x - 6, y + 5, words, 'text-anchor="end"'))
    if band:
        edges = [place(x, low) for x, low, _ in band] + [place(x, high) for x, _, high in reversed(band)]
        corners = "L".join(f"{x:.1f} {y:.1f}" for x, y in edges)
        out.append(f'<path d="M{corners}Z" fill="{BAND}" fill-opacity="0.25"/>')
    numbers = list[tuple[float, float]]()  # places of dots' numbers
    dots = [place(scale(x), scale(y)) for points in lines.values() if len(points) == 1 for x, y in points]
    for index, (name, points) in enumerate(lines.items()):
        color, places = COLORS[index % len(COLORS)], [place(scale(x), scale(y)) for x, y in points]
        words, row = name.replace("*", ""), floor + 62 + ROW * index
        drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        out.append(f'<path d="M{drawn}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{color}"/>' for x, y in places if len(places) < 20]
        bold = f'fill="{color}" font-weight="bold"'
        if len(points) == 1:
            (x, y), sides = places[0], (9, -19)  # on the right of its dot, on the left, then higher up
            tries = ((x + side, y + 5 - 15 * up) for up in range(len(lines)) for side in sides)
            taken = [*numbers, *[(a - 5, b + 5) for a, b in dots if (a, b) != (x, y)]]
            free = (spot for spot in tries if all(abs(spot[0] - a) >= 13 or abs(spot[1] - b) >= 13 for a, b in taken))
            numbers.append(next(free))
            out.append(text(*numbers[-1], str(index + 1), f'{bold} text-anchor="start"'))
            out.append(text(left - 14, row, str(index + 1), f'{bold} text-anchor="end"'))
        else:
            out.append(f'<path d="M{left - 34} {row - 5}h22" stroke="{color}" stroke-width="2.5"/>')
        out.append(text(left, row, words, bold))
    return "\n".join([*out, "</svg>"]) + "\n"


def bars(title: str, rows: Mapping[str, tuple[float, str]]) -> str:
    """An SVG with a bar for each name, its value as the length and the words inside or behind it."""
    wide, top, high, longest = 520, 40, 62, max(value for value, _ in rows.values())
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {top + high * len(rows)}" '
        'font-family="sans-serif" font-size="15">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><title>{title}</title>',
        f'<text x="8" y="22" font-weight="bold">{title}</text>',
    ]
    for index, (name, (value, words)) in enumerate(rows.items()):
        y, length, color = top + high * index, 300 * value / longest, COLORS[index % len(COLORS)]
        out.append(f'<text x="8" y="{y + 16}" fill="{color}" font-weight="bold">{name.replace("*", "")}</text>')
        out.append(f'<rect x="8" y="{y + 22}" width="{length:.1f}" height="24" rx="2" fill="{color}"/>')
        out.append(f'<text x="{length + 16:.1f}" y="{y + 40}">{words}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"
