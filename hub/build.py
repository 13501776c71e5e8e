"""A folder that HuggingFace's `kernels` loads, made of this checkout: `python hub/build.py FOLDER`.

    FOLDER/README.md
    FOLDER/build/torch-universal/   Python and Triton, for every device
        metadata.json
        __init__.py                 the library's functions and `layers`; no models' or frameworks' parts
        layers.py
        functions/, losses/, kernels/, ...

The folder needs torch and Triton and nothing of this checkout. In it the library goes by the name of the build, so that
it can be loaded beside an installed one.
"""

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
NAME, VARIANT = "chunked-head", "torch-universal"
VERSION = 1  # of what the layers and functions take: the branch v1 of a repository on the Hub
LEFT_OUT = ("integrations", "__main__.py", "reference.py", "__pycache__")


def build(folder: Path) -> Path:
    """Makes the folder anew and returns its variant."""
    variant = folder / "build" / VARIANT
    shutil.rmtree(folder / "build", ignore_errors=True)
    leave_out = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(ROOT / "chunked_head", variant, ignore=leave_out)
    shutil.copytree(ROOT / "kernels", variant / "kernels", ignore=leave_out)
    shutil.copy(HERE / "layers.py", variant)
    shutil.copy(HERE / "README.md", folder)
    shutil.copy(ROOT / "LICENSE", folder)
    names = variant / "__init__.py"
    names.write_text(without_integrations(names.read_text()))
    metadata = {
        "id": f"_chunked_head_{digest(variant)}", "name": NAME, "version": VERSION, "license": "Apache-2.0",
        "python-depends": [], "backend": {"type": "cuda"},
    }  # fmt: skip
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def without_integrations(text: str) -> str:
    """The package's ``__init__`` with the layers, and without names that come from its integrations."""
    line = r"from \.integrations\S* import (.+)\n"
    for name in ", ".join(re.findall(line, text)).split(", "):
        text, count = re.subn(rf'"{name}",\s*', "", text)
        assert count == 1, f"{name} is not in __all__"
    return re.sub(line, "", text).replace("from . import losses", "from . import layers, losses")


def digest(variant: Path) -> str:
    """Twelve digits of all files, by which two builds have names of their own."""
    found = hashlib.sha256()
    for path in sorted(variant.rglob("*.py")):
        found.update(path.relative_to(variant).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python hub/build.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "hub" / "dist")
    print(build(parser.parse_args().folder.resolve()))
