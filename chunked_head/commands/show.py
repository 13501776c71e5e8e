"""What a command found, for people: in tables on a terminal with the package rich, else as plain text."""

import sys
from collections.abc import Sequence

from ..program.plans import Section, as_text

STYLES = {"pass": "bold green", "FAIL": "bold red"}  # by a value's first word


def show(sections: Sequence[Section]) -> None:
    shown = [section for section in sections if section[1]]
    try:
        if not sys.stdout.isatty():
            raise ImportError
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return print(as_text(shown))
    for title, rows in shown:
        numbers = len(rows[0]) > 2
        table = Table(title=title, title_justify="left", show_header=False)
        for at in range(len(rows[0])):
            table.add_column(justify="right" if numbers and at else "left", style="" if at else "bold")
        for row in rows:
            # Text, since brackets in a string would be taken for rich's markup
            table.add_row(*(Text(cell, style=STYLES.get(cell.split(",")[0], "")) for cell in row))
        Console().print(table)
