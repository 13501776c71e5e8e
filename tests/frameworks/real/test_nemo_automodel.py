"""NeMo Automodel's own loss path on the CPU, with its masked cross-entropy of logits and with this library's loss."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn

from chunked_head.integrations.nemo_automodel import ChunkedHeadCrossEntropy

VOCAB, HIDDEN, BATCH, TOKENS = 61, 16, 2, 8
YAML = """
loss_fn:
  _target_: chunked_head.integrations.nemo_automodel.ChunkedHeadCrossEntropy
  memory_budget: 16MiB
"""


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        made = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=made))

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.embedding(ids))


def batch(rank: int = 0) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(rank)
    ids, labels = (torch.randint(0, VOCAB, (BATCH, TOKENS), generator=made) for _ in range(2))
    labels[0, : 3 + rank] = -100
    return ids, labels


def close(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("options", [{}, {"num_label_tokens": 40}, {"num_label_tokens": 0}, {"weights": True}])
def test_by_its_own_loss_path(options: dict[str, Any]) -> None:
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.components.loss.utils import calculate_loss

    options = dict(options)
    (ids, labels), found = batch(), []
    if options.pop("weights", False):
        options["loss_weights"] = torch.linspace(0, 2, labels.numel()).view_as(labels)
    for ours in (True, False):
        model = Tiny()
        hidden = model(ids)
        if ours:
            loss = calculate_loss(
                ChunkedHeadCrossEntropy(), labels=labels.clone(), model=model, hidden_states=hidden, **options
            )
        else:
            each = MaskedCrossEntropy(reduction="none")(model.lm_head(hidden), labels.clone()).view(-1)
            each = each * options.get("loss_weights", torch.ones_like(labels)).reshape(-1)
            count = options.get("num_label_tokens")
            loss = each.sum() if count is None else each.sum() / count if count else each.sum() * 0
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    close(*found)


def test_yaml(tmp_path: Path) -> None:
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.components.loss.linear_ce_base import LinearCrossEntropy

    path = tmp_path / "recipe.yaml"
    path.write_text(YAML)
    loss = load_yaml_config(str(path)).loss_fn.instantiate()
    assert isinstance(loss, ChunkedHeadCrossEntropy) and isinstance(loss, LinearCrossEntropy)
    assert loss.options["memory_budget"] == "16MiB" and loss.ignore_index == -100


def sharded(rank: int, device: str) -> dict[str, Any]:
    """Two steps of FSDP2 with different tokens on each rank, as the recipe scales them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Tiny()
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.embedding, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)  # so that the loss meets a sharded weight
    loss_fn = ChunkedHeadCrossEntropy()
    count = sum(int((batch(r)[1] != -100).sum()) for r in range(2))
    ids, labels = batch(rank)
    loss = loss_fn(model(ids), labels, model.lm_head.weight, count, dist.group.WORLD)
    (loss * 2).backward()  # FSDP averages over the two ranks
    grads = [p.grad.full_tensor() for p in model.parameters()]
    alone = ranks.said(lambda: loss_fn(model(ids).detach(), labels, model.lm_head.weight, count))

    whole = Tiny()
    losses = []
    for r in range(2):
        ids, labels = batch(r)
        logits = whole.lm_head(whole(ids)).flatten(0, 1)
        losses.append(nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / count)
    sum(losses).backward()
    return {
        "ours": [loss.detach(), *grads], "true": [losses[rank].detach(), *(p.grad for p in whole.parameters())],
        "alone": alone,
    }  # fmt: skip


def test_a_sharded_weight(tmp_path: Path) -> None:
    for found in ranks.run(sharded, 2, tmp_path):
        close(found["ours"], found["true"])
        assert "grad_reduce_group" in found["alone"]


def test_refusals() -> None:
    (ids, labels), model = batch(), Tiny()
    with pytest.raises(ValueError, match="num_label_tokens"):
        ChunkedHeadCrossEntropy(reduction="mean")(model(ids), labels, model.lm_head.weight, 3)
    with pytest.raises(ValueError, match="reduction"):
        ChunkedHeadCrossEntropy(reduction="none")
    with pytest.raises(TypeError, match="memory_budgt"):
        ChunkedHeadCrossEntropy(memory_budgt=3)  # type: ignore[call-arg]
