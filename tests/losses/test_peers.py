"""Losses beside those of Liger-Kernel, TRL and verl, where they are installed: values and gradients.

One table: a name, our loss, their call, and how closely the two agree. Their options stand in their call, ours in our
loss: a row is the mapping from one to the other. Where definitions differ, a comment says how.
"""

import importlib.util
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from oracle.preference import DPO_VARIANTS
from peer_sequences import BASELINE, LENGTH, LONGEST, PAIRS, ROWS, Sequences, sequences
from torch import Tensor

from chunked_head import losses, metrics, weights
from chunked_head.losses import Losses

# of float64 throughout; of what adds up, takes logarithms or has an option in float32; of verl's means, over n + 1e-8
EXACT, SINGLE, VERL = 1e-10, 1e-5, 1e-7


class Peer(NamedTuple):
    """A row: ``ours`` of the sequences, ``theirs`` of them, and the relative difference that is allowed."""

    name: str
    ours: Callable[[Sequences], Losses]
    theirs: Callable[[Sequences], Tensor]
    tolerance: float
    is_paired: bool = False
    dtype: torch.dtype = torch.float64


# ---- Liger-Kernel: chunked_loss, in float64 but for its log-softmax


def liger_policy(kind: str, **options: Any) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        rollout, beta = options.get("rollout"), options.get("beta", 0.0)
        own = {name: value for name, value in options.items() if name not in ("rollout", "beta", "on_policy")}
        module = LigerFusedLinearGRPOLoss(beta, False, beta > 0, loss_type=kind, max_completion_length=LONGEST, **own)
        old = None if options.get("on_policy") else s.old_logprobs
        ratio = None if rollout is None else rollout(s)
        return module(
            s.hidden, s.weight, s.ids, s.mask.to(s.hidden.dtype), s.advantages, ref_per_token_logps=s.ref_logprobs,
            old_per_token_logps=old, vllm_is_ratio=ratio,
        )[0]  # fmt: skip

    return call


def liger_paired(name: str, **options: Any) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        from liger_kernel import chunked_loss

        module = getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(compiled=False, **options)
        reference = {"ref_input": s.other_hidden, "ref_weight": s.weight.detach()}
        if name == "KTO":
            kl = torch.tensor(BASELINE)
            return module(s.hidden, s.weight, s.target, preference_labels=s.labels, kl=kl, **reference)[0]
        return module(s.weight, s.hidden, s.target, **(reference if name == "DPO" else {}))[0]

    return call


def liger_jsd(**options: Any) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

        rows, others, target = s.hidden.flatten(0, 1), s.other_hidden.flatten(0, 1), s.target.flatten()
        return LigerFusedLinearJSDLoss(compiled=False, **options)(rows, s.weight, others, s.other_weight, target)

    return call


SEQUENCE = {"importance_sampling_level": "sequence"}
LIGER_DPO = [name for name in DPO_VARIANTS if name not in ("ipo", "sigmoid_norm", "aot", "aot_unpaired")]  # its others


def smoothed(variant: str) -> float:
    return 0.1 if variant in ("robust", "exo_pair") else 0.0


def chosen_nll(s: Sequences) -> Losses:
    """The mean over the tokens of chosen sequences, which is part of Liger's and TRL's preference losses."""
    return losses.cross_entropy(token_weights="nll_mask", normalizer=float(s.mask[:PAIRS].sum()))


def by_rows(s: Sequences) -> dict[str, Any]:
    """Each sequence's mean, and the mean over all of them, empty ones counted."""
    return weights.sequence_mean(s.mask)


LIGER = [
    Peer("dapo", lambda s: losses.grpo(0.2, 0.28), liger_policy("dapo", epsilon_high=0.28), SINGLE),
    Peer("on-policy", lambda s: losses.reinforce(), liger_policy("cispo", epsilon_high=1.0, on_policy=True), SINGLE),
    Peer("bnpo-delta", lambda s: losses.grpo(delta=1.4), liger_policy("bnpo", delta=1.4), SINGLE),
    Peer("grpo", lambda s: losses.grpo(delta=1.1, **by_rows(s)), liger_policy("grpo", delta=1.1), SINGLE),
    Peer("dr_grpo", lambda s: losses.grpo(**weights.dr_grpo(ROWS, LONGEST)), liger_policy("dr_grpo"), SINGLE),
    # its bound is of the ratio itself, ours is that of the paper: 1 + clip_high
    Peer("cispo", lambda s: losses.cispo(0.3), liger_policy("cispo", epsilon_high=1.3), SINGLE),
    Peer("sapo", lambda s: losses.sapo(2.0, 1.5, **by_rows(s)),
         liger_policy("sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=1.5), SINGLE),
    Peer("vespo", lambda s: losses.vespo(k_pos=1.5, lambda_neg=1.0),
         liger_policy("vespo", vespo_k_pos=1.5, vespo_lambda_neg=1.0), SINGLE),
    # our mean of segments counts those with a token: the denominator names all
    Peer("gspo", lambda s: losses.gspo(normalizer=ROWS), liger_policy("grpo", **SEQUENCE), SINGLE),
    Peer("gspo-tokens", lambda s: losses.gspo(0.1, 0.1, "token"),
         liger_policy("dapo", epsilon_low=0.1, epsilon_high=0.1, **SEQUENCE), SINGLE),
    Peer("luspo", lambda s: losses.gspo(weighting="token", normalizer=ROWS), liger_policy("luspo", **SEQUENCE), SINGLE),
    Peer("kl", lambda s: losses.grpo() + 0.3 * losses.kl_to_reference(), liger_policy("bnpo", beta=0.3), SINGLE),
    Peer("kl-corrected", lambda s: losses.grpo() + 0.3 * losses.kl_to_reference(bias_correction=True),
         liger_policy("bnpo", beta=0.3, use_bias_correction_kl=True), SINGLE),
    Peer("rollout", lambda s: losses.grpo(rollout="truncate", rollout_max=1.1),
         liger_policy("bnpo", rollout=lambda s: s.rollout_ratio.clamp(max=1.1)), SINGLE),
    Peer("rollout-segments", lambda s: losses.grpo(rollout="truncate", rollout_max=1.1, rollout_level="segment"),
         liger_policy("bnpo", rollout=lambda s: s.rollout_ratio.prod(-1, keepdim=True).clamp(max=1.1)), SINGLE),
    # IPO is not in it, and its sigmoid takes no smoothing
    *(Peer(f"dpo-{variant}", lambda s, v=variant: losses.dpo(0.3, v, label_smoothing=smoothed(v)),
           liger_paired("DPO", beta=0.3, loss_type=variant, label_smoothing=smoothed(variant)), SINGLE, True)
      for variant in ("exo_pair", *LIGER_DPO)),
    Peer("dpo-average", lambda s: losses.dpo(0.3, average=True), liger_paired("DPO", beta=0.3, average_log_prob=True),
         SINGLE, True),
    Peer("simpo", lambda s: losses.simpo(0.3, 0.7, label_smoothing=0.1),
         liger_paired("SimPO", beta=0.3, gamma=0.7, label_smoothing=0.1, compute_nll_loss=False), SINGLE, True),
    Peer("cpo", lambda s: losses.cpo(0.3, label_smoothing=0.1) + 0.7 * chosen_nll(s),
         liger_paired("CPO", beta=0.3, label_smoothing=0.1, alpha=0.7), SINGLE, True),
    Peer("orpo", lambda s: losses.orpo(0.3) + chosen_nll(s), liger_paired("ORPO", beta=0.3), SINGLE, True),
    # it has no weights of desirable and undesirable segments, and does not bound the baseline
    Peer("kto", lambda s: losses.kto(0.3), liger_paired("KTO", beta=0.3, use_ref_model=True), SINGLE, True),
    *(Peer(f"jsd-{beta}-{t}", lambda s, b=beta, t=t: losses.jsd(b, temperature=t),
           liger_jsd(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=t), SINGLE)
      for beta in (0.0, 0.3, 1.0) for t in (1.0, 2.0)),
    # the temperature is of the divergence alone
    Peer("jsd-hard", lambda s: 0.4 * losses.cross_entropy() + 0.6 * losses.jsd(0.5, temperature=2.0),
         liger_jsd(weight_hard_loss=0.4, weight_soft_loss=0.6, beta=0.5, temperature=2.0), SINGLE),
]  # fmt: skip


# ---- TRL: what its trainers compute from log-probabilities


class Trainer:
    """What a loss of TRL's trainers asks of ``self``; an option that a row does not name is off."""

    def __init__(self, s: Sequences, kind: str, **options: Any) -> None:
        self.s, self.loss_type, self.loss_types, self.loss_weights = s, kind, [kind], [1.0]
        self.beta, self.epsilon_low, self.epsilon_high, self.label_smoothing = 0.0, 0.2, 0.2, 0.0
        self.importance_sampling_level, self.top_entropy_quantile, self.simpo_gamma, self.alpha = "token", 1.0, 0.5, 0.0
        self.f_divergence_type, self.desirable_weight, self.undesirable_weight = "reverse_kl", 1.0, 1.0
        self.max_completion_length, self.precompute_ref_logps, self.calculate_KL = LONGEST, True, True
        self.model, self._metrics = SimpleNamespace(training=False), {"eval": defaultdict(list)}
        self.accelerator = SimpleNamespace(
            num_processes=1, device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
        )  # fmt: skip
        self.args = SimpleNamespace(**{
            "delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
            "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
            "discopop_tau": 0.05,
        } | options)  # fmt: skip
        self.__dict__.update(options)

    def __getattr__(self, name: str) -> None:
        return None

    def get_gamma_weights(self, **given: Any) -> Tensor:
        from trl import GRPOTrainer

        return GRPOTrainer.get_gamma_weights(**given)

    def _get_per_token_logps_and_entropies(self, *given: Any, **options: Any) -> tuple[Tensor, Tensor, None]:
        return self.s.logprobs, torch.zeros_like(self.s.old_logprobs), None

    def _compute_kl_logps(self, model: Any, batch: Any) -> Tensor:
        return torch.full((ROWS,), BASELINE, dtype=torch.float64)

    def outputs(self, *given: Any, **options: Any) -> Any:
        zeros = torch.zeros_like(self.s.old_logprobs)
        return SimpleNamespace(log_probs=self.s.logprobs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


def trl_policy(trainer: str, kind: str, **options: Any) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        import trl
        from trl.experimental import gmpo

        nothing = torch.zeros(ROWS, 1, dtype=torch.int64)
        on_policy = options.get("on_policy", False)
        inputs = {
            "prompt_ids": nothing, "prompt_mask": nothing, "completion_ids": s.ids, "completion_mask": s.mask.long(),
            "advantages": s.advantages, "ref_per_token_logps": s.ref_logprobs, "num_items_in_batch": s.mask.sum(),
            "old_per_token_logps": None if on_policy else s.old_logprobs, "old_logps": s.sums(s.old_logprobs),
            "importance_sampling_ratio": options["rollout"](s) if "rollout" in options else None,
        }  # fmt: skip
        of_vllm = {"use_vllm": True, "vllm_importance_sampling_correction": True} if "rollout" in options else {}
        theirs = getattr(trl, trainer, None) or getattr(gmpo, trainer)
        return theirs._compute_loss(Trainer(s, kind, **options, **of_vllm), None, inputs)

    return call


def trl_paired(trainer: str, kind: str, **options: Any) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        import trl

        # a column more: their loss shifts, and the log-probabilities are shifted already
        tokens, mask = (F.pad(x.long(), (1, 0)) for x in (s.ids, s.mask))
        ref = s.sums(s.ref_logprobs)
        inputs = {
            "input_ids": tokens, "attention_mask": mask, "completion_mask": mask, "ref_chosen_logps": ref[:PAIRS],
            "ref_rejected_logps": ref[PAIRS:], "label": s.labels, "ref_logps": ref, "ref_KL_logps": torch.zeros(ROWS),
        }  # fmt: skip
        self = Trainer(s, kind, **options)
        return getattr(trl, trainer)._compute_loss(self, self.outputs, inputs, False)

    return call


def trl_logged(trainer: str, kind: str, **options: Any) -> Callable[[Sequences], dict[str, float]]:
    """What TRL's trainer logs of a batch, by its own code."""

    def call(s: Sequences) -> dict[str, float]:
        if trainer in ("DPOTrainer", "KTOTrainer"):
            logged: dict[str, list[float]] = defaultdict(list)
            trl_paired(trainer, kind, _metrics={"eval": logged}, **options)(s)
            return {name: values[-1] for name, values in logged.items()}
        from trl.experimental import cpo, orpo

        theirs: Any = {"CPOTrainer": cpo, "ORPOTrainer": orpo}[trainer]
        self = Trainer(s, kind, **options)
        scores = (s.means if kind in ("ipo", "simpo", "orpo") else s.sums)(s.logprobs)
        nothing = torch.zeros(1)
        self.concatenated_forward = lambda *given: (scores[:PAIRS], scores[PAIRS:], nothing, nothing, nothing)
        self.cpo_alpha = 0.0
        for name in ("cpo_loss", "odds_ratio_loss"):
            if hasattr(getattr(theirs, trainer), name):
                self.__dict__[name] = getattr(getattr(theirs, trainer), name).__get__(self)
        return getattr(theirs, trainer).get_batch_loss_metrics(self, None, {}, "train")[1]

    return call


# a loss, and what TRL logs beside it
LOGGED: list[tuple[Losses, Callable[[Sequences], dict[str, float]]]] = [
    (losses.dpo(0.3), trl_logged("DPOTrainer", "sigmoid", beta=0.3)),
    (losses.dpo(0.3, "ipo"), trl_logged("DPOTrainer", "ipo", beta=0.3)),
    (losses.dpo(0.3, "hinge", divergence="js"),
     trl_logged("DPOTrainer", "hinge", beta=0.3, f_divergence_type="js_divergence")),
    (losses.kto(0.3), trl_logged("KTOTrainer", "kto", beta=0.3)),
    (losses.simpo(2.0), trl_logged("CPOTrainer", "simpo", beta=2.0)),
    (losses.simpo(2.0, alpha=0.2), trl_logged("CPOTrainer", "simpo", beta=2.0, alpha=0.2)),
    (losses.cpo(0.3), trl_logged("CPOTrainer", "sigmoid", beta=0.3)),
    (losses.cpo(0.3, "ipo"), trl_logged("CPOTrainer", "ipo", beta=0.3)),
    (losses.orpo(0.3), trl_logged("ORPOTrainer", "orpo", beta=0.3)),
]  # fmt: skip


@pytest.mark.exhaustive  # as the other rows of TRL
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="the numbers are TRL's, which is not installed")
@pytest.mark.parametrize(("loss", "theirs"), LOGGED, ids=lambda value: repr(value) if isinstance(value, Losses) else "")
def test_what_a_preference_trainer_logs(loss: Losses, theirs: Callable[[Sequences], dict[str, float]]) -> None:
    s = sequences(torch.float64, True)
    logged, found = theirs(s), s.run(loss, metrics.preference(loss)).metrics
    shared = {name for name in logged if name.startswith(("rewards/", "logps/"))}
    assert shared == set(found) and len(shared) >= 5
    for name, value in found.items():
        single = name == "rewards/accuracies" or "orpo" in repr(loss)  # theirs are computed in float32
        assert float(value) == pytest.approx(logged[name], rel=1e-6 if single else 1e-9), name
        assert float(value) != 0 or name == "rewards/accuracies"


def trl_cpo(kind: str, **options: Any) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        from trl.experimental.cpo import CPOTrainer

        scores = (s.means if kind in ("ipo", "simpo") else s.sums)(s.logprobs)  # as it asks its forward for them
        return CPOTrainer.cpo_loss(Trainer(s, kind, **options), scores[:PAIRS], scores[PAIRS:])[0].mean()

    return call


def trl_orpo(beta: float) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        from trl.experimental.orpo import ORPOTrainer

        scores = s.means(s.logprobs)
        return -ORPOTrainer.odds_ratio_loss(Trainer(s, "", beta=beta), scores[:PAIRS], scores[PAIRS:])[0].mean()

    return call


def trl_jsd(beta: float, temperature: float) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        from trl.experimental.gkd import GKDTrainer

        teacher = s.other_hidden @ s.other_weight.t()
        return GKDTrainer.generalized_jsd_loss(s.logits, teacher, s.target, beta, temperature)

    return call


def trl_smoothed(variant: str) -> float:
    return smoothed(variant) or (0.1 if variant in ("aot", "aot_unpaired") else 0.0)


TRL = [
    Peer("dapo", lambda s: losses.grpo(0.2, 0.28), trl_policy("GRPOTrainer", "dapo", epsilon_high=0.28), EXACT),
    Peer("bnpo", lambda s: losses.grpo(delta=1.4), trl_policy("GRPOTrainer", "bnpo", delta=1.4), EXACT),
    Peer("grpo", lambda s: losses.grpo(**by_rows(s)), trl_policy("GRPOTrainer", "grpo"), EXACT),
    Peer("dr_grpo", lambda s: losses.grpo(**weights.dr_grpo(ROWS, LONGEST)),
         trl_policy("GRPOTrainer", "dr_grpo"), EXACT),
    # as Liger's
    Peer("cispo", lambda s: losses.cispo(0.3), trl_policy("GRPOTrainer", "cispo", epsilon_high=1.3), EXACT),
    Peer("sapo", lambda s: losses.sapo(2.0, 1.5, **by_rows(s)),
         trl_policy("GRPOTrainer", "sapo", sapo_temperature_pos=2.0, sapo_temperature_neg=1.5), EXACT),
    Peer("vespo", lambda s: losses.vespo(k_pos=1.5), trl_policy("GRPOTrainer", "vespo", vespo_k_pos=1.5), EXACT),
    Peer("vespo-rollout", lambda s: losses.vespo(rollout="truncate", rollout_max=1.1),
         trl_policy("GRPOTrainer", "vespo", rollout=lambda s: s.rollout_ratio.clamp(max=1.1)), EXACT),
    Peer("gspo", lambda s: losses.gspo(normalizer=ROWS), trl_policy("GRPOTrainer", "grpo", **SEQUENCE), EXACT),
    Peer("luspo", lambda s: losses.gspo(weighting="token", normalizer=ROWS),
         trl_policy("GRPOTrainer", "luspo", **SEQUENCE), EXACT),
    Peer("kl", lambda s: losses.grpo() + 0.3 * losses.kl_to_reference(bias_correction=True),
         trl_policy("GRPOTrainer", "bnpo", beta=0.3, use_bias_correction_kl=True), EXACT),
    # a token that is masked stays in the denominator
    Peer("rollout", lambda s: losses.grpo(rollout="mask", rollout_max=1.1), trl_policy(
        "GRPOTrainer", "bnpo", rollout=lambda s: torch.where(s.rollout_ratio > 1.1, 0.0, s.rollout_ratio)), EXACT),
    # an empty sequence is one with a ratio of 1 in their mean, and none in ours
    Peer("rloo", lambda s: losses.rloo(0.1, 0.4), trl_policy("RLOOTrainer", "", epsilon_low=0.1, epsilon_high=0.4),
         EXACT, True),
    Peer("gmpo", lambda s: losses.gmpo(), trl_policy("GMPOTrainer", "", epsilon_low=0.4, epsilon_high=0.4),
         EXACT, True),
    *(Peer(f"dpo-{variant}", lambda s, v=variant: losses.dpo(0.3, v, label_smoothing=trl_smoothed(v)),
           trl_paired("DPOTrainer", variant, beta=0.3, label_smoothing=trl_smoothed(variant)),
           SINGLE if variant == "exo_pair" else EXACT, True)
      for variant in ("exo_pair", *DPO_VARIANTS)),
    *(Peer(f"dpo-{ours}", lambda s, ours=ours: losses.dpo(0.3, "hinge", divergence=ours, divergence_alpha=1.7),
           trl_paired("DPOTrainer", "hinge", beta=0.3, f_divergence_type=theirs, f_alpha_divergence_coef=1.7),
           *((SINGLE, True, torch.float32) if ours == "alpha" else (EXACT, True)))
      for ours, theirs in (("forward_kl", "forward_kl"), ("js", "js_divergence"), ("alpha", "alpha_divergence"))),
    Peer("kto", lambda s: losses.kto(0.3, 1.5, 0.7), trl_paired(
        "KTOTrainer", "kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.7), EXACT, True),
    *(Peer(f"cpo-{variant}", lambda s, v=variant: losses.cpo(0.3, v, alpha=0.2), trl_cpo(variant, beta=0.3, alpha=0.2),
           EXACT, True) for variant in ("hinge", "sigmoid")),
    # the formula is that of sums; their forward has means of it, as IPO has
    Peer("cpo-ipo", lambda s: losses.cpo(0.3, "ipo"), trl_cpo("ipo", beta=0.3), EXACT, True),
    Peer("cpo-smoothed", lambda s: losses.cpo(0.3, label_smoothing=0.1),
         trl_cpo("sigmoid", beta=0.3, label_smoothing=0.1), EXACT, True),
    Peer("simpo", lambda s: losses.simpo(0.3, 0.7, label_smoothing=0.1, alpha=0.2),
         trl_cpo("simpo", beta=0.3, simpo_gamma=0.7, label_smoothing=0.1, alpha=0.2), EXACT, True),
    Peer("orpo", lambda s: losses.orpo(0.3), trl_orpo(0.3), SINGLE, True),
    *(Peer(f"jsd-{beta}-{t}", lambda s, b=beta, t=t: losses.jsd(b, temperature=t), trl_jsd(beta, t), EXACT)
      for beta in (0.0, 0.3, 1.0) for t in (1.0, 2.0)),
]  # fmt: skip


# ---- verl: its policy losses, in an environment of their own


def verl_policy(kind: str, mode: str = "token-mean", **options: Any) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce, get_policy_loss_fn
        from verl.workers.config import ActorConfig

        rollout = options.get("rollout")
        own = {name: value for name, value in options.items() if name != "rollout"}
        config = ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, **own)
        function = compute_policy_loss_reinforce if kind == "reinforce" else get_policy_loss_fn(kind)
        advantages = s.advantages[:, None].expand(ROWS, LENGTH)
        ratio = None if rollout is None else rollout(s)
        old = s.rollout_logprobs if kind == "reinforce" else s.old_logprobs
        mask = s.mask.to(s.hidden.dtype)
        return function(old, s.logprobs, advantages, mask, mode, config=config, rollout_is_weights=ratio)[0]

    return call


def verl_kl(estimator: str) -> Callable[[Sequences], Tensor]:
    def call(s: Sequences) -> Tensor:
        from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

        return agg_loss(kl_penalty(s.logprobs, s.ref_logprobs, estimator), s.mask.to(s.hidden.dtype), "token-mean")

    return call


def with_tokens(s: Sequences) -> float:
    """Sequences with a token that counts: those of verl's means, of which a batch size is not given."""
    return float(s.mask.any(-1).sum())


def by_tokens(s: Sequences) -> dict[str, Any]:
    return weights.sequence_mean(s.mask, empty="excluded")


VERL_PEERS = [
    # its dual clip is always on, 3 by default
    Peer("ppo", lambda s: losses.grpo(0.2, 0.28, dual_clip=1.5),
         verl_policy("vanilla", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.5), EXACT),
    Peer("ppo-rollout", lambda s: losses.grpo(dual_clip=3.0, rollout="truncate", rollout_max=1.1),
         verl_policy("vanilla", rollout=lambda s: s.rollout_ratio.clamp(max=1.1)), EXACT),
    Peer("ppo-sequence-mean", lambda s: losses.grpo(dual_clip=3.0, **by_tokens(s)),
         verl_policy("vanilla", "seq-mean-token-mean"), VERL),
    Peer("ppo-sequence-sum", lambda s: losses.grpo(dual_clip=3.0, **weights.sequence_sum(with_tokens(s))),
         verl_policy("vanilla", "seq-mean-token-sum"), EXACT),
    # over the length of the rectangle, unless a factor is given
    Peer("ppo-dr-grpo", lambda s: losses.grpo(dual_clip=3.0, **weights.dr_grpo(with_tokens(s), LENGTH)),
         verl_policy("vanilla", "seq-mean-token-sum-norm"), EXACT),
    Peer("gspo", lambda s: losses.gspo(0.1, 0.2, level="token"),
         verl_policy("gspo", "seq-mean-token-mean", clip_ratio_low=0.1, clip_ratio_high=0.2), VERL),
    Peer("gspo-tokens", lambda s: losses.gspo(0.1, 0.2, weighting="token", level="token"),
         verl_policy("gspo", clip_ratio_low=0.1, clip_ratio_high=0.2), EXACT),
    # by the mean of each sequence, whatever mode is asked for
    Peer("sapo", lambda s: losses.sapo(2.0, 1.5, **by_tokens(s)), verl_policy("sapo", tau_pos=2.0, tau_neg=1.5), VERL),
    Peer("gpg", lambda s: losses.reinforce(), verl_policy("gpg"), EXACT),
    Peer("reinforce", lambda s: losses.reinforce(), verl_policy("reinforce"), EXACT),
    # an empty sequence counts in its mean
    Peer("gmpo", lambda s: losses.gmpo(0.3, 0.2, normalizer=ROWS),
         verl_policy("geo_mean", clip_ratio_low=0.3, clip_ratio_high=0.2), VERL),
    Peer("cispo", lambda s: losses.cispo(0.3, 0.2),
         verl_policy("cispo", clip_ratio_low=0.2, clip_ratio_high=0.3), EXACT),
    *(Peer(f"kl-{ours}", lambda s, e=ours: losses.kl_to_reference(e, kl_clamp=10.0 if e.startswith("k3") else None),
           verl_kl(theirs), EXACT)
      for ours, theirs in (("k1", "kl"), ("abs", "abs"), ("k2", "mse"), ("k3", "low_var_kl"), ("k1+", "k1+"),
                           ("abs+", "abs+"), ("k3+", "k3+"))),
]  # fmt: skip


def peers() -> list[Any]:
    """Rows whose library is installed. TRL's are exhaustive, since to import it takes seconds."""
    tables = {"liger_kernel": (LIGER, []), "trl": (TRL, [pytest.mark.exhaustive]), "verl": (VERL_PEERS, [])}
    return [
        pytest.param(row, id=f"{library}-{row.name}", marks=marks)
        for library, (rows, marks) in tables.items() if importlib.util.find_spec(library) for row in rows
    ]  # fmt: skip


@pytest.mark.parametrize("peer", peers())
def test_peers(peer: Peer) -> None:
    s = sequences(peer.dtype, peer.is_paired)
    outcomes = []
    for loss in (s.step(peer.ours(s)), peer.theirs(s)):
        gradients = torch.autograd.grad(loss, (s.hidden, s.weight))
        outcomes.append([x.detach().double() for x in (loss, *gradients)])
    for mine, true in zip(*outcomes, strict=True):
        largest = float(true.abs().max())
        assert largest > 1e-3  # or there is nothing to compare
        # a loss is added up from values of about 1, whatever it comes to
        allowed = peer.tolerance * (largest if mine.dim() else max(1.0, largest))
        torch.testing.assert_close(mine, true, rtol=0, atol=allowed)
