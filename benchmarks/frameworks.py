"""Losses by other frameworks' own code, on logits and on lazy ones: `python -m benchmarks.frameworks lm_eval`.

One framework a run, in an environment that has it (`make test-frameworks` makes them): the function of the framework
that takes a model's logits, with a two-layer model of random weights around it. Peak memory is that of a step in a
process of its own, gradients included; times are of both ways taking turns. Without a framework's name: the steps of
`benchmarks/trainers.py`, on a GPU with `--device cuda`.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import command, measure, trainers
from benchmarks.trainers import OURS, PLAIN
from chunked_head import patch_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
SEQUENCES = 8
Run = Callable[[Any, Tensor], Tensor]


def swift_loss(dft: bool) -> Run:
    from swift.trainers import per_token_loss_func

    def run(model: Any, ids: Tensor) -> Tensor:
        return per_token_loss_func(model(input_ids=ids, use_cache=False), ids, enable_dft_loss=dft).mean()

    return run


def llamafactory_dft() -> Run:
    from llamafactory.train.trainer_utils import dft_loss_func

    return lambda model, ids: dft_loss_func(model(input_ids=ids, use_cache=False), ids)


def llamafactory_dpo() -> Run:
    """What its DPO trainer computes of the policy: log-probabilities, and the means of the logits that it logs."""
    from llamafactory.train.trainer_utils import get_batch_logps

    def run(model: Any, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits.to(torch.float32)
        chosen, rejected = get_batch_logps(logits, ids)[0].chunk(2)
        for half in logits.chunk(2):
            half.mean().item()
        return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()

    return run


def lm_eval_rolling() -> Run:
    """One batch of ``HFLM._loglikelihood_tokens``, every token scored, as wikitext's are."""
    from lm_eval.models.huggingface import HFLM
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), eos_token="a")

    @functools.cache
    def scorer(model: Any, batch_size: int) -> Any:
        return HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=batch_size)

    def run(model: Any, ids: Tensor) -> Tensor:
        lm = scorer(model, len(ids))
        rows = [(None, row[:1], row[1:]) for row in ids.tolist()]
        return torch.tensor([value for value, _ in lm._loglikelihood_tokens(rows, disable_tqdm=True)]).sum()

    return run


LOSSES: dict[str, dict[str, Callable[[], Run]]] = {
    "lm_eval": {"rolling log-likelihood": lm_eval_rolling},
    "ms-swift": {"per-token loss": lambda: swift_loss(False), "DFT": lambda: swift_loss(True)},
    "llamafactory": {"DFT": llamafactory_dft, "DPO's policy": llamafactory_dpo},
}


@dataclass(frozen=True)
class Request:
    """A step to be made, perhaps in another process."""

    framework: str
    loss: str
    way: str
    tokens: int
    vocab: int
    budget: str

    def step(self) -> trainers.TrainerStep:
        import transformers

        torch.manual_seed(0)
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=self.vocab)).train()
        if self.way == OURS:
            patch_model(model, when="always", memory_budget=self.budget)
        ids = torch.randint(0, self.vocab, (SEQUENCES, self.tokens // SEQUENCES))
        return trainers.TrainerStep(model, functools.partial(LOSSES[self.framework][self.loss](), model, ids))


def compared(framework: str, loss: str, args: argparse.Namespace) -> dict[str, Any]:
    """A row: both ways' loss, times and peaks."""
    requests = {way: Request(framework, loss, way, args.tokens, args.vocab, args.budget) for way in (PLAIN, OURS)}
    steps = {way: request.step() for way, request in requests.items()}
    row: dict[str, Any] = {"loss": loss, "tokens": args.tokens, "vocab": args.vocab, "ways": {}}
    values = {way: float(step()) for way, step in steps.items()}
    times, failures = trainers.timed(steps, torch.device("cpu"), args.rounds)
    for way, request in requests.items():
        peak, failure = measure.cpu_peak(request)  # type: ignore[arg-type]
        failure = failures.get(way) or failure
        row["ways"][way] = {"value": values[way], **(peak or {})} | (
            failure.record() if failure else {"ms": statistics.median(times[way])}
        )
    report = steps[OURS].model.chunked_head
    row["fused"], row["materialised"] = report.fused, report.materialised
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Measures one framework's losses."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frameworks", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("framework", choices=LOSSES, nargs="?", help="one; none: trainers and loops that are there")
    parser.add_argument("--trainers", nargs="+", choices=trainers.TRAINERS, default=[*trainers.TRAINERS])
    parser.add_argument("--device", default="cpu", help="cpu, or of trainers cuda")
    parser.add_argument("--tokens", type=int, help="of a batch (2048; on a GPU 8192)")
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--budget", default="64MiB", help="memory_budget of this library's head")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    device = command.device_of(parser, args.device)
    args.tokens = args.tokens or (8192 if device.type == "cuda" else 2048)
    if args.framework is None:
        path, rows = command.results_path(args.output, "frameworks", device), []
        for row in trainers.measured(args.trainers, device, args.tokens, args.rounds):
            rows.append(row)
            print(row, flush=True)
            versions = {name: importlib.metadata.version(name) for name in ("transformers", "trl", "pytorch-lightning")
                        if importlib.util.find_spec(name.replace("-", "_"))}  # fmt: skip
            command.write_results(path, "frameworks", argv, device, framework=versions, rows=rows)
        return 1 if any("status" in way for row in rows for way in (row, *row.get("ways", {}).values())) else 0
    if device.type != "cpu":
        parser.error(f"{args.framework} is measured on the CPU")
    path = command.results_path(args.output, f"frameworks-{args.framework}", device)
    rows = []
    for loss in LOSSES[args.framework]:
        rows.append(compared(args.framework, loss, args))
        print(rows[-1])
        version = importlib.metadata.version(args.framework)
        command.write_results(path, "frameworks", argv, device, framework={args.framework: version}, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
