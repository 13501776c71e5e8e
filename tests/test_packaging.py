"""The two packages as a wheel, an editable install and a checkout lay them out, beside transformers."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USE = "import chunked_head, chunked_head.kernels.launch as k; print(k.__file__)"


def run_python(code: str, cwd: Path, path: Path | None = None, interpreter: str = sys.executable) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"TRITON_INTERPRET": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(
        [interpreter, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_kernels_has_no_init() -> None:
    """With one, the folder would pass for the package `kernels`, which transformers imports where it finds it."""
    assert (ROOT / "kernels" / "exp_logits.py").is_file()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_bare_checkout(tmp_path: Path) -> None:
    assert run_python(USE, ROOT) == str(ROOT / "kernels" / "launch.py")
    assert run_python(USE, tmp_path, path=ROOT) == str(ROOT / "kernels" / "launch.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a build folder beside its sources."""
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77, as pip would fetch")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("chunked_head", "kernels", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-q",
        "-w",
        str(folder),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    return next(folder.glob("*.whl"))


def test_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert "chunked_head/kernels/exp_logits.py" in names
    assert not [name for name in names if name.startswith("kernels")]
    found = run_python(USE, tmp_path, path=tmp_path / "site")
    assert found == str(tmp_path / "site" / "chunked_head" / "kernels" / "launch.py")


def test_wheel_needs_torch_and_triton_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("METADATA")]
        metadata = archive.read(name).decode()
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert [line.split()[1].split(">")[0].rstrip(";") for line in needed] == ["torch", "triton"]
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.parametrize("mode", [[], ["editable_mode=compat"], ["editable_mode=strict"]], ids=str)
def test_editable_install(mode: list[str], tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools 77, as pip would fetch")
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("chunked_head", "kernels", "pyproject.toml", "README.md", "LICENSE"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(target)], check=True)
    install = [
        sys.executable, "-m", "pip", "--python", str(target / "bin" / "python"), "install", "--no-build-isolation",
        "--no-deps", "-q", *(part for setting in mode for part in ("--config-settings", setting)), "-e", str(source),
    ]  # fmt: skip
    # the new environment sees this one's torch and setuptools
    here = next(p for p in sys.path if p.endswith("site-packages"))
    done = subprocess.run(
        install, capture_output=True, text=True, timeout=200, env=os.environ | {"PYTHONPATH": here}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for cwd in (tmp_path, source):
        run_python(USE, cwd, path=Path(here), interpreter=str(target / "bin" / "python"))


def test_transformers_imports_beside_our_kernels(tmp_path: Path) -> None:
    """From the repository's root, where `kernels` is a folder of ours, Llama still imports.

    With the published package `kernels` installed (a stand-in with its metadata here) and without it.
    """
    pytest.importorskip("transformers", reason="the conflict is with transformers, which is not installed")
    code = (
        "from transformers import LlamaForCausalLM; import sys; import chunked_head.kernels.launch;"
        "ours = getattr(sys.modules.get('kernels'), '__file__', None) or ''; print('main' in ours and 'launch' in ours)"
    )
    assert run_python(code, ROOT) == "False"
