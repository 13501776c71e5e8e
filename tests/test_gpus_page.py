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
WORKLOADS = ["ce+entropy+accuracy", "grpo+z+metrics", "topk", "dense-kl", "jsd", "gspo"]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def how(gpu: Gpu) -> str:
    operands = "tensor copies" if gpu.wide.described else "pointers"
    return f"{operands}, {gpu.wide.block_m} x {gpu.wide.block_n}; dhidden {'ours' if gpu.own_dhidden else 'BLAS'}"


def page() -> str:
    forced, own = read("speed-cuda-sm_80.json"), read("speed-cuda-sm_90.json")
    mixes, own_mixes = read("losses-cuda-sm_80.json"), read("losses-cuda-sm_90.json")
    assert forced["architecture"] == mixes["architecture"] == "sm_80"
    assert own["architecture"] == own_mixes["architecture"] == "sm_90"
    lines = [
        "# GPUs",
        "",
        "GPUs of this list keep two bytes a logit, with statistics and gradients from fp32 sums",
        "([paths.md](paths.md)). **Only Hopper's row was measured on such a GPU.** The others' matmuls were compiled",
        "for their architecture, where shared memory, spilled registers and instructions are checked (at each change,",
        "but once for sm_103 and gfx950). Both ways of reading and multiplying run in Triton's interpreter against the",
        "oracle, in small tiles, and on an H200 as sm_80's. NVIDIA GPUs that are not listed take the newest older row",
        "of their generation; those before sm_80 and of other generations keep fp32 logits. Other AMD GPUs take the",
        "torch backend.",
        "",
        "| architecture | for example | logits' matmul, tile; whose dhidden | shared memory | measured |",
        "|---|---|---|---|---|",
    ]
    for name, gpu in GPUS.items():
        measured = {"sm_90": "on an H200", "sm_80": "compiled; run on an H200"}.get(name, "compiled only")
        lines.append(f"| {name} | {KNOWN[name]} | {how(gpu)} | {gpu.shared:,} bytes | {measured} |")
    lines += [
        "",
        f"`CHUNKED_HEAD_ARCH=sm_80` on an {forced['device']}, Triton {forced['versions']['triton']}: the time of a",
        "call and its backward as a ratio to three bare matmuls (four beside a dense teacher), and the same with its",
        "own kernels. What the pointer kernels reach there is the cost of the design, and a guess for any other GPU.",
        f"Commit {forced['commit'][:7]}, `{forced['command']}`:",
        "",
        "`compile` is torch.compile of the plain head, `liger` Liger-Kernel, both as they run on the H200.",
        "",
        "| tokens x hidden x vocabulary | row | ours as sm_80 | ours as the H200 |",
        "|---|---|---|---|",
    ]
    both = [
        {(row["shape"], row["row"]): f"{row['ratios']['3 products']:.3f}" for row in found["rows"] if "ratios" in row}
        for found in (forced, own)
    ]
    lines += [f"| {key[0]} | {key[1]} | {ratio} | {both[1].get(key, '')} |" for key, ratio in both[0].items()]
    lines += ["", f"`{mixes['command']}`:", "", "| loss | ours as sm_80 | ours as the H200 |", "|---|---|---|"]
    for name in WORKLOADS:
        here, there = (next(r for r in found["rows"] if r["workload"] == name)["ratio"] for found in (mixes, own_mixes))
        lines.append(f"| {name} | {here:.3f} | {there:.3f} |")
    return "\n".join(lines) + "\n"


def test_page() -> None:
    assert (ROOT / "docs" / "gpus.md").read_text() == page(), "python tests/test_gpus_page.py > docs/gpus.md"


if __name__ == "__main__":
    print(page(), end="")
