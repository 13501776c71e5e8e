"""The matmul that leaves gradients of logits, against the matmul and the pass over stored logits that it stands for."""

from dataclasses import dataclass

import pytest
import torch
from cases import GPU, TRITON, Place

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]
COEFFICIENTS = ("alpha", "eta", "alpha2", "eta2", "beta", "kappa")


@dataclass(frozen=True)
class Case:
    name: str
    coefficients: tuple[str, ...] = ("alpha", "beta")
    rows: int = 77
    hidden: int = 72
    columns: int = 203
    first: int = 0  # of the tile in a vocabulary of some more columns
    columns2: int = 150
    ratio2: float | None = None
    bias: bool = False
    class_weights: bool = False
    logit_scale: float | None = None
    softcap: float | None = None


CASES = [
    Case("cross-entropy"),
    Case("later-tile", first=64),
    Case("rows-of-whole-tiles", rows=64, columns=128, first=128),
    Case("one-row", rows=1),
    Case("few-columns", columns=5, columns2=3, hidden=8),
    Case("alpha-alone", ("alpha",)),
    Case("beta-alone", ("beta",)),
    Case("kappa-alone", ("kappa",), first=8),
    Case("nothing", ()),
    Case("entropy", ("alpha", "eta", "beta")),
    Case("smoothing", ("alpha", "beta", "kappa"), class_weights=True),
    Case("smoothing-bias", ("alpha", "beta", "kappa"), bias=True, first=32),
    Case("bias", bias=True, first=16),
    Case("scale", logit_scale=0.37),
    Case("cap", softcap=3.0, first=24),
    Case("scale-cap-bias", softcap=3.0, logit_scale=1.5, bias=True),
    Case("second-alone", ("alpha2", "beta"), ratio2=0.5),
    Case("two-softmaxes", ("alpha", "alpha2", "beta"), ratio2=2.0, first=64),
    Case("second-of-fewer", ("alpha", "alpha2", "eta2"), columns2=64),
    Case("second-of-none-here", ("alpha", "alpha2"), columns2=0, first=96),
    Case(
        "everything", COEFFICIENTS, ratio2=0.7, bias=True, class_weights=True, logit_scale=0.8, softcap=5.0, first=40
    ),
]  # fmt: skip


def softmax_of(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """start and rest of log p = (x - start) + rest"""
    return x.max(1).values, -(x - x.max(1).values[:, None]).exp().sum(1).log()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_is_what_row_grad_makes(place: Place, case: Case, dtype: torch.dtype) -> None:
    from chunked_head.kernels import launch_grads, launch_rows
    from chunked_head.kernels.launch_rows import Softmax, Stored

    made = torch.Generator().manual_seed(3)
    vocab = case.first + case.columns + 9
    tile = slice(case.first, case.first + case.columns)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made).to(place.device)

    hidden = normal(case.rows, case.hidden).to(dtype)
    weight = (3 * normal(vocab, case.hidden) / case.hidden**0.5).to(dtype)
    bias = normal(vocab).to(dtype) if case.bias else None
    class_weights = normal(vocab).abs() if case.class_weights else None
    target = torch.randint(0, vocab, (case.rows,), generator=made).to(place.device)
    target[::3] = tile.start + target[::3] % case.columns  # no tile without targets
    target[4::5] = -1
    hidden[4::10] = torch.nan  # of rows that do not count

    raw = hidden.float() @ weight.float().t()
    x = raw if bias is None else raw + bias.float()
    x = x * (case.logit_scale or 1.0)
    x = x if case.softcap is None else case.softcap * torch.tanh(x / case.softcap)
    # not the matmul's own value: that it is taken, and not the column's, shows
    target_logit = x.gather(1, target.clamp(min=0)[:, None])[:, 0] + 0.25 * normal(case.rows)
    c = {name: normal(case.rows) for name in COEFFICIENTS if name in case.coefficients}
    c = {name: value.masked_fill(target < 0, torch.nan) for name, value in c.items()}
    first = Softmax(*softmax_of(x), c.get("alpha"), c.get("eta"))
    second = Softmax(
        *softmax_of(x * (case.ratio2 or 1.0)), c.get("alpha2"), c.get("eta2"), case.ratio2, case.columns2
    )  # fmt: skip
    common = (target, target_logit, first, second, c.get("beta"), c.get("kappa"))
    sliced = None if class_weights is None else class_weights[tile]
    after = (case.first, case.logit_scale, case.softcap)

    expected = torch.empty(case.rows, case.columns, device=place.device)
    stored = Stored(
        raw[:, tile].contiguous(), None, None if bias is None else bias[tile], case.logit_scale, case.softcap
    )  # fmt: skip
    launch_rows.row_grad(expected, stored, sliced, *common, None, *after)
    # a number that no gradient is, in every place and in those between the rows, which stay as they are
    buffer = torch.full((case.rows, -(-case.columns // 8) * 8 + 8), 77.0, device=place.device, dtype=dtype)
    dlogits = buffer[:, : case.columns]
    launch_grads.grad_logits(
        dlogits, hidden, weight[tile], None if bias is None else bias[tile], sliced, *common, *after
    )
    assert (buffer[:, case.columns :] == 77.0).all()
    assert (dlogits[target < 0] == 0).all() and (expected[target < 0] == 0).all()
    if case.coefficients:
        assert expected.abs().max() > 0.1
    size = expected.abs() + 1e-3 * expected.abs().amax(1, keepdim=True)
    error = (dlogits.float() - expected).abs()
    # rounded once to 16 bits; what is added up before is as large as the coefficients
    allowed = torch.finfo(dtype).eps * size + 2e-5
    assert (error <= allowed).all(), (
        f"{(error / allowed).max()} at {divmod(int((error / allowed).argmax()), case.columns)}"
    )
