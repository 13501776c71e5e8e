"""What people read: results, losses and metrics as text and numbers, arguments that are fields too, others' names."""

import gc
import weakref
from typing import Any

import pytest
import torch

import chunked_head
from chunked_head import linear_cross_entropy, linear_loss, logits_loss, losses, metrics, plan

HIDDEN, WEIGHT, TARGET = torch.randn(4, 6, 8), torch.randn(11, 8), torch.randint(0, 11, (4, 6))
MASK, WEIGHTS = TARGET > 2, torch.rand(4, 6)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: losses.grpo(clip_high=0.28), "Losses(grpo(clip_high=0.28))"),
        (lambda: losses.grpo(), "Losses(grpo())"),
        (lambda: losses.dpo(0.05, "ipo", label_smoothing=0.0), "Losses(dpo(0.05, 'ipo'))"),
        (
            lambda: losses.cross_entropy() + 1e-4 * losses.z_loss() - losses.entropy() - 0.5 * losses.focal(),
            "Losses(cross_entropy() + 0.0001 * z_loss() - entropy() - 0.5 * focal())",
        ),
        (lambda: -losses.z_loss(), "Losses(- z_loss())"),
        (lambda: torch.tensor(2.0) * losses.z_loss(), "Losses(tensor[] * z_loss())"),
        (lambda: losses.focal(token_weights=WEIGHTS), "Losses(focal(token_weights=tensor[4, 6]))"),
        (lambda: losses.custom(minus_logprob, scope="token"), "Losses(minus_logprob)"),
        (lambda: losses.dpo(0.05).terms[0][1], "Summand(dpo(0.05))"),
        (lambda: metrics.clip_fraction(clip_high=0.3), "Metric(clip_fraction(clip_high=0.3))"),
        (lambda: metrics.Metric("mine", minus_logprob), "Metric(mine)"),
        (lambda: metrics.MetricValue("mean", torch.tensor(3.0), torch.tensor(2.0)), "MetricValue(1.5, sum=3, count=2)"),
        (lambda: metrics.MetricValue("max", extremum=torch.tensor(3.0)), "MetricValue(3, max)"),
    ],
)
def test_text(make: Any, text: str) -> None:
    assert repr(make()) == text


def minus_logprob(stats: Any, batch: Any) -> torch.Tensor:
    return -stats.logprob


def test_equal_numbers_are_one_loss() -> None:
    """What the text is made of is no part of a loss."""
    assert losses.dpo(0.05) is losses.dpo(0.05)
    assert losses.dpo(0.05).terms[0][1].key == losses.dpo(beta=0.05).terms[0][1].key


def test_results_in_a_screen() -> None:
    mix, measured = losses.cross_entropy() + 1e-4 * losses.z_loss(), [metrics.entropy(), metrics.lse(reduce="max")]
    out = linear_loss(HIDDEN, WEIGHT, TARGET, mix, metrics=measured)
    lines = str(out).splitlines()
    assert len(lines) == 8 and max(map(len, lines)) <= 120
    assert lines[1].strip() == f"loss={out.loss.item():.6g}, float32 on cpu"
    assert lines[2].strip() == f"parts['cross_entropy']={out.parts['cross_entropy'].item():.6g}"
    assert lines[4].strip().startswith(f"metrics['entropy']=MetricValue({float(out.metrics['entropy']):.6g}, sum=")
    assert lines[6].strip().startswith("plan=Plan(24 x 8 x 11 float32: loss only, 1 chunk of 24 tokens, ")
    assert "loss=tensor[4, 6], float32" in str(linear_loss(HIDDEN, WEIGHT, TARGET, mix, reduction="none"))
    streams = linear_loss([HIDDEN, HIDDEN], WEIGHT, TARGET, mix, shift=[0, 1])
    assert f"streams[1].loss={streams.streams[1].loss.item():.6g}" in str(streams)
    assert len(repr(plan(16384, 4096, 128256, torch.bfloat16, device="sm_90"))) < 160


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_part_that_takes_the_loss_frees_the_graph(reduction: str) -> None:
    """Backward holds no tensor of ``parts``: the graph of a part that a caller writes to ends with the part."""
    weight = WEIGHT.clone().requires_grad_()
    watched = weakref.ref(weight)
    mix = losses.cross_entropy(reduction=reduction) + 1e-4 * losses.z_loss()
    out = linear_loss(HIDDEN, weight, TARGET, mix)
    part = out.parts["cross_entropy"]
    part += 0.1 * out.loss
    part.backward()
    assert weight.grad is not None
    del part, out, weight
    gc.collect()
    assert watched() is None


def test_numbers() -> None:
    out = linear_loss(HIDDEN, WEIGHT, TARGET, losses.cross_entropy(), metrics=[metrics.perplexity()])
    assert float(out.metrics["perplexity"]) == pytest.approx(out.loss.exp().item())


def test_a_function_of_statistics_sees_their_names() -> None:
    names: list[list[str]] = []

    def spied(stats: Any, batch: Any) -> torch.Tensor:
        names.append(dir(stats))
        return -stats.logprob

    linear_loss(HIDDEN, WEIGHT, TARGET, losses.custom(spied, scope="token"), metrics=[metrics.entropy()])
    assert {"logprob", "lse"} <= set(names[-1])


@pytest.mark.parametrize("options", [{}, {"shift": 1}])
def test_fields_as_arguments(options: dict[str, Any]) -> None:
    right = linear_loss(
        HIDDEN, WEIGHT, TARGET, losses.cross_entropy(), batch={"mask": MASK, "token_weights": WEIGHTS}, **options
    ).loss
    fields: dict[str, Any] = {"mask": MASK, "token_weights": WEIGHTS}
    ours = linear_loss(HIDDEN, WEIGHT, TARGET, losses.cross_entropy(), **fields, **options).loss
    mixed = linear_loss(
        HIDDEN, WEIGHT, TARGET, losses.cross_entropy(), batch={"mask": MASK}, token_weights=WEIGHTS, **options
    ).loss
    of_head = linear_cross_entropy(HIDDEN, WEIGHT, TARGET, **fields, **options)
    of_logits = logits_loss(HIDDEN @ WEIGHT.T, TARGET, losses.cross_entropy(), **fields, **options).loss
    assert torch.equal(ours, right) and torch.equal(mixed, right) and torch.equal(of_head, right)
    torch.testing.assert_close(of_logits, right)
    if not options:
        streams = linear_loss(
            [HIDDEN, HIDDEN], WEIGHT, TARGET, losses.cross_entropy(), mask=[MASK, ~MASK], token_weights=WEIGHTS
        )
        assert torch.equal(streams.streams[0].loss, right)


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        (losses, "ppo", r"; that is losses\.grpo\(\), with the critic's"),
        (losses, "CrossEntropy", "did you mean 'cross_entropy'"),
        (losses, "CrossEntropyLoss", r"; that is losses\.cross_entropy\(\)"),
        (losses, "ipo", r"losses\.dpo\(variant='ipo'\)"),
        (losses, "kl_div", r"losses\.kl_to_reference\(\)"),
        (losses, "gropo", "did you mean 'grpo'"),
        (losses, "nothing_like_it", "has no attribute 'nothing_like_it'$"),
        (metrics, "clip_frac", r"metrics\.clip_fraction\(\)"),
        (chunked_head, "LigerFusedLinearCrossEntropyLoss", "chunked_head.integrations.liger"),
        (chunked_head, "linear_logprob", "did you mean 'linear_logprobs'"),
    ],
)
def test_names_of_others(module: Any, name: str, says: str) -> None:
    with pytest.raises(AttributeError, match=f"^module '{module.__name__}' .*{says}"):
        getattr(module, name)


def test_hints_name_what_exists() -> None:
    """Every remedy's own names."""
    import re

    for module in (chunked_head, losses, metrics):
        hints = module.__getattr__.__closure__
        texts = next(cell.cell_contents for cell in hints if isinstance(cell.cell_contents, dict))
        for text in texts.values():
            for home, name in re.findall(r"\b(losses|metrics|weights)\.(\w+)", text):
                assert name in vars(getattr(chunked_head, home))


def test_top_level() -> None:
    from chunked_head.integrations.huggingface import log_metrics
    from chunked_head.integrations.trl import patch_trl
    from chunked_head.parallel import shift_targets

    assert chunked_head.quantize is chunked_head.quantise
    assert (chunked_head.log_metrics, chunked_head.patch_trl) == (log_metrics, patch_trl)
    assert chunked_head.shift_targets is shift_targets
