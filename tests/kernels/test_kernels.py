"""Kernels by themselves, where the calls above them would hide what matters: order of sums, masks, strides."""

import pytest
import torch
from cases import GPU, PRODUCT_TILES, TILES, TRITON, Place, backend_of, named
from chunked_head.kernels.common import operands
from chunked_head.kernels.gradients import launch as gradients
from chunked_head.kernels.products import launch as products
from chunked_head.kernels.statistics import launch as statistics
from tiers import crossed

from chunked_head.core import records, tiles
from chunked_head.core.statistics import ENTROPY, TOP, WEIGHTED_SUM

PLACES = [*TRITON, *(place for place in GPU if place.values[0].backend == "triton")]

TARGETS = {
    "random": lambda made: torch.randint(0, 50, (301,), generator=made),
    "all equal": lambda made: torch.full((301,), 7),
    "ignored": lambda made: torch.full((301,), -1),
    "half ignored": lambda made: torch.where(torch.rand(301, generator=made) < 0.5, -1, 3),
    "one token": lambda made: torch.tensor([4]),
    "pieces": lambda made: torch.arange(301) // 32,
    "long run": lambda made: torch.cat([torch.zeros(3), torch.full((290,), 5), torch.full((8,), 9)]).long(),
}


@crossed(place=PLACES, kind=TARGETS, dtype=[torch.float32, torch.bfloat16])
def test_add_rows(place: Place, kind: str, dtype: torch.dtype) -> None:
    """Sorted pieces add what one addition after the other would, and the same bits every time."""
    made = torch.Generator().manual_seed(5)
    target = TARGETS[kind](made).to(place.device)
    tokens, vocab, hidden = len(target), 301, 72
    rows = torch.randn(tokens, hidden + 8, generator=made).to(place.device)[:, :hidden]  # rows further apart than long
    factor = torch.randn(tokens, generator=made).to(place.device)
    rows[target < 0] = torch.nan
    start = torch.randn(vocab, hidden, generator=made).to(place.device, dtype)

    def run() -> torch.Tensor:
        dweight = start.clone()
        products.add_rows(dweight, rows, target, factor)
        return dweight

    counts = target >= 0
    terms = (factor[:, None] * rows)[counts].double()
    expected = start.double().index_add(0, target[counts], terms)
    size = start.double().abs().index_add(0, target[counts], terms.abs())
    first = run()
    rounding = 2 * torch.finfo(dtype).eps * expected.abs() + 1e-6 * size
    assert ((first.double() - expected).abs() <= rounding).all()
    assert torch.equal(first, run())


@crossed(place=PLACES, counted=[True, False], kind=TARGETS)
def test_sort_columns(place: Place, kind: str, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting and sorting put equal targets in the same order, the first in place, and tell how many there are."""
    target = TARGETS[kind](torch.Generator().manual_seed(6)).to(place.device).repeat(4)
    if not counted:
        monkeypatch.setattr(products, "MAX_COMPARED", 0)
    ordered, order, occurrences = products.sort_columns(target, counts_occurrences=True)
    expected = torch.sort(target, stable=True)
    assert ordered.dtype == torch.int32
    assert torch.equal(ordered.long(), expected.values)
    assert torch.equal(order, expected.indices)
    assert torch.equal(occurrences.long(), (target[:, None] == target).sum(1))
    assert products.sort_columns(target).occurrences is None


@crossed(place=PLACES, kind=TARGETS, dtype=[torch.float32, torch.bfloat16])
def test_put_rows(place: Place, kind: str, dtype: torch.dtype) -> None:
    """Of equal places the first is put; others stay as they are."""
    places = TARGETS[kind](torch.Generator().manual_seed(6)).sort().values.int().to(place.device)
    out, rows = torch.randn(301, 72, device=place.device, dtype=dtype), torch.randn(301, 72, device=place.device)
    expected, rows = out.clone(), rows[: len(places[::3])]
    for place_of_row, row in zip(reversed(places[::3].tolist()), reversed(rows), strict=True):
        if place_of_row >= 0:
            expected[place_of_row] = row
    products.put_rows(out, rows, places, 3)
    torch.testing.assert_close(out, expected, rtol=2**-7 if dtype == torch.bfloat16 else 0.0, atol=0.0)


@crossed(place=PLACES, kind=TARGETS, counted=[False, True])
def test_pick_columns(place: Place, kind: str, counted: bool) -> None:
    """Columns of each third target; 0 where there is none, and behind the rows that count, which may be anything."""
    columns = TARGETS[kind](torch.Generator().manual_seed(6)).sort().values.int().to(place.device)
    grad = torch.randn(70, 308, device=place.device).bfloat16()[:, :301]
    out, rows = torch.empty(70, len(columns[::3]), dtype=torch.bfloat16, device=place.device), 70
    count = records.ALL_ROWS
    if counted:
        rows, count = 41, (torch.tensor(51, device=place.device), 10)
        grad[rows:] = torch.nan
    products.pick_columns(out, grad, columns, 3, count)
    expected = torch.where(columns[::3] < 0, 0.0, grad[:, columns[::3].long().clamp(min=0)])
    expected[rows:] = 0.0
    assert torch.equal(out, expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("with_logits", [False, True])
def test_clean_rows(place: Place, with_logits: bool) -> None:
    source = torch.randn(9, 37, device=place.device).t()  # columns apart, rows adjacent
    target = torch.tensor([0, -1, 5] * 12 + [-1], device=place.device)
    source[target < 0] = torch.nan
    order = torch.randperm(37, device=place.device)
    weight, bias = torch.randn(6, 9, device=place.device), torch.randn(6, device=place.device)
    scale = torch.rand(37, device=place.device)
    out, logit = torch.empty(37, 9, device=place.device), torch.empty(37, device=place.device)
    for rows, given in ((source, None), (source[order.argsort()], order)):
        head = (logit, weight, bias, records.Transform(0.5, 3.0, scale)) if with_logits else ()
        statistics.clean_rows(out, rows, target, given, *head)
        assert torch.equal(out, torch.where((target < 0)[:, None], 0.0, source))
        if with_logits:
            counts = target >= 0
            raw = 0.5 * ((source[counts] * weight[target[counts]]).sum(1) + bias[target[counts]])
            torch.testing.assert_close(logit[counts], scale[counts] * 3.0 * torch.tanh(raw / 3.0))


@crossed(place=PLACES, hidden=[64, 200, 2880], dtype=[torch.bfloat16, torch.float16], tile=TILES, scale=[None, 0.6])
def test_a_target_has_the_bits_of_its_tile(
    place: Place, hidden: int, dtype: torch.dtype, tile: tiles.Tile, scale: float | None
) -> None:
    """What is taken out of the sums of a tile is what is in them. The interpreter's products are numpy's."""
    states, weight, _, _ = head_operands(place, (70, 640, hidden), dtype, spread=4.0)
    device, bias, made = states.device, torch.linspace(-1, 1, 640).to(states), records.Transform(scale)
    strips = operands.Strips.empty(70, -(-640 // tile.block_n), device, ((TOP,),)).of_rows(70)
    statistics.exp_logits(None, strips, states, weight, bias, None, None, made, tile)
    tops, ids = strips.statistics[0][0][1]
    for top, target in zip(tops, ids.long(), strict=True):
        exact, of_tile = torch.empty(2, 70, device=device).unbind()
        statistics.clean_rows(torch.empty_like(states), states, target, None, exact, weight, bias, made, None, of_tile)
        if states.is_cuda:
            assert torch.equal(of_tile, top)
        torch.testing.assert_close(of_tile, top, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(exact, top, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("width", [1, 40, 700])
@pytest.mark.parametrize("rare", [False, True])
def test_level_rows_scales_hidden_states(place: Place, width: int, rare: bool) -> None:
    """Terms of the targets of many tokens are in the product, but for what 16 bits lose of them; others are apart."""
    rows, vocab = 37, 64
    device = torch.device(place.device)
    target = torch.tensor([0, -1, 5] * 12 + [-1], device=device)
    lse_base, neg_log_sum, logprob, alpha, beta = torch.randn(5, rows, device=device).unbind(0)
    level = torch.randn(rows, device=device)
    for vector in (lse_base, neg_log_sum, logprob):
        vector[target < 0] = torch.nan
    hidden = torch.randn(rows, width, device=device).half()
    hidden[target < 0] = 0.0
    before, exp = hidden.clone(), torch.rand(rows, vocab, device=device).bfloat16()
    stored, factors = exp.clone(), torch.full((3, rows), torch.nan, device=device)
    softmax, at_target, ratio = factors
    gradients.level_rows(
        exp, factors, hidden, operands.Strips.empty(rows, 2, device).of_rows(rows), 32, level, logprob,
        records.Terms(target, level, beta, None, (records.Softmax(lse_base, neg_log_sum, alpha),)),
        records.Transform(2.0), occurrences=torch.full((rows,), 4 if rare else 5, dtype=torch.int32, device=device),
    )  # fmt: skip
    counts = target >= 0
    expected = 2.0 * alpha * (level - lse_base + neg_log_sum).exp()
    torch.testing.assert_close(softmax[counts], expected[counts])
    whole = 2.0 * (alpha * logprob.exp() - beta)
    torch.testing.assert_close((at_target + softmax * ratio)[counts], whole[counts])
    if rare:
        assert not ratio[counts].any()
    else:
        assert ((at_target / whole)[counts].abs() <= 2.0**-7).all()
    stored[counts, target[counts]] = ratio[counts].bfloat16()
    assert torch.equal(exp, stored)
    assert torch.equal(hidden[counts], (before.float() * softmax[:, None]).half()[counts])
    assert not hidden[~counts].any()


@pytest.mark.parametrize("place", PLACES)
def test_scale_leaves_alone_what_needs_nothing(place: Place) -> None:
    """In place, a factor of 1 writes nothing: nan's payload and signed zeros are as they were."""
    values = torch.tensor([0.0, -0.0, 1.5, 3.0e38], device=place.device).repeat(700)
    before = values.clone()
    gradients.scale(values, values, torch.ones((), device=place.device))
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))
    gradients.scale(values, values, torch.tensor(0.5, device=place.device))
    assert torch.equal(values, before * 0.5)
    half = torch.empty_like(values, dtype=torch.float16)
    gradients.scale(half, before, torch.tensor(2.0, device=place.device))
    assert torch.equal(half, (before * 2.0).half())


CUT = [(70, 203, 72), (17, 40, 40), (33, 136, 104)]  # rows, vocab, hidden
if torch.cuda.is_available():
    # tiles that every edge cuts, one of two steps, several for a program, fewer steps than stages and one more
    CUT = [(2048, 12032, 2304), (333, 5000, 1160), (17, 136, 72), (96, 200000, 64), (128, 100000, 264)]


def head_operands(
    place: Place, sizes: tuple[int, int, int], dtype: torch.dtype, spread: float = 2.0
) -> tuple[torch.Tensor, ...]:
    """Hidden states, weight, the logits in float64 and one of each row as an offset."""
    (rows, vocab, hidden), made = sizes, torch.Generator().manual_seed(5)
    states = torch.randn(rows, hidden, generator=made).to(place.device, dtype)
    weight = (torch.randn(vocab, hidden, generator=made) * spread / hidden**0.5).to(place.device, dtype)
    column = torch.randint(vocab, (rows,), generator=made).to(place.device)
    logits = states.double() @ weight.double().t()
    offset = logits.gather(1, column[:, None])[:, 0].float()
    return states, weight, logits, offset


def run_exp_logits(
    states: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor | None,
    tile: tiles.Tile,
    **options,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Exponentials, and strips' offsets and sums, [rows, strips]; sums alone without an offset."""
    (rows, vocab), count = (len(states), len(weight)), -(-len(weight) // tile.block_n)
    strips = operands.Strips.empty(rows, count, states.device).of_rows(rows)
    strips.offset.fill_(torch.nan)
    out = states.new_full((rows, -(-vocab // 8) * 8 + 8), torch.nan)[:, :vocab]  # rows further apart than long
    out = None if offset is None else out
    options = {"transform": records.PLAIN} | options
    statistics.exp_logits(out, strips, states, weight, None, None, offset, **options, tile=tile)
    return out, strips.offset.t(), strips.sums[0].t()


def accumulation_error(states: torch.Tensor, weight: torch.Tensor) -> float:
    """How far plain PyTorch's product of these, summed in fp32, is from the exact logits: the relative error that it
    means for exponentials. Twice that is the budget."""
    if states.is_cuda:
        eager = torch.mm(states, weight.t(), out_dtype=torch.float32)
    else:
        eager = states.float() @ weight.float().t()
    return float((eager.double() - states.double() @ weight.double().t()).abs().max())


def strip_sums(exact: torch.Tensor, strips: int, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(exact, (0, strips * width - exact.shape[1])).view(len(exact), strips, width).sum(2)


@crossed(place=PLACES, sizes=CUT, dtype=[torch.bfloat16, torch.float16], tile=TILES, scale=[None, 0.6])
def test_exponentials(
    place: Place, sizes: tuple[int, int, int], dtype: torch.dtype, tile: tiles.Tile, scale: float | None
) -> None:
    """Relative to a row's offset, and their sums; the same bits every time."""
    states, weight, logits, offset = head_operands(place, sizes, dtype, spread=1.0)
    offset = offset * (scale or 1.0)
    (out, _, sums), again = (
        run_exp_logits(states, weight, offset, tile, transform=records.Transform(scale)) for _ in range(2)
    )
    exact = (logits * (scale or 1.0) - offset.double()[:, None]).exp()
    assert ((out.double() - exact).abs() <= torch.finfo(dtype).eps * exact + 1e-5).all()
    budget = 4e-6 + 2 * accumulation_error(states, weight)
    torch.testing.assert_close(sums.double(), strip_sums(exact, sums.shape[1], tile.block_n), rtol=budget, atol=1e-6)
    assert torch.equal(out, again[0]) and torch.equal(sums, again[2])


@pytest.mark.parametrize("place", [*TRITON, *GPU[:1]])
@pytest.mark.parametrize(
    "coefficients", [(1.0,), (0.5, -2.0), (1.0, 0.04, 1e-4, 3.0), (1.0, 2.0, 3.0, 4.0, 5.0)], ids=len
)
def test_sums_of_losses_and_metrics(place: Place, coefficients: tuple[float, ...]) -> None:
    backend, draw = backend_of("triton", torch.device(place.device)), torch.Generator().manual_seed(1)
    table = torch.randn(len(coefficients) + 2, 5000, generator=draw).to(place.device)
    inverse, one_or_nan = torch.tensor([0.25, 1.0], device=place.device).unbind()
    total, sums = backend.sum_rows(table, inverse, one_or_nan, coefficients)
    expected = table.double().sum(1) * torch.tensor([0.25] * len(coefficients) + [1.0] * 2, device=place.device)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-3)
    weighted = sum(c * value for c, value in zip(coefficients, sums.double(), strict=False))
    torch.testing.assert_close(total.double(), weighted, rtol=1e-5, atol=1e-4)
    assert total.untyped_storage().data_ptr() != sums.untyped_storage().data_ptr()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("tile", TILES, ids=named)
def test_far_above_the_offset(place: Place, tile: tiles.Tile) -> None:
    """Strips whose maximum lies more than REACH above take an offset of their own, which the sum's sign says."""
    sizes = (300, 3000, 1024) if torch.cuda.is_available() else (70, 203, 72)
    states, weight, logits, offset = head_operands(place, sizes, torch.bfloat16, spread=25.0)
    out, own_offset, sums = run_exp_logits(states, weight, offset, tile)
    own = sums < 0
    assert own.any() and not own.all() and torch.equal(own, ~own_offset.isnan())
    level = torch.where(own, own_offset, offset[:, None]).double()
    each = level.repeat_interleave(tile.block_n, 1)[:, : logits.shape[1]]
    exact = (logits - each).exp()
    budget = 4e-6 + 2 * accumulation_error(states, weight)
    exact_sums = strip_sums(exact, sums.shape[1], tile.block_n)
    torch.testing.assert_close(sums.abs().double(), exact_sums, rtol=budget, atol=1e-6)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=1e-6)
    states, weight, logits, _ = head_operands(place, sizes, torch.bfloat16)
    _, offset, sums = run_exp_logits(states, weight, None, tile)  # without exponentials
    found = (offset.double() + sums.double().log()).logsumexp(1)
    torch.testing.assert_close(found, logits.logsumexp(1), rtol=1e-6, atol=1e-5)


@crossed(
    place=PLACES,
    vocab=[96, 129, 384, 1000, 1024 + 128],
    kept=["exponentials", "relative", "nothing"],
    tile=TILES[:1],
    biased=[False, True],
)
def test_statistics_of_strips(place: Place, vocab: int, kept: str, tile: tiles.Tile, biased: bool) -> None:
    """Sure tokens among others, rows that do not count, targets of other ranks, impossible ids; where exponentials are
    not kept, two softmaxes."""
    rows, hidden, (scale, ratio) = 70, 128, (0.8, 1.5)
    states, weight, _, _ = head_operands(place, (rows, vocab, hidden), torch.bfloat16, spread=1.0)
    device, made = states.device, torch.Generator().manual_seed(1)
    target = torch.randint(vocab, (rows,), generator=made).to(device)
    towards = weight[target].float() / weight[target].float().square().sum(1, keepdim=True)
    states = (states.float() + torch.linspace(0, 60, rows, device=device)[:, None] * towards).bfloat16()
    bias = torch.zeros(vocab, dtype=torch.bfloat16, device=device)
    if biased:
        bias[::7] = -torch.inf
    logits = scale * (states.double() @ weight.double().t() + bias.double())
    target[3::8], target[5::8] = -1, tiles.ELSEWHERE
    states[target < 0] = torch.nan
    counts, own = target >= 0, (target >= 0) & (target < vocab)
    picked = logits.gather(1, target.where(own, 0)[:, None])[:, 0]
    asked, of_tile, level = torch.empty(3, rows, device=device).unbind()
    given, clean = records.Transform(scale), torch.empty_like(states)
    statistics.clean_rows(clean, states, target, None, asked, weight, bias if biased else None, given, None, of_tile)
    asked[counts & ~own] = 1.0  # as another rank has it
    count = -(-vocab // tile.block_n) * (2 if kept == "relative" else 1)
    kinds = [ENTROPY, TOP] if biased else [ENTROPY, WEIGHTED_SUM, TOP]
    strips = operands.Strips.empty(rows, count, device, [kinds, [ENTROPY]][: 1 + (kept != "exponentials")]).of_rows(
        rows
    )
    out = None
    if kept != "nothing":
        out = torch.empty(rows, -(-vocab // 8) * 8, device=device, dtype=torch.bfloat16)[:, :vocab]
        out = out if kept == "exponentials" else out.view(torch.float16)
    offset, columns2 = (asked if kept == "exponentials" else None), vocab // tile.block_n * tile.block_n or None
    softmaxes = [each[: len(strips.sums)] for each in ((None, ratio), (None, columns2))]
    statistics.exp_logits(out, strips, clean, weight, bias if biased else None, None, offset, given, tile, *softmaxes)
    leveled, targets = None if offset is None else level, (asked, of_tile, target)
    for second in range(len(strips.sums)):
        every = logits[:, :columns2] * ratio if second else logits
        own2 = own & (target < every.shape[1])
        found = torch.full((8, rows), torch.nan, device=device)
        lse, lse_base, neg_log_sum, logprob, entropy, weighted, top, _ = found
        ids = found[7].view(torch.int32)
        vectors = {ENTROPY: (entropy,), WEIGHTED_SUM: (weighted,), TOP: (top, ids)}
        made_of = [(each, vectors[each]) for each, _ in strips.statistics[second]]
        result = records.SoftmaxVectors(lse, lse_base, neg_log_sum, logprob, None, tuple(made_of))
        statistics.merge_strips(result, leveled, strips, *targets, every.shape[1], ratio if second else None, second)
        log_p = every - every.logsumexp(1, keepdim=True)
        budget = 4e-6 + 2 * accumulation_error(states[counts], weight)
        assert ((lse - every.logsumexp(1)).abs()[counts] <= budget).all()
        torch.testing.assert_close(lse_base - neg_log_sum, lse, equal_nan=True)
        entropies = -(log_p.exp() * log_p.where(log_p > -1e4, 0.0)).sum(1)
        assert ((entropy - entropies).abs()[counts] <= 20 * budget).all()
        expected = picked * (ratio if second else 1.0) - every.logsumexp(1)
        assert ((logprob - expected).abs() <= budget)[own2 & (picked > -torch.inf)].all()
        assert (logprob[own2] <= 0.0).all() and (logprob[own2 & (picked == -torch.inf)] == -torch.inf).all()
        sure = own2 & (expected > -1e-6)
        # exponentials and their sums in fp32, whatever the logits are
        assert sure.sum() > 5 and ((logprob - expected).abs()[sure] <= 1e-6).all()
        if not second:
            assert torch.equal(ids[counts].long(), logits.argmax(1)[counts])
        if WEIGHTED_SUM in result.kinds:
            torch.testing.assert_close(weighted.double()[counts], logits.sum(1)[counts], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("place", PLACES)
def test_more_strips_than_are_read_at_once(place: Place) -> None:
    """As those of 131,072 ids: sums so far are brought to the largest offset yet."""
    rows, count, made = 9, 1300, torch.Generator().manual_seed(4)
    strips = operands.Strips.empty(rows, count, torch.device(place.device), ((ENTROPY,),)).of_rows(rows)
    ((_, (shifted_sum,)),) = strips.statistics[0]
    offset, (total, shifted) = (
        torch.randn(count, rows, generator=made),
        torch.rand(2, count, rows, generator=made) + 0.1,
    )
    offset[600] += torch.linspace(-6, 6, rows)
    for kept, drawn in ((strips.offset, offset), (strips.sums[0], total), (shifted_sum, -shifted)):
        kept.copy_(drawn)
    lse, lse_base, neg_log_sum, entropy = torch.full((4, rows), torch.nan, device=place.device)
    outputs = records.SoftmaxVectors(lse, lse_base, neg_log_sum, statistics=((ENTROPY, (entropy,)),))
    statistics.merge_strips(outputs, None, strips, None, None, None, count)
    x, weight = offset.double(), (offset.double() - offset.double().amax(0)).exp()
    exact = offset.amax(0) + (weight * total).sum(0).log()
    torch.testing.assert_close(lse.cpu().double(), exact, rtol=0, atol=5e-6)
    mean = (weight * (total * x - shifted)).sum(0) / (weight * total).sum(0)
    torch.testing.assert_close(entropy.cpu().double(), exact - mean, rtol=0, atol=1e-5)


def dweight_operands(
    place: Place, sizes: tuple[int, int, int], dtype: torch.dtype, out: torch.dtype
) -> tuple[torch.Tensor, ...]:
    (rows, vocab, hidden), made = sizes, torch.Generator().manual_seed(5)
    grad = torch.randn(rows, -(-vocab // 8) * 8 + 8, generator=made).to(place.device, dtype)[:, :vocab]
    states = torch.randn(rows, hidden, generator=made).to(place.device, dtype)
    return grad, states, torch.randn(vocab, hidden, generator=made).to(place.device, out)


def assert_dweight(found: torch.Tensor, old: torch.Tensor | None, grad: torch.Tensor, states: torch.Tensor) -> None:
    """Rounded once to the output's dtype, of fp32 sums over as many products as there are rows."""
    wide = grad.double().t(), states.double()
    expected, size = wide[0] @ wide[1], wide[0].abs() @ wide[1].abs()
    if old is not None:
        expected, size = expected + old.double(), size + old.double().abs()
    sums = 2.0**-23 * max(len(grad), 16) ** 0.5 * size
    assert ((found.double() - expected).abs() <= torch.finfo(found.dtype).eps * expected.abs() + sums).all()


@crossed(
    place=PLACES,
    sizes=CUT,
    dtype=[torch.bfloat16, torch.float16],
    tile=PRODUCT_TILES,
    wide=[False, True],
    first=[False, True],
)
def test_dweight(
    place: Place, sizes: tuple[int, int, int], dtype: torch.dtype, tile: tiles.Tile, wide: bool, first: bool
) -> None:
    grad, states, old = dweight_operands(place, sizes, dtype, torch.float32 if wide else dtype)
    results = []
    for _ in range(2):
        results.append(torch.full_like(old, torch.nan) if first else old.clone())
        products.dweight(results[-1], grad, states, first, tile)
    assert_dweight(results[0], None if first else old, grad, states)
    assert torch.equal(*results)


@crossed(place=PLACES, count=[0, 1, 32, 33, 299, 1000], tile=PRODUCT_TILES, first=[False, True])
def test_dweight_of_counted_rows(place: Place, count: int, tile: tiles.Tile, first: bool) -> None:
    """What lies behind the rows that count, in steps of its own, is not read; nothing to count stores zeros."""
    sizes = (300, 3000, 520) if torch.cuda.is_available() else (300, 72, 40)
    grad, states, old = dweight_operands(place, sizes, torch.bfloat16, torch.bfloat16)
    counts = min(count, 300)
    states[counts:] = 0.0
    grad[-(-counts // tile.block_k) * tile.block_k :] = torch.nan
    out = torch.full_like(old, torch.nan) if first else old.clone()
    products.dweight(out, grad, states, first, tile, (torch.tensor(700 + count, device=place.device), 700))
    assert_dweight(out, None if first else old, grad[:counts], states[:counts])
