"""A model's training step by trainers and loops, with their own head and with ours: `python -m benchmarks.frameworks`.

The model is of random weights (on a GPU of Qwen3 0.6B's shape with 8 layers, in bfloat16; on a CPU a tiny one), the
batch of random ids. A step is the trainer's own loss of that batch and its backward; Lightning's is a step of `fit`.
Trainers whose package is missing are left out. TRL's own head is chunked already.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import command, measure
from benchmarks.rounds import Times, Turns, time_rounds
from chunked_head import linear_cross_entropy, patch_model

PLAIN, OURS, LOSSES = "plain", "ours", "losses"
# https://huggingface.co/Qwen/Qwen3-0.6B, config.json, with 8 of its 28 layers
QWEN = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
TINY = QWEN | {"vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
               "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
SEQUENCES, FITTED = 4, 8  # sequences of a batch; steps of a fit of Lightning's
Run = Callable[[], Tensor]


@dataclass
class Batch:
    """Device, size and folder that every step is made of."""

    device: torch.device
    tokens: int
    folder: str

    def model(self, seed: int = 0) -> Any:
        import transformers

        torch.manual_seed(seed)
        gpu = self.device.type == "cuda"
        with self.device:
            made: Any = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(QWEN if gpu else TINY)))
        return made.to(torch.bfloat16 if gpu else torch.float32).train()

    def ids(self, model: Any) -> Tensor:
        return self.ids_below(model.config.vocab_size)

    def ids_below(self, vocab: int) -> Tensor:
        made = torch.Generator().manual_seed(0)
        return torch.randint(0, vocab, (SEQUENCES, self.tokens // SEQUENCES), generator=made).to(self.device)

    def made(self) -> tuple[Any, Tensor]:
        model = self.model()
        return model, self.ids(model)

    def settings(self) -> dict[str, Any]:
        return {
            "output_dir": self.folder, "report_to": "none", "use_cpu": self.device.type == "cpu", "bf16": False,
            "gradient_checkpointing": False, "per_device_train_batch_size": SEQUENCES, "disable_tqdm": True,
        }  # fmt: skip


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), eos_token="a",
                                   pad_token="a")  # fmt: skip


def loop(batch: Batch, way: str) -> tuple[Any, Run]:
    model = batch.model()
    ids = batch.ids(model)

    def run() -> Tensor:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        if way == OURS:
            return linear_cross_entropy(hidden, model.lm_head.weight, ids, shift=1)
        return F.cross_entropy(model.lm_head(hidden)[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())

    return model, run


def trainer(batch: Batch, way: str) -> tuple[Any, Run]:
    from transformers import Trainer, TrainingArguments

    model = batch.model()
    ids = batch.ids(model)
    if way == OURS:
        patch_model(model, logits=None)
    made = Trainer(model, TrainingArguments(**batch.settings()))
    return model, lambda: made.compute_loss(model, {"input_ids": ids, "labels": ids}, num_items_in_batch=ids.numel())


def trl(batch: Batch, way: str, kind: str) -> tuple[Any, Run]:
    """Loss of a batch by one of TRL's trainers, with TRL's functions of the head or ours.

    The way LOSSES makes gradients along with the log-probabilities.
    """
    import trl as package
    from datasets import Dataset

    model = batch.model()
    ids = batch.ids(model)
    half = ids.shape[1] // 2
    mask = torch.ones_like(ids)
    rows, more = {"text": "a a"}, dict[str, Any]()
    completion = mask.clone()
    completion[:, :half] = 0
    config: dict[str, Any] = {}
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    if kind == "DPO":
        rows, more = {"prompt": "a", "chosen": "a", "rejected": "a"}, {"ref_model": batch.model(1)}
        inputs = {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}
    if kind in ("GRPO", "Distillation"):
        rows, config = {"prompt": "a"}, {"max_completion_length": half}
        inputs = {
            "prompt_ids": ids[:, :half], "prompt_mask": mask[:, :half], "completion_ids": ids[:, half:],
            "completion_mask": mask[:, half:], "num_items_in_batch": mask[:, half:].sum().float(),
        }  # fmt: skip
    if kind == "Distillation":
        more = {"teacher_model": batch.model(1)}
    if kind == "GRPO":
        more = {"reward_funcs": lambda completions, **rest: [0.0] * len(completions)}
        config |= {"num_generations": SEQUENCES, "beta": 0.0}
        inputs["advantages"] = torch.linspace(-1, 2, SEQUENCES, device=batch.device)
    arguments = getattr(package, f"{kind}Config")(**batch.settings(), **config)
    made = getattr(package, f"{kind}Trainer")(
        model, args=arguments, train_dataset=Dataset.from_list([rows] * SEQUENCES), processing_class=tokenizer(), **more
    )
    made.current_gradient_accumulation_steps = 1

    def run() -> Tensor:
        with trl_head(way):
            return made.compute_loss(model, inputs)

    return model, run


@functools.cache
def trl_places(way: str) -> list[tuple[Any, str, Any]]:
    """TRL's modules and classes, a name in each, and what ``patch_trl`` puts there."""
    from chunked_head.integrations.trl import replacement_functions

    found = []
    for framework, ours in replacement_functions({}, ("SFT",) if way == LOSSES else ()):
        for place, theirs in framework.tested_objects().items():
            *outer, name = place[1].split(".")
            for path in (place[0], *framework.importing_modules):
                owner = functools.reduce(getattr, outer, sys.modules.get(path))
                if hasattr(owner, name):
                    found.append((owner, name, ours(place, theirs)))
    return found


@contextlib.contextmanager
def trl_head(way: str) -> Iterator[None]:
    """``patch_trl`` without its checks, for the length of a ``with`` block: in microseconds."""
    places = [] if way == PLAIN else trl_places(way)
    theirs = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, ours in places:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for (owner, name, _), function in zip(places, theirs, strict=True):
            setattr(owner, name, function)


def lightning(batch: Batch, way: str) -> tuple[Any, Run]:
    """A fit of some steps, with an optimizer that changes nothing."""
    import pytorch_lightning

    model, step = loop(batch, way)

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.last = model, torch.zeros(())

        def training_step(self, ids: Tensor, index: int) -> Tensor:
            loss = step()
            self.last = loss.detach()
            return loss

        def cpu(self) -> Any:
            return self  # where Lightning would put the model after each fit

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def run() -> Tensor:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
                 "enable_model_summary": False}  # fmt: skip
        module = Module()
        texts: Any = [batch.ids(model).cpu()] * FITTED
        logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)  # what it says at each fit
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = pytorch_lightning.Trainer(
                max_steps=FITTED, accelerator="gpu" if batch.device.type == "cuda" else "cpu", devices=1, **quiet
            )
            made.fit(module, torch.utils.data.DataLoader(texts, batch_size=None))
        return module.last

    return model, run


TRL_KINDS = {"SFT": "SFT", "DPO": "DPO", "GRPO": "GRPO", "distillation": "Distillation"}
TRAINERS: dict[str, Callable[[Batch, str], tuple[Any, Run]]] = {
    "plain loop": loop,
    "Lightning": lightning,
    "Trainer": trainer,
    **{f"TRL {name}": functools.partial(trl, kind=kind) for name, kind in TRL_KINDS.items()},
}


@dataclass
class TrainerStep:
    """A loss and its backward."""

    model: Any
    run: Run

    def __call__(self) -> Tensor:
        loss = self.run()
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    def clear(self) -> None:
        """Lets go of the gradients."""
        self.model.zero_grad(set_to_none=True)


@dataclass
class Gradients:
    """Gradients of all steps' models, which are cleared before each step."""

    steps: Iterable[TrainerStep]

    def clear(self) -> None:
        for step in self.steps:
            step.clear()


def timed(
    steps: dict[str, TrainerStep], device: torch.device, rounds: int
) -> tuple[dict[str, Times], dict[str, measure.Failure]]:
    """``time_rounds`` of models that hold gradients of their own."""
    return time_rounds(steps, Turns(Gradients(steps.values()), device), rounds)


def once(step: TrainerStep, device: torch.device) -> dict[str, Any]:
    """Run a step; return its loss and the norm of all gradients, and on a GPU its peak.

    The peak is beside the parameters and includes the gradients.
    """
    found = {"loss": float(step())}
    gradients = [parameter.grad for parameter in step.model.parameters() if parameter.grad is not None]
    if gradients:
        found["grad_norm"] = float(torch.nn.utils.get_total_norm(gradients))
    del gradients
    step.clear()
    if device.type == "cuda":
        found["peak_bytes"] = measure.gpu_peak(step, step)["peak_bytes"]
    return found


def compared(name: str, batch: Batch, rounds: int) -> dict[str, Any]:
    """Return a row with each way's loss, norm of all gradients and time of a step, and on a GPU its peak."""
    ways = (PLAIN, OURS, LOSSES) if name == "TRL SFT" else (PLAIN, OURS)
    steps = {way: TrainerStep(*TRAINERS[name](batch, way)) for way in ways}
    row: dict[str, Any] = {"trainer": name, "tokens": batch.tokens, "ways": {way: {} for way in steps}}
    for way, step in steps.items():
        row["ways"][way] = once(step, batch.device)
    times, failures = timed(steps, batch.device, rounds)
    for way, found in times.items():
        row["ways"][way]["ms"] = measure.quantile(found.rounds, 0.5) / (FITTED if name == "Lightning" else 1)
    for way, failure in failures.items():
        row["ways"][way] |= failure.record()
    return row


def measured(names: Sequence[str], device: torch.device, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each trainer that is installed; the row of a trainer that fails says why."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            row, failure = measure.attempt(functools.partial(compared, name, Batch(device, tokens, folder), rounds))
            measure.release()
            if failure is not None and failure.error.startswith(("ImportError", "ModuleNotFoundError")):
                print(f"{name} is left out: {failure.error}")
                continue
            yield row if failure is None else {"trainer": name, "tokens": tokens, **failure.record()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 where a trainer failed."""
    parser = command.arguments("frameworks", __doc__, rounds=3, dtype=False)
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=[*TRAINERS])
    parser.add_argument("--tokens", type=command.count, help="of a batch (2048; on a GPU 8192)")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    path, rows = command.results_path(args.output, "frameworks", args.device), list[dict[str, Any]]()
    for row in measured(args.trainers, args.device, args.tokens or (8192 if args.gpu else 2048), args.rounds):
        rows.append(row)
        print(row, flush=True)
        versions = {name: importlib.metadata.version(name) for name in ("transformers", "trl", "pytorch-lightning")
                    if importlib.util.find_spec(name.replace("-", "_"))}  # fmt: skip
        command.write_results(path, "frameworks", args.argv, args.device, framework=versions, rows=rows)
    return int(any("status" in way for row in rows for way in (row, *row.get("ways", {}).values())))


if __name__ == "__main__":
    sys.exit(main())
