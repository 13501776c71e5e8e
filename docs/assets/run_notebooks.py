"""Run the notebooks of docs/ and keep what their cells print: `python docs/assets/run_notebooks.py`."""

import contextlib
import io
import json
from pathlib import Path

for path in sorted(Path(__file__).parents[1].glob("notebooks/*.ipynb")):
    book, names = json.loads(path.read_text()), {"__name__": "__main__"}
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]), names)
            lines = printed.getvalue().splitlines(keepends=True)
            cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
            cell["execution_count"] = None
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n")
    print(path.name)
