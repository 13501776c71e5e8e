"""A picture of lines or dots."""

import math
from collections.abc import Callable, Mapping, Sequence

COLORS = ("#00798c", "#d1495b", "#edae49", "#30638e", "#7b4b94", "#5d6470", "#6a994e", "#bc6c25", "#e07a9b", "#3a3a3a")
Points = Sequence[tuple[float, float]]


def plot(title: str, across: str, up: str, lines: Mapping[str, Points], log: bool = False) -> str:
    """An SVG, written by hand so that it is the same on every machine: a line for each name, or a dot for one point."""
    wide, high, left, top, right, bottom = 720, 400, 62, 40, 200, 52
    scale: Callable[[float], float] = math.log2 if log else float
    spans = [[scale(point[axis]) for points in lines.values() for point in points] for axis in (0, 1)]
    ends = [(min(span), max(span)) if log else (0.0, 1.1 * max(span)) for span in spans]

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = ((value - low) / (end - low) for value, (low, end) in zip((x, y), ends, strict=True))
        return left + across * (wide - left - right), high - bottom - up * (high - top - bottom)

    def text(x: float, y: float, words: str, more: str = 'text-anchor="middle"') -> str:
        return f'<text x="{x:.0f}" y="{y:.0f}" {more}>{words}</text>'

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>', text(left, 22, title, 'font-size="14" font-weight="bold"'),
        text((left + wide - right) / 2, high - 12, across),
        text(0, 0, up, f'text-anchor="middle" transform="translate(16 {high // 2}) rotate(-90)"'),
    ]  # fmt: skip
    for axis, (low, end) in enumerate(ends):
        step = 1.0 if log else next(s for s in (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0) if end - low <= 8 * s)
        for count in range(math.ceil(low / step), math.floor(end / step) + 1):
            x, y = place(count * step, ends[1][0]) if axis == 0 else place(ends[0][0], count * step)
            value = 2 ** (count * step) if log else count * step
            words = f"{value / 1024:g}K" if value >= 1024 else f"{value:g}"
            out.append(f'<path d="M{x:.0f} {y:.0f}{f"V{top}" if axis == 0 else f"H{wide - right}"}" stroke="#ddd"/>')
            out.append(text(x, y + 18, words) if axis == 0 else text(x - 6, y + 4, words, 'text-anchor="end"'))
    labels = list[tuple[str, float, float]]()
    for index, (name, points) in enumerate(lines.items()):
        color, places = COLORS[index % len(COLORS)], [place(scale(x), scale(y)) for x, y in points]
        label, anchor = (wide - right + 12.0, top + 14.0 + 20 * index), "start"
        if len(points) == 1:  # next to the dot; ours on its left, where no other is, if the plot has room for it
            anchor = "end" if "chunked_head" in name and places[0][0] > 75 + 7 * len(name.replace("*", "")) else "start"
            label = places[0][0] + (10 if anchor == "start" else -10), places[0][1] + 4
            while any(side == anchor and abs(label[0] - x) < 160 and abs(label[1] - y) < 13 for side, x, y in labels):
                label = label[0], label[1] - 13
            labels.append((anchor, *label))
        drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        out.append(f'<path d="M{drawn}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>' for x, y in places if len(places) < 20]
        out.append(text(*label, name.replace("*", ""), f'fill="{color}" font-weight="bold" text-anchor="{anchor}"'))
    return "\n".join([*out, "</svg>"]) + "\n"
