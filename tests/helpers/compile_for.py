"""Compiles what an architecture's calls launch, on a machine without such a GPU:
``CHUNKED_HEAD_ARCH=sm_80 python tests/helpers/compile_for.py [OTHER ...]``.

The calls run on the CPU with launches that do nothing; each kind of launch is then compiled as Triton would compile it
there. Matmuls are also compiled for the others, architectures whose calls launch the same. Prints a line of JSON for
each: the architecture, the kernel's name, its constants, the dtype of a bias, bytes of shared memory, bytes that a
thread spills, and which instructions the machine code holds.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from chunked_head.kernels.common.launcher import FUSED, Launcher
from compiled_for import told
from triton.backends.compiler import GPUTarget

from chunked_head import linear_cross_entropy, linear_logprobs, linear_loss, losses, metrics, quantise
from chunked_head.core.gpus import GPUS
from chunked_head.core.statistics import STATISTICS
from chunked_head.core.stats import Demand, RowStats, layout_of
from chunked_head.stores.triton.backend import TRITON, TritonBackend

MATMULS = "exp_logits_kernel", "grad_logits_kernel", "dhidden_kernel", "dweight_kernel"
INSTRUCTIONS = (
    "st.global.b16",
    "ld.global.b16",
    "cp.async.ca",
    "cp.async.cg",
    "cp.async.bulk.tensor",
    "mma.sync",
    "wgmma",
    "tcgen05.mma",
    "v_mfma",
    "buffer_load",
)


def target_of(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, GPUS[name].warp_size)


def pretend(target: GPUTarget) -> None:
    """Sets a driver with which Triton compiles for a GPU that this machine lacks."""
    active = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0,
        set_current_device=lambda device: None,
    )  # fmt: skip
    triton.runtime.driver.set_active(active)


def launches() -> dict[Any, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Kinds of launch of the calls below, with arguments of each."""
    found: dict[Any, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def record(self: Launcher, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> None:
            kinds = map(told, self.kernel.arg_names, arguments)
            key = id(self), *kinds, *constants.items()
            found.setdefault(key, (self.kernel, arguments, constants))

        return launch

    Launcher.__getitem__ = record
    TritonBackend.check = lambda *given: None
    # what no kernel writes is read as an index
    torch.empty, torch.empty_like, torch.Tensor.new_empty = torch.zeros, torch.zeros_like, torch.Tensor.new_zeros
    calls()
    return found


def operands(tokens: int, hidden: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    states, weight = torch.zeros(tokens, hidden, dtype=dtype), torch.zeros(vocab, hidden, dtype=dtype)
    return states.requires_grad_(), weight.requires_grad_(), torch.zeros(tokens, dtype=torch.int64)


def fp8_calls() -> None:
    options: dict[str, Any] = {"precision": "fp8", "backend": "triton"}
    for hidden, vocab in ((1040, 1001), (4096, 1024), (1024, 1024)):
        given = operands(256, hidden, vocab, torch.bfloat16)
        linear_cross_entropy(*given, reduction="none", **options).sum().backward()
        linear_cross_entropy(*given, **options).backward()
        temperature = torch.ones(256)
        linear_logprobs(*given, temperature=temperature, skip_ignored=True, **options).sum().backward()
        given = operands(256, hidden, vocab, torch.float16)
        mix = losses.entropy() + losses.cross_entropy(label_smoothing=0.1) + losses.z_loss(temperature=2.0)
        more: dict[str, Any] = {"bias": torch.zeros(vocab, dtype=torch.float16), "softcap": 30.0}
        linear_loss(*given, mix, metrics=[metrics.accuracy()], **more, **options).loss.backward()
        with torch.no_grad():
            given = operands(8, hidden, vocab, torch.bfloat16)
            linear_logprobs(*given, **options)
            linear_logprobs(*given, fp8_weight=quantise(given[1], backend="triton"), **options)


def calls() -> None:
    if GPUS[os.environ["CHUNKED_HEAD_ARCH"]].fp8:
        fp8_calls()
    for hidden, vocab in ((1032, 1001), (4096, 1024)):
        given = operands(256, hidden, vocab, torch.bfloat16)
        # rows of 16 bytes that are no multiple of 32, and an odd vocabulary
        given[0].requires_grad_(hidden % 16 == 0)
        linear_cross_entropy(*given, reduction="none", backend="triton").sum().backward()
        linear_cross_entropy(*given, skip_ignored=True, backend="triton").backward()
    batch = {"old_logprobs": torch.zeros(256), "advantages": torch.zeros(256)}
    given = operands(256, 4096, 1024, torch.float16)
    mix = losses.grpo() + losses.entropy() + losses.cross_entropy(label_smoothing=0.1)
    asked = [metrics.entropy(), metrics.accuracy()]
    options = {"batch": batch, "metrics": asked, "temperature": torch.ones(256), "backend": "triton"}
    linear_loss(*given, mix, **options).loss.backward()
    # sums that come with the gradient, and those before it
    teacher = {"teacher_hidden": given[0].detach(), "teacher_weight": given[1].detach()}
    for loss in (losses.forward_kl("cross_entropy"), losses.jsd(), losses.tvd()):
        linear_loss(*given, loss, batch=teacher, backend="triton").loss.backward()
    kept = {"kept_ids": torch.zeros(256, 8, dtype=torch.int64), "kept_everywhere": True}
    linear_logprobs(*given, **kept, entropy=True, backend="triton")[0].sum().backward()
    linear_logprobs(given[0], given[1].detach(), given[2], backend="triton").sum().backward()  # a frozen head
    with torch.no_grad():
        # few rows
        linear_logprobs(*operands(8, 4096, 1024, torch.bfloat16), entropy=True, deterministic=True, backend="triton")
    target = torch.zeros(8, dtype=torch.int64)
    for demand in (Demand(), Demand(statistics=(STATISTICS,))):
        stats = RowStats.empty(8, layout_of(demand), torch.float32, target.device)
        message = torch.zeros(2, len(layout_of(demand).message_indices) + 1, 8)
        TRITON.merge_ranks(stats, message, demand, target, False, torch.zeros(()))


def spilled(compiled: Any) -> int:
    if "cubin" not in compiled.asm:
        return int(re.search(r"\.vgpr_spill_count:\s+(\d+)", compiled.asm["amdgcn"])[1])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return max((int(bytes_) for bytes_ in re.findall(r"STACK:(\d+)", said)), default=-1)


def main() -> None:
    found = launches().values()
    for name in (os.environ["CHUNKED_HEAD_ARCH"], *sys.argv[1:]):
        pretend(target_of(name))
        for kernel, arguments, constants in found:
            if name not in sys.argv or kernel.fn.__name__ in MATMULS:
                row = made(kernel, arguments, constants)
                print(json.dumps({"architecture": name} | row, default=str), flush=True)


def made(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> dict[str, Any]:
    row = {"kernel": kernel.fn.__name__, "constants": {k: v for k, v in constants.items() if v is not None}}
    try:
        compiled = kernel.warmup(*arguments, grid=(1,), **constants, **FUSED)
        code = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
        holds = [name for name in INSTRUCTIONS if name in code]
        row["e4m3"] = torch.float8_e4m3fn in [getattr(getattr(one, "base", one), "dtype", None) for one in arguments]
        bias = dict(zip(kernel.arg_names, arguments, strict=False)).get("bias_ptr")
        row["bias"] = "" if bias is None else str(bias.dtype)
        row |= {"shared": compiled.metadata.shared, "spilled": spilled(compiled), "holds": holds}
    except Exception as error:  # one kernel's failure shall not hide the others'; the test asks for none
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return row


if __name__ == "__main__":
    main()
