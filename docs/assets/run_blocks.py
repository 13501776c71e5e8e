"""Run the Python blocks of docs/ and keep what they print, which the site shows below them:
`python docs/assets/run_blocks.py`. Blocks whose fence says why they are not run are left out."""

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
from pathlib import Path

OUTPUTS = Path(__file__).with_name("outputs.json")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


VOLATILE = re.compile(r"runtime|_chunked_head_")  # times and names that no other run prints


def key_of(code: str) -> str:
    return hashlib.sha256(code.strip().encode()).hexdigest()[:16]


def main() -> None:
    import torch

    outputs: dict[str, str] = {}
    docs = Path(__file__).parents[1]
    os.chdir(tempfile.mkdtemp())
    for page in sorted(docs.rglob("*.md")):
        for code in BLOCK.findall(page.read_text()):
            printed = io.StringIO()
            torch.manual_seed(0)
            with contextlib.redirect_stdout(printed):
                exec(compile(code, page.name, "exec"), {"__name__": "__main__"})
            if printed.getvalue().strip() and not VOLATILE.search(printed.getvalue()):
                outputs[key_of(code)] = printed.getvalue()
        print(page.relative_to(docs), flush=True)
    OUTPUTS.write_text(json.dumps(outputs, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
