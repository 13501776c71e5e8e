"""The two packages as a wheel, an editable install and a checkout lay them out, beside transformers."""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import chunked_head

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = Path("kernels") / "statistics" / "launch.py"
KERNELS = {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("*.py")}
USE = "import chunked_head, chunked_head.kernels.statistics.launch as k; print(k.__file__)"


def run_python(code: str, cwd: Path, path: Path | None = None, interpreter: str = sys.executable) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(
        [interpreter, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_what_the_repository_says_of_itself() -> None:
    """The version to cite is the package's, badges say what pyproject.toml does, issues ask for ``doctor``'s words."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation, badges = (ROOT / "CITATION.cff").read_text(), (ROOT / "README.md").read_text()
    assert f"\nversion: {chunked_head.__version__}\n" in citation and f"\nlicense: {project['license']}\n" in citation
    minors = [word.rpartition(".")[2] for word in project["classifiers"] if "Python :: 3." in word]
    assert f"python-3.{min(minors, key=int)}%20to%203.{max(minors, key=int)}-" in badges
    assert next(word for word in project["dependencies"] if word.startswith("torch")) == "torch>=2.9"
    assert "torch-2.9%20to%20" in badges and f"licence-{project['license'].replace('-', '--')}-" in badges
    templates = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(templates) == 4 and all("chunked-head doctor" in path.read_text() for path in templates)


def test_kernels_has_no_init() -> None:
    """With one, the folder would pass for the package `kernels`, which transformers imports where it finds it."""
    assert (ROOT / LAUNCH).is_file()
    assert not list((ROOT / "kernels").rglob("__init__.py"))


def test_bare_checkout(tmp_path: Path) -> None:
    assert run_python(USE, ROOT) == str(ROOT / LAUNCH)
    assert run_python(USE, tmp_path, path=ROOT) == str(ROOT / LAUNCH)


HEAVY = ("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton", "transformers", "sympy", "trl")


def test_import_brings_what_a_call_needs_and_no_more() -> None:
    """Nor does a call on a CPU. What torch itself imports is torch's."""
    code = (
        "import sys; from time import perf_counter as now; start = now(); import torch; torchs = now() - start;"
        "known, start = set(sys.modules), now(); import chunked_head; ours = now() - start;"
        "head = [torch.ones(3, 2, requires_grad=True) for _ in range(2)];"
        "chunked_head.linear_cross_entropy(*head, torch.ones(3, dtype=torch.int64)).backward();"
        "print(torchs, ours, *(set(sys.modules) - known))"
    )
    torchs, ours, *modules = run_python(code, ROOT).split()
    assert not set(modules) & set(HEAVY)
    assert float(ours) < max(0.5, 0.3 * float(torchs))  # on a busy machine both take longer


def test_private_names_of_torch_are_looked_up_late() -> None:
    """By ``private``, which has a documented way beside each: no attribute of torch that begins with an underscore is
    read. Of what stands in for logits in somebody else's model only what runs at import is looked at."""
    found = []
    for path in sorted((ROOT / "chunked_head").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py")):
        tree = ast.parse(path.read_text())
        if "integrations" in path.parts:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    node.body = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.ImportFrom):
                name = ast.unparse(node) if isinstance(node, ast.Attribute) else node.module or ""
                if re.match(r"(torch|triton|transformers)\b.*\._[a-z]", name, re.IGNORECASE):
                    found.append(f"{path.name}:{node.lineno} {name}")
    assert not found


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", chunked_head.__version__)
    assert f"## {chunked_head.__version__} " in (ROOT / "CHANGELOG.md").read_text()


def test_a_tag_is_compared_with_the_version() -> None:
    """By the line of the release's workflow that reads it, before anything is built or published."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (command,) = re.findall(r"\$\((sed .*)\)", text)
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == chunked_head.__version__
    assert text.index(command) < text.index("make dist") < text.index("publish:")


def test_every_folder_is_packaged() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    files = [*(ROOT / "chunked_head").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in files}
    assert {name if name.startswith("chunked_head") else f"chunked_head.{name}" for name in folders} == set(listed)


def copied(folder: Path) -> Path:
    """The sources, since setuptools leaves a build folder beside them."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77, as pip would fetch")
    folder.mkdir()
    texts = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md")
    for name in ("chunked_head", "kernels", "tests", *texts):
        subprocess.run(["cp", "-r", str(ROOT / name), str(folder)], check=True)
    return folder


def run_pip(*words: str | Path, **how: Any) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, **how)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    source = copied(folder / "source")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=200)
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """Made of nothing but the sdist."""
    run_pip("wheel", "--no-build-isolation", "--no-deps", "-q", "-w", sdist.parent, sdist)
    return next(sdist.parent.glob("*.whl"))


@pytest.mark.exhaustive
def test_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*KERNELS, "chunked_head/py.typed", "LICENSE", "README.md", "CHANGELOG.md"} <= names
    assert not [name for name in names if name.startswith("tests")]


@pytest.mark.exhaustive
def test_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {"chunked_head/py.typed", *(f"chunked_head/{kernel}" for kernel in KERNELS)} <= set(names)
    assert not [name for name in names if name.startswith(("kernels", "tests")) or "oracle" in name]
    found = run_python(USE, tmp_path, path=tmp_path / "site")
    assert found == str(tmp_path / "site" / "chunked_head" / LAUNCH)


@pytest.mark.exhaustive
def test_wheel_needs_torch_and_triton_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("METADATA")]
        metadata = archive.read(name).decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert [line.split()[1].split(">")[0].rstrip(";") for line in needed] == ["torch", "triton"]
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.exhaustive
def test_transformers_imports_beside_our_kernels(tmp_path: Path) -> None:
    """From the repository's root, where `kernels` is a folder of ours, Llama still imports.

    With the published package `kernels` installed (a stand-in with its metadata here) and without it.
    """
    pytest.importorskip("transformers", reason="the conflict is with transformers, which is not installed")
    code = (
        "from transformers import LlamaForCausalLM; import sys; import chunked_head.kernels.statistics.launch;"
        "ours = getattr(sys.modules.get('kernels'), '__file__', None) or ''; print('main' in ours and 'launch' in ours)"
    )
    assert run_python(code, ROOT) == "False"
