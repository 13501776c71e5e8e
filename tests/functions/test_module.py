"""ChunkedHead against nn.Linear."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chunked_head import ChunkedHead


@pytest.mark.parametrize("bias", [False, True])
def test_state_dict_is_linears(bias: bool) -> None:
    linear, head = nn.Linear(8, 11, bias=bias), ChunkedHead(8, 11, bias=bias)
    assert list(head.state_dict()) == list(linear.state_dict())
    head.load_state_dict(linear.state_dict())
    hidden = torch.randn(3, 5, 8)
    torch.testing.assert_close(head.logits(hidden), linear(hidden))
    linear.load_state_dict(head.state_dict())


def test_initialised_as_linear() -> None:
    torch.manual_seed(1)
    linear = nn.Linear(8, 11, bias=True)
    torch.manual_seed(1)
    head = ChunkedHead(8, 11, bias=True)
    assert torch.equal(head.weight, linear.weight)
    assert torch.equal(head.bias, linear.bias)


def test_from_linear_shares_parameters() -> None:
    linear = nn.Linear(8, 11)
    head = ChunkedHead.from_linear(linear)
    assert head.weight is linear.weight
    assert head.bias is linear.bias
    assert dict(head.named_parameters()).keys() == {"weight", "bias"}


def test_options_reach_loss_and_logits() -> None:
    head = ChunkedHead(8, 11, softcap=3.0, logit_scale=2.0, label_smoothing=0.1)
    hidden, target = torch.randn(5, 8), torch.randint(0, 11, (5,))
    x = 3.0 * torch.tanh(2.0 * hidden @ head.weight.T / 3.0)
    torch.testing.assert_close(head.logits(hidden), x)
    torch.testing.assert_close(head(hidden, target), F.cross_entropy(x, target, label_smoothing=0.1))
    torch.testing.assert_close(head(hidden, target, label_smoothing=0.0), F.cross_entropy(x, target))
    assert "softcap=3.0" in repr(head)


def test_trains_and_pickles() -> None:
    head = ChunkedHead(8, 11, bias=True)
    hidden, target = torch.randn(20, 8), torch.randint(0, 11, (20,))
    optimizer = torch.optim.SGD(head.parameters(), lr=1.0)
    first = head(hidden, target)
    first.backward()
    optimizer.step()
    assert head(hidden, target) < first
    copy = pickle.loads(pickle.dumps(head))
    torch.testing.assert_close(copy(hidden, target), head(hidden, target))
