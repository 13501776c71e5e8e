"""docs/gpus.md is made of the table of architectures and of what was measured: ``python tests/test_gpus_page.py``."""

import json
from pathlib import Path
from typing import Any

from chunked_head.kernels.common.gpus import GPUS, Gpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
KNOWN = {
    "sm_80": "A100", "sm_86": "RTX 3090, A40, A10", "sm_89": "RTX 4090, L40S, L4", "sm_90": "H100, H200",
    "sm_100": "B200", "sm_103": "B300", "sm_120": "RTX 5090, RTX PRO 6000", "gfx942": "MI300, MI325", "gfx950": "MI350",
}  # fmt: skip
PEERS = {
    "default": "chunked_head", "compile": "torch.compile", "liger": "Liger-Kernel", "cce": "Cut Cross-Entropy",
}  # fmt: skip
WORKLOADS = ["ce+entropy+accuracy", "grpo+z+metrics", "topk", "dense-kl", "jsd", "gspo"]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def how(gpu: Gpu) -> str:
    operands = "tensor copies" if gpu.wide.described else "pointers"
    return f"{operands}, {gpu.wide.block_m} x {gpu.wide.block_n}; {'our own' if gpu.own_dhidden else 'BLAS'}"


def page() -> str:
    forced, own = read("speed-cuda-sm_80.json"), read("speed-cuda.json")
    other = read("speed-cuda-h100.json")
    assert "H100" in other["device"]
    mixes, own_mixes = read("losses-cuda-sm_80.json"), read("losses-cuda.json")
    assert forced["architecture"] == mixes["architecture"] == "sm_80"
    assert own["architecture"] == own_mixes["architecture"] == "sm_90"
    lines = [
        "# GPUs",
        "",
        "The library has Triton kernels for the GPUs of this list. A call keeps two bytes a logit there, with",
        "statistics and gradients from float32 sums ([paths](paths.md)). **Only Hopper's kernels were measured on",
        "the GPU that they are for.** With every change, a test compiles the matrix products for the other",
        "architectures and checks shared memory, spilled registers and instructions; for sm_103 and gfx950 it ran",
        "once. All kernels are compared with full logits in Triton's interpreter, in small tiles. sm_80's kernels",
        "also ran on an H200.",
        "",
        "An NVIDIA GPU that is not listed takes the kernels of the newest older row of its generation. NVIDIA GPUs",
        "before sm_80 and of other generations keep float32 logits. Other AMD GPUs use PyTorch operations.",
        "",
        "| architecture | for example | logits: operands by, tile; gradient of hidden by | shared memory | measured |",
        "|---|---|---|---|---|",
    ]
    for name, gpu in GPUS.items():
        measured = {"sm_90": "on an H200 and an H100", "sm_80": "compiled; run on an H200"}.get(name, "compiled only")
        lines.append(f"| {name} | {KNOWN[name]} | {how(gpu)} | {gpu.shared:,} bytes | {measured} |")
    lines += [
        "",
        "## On an H100",
        "",
        "The time of a call and its backward as a ratio to its three bare matrix products.",
        f"PyTorch {other['versions']['torch']}, Triton {other['versions']['triton']}, commit {other['commit'][:7]}:",
        "",
        f"    {other['command']}",
        "",
        f"| tokens x hidden x vocabulary | {' | '.join(PEERS.values())} | chunked_head on an H200 |",
        "|---|" + "---|" * (len(PEERS) + 1),
    ]
    for shape in dict.fromkeys(row["shape"] for row in other["rows"]):
        ratios = {
            row["row"]: row["ratios"]["3 products"]
            for row in other["rows"]
            if row["shape"] == shape and "ratios" in row
        }
        beside = next(row for row in own["rows"] if (row["shape"], row["row"]) == (shape, "default"))
        cells = [f"{ratios[name]:.3f}" if name in ratios else "-" for name in PEERS]
        lines.append(f"| {shape} | {' | '.join(cells)} | {beside['ratios']['3 products']:.3f} |")
    lines += [
        "",
        "Hidden size 2048 has taken wider tiles since then, which an H100 is faster with and an H200 as fast",
        "([findings](internals/findings.md)).",
        "",
        "## Kernels of another GPU on an H200",
        "",
        f"`CHUNKED_HEAD_ARCH=sm_80` makes an {forced['device']} use sm_80's kernels. The tables show the time of a",
        "call and its backward as a ratio to three bare matrix products (four beside a dense teacher), with",
        "sm_80's kernels and with the H200's own. They say what loading operands through pointers costs, and are",
        "only a guess for any other GPU. [Benchmarks](benchmarks.md) names the commands of the H200's own.",
        "",
        f"Triton {forced['versions']['triton']}, commit {forced['commit'][:7]}:",
        "",
        f"    {forced['command']}",
        "",
        "| tokens x hidden x vocabulary | with sm_80's kernels | with the H200's |",
        "|---|---|---|",
    ]
    both = [
        {row["shape"]: f"{row['ratios']['3 products']:.3f}" for row in found["rows"] if row["row"] == "default"}
        for found in (forced, own)
    ]
    lines += [f"| {shape} | {ratio} | {both[1][shape]} |" for shape, ratio in both[0].items()]
    lines += ["", f"    {mixes['command']}", "", "| loss | with sm_80's kernels | with the H200's |", "|---|---|---|"]
    for name in WORKLOADS:
        here, there = (
            next(row["ratio"] for row in found["rows"] if (row["workload"], row["shape"]) == (name, "8192x4096x128256"))
            for found in (mixes, own_mixes)
        )
        lines.append(f"| {name} | {here:.3f} | {there:.3f} |")
    return "\n".join(lines) + "\n"


def test_page() -> None:
    assert (ROOT / "docs" / "gpus.md").read_text() == page(), "python tests/test_gpus_page.py > docs/gpus.md"


if __name__ == "__main__":
    print(page(), end="")
