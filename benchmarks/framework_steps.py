"""A training step by frameworks' own code, with their heads and with ours: `python -m benchmarks.framework_steps verl`.

The model and the batch are those of `benchmarks/frameworks.py` (Megatron's is its own GPTModel of that shape). A step
is the framework's loss of the batch and its backward; lm-eval's is the log-likelihood of the batch. Each framework runs
in a process of its own, all of its ways taking turns there; one that is missing, fails or takes too long is a row that
says so. `--packages FOLDER` has each framework see the packages in FOLDER/NAME before any other.
"""

import functools
import importlib
import importlib.metadata
import json
import multiprocessing.connection
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import command, frameworks, measure
from benchmarks.frameworks import OURS, QWEN, SEQUENCES, TINY, Batch, Run
from chunked_head import patch_model

OWN = "its own"
# by name, the framework's default first and ours last: what makes a model and its loss
Ways = dict[str, Callable[[], tuple[Any, Run]]]


def verl(batch: Batch) -> Ways:
    """A policy gradient and an entropy bonus, of what its FSDP engine computes from logits or by a fused forward."""
    from verl.models.transformers import dense_common
    from verl.utils import torch_functional
    from verl.utils.experimental import torch_functional as fused

    from chunked_head.integrations.verl import FusedLinearForPPO

    gpu, entropy_of = batch.device.type == "cuda", torch_functional.entropy_from_logits
    if gpu:
        entropy_of = torch.compile(entropy_of, dynamic=True)  # the engine's default, use_torch_compile

    def make(backend: str = "", head: Any = fused.FusedLinearForPPO) -> tuple[Any, Run]:
        model, ids = batch.made()
        advantages = torch.linspace(-1, 2, ids.numel(), device=ids.device)

        def run() -> Tensor:
            if backend:
                forward = getattr(dense_common, f"forward_with_{backend}_backend")
                with mock.patch.object(fused, "FusedLinearForPPO", head):  # as patch_verl does for good
                    out = forward(model, input_ids=ids, use_cache=False, return_dict=True)
                logprobs, entropy = out.log_probs.flatten(), out.entropy.flatten()
            else:
                logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
                entropy, labels = entropy_of(logits), next_ids(ids).flatten()
                logprobs = torch_functional.logprobs_from_logits(logits, labels, inplace_backward=False)
            return -(logprobs * advantages).mean() - 0.01 * entropy.float().mean()

        return model, run

    kernel: Ways = {"use_fused_kernels, triton": lambda: make("triton")}
    return {
        OWN: make, "use_fused_kernels, torch": lambda: make("torch"), **(kernel if gpu else {}),
        OURS: lambda: make("torch", FusedLinearForPPO),
    }  # fmt: skip


def megatron(batch: Batch) -> Ways:
    """Without Transformer Engine: local layers, whose attention is computed again in the backward."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from chunked_head.integrations.megatron import attach_head

    gpu, length = batch.device.type == "cuda", batch.tokens // SEQUENCES
    shape: dict[str, Any] = QWEN if gpu else TINY
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)

    def make(ours: bool = False, fusion: bool = False) -> tuple[Any, Run]:
        more = {"recompute_granularity": "selective"} if gpu else {"use_cpu_initialization": True}
        config = TransformerConfig(
            num_layers=shape["num_hidden_layers"], hidden_size=shape["hidden_size"],
            ffn_hidden_size=shape["intermediate_size"], num_attention_heads=shape["num_attention_heads"],
            num_query_groups=shape["num_key_value_heads"], kv_channels=shape["head_dim"], normalization="RMSNorm",
            gated_linear_unit=True, activation_func=F.silu, add_bias_linear=False, attention_dropout=0.0,
            hidden_dropout=0.0, bf16=gpu, params_dtype=torch.bfloat16 if gpu else torch.float32,
            gradient_accumulation_fusion=False, masked_softmax_fusion=False, qk_layernorm=True,
            cross_entropy_loss_fusion=fusion, **more,
        )  # fmt: skip
        torch.manual_seed(0)
        if gpu:
            tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)
        model: Any = GPTModel(
            config, get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
            vocab_size=shape["vocab_size"], max_sequence_length=length, position_embedding_type="rope",
            share_embeddings_and_output_weights=True,
        ).to(batch.device)  # fmt: skip
        ids = batch.ids_below(shape["vocab_size"])
        positions = torch.arange(length, device=batch.device).expand_as(ids)
        mask = torch.ones(length, length, dtype=torch.bool, device=batch.device).triu(1)[None, None]
        if ours:
            attach_head(model)
        return model, lambda: model(ids, positions, mask, labels=next_ids(ids)).mean()

    fused: Ways = {"cross_entropy_loss_fusion": lambda: make(fusion=True)}
    return {OWN: make, **(fused if gpu else {}), OURS: lambda: make(True)}


def torchtitan(batch: Batch) -> Ways:
    """Its losses, given the logits, or hidden states and the output layer."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    from chunked_head.integrations.torchtitan import ChunkedHeadLoss

    def make(kind: Any) -> tuple[Any, Run]:
        model, ids = batch.made()
        loss_fn, valid = kind.Config().build(compile_config=None), torch.tensor(ids.numel(), device=ids.device)
        if kind is CrossEntropyLoss:
            return model, lambda: loss_fn(model.lm_head(hidden_of(model, ids)), next_ids(ids), valid)[0]
        loss_fn.set_lm_head(model.lm_head)
        return model, lambda: loss_fn(hidden_of(model, ids), next_ids(ids), valid)[0]

    return {
        OWN: lambda: make(CrossEntropyLoss), "ChunkedLossWrapper": lambda: make(ChunkedLossWrapper),
        OURS: lambda: make(ChunkedHeadLoss),
    }  # fmt: skip


def nemo_automodel(batch: Batch) -> Ways:
    """Its losses, by the function that its recipes call."""
    from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
    from nemo_automodel.components.loss.linear_ce import FusedLinearCrossEntropy
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.components.loss.utils import calculate_loss

    from chunked_head.integrations.nemo_automodel import ChunkedHeadCrossEntropy

    gpu = batch.device.type == "cuda"

    def make(kind: Any, **options: Any) -> tuple[Any, Run]:
        loss_fn, (model, ids) = kind(**options), batch.made()

        def run() -> Tensor:
            hidden = hidden_of(model, ids)
            given = {"logits": model.lm_head(hidden)} if kind is MaskedCrossEntropy else {"hidden_states": hidden}
            inputs = {"labels": next_ids(ids), "num_label_tokens": ids.numel(), "model": model} | given
            return calculate_loss(loss_fn, **inputs)

        return model, run

    cut: Ways = {
        "FusedLinearCrossEntropy": lambda: make(FusedLinearCrossEntropy),
        "FusedLinearCrossEntropy, torch_compile": lambda: make(FusedLinearCrossEntropy, impl="torch_compile"),
    }
    return {
        OWN: lambda: make(MaskedCrossEntropy), **(cut if gpu else {}),
        "ChunkedCrossEntropy": lambda: make(ChunkedCrossEntropy, compile=gpu),
        OURS: lambda: make(ChunkedHeadCrossEntropy),
    }  # fmt: skip


def axolotl(batch: Batch) -> Ways:
    """The trainer that it makes of a configuration file."""
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.integrations.base import PluginManager
    from axolotl.train import setup_model_and_trainer
    from transformers import Qwen3ForCausalLM

    gpu, folder = batch.device.type == "cuda", Path(batch.folder)
    (folder / "axolotl.jsonl").write_text('{"instruction": "a", "input": "", "output": "a"}\n' * SEQUENCES)
    given = {
        "base_model": saved(batch), "tokenizer_type": "PreTrainedTokenizerFast", "output_dir": f"{folder}/axolotl",
        "datasets": [{"path": f"{folder}/axolotl.jsonl", "ds_type": "json", "split": "train", "type": "alpaca"}],
        "dataset_prepared_path": f"{folder}/prepared", "sequence_len": 256, "micro_batch_size": SEQUENCES,
        "gradient_accumulation_steps": 1, "max_steps": 1, "learning_rate": 1e-3, "optimizer": "adamw_torch",
        "lr_scheduler": "constant", "save_strategy": "no", "val_set_size": 0, "sample_packing": False,
        "attn_implementation": "sdpa", "dataset_num_proc": 1, "use_wandb": False, "warmup_steps": 0, "bf16": gpu,
        "special_tokens": {"pad_token": "a", "eos_token": "a"},
    }  # fmt: skip

    def make(plugin: str = "", **more: Any) -> tuple[Any, Run]:
        PluginManager.get_instance().plugins.clear()  # of another way
        (folder / "axolotl.yaml").write_text(json.dumps(given | more | ({"plugins": [plugin]} if plugin else {})))
        cfg, theirs = load_cfg(f"{folder}/axolotl.yaml"), Qwen3ForCausalLM.forward
        trainer, model, *_ = setup_model_and_trainer(cfg, load_datasets(cfg=cfg, cli_args=TrainerCliArgs()))
        if Qwen3ForCausalLM.forward is not theirs:  # for this model, not for the class
            model.forward = types.MethodType(Qwen3ForCausalLM.forward, model)
            Qwen3ForCausalLM.forward = theirs
        _, run = loss_of(trainer, model.train(), batch)

        def cast() -> Tensor:  # as the model is that accelerate prepares for a training step
            with trainer.accelerator.autocast():
                return run()

        return model, cast

    cut: Ways = {
        "cut_cross_entropy": lambda: make(
            "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin", cut_cross_entropy=True
        )
    }
    ours = "chunked_head.integrations.axolotl.ChunkedHeadPlugin"
    return {OWN: make, **(cut if gpu else {}), OURS: lambda: make(ours)}


def llamafactory(batch: Batch, dpo: bool = False) -> Ways:
    """Its trainers, with models as its seam, ``load_model``, gives them."""
    from llamafactory.hparams import FinetuningArguments, TrainingArguments
    from llamafactory.train.dpo.trainer import CustomDPOTrainer
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

    def make(way: str) -> tuple[Any, Run]:
        policy, reference = models = batch.model(), batch.model(1).eval().requires_grad_(False)
        for model in models if way == OURS else ():
            patch_model(model, when="always")
        finetuning: Any = FinetuningArguments(stage="dpo" if dpo else "sft", finetuning_type="full")
        common: dict[str, Any] = {
            "finetuning_args": finetuning, "processor": None, "model": policy, "tokenizer": frameworks.tokenizer(),
            "args": TrainingArguments(**batch.settings()),
        }  # fmt: skip
        trainer: Any = CustomDPOTrainer(ref_model=reference, **common) if dpo else CustomSeq2SeqTrainer(**common)
        return loss_of(trainer, policy, batch)

    return {OWN: lambda: make(OWN), **({} if dpo else liger_head(batch, make)), OURS: lambda: make(OURS)}


def swift(batch: Batch) -> Ways:
    """The trainer of ``swift sft``, with the token accuracy that it logs at every step."""
    from swift import SftArguments
    from swift.pipelines.train.sft import SwiftSft

    from chunked_head.integrations.ms_swift import register

    class Made(SwiftSft):
        def train(self, trainer: Any) -> Any:
            return trainer

    gpu, folder = batch.device.type == "cuda", Path(batch.folder)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    (folder / "swift.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * SEQUENCES)
    given: dict[str, Any] = {
        "model": saved(batch), "model_type": "qwen3", "template": "chatml", "output_dir": f"{folder}/swift",
        "dataset": [f"{folder}/swift.jsonl"], "add_version": False, "max_steps": 1, "report_to": "none", "bf16": gpu,
        "torch_dtype": "bfloat16" if gpu else "float32", "tuner_type": "full", "check_model": False, "use_hf": True,
        "dataset_num_proc": 1, "dataloader_num_workers": 0, "split_dataset_ratio": 0.0, "max_length": 128,
        "attn_impl": "sdpa", "gradient_checkpointing": False, "per_device_train_batch_size": SEQUENCES,
    }  # fmt: skip
    register()

    def make(way: str) -> tuple[Any, Run]:
        trainer: Any = Made(SftArguments(**given, callbacks=["chunked_head"] if way == OURS else [])).run()
        return loss_of(trainer, trainer.model.train(), batch)

    return {OWN: lambda: make(OWN), **liger_head(batch, make), OURS: lambda: make(OURS)}


def lm_eval(batch: Batch) -> Ways:
    """Every token of the batch scored, as wikitext's are, in one forward."""
    from lm_eval.models.huggingface import HFLM

    from chunked_head.integrations.lm_eval import ChunkedHeadLM

    def make(kind: Any) -> tuple[Any, Run]:
        model, ids = batch.made()
        rows = [(None, row[:1], row[1:]) for row in ids.tolist()]
        made = kind(pretrained=model, tokenizer=frameworks.tokenizer(), device=str(batch.device), batch_size=SEQUENCES)
        return model, lambda: torch.tensor([value for value, _ in made._loglikelihood_tokens(rows, True)]).sum()

    return {OWN: lambda: make(HFLM), OURS: lambda: make(ChunkedHeadLM)}


def next_ids(ids: Tensor) -> Tensor:
    """Targets for frameworks that shift them themselves; a sequence's last one is its first id."""
    return ids.roll(-1, 1)


def hidden_of(model: Any, ids: Tensor) -> Tensor:
    return model.model(input_ids=ids, use_cache=False).last_hidden_state


def loss_of(trainer: Any, model: Any, batch: Batch) -> tuple[Any, Run]:
    """A trainer's loss of the batch, with what transformers' training step gives it."""
    ids = batch.ids(model)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    count = torch.tensor(batch.tokens - SEQUENCES, device=batch.device)
    return model, lambda: trainer.compute_loss(model, dict(inputs), num_items_in_batch=count)


def liger_head(batch: Batch, make: Callable[[str], tuple[Any, Run]]) -> Ways:
    """The fused head of those kernels that ``enable_liger_kernel`` and ``use_liger_kernel`` bring."""

    def made() -> tuple[Any, Run]:
        from liger_kernel.transformers.model.qwen3 import lce_forward

        model, run = make(OWN)
        model.forward = types.MethodType(lce_forward, model)
        return model, run

    return {"Liger's head": made} if batch.device.type == "cuda" else {}


def saved(batch: Batch) -> str:
    """A folder with the model and a tokenizer, for frameworks that load them."""
    path = Path(batch.folder) / "model"
    batch.model().save_pretrained(path)
    frameworks.tokenizer().save_pretrained(path)
    return str(path)


class Framework(NamedTuple):
    """Cases of a framework by name, and the number of lines that a user changes to have our head."""

    title: str
    package: str
    lines: int
    cases: dict[str, Callable[[Batch], Ways]]


FRAMEWORKS = {
    "verl": Framework("verl", "verl", 2, {"PPO": verl}),
    "megatron": Framework("Megatron-LM", "megatron-core", 2, {"pre-training": megatron}),
    "torchtitan": Framework("torchtitan", "torchtitan", 2, {"pre-training": torchtitan}),
    "nemo_automodel": Framework("NeMo Automodel", "nemo-automodel", 2, {"SFT": nemo_automodel}),
    "axolotl": Framework("Axolotl", "axolotl", 2, {"SFT": axolotl}),
    "llamafactory": Framework("LLaMA-Factory", "llamafactory", 1,
                              {"SFT": llamafactory, "DPO": functools.partial(llamafactory, dpo=True)}),
    "swift": Framework("ms-swift", "ms-swift", 3, {"SFT": swift}),
    "lm_eval": Framework("lm-eval", "lm_eval", 1, {"log-likelihood": lm_eval}),
}  # fmt: skip


def step_of(make: Callable[[], tuple[Any, Run]]) -> frameworks.TrainerStep:
    return frameworks.TrainerStep(*make())


def compared(name: str, case: str, batch: Batch, rounds: int) -> dict[str, Any]:
    """Return a row with each way's loss, norm of all gradients, peak and time, or its failure."""
    framework = FRAMEWORKS[name]
    row: dict[str, Any] = {
        "framework": framework.title, "case": case, "lines": framework.lines, "tokens": batch.tokens
    }  # fmt: skip
    made, failure = measure.attempt(functools.partial(framework.cases[case], batch))
    if failure is not None:
        return row | failure.record()
    row |= {"version": importlib.metadata.version(framework.package), "ways": {}}
    steps = dict[str, frameworks.TrainerStep]()
    for way, make in made.items():
        step, failure = measure.attempt(functools.partial(step_of, make))
        if failure is None:
            row["ways"][way], failure = measure.attempt(functools.partial(frameworks.once, step, batch.device), step)
        if failure is None:
            steps[way] = step
        else:
            row["ways"][way] = failure.record()
    times, failures = frameworks.timed(steps, batch.device, rounds)
    for way in steps:
        row["ways"][way] |= failures[way].record() if way in failures else times[way].row()
    return row


def child(sender: multiprocessing.connection.Connection, name: str, args: Any) -> None:
    """Send the rows of one framework, each as soon as it is measured, and then None."""
    if args.packages:
        sys.path.insert(0, str(args.packages / name))
    with tempfile.TemporaryDirectory() as folder:
        for case in FRAMEWORKS[name].cases:
            sender.send(compared(name, case, Batch(args.device, args.tokens, folder), args.rounds))
    sender.send(None)


def measured(name: str, args: Any) -> Iterator[dict[str, Any]]:
    """Yield rows of a framework from a process of its own, and a row that says what ended the process early."""
    for row in measure.messages(child, name, args, seconds=args.limit):
        if isinstance(row, measure.Failure):
            yield {"framework": FRAMEWORKS[name].title, **row.record()}
        elif row is None:
            return
        else:
            yield row


def main(argv: Sequence[str] | None = None) -> int:
    """Measures frameworks one after the other; returns 1 where one, or one of its ways, gave no figures."""
    parser = command.arguments("framework_steps", __doc__, rounds=3, dtype=False)
    add = parser.add_argument
    add("frameworks", nargs="*", metavar="NAME", help=f"of {', '.join(FRAMEWORKS)}; none: all")
    add("--tokens", type=command.count, help="of a batch (8192; on a CPU 64)")
    add("--limit", type=int, default=120, help="seconds of a framework")
    add("--packages", type=Path, help="a folder with a folder of packages for each framework")
    args = command.read(parser, sys.argv[1:] if argv is None else argv)
    for name in set(args.frameworks) - FRAMEWORKS.keys():
        parser.error(f"{name} is none of {', '.join(FRAMEWORKS)}")
    args.tokens = args.tokens or (8192 if args.gpu else 64)
    path, rows = command.results_path(args.output, "framework_steps", args.device), list[dict[str, Any]]()
    for name in args.frameworks or FRAMEWORKS:
        for row in measured(name, args):
            rows.append(row)
            print(json.dumps(row), flush=True)
            command.write_results(path, "framework_steps", args.argv, args.device, rows=rows)
    return int(any("status" in each for row in rows for each in (row, *row.get("ways", {}).values())))


if __name__ == "__main__":
    sys.exit(main())
