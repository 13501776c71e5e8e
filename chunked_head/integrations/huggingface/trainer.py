"""A patched model's metrics in the logs of transformers' Trainer, or of any that logs as it does."""

import functools
from typing import Any

from ...metrics import all_reduce
from .agreement import Agreement
from .find_head import base_model


def log_metrics(trainer: Any) -> Any:
    """Adds what ``patch_model(model, metrics=[...])`` measures to what a Trainer logs; returns the trainer.

        model = patch_model(model, metrics=[metrics.entropy(), metrics.accuracy()])
        log_metrics(Trainer(model, ...)).train()      # {"loss": ..., "entropy": ..., "accuracy": ...}

    Each logged value is that of all tokens since the last log, over all ranks, no average of averages: those of
    training beside ``loss``, those of an evaluation beside ``eval_loss`` as ``eval_entropy``. Values are read from the
    device when they are logged, and no earlier. No callback: reporters that come before it would not see them.

    Raises:
        ValueError: the trainer's model is not patched, or measures nothing. A trainer that makes its loss outside of
        the model's forward raises at its first step.
    """
    agreed = getattr(base_model(trainer.model), "chunked_head", None)
    if not isinstance(agreed, Agreement) or not agreed.measured:
        raise ValueError(
            "log_metrics needs a trainer whose model measures: patch_model(model, metrics=[metrics.entropy(), ...])"
        )
    if getattr(trainer.log, "logs_metrics", False):
        return trainer
    log = trainer.log

    @functools.wraps(log)
    def with_metrics(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        prefix = evaluated(logs)
        if prefix is not None or "loss" in logs:
            found = all_reduce(agreed.take_metrics(training=prefix is None))
            logs |= {f"{prefix or ''}{name}": value.value.item() for name, value in found.items()}
        return log(logs, *args, **kwargs)

    with_metrics.logs_metrics = True  # type: ignore[attr-defined]
    trainer.log = with_metrics
    return trainer


def evaluated(logs: dict[str, float]) -> str | None:
    """The prefix of an evaluation's logs: ``"eval_"`` beside ``eval_loss``; None for those of training."""
    return next((key[: -len("loss")] for key in logs if key.endswith("_loss") and key != "train_loss"), None)
