"""Operations on lazy logits against the same on logits: what stays lazy, what does not, and that both are right."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from tiers import crossed
from tiny_models import LazyLogits, pair
from torch import Tensor

from chunked_head import patch_model

VOCAB = 97
BIAS = torch.linspace(-1, 1, VOCAB)
MASK = torch.arange(22).view(2, 11) % 3 == 0
Operation = Callable[[Any], Any]

LAZY: dict[str, Operation] = {
    "float": lambda x: x.float(),
    "to dtype": lambda x: x.to(torch.float64),
    "to device and dtype": lambda x: x.to("cpu", torch.bfloat16),
    "scale": lambda x: 3 * x / 7,
    "cap": lambda x: 5 * torch.tanh(x / 5),
    "bias": lambda x: x + BIAS,
    "bias of three dimensions": lambda x: torch.add(x, BIAS.view(1, 1, -1)),
    "scaled bias and cap": lambda x: ((x * 2 + BIAS) / 5).tanh() * 5,
    "crop": lambda x: x[..., :90],
    "rows": lambda x: x[:, :-1],
    "ellipsis": lambda x: x[..., :-1, :],
    "one row": lambda x: x[0],
    "new axis": lambda x: x[None],
    "mask": lambda x: x[MASK],
    "mask and crop": lambda x: x[MASK, :50],
    "ids of rows": lambda x: x[torch.tensor([1, 0]), torch.tensor([2, 3])],
    "view with the vocabulary inferred": lambda x: x.reshape(22, -1),
    "flatten": lambda x: x.flatten(0, 1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "transpose": lambda x: x.transpose(0, 1),
    "swapaxes": lambda x: x.swapaxes(1, -3),
    "permute": lambda x: x.permute(1, 0, 2),
    "split": lambda x: x.split(1)[1],
    "chunk": lambda x: x.chunk(3, dim=1)[2],
    "select": lambda x: x.select(1, 3),
    "index_select": lambda x: x.index_select(1, torch.tensor([3, 1])),
    "expand": lambda x: x[:1].expand(3, -1, -1),
    "expand and chunk": lambda x: x[:1].expand(3, -1, VOCAB).chunk(3)[1],
    "detach": lambda x: x.detach(),
    "negative log-probabilities": lambda x: -x.log_softmax(-1),
}
COMPUTED: dict[str, Operation] = {
    "crop by narrow": lambda x: x.narrow(-1, 0, 90),
    "columns of the end": lambda x: x[..., 5:],
    "one column": lambda x: x[..., 3],
    "softmax": lambda x: x.softmax(-1),
    "scale in place": lambda x: x.mul_(0.3).div_(2),
    "augmented": lambda x: operate(x, "/=", 3.0),
    "a scale for each row": lambda x: x * torch.ones(2, 1, 1),
    "a bias for each row": lambda x: x + torch.ones(2, 11, 1),
    "sum": lambda x: x.sum(-1),
    "expand of the vocabulary": lambda x: x.unsqueeze(-2).unsqueeze(-1).expand(2, 11, 1, VOCAB, 2),
    "log_softmax, all of it": lambda x: x.log_softmax(-1).exp(),
    "argmax of all": lambda x: x.argmax(),
    "topk": lambda x: x.topk(3).values,
    "stack beside a tensor": lambda x: torch.stack([x[0], torch.zeros(11, VOCAB)]),
    "fill": lambda x: operate(x, "fill", -3.0) + 0,
    "vocabulary first": lambda x: x.transpose(1, 2),
    "flattened with the vocabulary": lambda x: x.flatten(1),
    "reshaped across": lambda x: x.reshape(-1, 2, VOCAB).reshape(-1),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "masked_fill_": lambda x: x.masked_fill_(torch.arange(VOCAB) > 50, 0.0),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "matrix product": lambda x: x @ torch.ones(VOCAB, 2),
    "deep copy": lambda x: copy.deepcopy(x.detach()),
    "cross-entropy of probabilities": lambda x: F.cross_entropy(x[0], F.softmax(torch.ones(11, VOCAB), -1)),
    "cross-entropy, classes second": lambda x: F.cross_entropy(x.transpose(1, 2), torch.zeros(2, 11).long()),
    "cross-entropy of two caps": lambda x: F.cross_entropy(x.tanh().tanh().flatten(0, 1), torch.arange(22)),
}


def operate(x: Any, how: str, value: float) -> Any:
    if how == "/=":
        x /= value
    else:
        x[:, :, torch.tensor([2, 50])] = value
    return x


@pytest.fixture
def both() -> tuple[Any, Tensor, Any]:
    plain, patched = pair(when="training")
    ids = tiny_models.tokens()["input_ids"]
    return patched(input_ids=ids).logits, plain(input_ids=ids).logits, patched.chunked_head


@pytest.mark.parametrize("name", LAZY)
def test_lazy(name: str, both: tuple[Any, Tensor, Any]) -> None:
    lazy, logits, report = both
    found, expected = LAZY[name](lazy), LAZY[name](logits)
    assert isinstance(found, LazyLogits) and report.materialised == 0
    assert (found.shape, found.dtype, found.device) == (expected.shape, expected.dtype, expected.device)
    torch.testing.assert_close(found.materialise(), expected, rtol=1e-5, atol=1e-5)
    assert found.materialise().requires_grad == expected.requires_grad


@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.filterwarnings("ignore:chunked_head")
def test_computed(name: str, both: tuple[Any, Tensor, Any]) -> None:
    lazy, logits, report = both
    found, expected = COMPUTED[name](lazy), COMPUTED[name](logits)
    assert not isinstance(found, LazyLogits) and report.materialised >= 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# what a model does before its loss; the gradient tells whether the loss knows all of it
TAILS = ["scale", "cap", "scaled bias and cap", "crop", "rows", "mask", "mask and crop", "transpose", "split"]


HOW: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.2},
    "weighted": {"weight": torch.linspace(0.5, 2, VOCAB), "ignore_index": 7},
}


def compared(value_of: Operation) -> Any:
    """The patched model, after holding values of its logits and the gradients of all parameters to the plain one's."""
    found, models = [], pair(when="training", strict=True)
    for model in models:
        value = value_of(model(input_ids=tiny_models.tokens()["input_ids"]).logits)
        (value * torch.linspace(0.3, 1, value.numel()).view(value.shape)).sum().backward()
        found.append([value.detach(), *(p.grad for p in model.parameters())])
    for theirs, ours in zip(*found, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max().item())
    return models[1]


@crossed(name=TAILS, kind=HOW)
def test_cross_entropy(name: str, kind: str) -> None:
    def loss_of(logits: Any) -> Any:
        logits = LAZY[name](logits)
        logits, how = logits.reshape(-1, logits.shape[-1]), HOW[kind]
        options = how | ({"weight": how["weight"][: logits.shape[-1]]} if "weight" in how else {})
        return F.cross_entropy(logits, (torch.arange(logits.shape[0]) * 3 + 7) % 40, **options)

    compared(loss_of)


def fill(x: Any) -> None:
    x.fill_(-30.0)


def augment(x: Any) -> None:
    x /= 2.0


# how logits, or some of them, are had; and how they are written to
HAD: dict[str, Operation] = {
    "themselves": lambda x: x,
    "rows": lambda x: x[:, 1:],
    "columns": lambda x: x[..., 5],
    "rows and columns": lambda x: x[:, :-1][..., :50],
    "detached": lambda x: x.detach(),
    "detached columns": lambda x: x.detach()[..., 7:],
    "data": lambda x: x.data,
    "view_as": lambda x: x.view_as(torch.empty(2, 11, VOCAB)),
    "select": lambda x: x.select(-1, 3),
    "flat": lambda x: x.view(-1),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "transposed": lambda x: x.transpose(1, 2),
    "one of those split": lambda x: x.detach().split(1, dim=1)[2],
    "one sequence": lambda x: list(x.detach())[1],
    "a contiguous copy": lambda x: x[:, :-1].contiguous(),
    "a flat copy": lambda x: x[:, :-1].reshape(-1, VOCAB),
    "a copy": lambda x: x.clone(),
    "another dtype": lambda x: x.double(),
    "its own dtype": lambda x: x.float(),
}
WRITES: dict[str, Operation] = {
    "fill": fill, "augment": augment, "values": lambda x: x[..., :2].copy_(torch.ones(())), "out": lambda x: torch.mul(
        x, 2.0, out=x
    ),
}  # fmt: skip


@crossed(had=HAD, write=WRITES)
@pytest.mark.filterwarnings("ignore:chunked_head")
def test_what_is_written_reaches_who_shares_the_memory(had: str, write: str) -> None:
    """And nobody else: relatives made before and after, copies made before."""
    found = []
    for model in pair(when="always"):
        with torch.no_grad():
            logits = model(input_ids=tiny_models.tokens()["input_ids"]).logits
            before = [logits[:, :-1], logits.detach(), logits.view(-1, VOCAB), logits * 1.0, logits[:, 2:].contiguous()]
            written = HAD[had](logits)
            WRITES[write](written)
            after = [logits[0], logits[..., 3], F.cross_entropy(before[0].flatten(0, 1), IDS[:, 1:].flatten())]
            found.append([logits, written, *before, *after])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(getattr(ours, "materialise", lambda x=ours: x)(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:chunked_head")
def test_gradients_of_what_was_written_to() -> None:
    found = []
    for model in pair(when="training"):
        logits = model(input_ids=tiny_models.tokens()["input_ids"]).logits
        part = logits[:, :-1]
        logits[..., 5].fill_(-30.0)
        F.cross_entropy(part.reshape(-1, VOCAB), IDS[:, 1:].flatten()).backward()
        found.append(model.lm_head.weight.grad)
    assert found[0][5].abs().max() == 0
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)


def test_what_is_only_read_is_computed_by_itself() -> None:
    """Rows for rows: the memory of all logits is what these are there to spare."""
    model = patch_model(tiny_models.llama(), when="training")
    logits = model(input_ids=tiny_models.tokens()["input_ids"]).logits
    part = logits[:, 1:3]
    with pytest.warns(UserWarning, match="computed after all, for softmax"):
        part.softmax(-1)
    assert part.float() is part and logits._computed is None and part._computed is not None


@pytest.mark.filterwarnings("ignore:chunked_head")
def test_what_is_written_to_computed_logits_stays(both: tuple[Any, Tensor, Any]) -> None:
    lazy, logits, _ = both
    lazy.clamp_(max=0.0)
    torch.testing.assert_close(lazy.materialise(), logits.clamp(max=0.0))
    torch.testing.assert_close(lazy.float()[:, 1:], logits.clamp(max=0.0)[:, 1:])


def test_it_says_what_it_is(both: tuple[Any, Tensor, Any]) -> None:
    lazy, _, report = both
    assert repr(lazy) == "LazyLogits(shape=(2, 11, 97), dtype=torch.float32, device='cpu')"
    assert len(lazy) == 2 and lazy.dim() == 3 and lazy.numel() == 2 * 11 * 97 and lazy.is_floating_point()
    assert torch.is_floating_point(lazy) and not torch.is_complex(lazy) and torch.numel(lazy) == lazy.nbytes // 4
    assert report.materialised == 0
    lazy.materialise()
    assert "computed" in repr(lazy)


MEANS: dict[str, Operation] = {
    "rows": lambda x: x.mean(-1),
    "rows, kept": lambda x: x[:, :-1].mean(2, keepdim=True, dtype=torch.float64),
    "everything": lambda x: torch.mean(x.float()),
    "scaled": lambda x: (x * 3).mean(-1),
    "biased": lambda x: (x * 2 + BIAS).mean(-1),
    "cropped": lambda x: (x + BIAS)[..., :90].mean(-1),
    "capped": lambda x: ((x * 2 + BIAS) / 5).tanh().mul(5).mean(-1),
    "of one after the other": lambda x: torch.stack([row.logsumexp(-1) for row in x]),
    "TRL's log-probabilities": lambda x: x.gather(-1, IDS) - torch.stack([row.logsumexp(-1) for row in x])[..., None],
}
IDS = torch.arange(22).view(2, 11, 1) * 3


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.filterwarnings("ignore:chunked_head")
def test_statistics_of_rows(name: str) -> None:
    """What was computed of all rows serves each of them; a mean without a cap takes no pass."""
    passes = {"TRL's log-probabilities": 1, "of one after the other": 2, "capped": 1}.get(name, 0)
    assert compared(MEANS[name]).chunked_head.fused == passes


def test_always_lazy_but_in_generation() -> None:
    plain = tiny_models.llama().eval()
    patched = patch_model(copy.deepcopy(plain), when="always", strict=True)
    ids = tiny_models.tokens()["input_ids"]
    with torch.no_grad():
        lazy = patched(input_ids=ids).logits
        assert isinstance(lazy, LazyLogits)
        found, expected = (x.log_softmax(-1).gather(-1, IDS) for x in (lazy, plain(input_ids=ids).logits))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        cache = patched(input_ids=ids, use_cache=True).past_key_values
        assert not isinstance(patched(input_ids=ids[:, :1], past_key_values=cache).logits, LazyLogits)
    assert torch.equal(*(model.generate(ids, max_new_tokens=3, do_sample=False) for model in (patched, plain)))
    assert not isinstance(patch_model(plain, when="training")(input_ids=ids).logits, LazyLogits)


def test_what_is_made_without_gradients_has_none() -> None:
    """Of logits that have some: an evaluation beside a training step."""
    patched = patch_model(tiny_models.llama(), when="training", strict=True)
    ids = tiny_models.tokens()["input_ids"]
    lazy = patched(input_ids=ids).logits
    with torch.no_grad():
        made = [F.cross_entropy(lazy[0], ids[0]), lazy.log_softmax(-1).gather(-1, IDS), lazy.mean(-1)]
    assert not any(value.requires_grad for value in made)
    assert F.cross_entropy(lazy[0], ids[0]).requires_grad
