"""Paths of other GPUs against the oracle, kernels compiled for each of them, and what Triton compiles for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cases
import loss_cases
import pytest
import torch
from cases import HALVES, Case, Place, backend_of, combinations
from compile_for import MATMULS
from compiled_for import record_launches
from loss_cases import LossCase, loss_combinations
from tiers import tier

from chunked_head import linear_cross_entropy, linear_loss, losses, metrics, plan
from chunked_head.core import gpus
from chunked_head.core.tiles import PRODUCT_ROWS

ROOT = Path(__file__).parents[2]
# tiles of any others differ in size alone; sm_100 reads as Hopper does, multiplies as sm_80 does
ARCHITECTURES = {"sm_80": 3, "sm_100": 12}


def ours(params: list) -> list:
    """Some calls of 16-bit operands in kernels, each for an architecture; half of them in every run."""
    halves = [param for param in params if param.values[1] in HALVES and param.values[2].backend == "triton"]
    found = []
    for name, every in ARCHITECTURES.items():
        for i, param in enumerate(halves[::every]):
            marked = pytest.param(name, *param.values, marks=param.marks, id=f"{name}-{param.id}")
            found += tier(marked, i % 2 == 0)
    return found


@pytest.mark.parametrize(("architecture", "case", "dtype", "place"), ours(combinations()), indirect=["architecture"])
def test_cross_entropy_of(architecture: str, case: Case, dtype: torch.dtype, place: Place) -> None:
    cases.hold(case, dtype, place)


@pytest.mark.parametrize(
    ("architecture", "case", "dtype", "place", "schedule"), ours(loss_combinations()), indirect=["architecture"],
)  # fmt: skip
def test_loss_of(architecture: str, case: LossCase, dtype: torch.dtype, place: Place, schedule: dict) -> None:
    loss_cases.hold(case, dtype, place, schedule)


def test_tiles_read_no_rows_that_nobody_wrote() -> None:
    for gpu in gpus.GPUS.values():
        assert all(tile.block_m % gpu.product.block_k == 0 for tile in (gpu.logits, gpu.few_rows or gpu.logits))
        assert gpu.product.block_k <= PRODUCT_ROWS


def test_newer_ones_are_taken_for_what_they_can_run() -> None:
    found = {name: gpus.newest(*name) for name in ((7, 5), (8, 0), (8, 7), (8, 9), (9, 0), (10, 3), (12, 1), (13, 0))}
    names = {name: None if gpu is None else next(key for key in gpus.GPUS if gpus.GPUS[key] is gpu)
             for name, gpu in found.items()}  # fmt: skip
    assert names == {
        (7, 5): None, (8, 0): "sm_80", (8, 7): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90", (10, 3): "sm_103",
        (12, 1): "sm_120", (13, 0): None,
    }  # fmt: skip


def test_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls its GPUs cuda as well."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert type(backend_of(None, torch.device("cuda"))) is type(backend_of("triton", torch.device("cuda")))


# ---- plans


@pytest.mark.parametrize("name", gpus.GPUS)
def test_plan_names_the_architecture(name: str) -> None:
    made = plan(4096, 4096, 32000, torch.bfloat16, device=name, backend="triton")
    assert made.sizes.gpu == gpus.GPUS[name] and made.sizes.store.name == "fast"
    assert ["GPU", name] in [line.split() for line in str(made).splitlines()]


CE = losses.cross_entropy()
PATHS: dict[str, tuple[losses.Losses, tuple, dict[str, Any]]] = {
    "cross-entropy, class weights, DFT, focal": (CE + losses.focal() + losses.unlikelihood(), (), {}),
    "z-loss": (losses.z_loss(), (), {}),
    "policy losses, KL to a reference": (losses.grpo() + losses.kl_to_reference() + losses.cispo(), (), {}),
    "losses of segments and pairs": (losses.gspo() + losses.dpo(), (), {}),
    "entropy, accuracy, lse, mean logit as metrics": (
        CE, (metrics.entropy(), metrics.accuracy(), metrics.lse(), metrics.mean_logit()), {}
    ),
    "softcap": (CE, (), {"softcap": 30.0}),
    "trained bias": (CE, (), {"bias": True}),
    "label smoothing": (losses.cross_entropy(label_smoothing=0.1), (), {}),
    "entropy as a loss": (CE - 0.1 * losses.entropy(), (), {}),
    "two temperatures": (CE + losses.z_loss(temperature=2.0), (), {}),
    "top-K teacher": (CE + losses.topk_kl(), (), {"teacher_k": 8}),
    "dense teacher": (losses.forward_kl() + losses.jsd() + losses.tvd(), (), {"teacher_hidden": 64}),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_paths_stand_in_the_documentation(name: str) -> None:
    loss, measured, more = PATHS[name]
    more |= {"loss": loss, "metrics": measured, "device": "cuda", "backend": "triton"}
    dtypes = torch.bfloat16, torch.float16, torch.float32
    stores = [plan(4096, 64, 5000, dtype, **more).sizes.store.name for dtype in dtypes]
    assert f"| {name} | {' | '.join(stores)} |\n" in (ROOT / "docs" / "how-it-works.md").read_text()


# ---- compiling

# whose calls launch the same
ALIKE = {"sm_100": [], "sm_80": ["sm_86"], "sm_89": ["sm_120"], "sm_90": [], "gfx942": []}
# bytes that a thread may spill: nobody has measured tiles of Blackwell there
SPILLED = {"sm_100": 768}
SPILLED_E4M3 = {"sm_89": 384, "sm_100": 960, "sm_120": 384}  # nor those of e4m3 operands, but on Hopper
POINTERS, POINTERS_E4M3 = ["cp.async.cg", "mma.sync"], ["cp.async.ca", "mma.sync"]  # bytes go in pieces
HOLDS = {
    "sm_90": ["cp.async.bulk.tensor", "wgmma"], "sm_100": ["cp.async.bulk.tensor", "tcgen05.mma"],
    "gfx942": ["v_mfma", "buffer_load"],
}  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", ALIKE)
def test_compiles(first: str) -> None:
    environment = os.environ | {"CHUNKED_HEAD_ARCH": first, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "tests/helpers/compile_for.py"), *ALIKE[first]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows_of_all = [json.loads(line) for line in done.stdout.splitlines()]
    for name in (first, *ALIKE[first]):
        rows = [row for row in rows_of_all if row["architecture"] == name]
        assert {row["kernel"] for row in rows} >= set(MATMULS)
        assert not [row for row in rows if "error" in row]
        for row in rows:
            assert row["shared"] <= gpus.GPUS[name].shared_bytes, row
            assert 0 <= row["spilled"] <= (SPILLED_E4M3 if row["e4m3"] else SPILLED).get(name, 256), row
            if row["kernel"] in MATMULS:
                assert set(HOLDS.get(name, POINTERS_E4M3 if row["e4m3"] else POINTERS)) <= set(row["holds"]), row
            # a bias of an odd vocabulary is read so, one row of it for each tile
            if row["kernel"] in MATMULS[:2] and "16" not in row["bias"]:
                assert not {"ld.global.b16", "st.global.b16"} & set(row["holds"]), f"numbers one by one: {row}"


def test_those_alike_launch_the_same() -> None:
    assert [name for name, gpu in gpus.GPUS.items() if gpu.fp8] == ["sm_89", "sm_90", "sm_100", "sm_103", "sm_120"]
    for name, others in (*ALIKE.items(), ("sm_100", ["sm_103"]), ("gfx942", ["gfx950"])):
        own = {"name": None, "shared_bytes": None, "multiprocessors": None}
        assert all(gpus.GPUS[other]._replace(**own) == gpus.GPUS[name]._replace(**own) for other in others)


# ---- what Triton compiles for: the same of every launch, however many tokens a call has

HIDDEN, VOCAB, CHUNK = 64, 203, 96
COUNTS = (1, 2, 3, 15, 16, 17, 32, 33, 64, 65, 95, 96, 97, 128, 129, 191, 192, 193, 1000)


def specializations(launched: set, tokens: int, dtype: torch.dtype, **options: Any) -> frozenset:
    hidden, weight = (torch.zeros(n, HIDDEN, dtype=dtype, requires_grad=True) for n in (tokens, VOCAB))
    operands = hidden, weight, torch.zeros(tokens, dtype=torch.int64)
    launched.clear()
    if "reduction" in options:
        linear_cross_entropy(*operands, backend="triton", **options).sum().backward()
    else:
        measured = [metrics.accuracy(), metrics.entropy(), metrics.lse()]
        linear_loss(*operands, losses.cross_entropy(), metrics=measured, backend="triton", **options).loss.backward()
    return frozenset((name, kinds) for name, _, kinds in launched)


def kind(found: frozenset, several: bool) -> tuple[Any, ...]:
    """Which of the few kinds of call it is: of one chunk, few or many, with cut tiles of dhidden and without, of
    few rows or more, with the weight's gradient by our product or by BLAS's."""
    cut = {dict(named)["part_ptr"] is not None for name, named in found if name == "dhidden_kernel"}
    tiles = {dict(named)["BLOCK_M"] for name, named in found if name == "exp_logits_kernel"}
    return several, *sorted(cut), *tiles, any(name == "dweight_kernel" for name, _ in found)


# in the order of what keeps the logits: exponentials, relative logits, fp32 logits
@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are stubbed in the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{"chunk_tokens": CHUNK}, {"chunk_tokens": CHUNK, "skip_ignored": True},
                                     {"reduction": "none"}], ids=str)  # fmt: skip
def test_any_number_of_tokens(options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    # only those run whose numbers torch takes for indices
    launched = record_launches(monkeypatch, lambda name: name in ("read_targets_kernel", "sort_columns_kernel"))
    if dtype == torch.float32:
        options = {name: value for name, value in options.items() if name != "skip_ignored"}  # needs to wait
    kinds: dict[tuple, dict[frozenset, int]] = {}
    for tokens in COUNTS:
        made = plan(tokens, HIDDEN, VOCAB, dtype, backend="triton", chunk_tokens=CHUNK)
        several = "chunk_tokens" in options and made.chunks > 1 and str(made.weight_accumulate)
        found = specializations(launched, tokens, dtype, **options)
        assert len(found) > 4
        kinds.setdefault(kind(found, several), {}).setdefault(found, tokens)
    assert len(kinds) <= 6
    for name, same in kinds.items():
        one, *others = same
        told = [(name, set(named) - set(told)) for name, named in one - others[0] for also, told in others[0] - one
                if name == also] if others else ""  # fmt: skip
        assert not others, f"{name}: {list(same.values())}: {told}"
