"""For the site: each notebook of docs/ is a page, and links to notebooks lead to these pages."""

import json
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        cells = json.loads(notebook.content_string)["cells"]
        texts = ("".join(cell["source"]) for cell in cells)
        parts = [
            text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
            for cell, text in zip(cells, texts, strict=True)
        ]
        parts.append(f'[Download this notebook]({notebook.name}.ipynb){{: download=""}}')
        name = notebook.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, name, content="\n\n".join(parts) + "\n"))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    if page.file.generated_by is not None:
        return markdown
    return re.sub(r"(\]\([\w./-]+)\.ipynb\)", r"\1.md)", markdown)
