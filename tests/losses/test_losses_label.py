"""Label losses on statistics of full logits against the oracle, float64, values and gradients."""

import pytest
import torch
from full_stats import Stats, check, full_stats, make_batch, only
from oracle import label as oracle
from tiers import crossed
from torch import Tensor

from chunked_head.losses import label

N, V = 9, 23
F64 = torch.float64
Z_LOSS = label.z_loss()


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    """Logits [N, V] and targets with two tokens that don't count, nan and inf in one's logits."""
    x = torch.randn(N, V, dtype=F64) * 3
    target = torch.randint(V, (N,))
    target[2], target[6] = -1, -1
    x[2], x[6] = float("nan"), float("inf")
    return x, target


def class_weights() -> Tensor:
    weights = torch.rand(V, dtype=F64) + 0.1
    weights[::4] = 0
    return weights


@crossed(token_scaling=[False, True], weighted=[False, True], smoothing=[0.0, 0.1, 1.0])
def test_cross_entropy(data, smoothing: float, weighted: bool, token_scaling: bool) -> None:
    weights = class_weights() if weighted else None
    options = {"label_smoothing": smoothing, "class_weights": weights, "token_scaling": token_scaling}
    check(label.cross_entropy(**options), oracle.cross_entropy, *data, {}, options=options, class_weights=weights)


def test_cross_entropy_needs_and_denominator(data) -> None:
    x, target = data
    weights = class_weights()
    assert only(label.cross_entropy()).needs == frozenset()
    assert only(label.cross_entropy(class_weights=weights)).needs == frozenset()
    assert only(label.cross_entropy(0.1)).needs == {"mean_logit"}
    assert only(label.cross_entropy(0.1, weights)).needs == {"weighted_sum"}
    assert only(label.cross_entropy()).counted is None
    batch = make_batch({}, target, V)
    summand = only(label.cross_entropy(0.1, weights))
    counted = summand.counted(batch, **summand.tensors)
    assert torch.equal(counted[batch.mask], weights[target[target >= 0]])
    # PyTorch's mean is the sum over the weights counted
    values = summand.values(full_stats(x, target, class_weights=weights), batch, summand.tensors)
    ours = values[batch.mask].sum() / counted[batch.mask].sum()
    theirs = torch.nn.functional.cross_entropy(
        x[batch.mask], target[batch.mask], weights, label_smoothing=0.1, reduction="mean"
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("alpha", [None, 0.25, "classes"])
def test_focal(data, gamma: float, alpha: object) -> None:
    alpha = class_weights() if alpha == "classes" else alpha
    options = {"gamma": gamma, "alpha": alpha}
    check(label.focal(**options), oracle.focal, *data, {}, options=options)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_of_certain_target(gamma: float) -> None:
    """p_y rounds to 1: value 0 and gradient 0, where the formula's power has an infinite slope."""
    x = torch.zeros(2, V, dtype=F64)
    x[:, 3] = torch.tensor([2000.0, 4.0])
    x.requires_grad_()
    target = torch.tensor([3, 3])
    summand = only(label.focal(gamma))
    values = summand.values(full_stats(x, target), make_batch({}, target, V), {})
    (grad,) = torch.autograd.grad(values.sum(), x)
    assert values[0] == 0 and values[1] > 0
    assert torch.equal(grad[0], torch.zeros(V, dtype=F64)) and grad[1].isfinite().all() and grad[1, 3] < 0


@pytest.mark.parametrize("kind", ["z_loss", "entropy"])
def test_without_options(data, kind: str) -> None:
    losses = getattr(label, kind)()
    check(losses, getattr(oracle, kind), *data, {})
    assert not only(losses).reads_target
    assert only(losses).needs == ({"entropy"} if kind == "entropy" else frozenset())


def test_signs() -> None:
    """A bonus comes from a negative coefficient alone."""
    x = torch.randn(3, V, dtype=F64)
    target = torch.zeros(3, dtype=torch.int64)
    stats, batch = full_stats(x, target), make_batch({}, target, V)
    ((coefficient, summand),) = (-0.01 * label.entropy()).terms
    assert coefficient == -0.01 and (summand.values(stats, batch, {}) > 0).all()
    assert (only(label.z_loss()).values(stats, batch, {}) >= 0).all()


@pytest.mark.parametrize(
    "losses",
    [
        label.cross_entropy(0.1, token_scaling=True),
        label.cross_entropy(0.1, torch.rand(V, dtype=F64)),
        label.focal(2.0, torch.rand(V, dtype=F64)),
        label.z_loss(),
        label.entropy(),
    ],
    ids=lambda losses: only(losses).kind,
)
def test_slices_equal_the_whole(losses, data) -> None:
    x, target = torch.nan_to_num(data[0]), data[1]
    summand = only(losses)

    def values(rows: slice) -> Tensor:
        stats = full_stats(x[rows], target[rows], class_weights=summand.tensors.get("class_weights"))
        return summand.values(stats, make_batch({}, target[rows], V), summand.tensors)

    assert summand.scope == "token"
    assert torch.equal(
        torch.cat([values(slice(0, 4)), values(slice(4, 5)), values(slice(5, None))]), values(slice(None))
    )


def test_half_class_weights_and_fp32_statistics() -> None:
    x, target = torch.randn(4, V), torch.arange(4)
    weights = torch.rand(V).bfloat16()
    summand = only(label.cross_entropy(0.2, weights))
    values = summand.values(
        full_stats(x, target, class_weights=weights.float()), make_batch({}, target, V), summand.tensors
    )
    assert values.dtype == torch.float32
    expected = torch.nn.functional.cross_entropy(x, target, weights.float(), reduction="none", label_smoothing=0.2)
    torch.testing.assert_close(values, expected)


def test_compiles_whole() -> None:
    x, target = torch.randn(4, V), torch.arange(4)
    batch = make_batch({}, target, V)
    weights = torch.rand(V)
    for losses in (label.cross_entropy(0.1, weights, True), label.focal(0.5, weights), label.focal(), Z_LOSS):
        summand = only(losses)
        stats = full_stats(x, target, class_weights=weights)

        leaves = {name: value for name, value in stats.values.items() if value.is_floating_point()}

        def run(leaves, summand=summand) -> Tensor:
            return summand.values(Stats(leaves), batch, summand.tensors)

        compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="eager")
        torch.testing.assert_close(compiled(leaves), run(leaves))
        grads = torch.func.grad(lambda leaves, run=run: run(leaves).sum())(leaves)
        read = "lse" if losses is Z_LOSS else "logprob"
        assert grads[read].all() and grads[read].isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "error", "named"),
    [
        (lambda: label.cross_entropy(1.1), ValueError, "label_smoothing of losses.cross_entropy"),
        (lambda: label.cross_entropy(-0.1), ValueError, "label_smoothing of losses.cross_entropy"),
        (lambda: label.cross_entropy(token_scaling=1), TypeError, "token_scaling of losses.cross_entropy"),
        (lambda: label.cross_entropy(class_weights=[1.0]), TypeError, "class_weights of losses.cross_entropy"),
        (lambda: label.cross_entropy(class_weights=torch.ones(2, 2)), ValueError, r"shape \(2, 2\)"),
        (lambda: label.cross_entropy(class_weights=torch.ones(3).long()), ValueError, "torch.int64"),
        (lambda: label.cross_entropy(class_weights=torch.ones(3).requires_grad_()), ValueError, "requires_grad=True"),
        (lambda: label.focal(-1.0), ValueError, "gamma of losses.focal"),
        (lambda: label.focal(alpha=-0.5), ValueError, "alpha of losses.focal"),
        (lambda: label.focal(alpha=torch.ones(1, 3)), ValueError, "alpha of losses.focal"),
    ],
)
def test_wrong_options(wrong, error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        wrong()
