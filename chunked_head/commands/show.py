"""What a command found, for people: in tables on a terminal with the package rich, else as plain text."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

STYLES = {"pass": "bold green", "FAIL": "bold red"}  # by a value's first word


class Section(NamedTuple):
    """A title and rows of cells; with a ``header``, which names the columns, those after the first are numbers."""

    title: str
    rows: Sequence[tuple[str, ...]]
    header: tuple[str, ...] = ()


def show(sections: Sequence[Section]) -> None:
    shown = [section for section in sections if section.rows]
    if not (sys.stdout.isatty() and in_tables(shown)):
        print("\n\n".join(as_text(section) for section in shown))


def as_text(section: Section) -> str:
    if not section.header:
        return "\n".join([section.title, *(f"  {key:<30}{value}" for key, value in section.rows)])
    lines = [(section.title, *section.header[1:]), *(("  " + row[0], *row[1:]) for row in section.rows)]
    return "\n".join(f"{first:<32}" + "".join(f"{cell:>10}" for cell in rest) for first, *rest in lines)


def in_tables(sections: Sequence[Section]) -> bool:
    """False without rich."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    console = Console()
    for section in sections:
        table = Table(title=section.title, title_justify="left", show_header=bool(section.header))
        for at in range(len(section.rows[0])):
            numbers = bool(section.header) and at > 0
            header = section.header[at] if section.header else ""
            table.add_column(header, justify="right" if numbers else "left", style="" if at else "bold")
        for row in section.rows:
            # Text, since brackets in a string would be taken for rich's markup
            table.add_row(*(Text(cell, style=STYLES.get(cell.split(",")[0], "")) for cell in row))
        console.print(table)
    return True
