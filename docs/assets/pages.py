"""Hooks of the site: each notebook of docs/ is a page, links to notebooks lead to these pages, Python blocks are
followed by what they print, and formulas are MathML, which browsers draw without a script."""

import html as markup
import json
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from run_blocks import BLOCK, OUTPUTS, key_of

CODE = re.compile(r"<code>([^<>\s]+)</code>")
PHONE = 40  # characters of code that fit a column of 400 pixels
JOINT = re.compile(r"[./(_:,]+(?=\w)")
SEEDED = "It prints, after torch.manual_seed(0)"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        cells = json.loads(notebook.content_string)["cells"]
        parts = []
        for cell in cells:
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
            parts += ["```text\n" + "".join(output["text"]) + "```" for output in cell.get("outputs", ())]
        parts.append(f'[Download this notebook]({notebook.name}.ipynb){{: download=""}}')
        name = notebook.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, name, content="\n\n".join(parts) + "\n"))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    if page.file.generated_by is not None:
        return markdown
    outputs = json.loads(OUTPUTS.read_text())

    def with_output(block: re.Match[str]) -> str:
        output = outputs.get(key_of(block[1]))
        title = "It prints" if "manual_seed" in block[1] or "rand" not in block[1] else SEEDED
        return block[0] if output is None else f'{block[0]}\n\n```text title="{title}"\n{output}```'

    markdown = BLOCK.sub(with_output, markdown)
    return re.sub(r"(\]\([\w./-]+)\.ipynb\)", r"\1.md)", markdown)


def whole(code: re.Match[str]) -> str:
    if len(markup.unescape(code[1])) <= PHONE:
        return f'<code class="name">{code[1]}</code>'
    return f'<code class="name long">{JOINT.sub(lambda end: end[0] + "<wbr>", code[1])}</code>'


def on_page_content(html: str, **_: Any) -> str:
    """Replace what the extension arithmatex makes of ``$...$`` and ``$$...$$`` by MathML; names of the reference may
    break behind a dot; code without a space stays whole, or breaks at a joint where it may be wider than a phone."""
    names = re.compile(r'(<span class="doc doc-object-name[^"]*">)([\w.]+)(</span>)')
    html = names.sub(lambda name: name[1] + name[2].replace(".", ".<wbr>") + name[3], html)
    html = CODE.sub(whole, html)
    for tag, display in (("span", "inline"), ("div", "block")):
        found = re.compile(rf'<{tag} class="arithmatex">\\[(\[](.*?)\\[)\]]</{tag}>', re.DOTALL)
        html = found.sub(lambda formula, display=display: convert(markup.unescape(formula[1]), display=display), html)
    return html
