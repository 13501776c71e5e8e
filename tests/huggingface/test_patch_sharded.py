"""Patched models over two ranks (gloo): data-parallel, sharded (FSDP, ZeRO-3), tensor-parallel; losses and gradients of
the plain."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import tiny_models
import torch
import torch.distributed as dist
from tiny_models import tokens, transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

from chunked_head import patch_model

RANKS, STEPS = 2, 3


def data_parallel(model: Any, **options: Any) -> Any:
    return DistributedDataParallel(model, **options)


def sharded(model: Any, head: str = "root", **options: Any) -> Any:
    """FSDP2 as accelerate does it, the head in the root's group or in one of its own."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head == "own":
        fully_shard(model.lm_head, mesh=mesh, **options)
    if head == "with norm":
        fully_shard([model.model.norm, model.lm_head], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **({} if head != "root" else options))


def sharded_first(model: Any, head: str = "root") -> Any:
    """FSDP1."""
    layers = type(model.model.layers[0])
    policy = CustomPolicy(lambda one: isinstance(one, layers) or (head == "own" and one is model.lm_head))
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True)


ZERO_3 = ("zero3", "zero3-tied")
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
}  # fmt: skip
LAYOUTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ddp": (data_parallel, {}),
    "ddp-unused": (data_parallel, {"find_unused_parameters": True}),
    "ddp-static": (data_parallel, {"static_graph": True}),
    "fsdp2-root": (sharded, {}),
    "fsdp2-root-reshard": (sharded, {"reshard_after_forward": True}),
    "fsdp2-own": (sharded, {"head": "own"}),
    "fsdp2-own-kept": (sharded, {"head": "own", "reshard_after_forward": False}),
    "fsdp2-norm": (sharded, {"head": "with norm"}),
    "fsdp2-cast": (sharded, {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64)}),
    "fsdp2-own-cast": (sharded, {"head": "own", "mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64)}),
    "fsdp2-own-wide": (sharded, {"head": "own", "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float64)}),
    "fsdp1": (sharded_first, {}),
    "fsdp1-own": (sharded_first, {"head": "own"}),
}


def losses_of(layout: str, patched: str, rank: int) -> list[float]:
    """Of some steps of SGD, an evaluation after each."""
    model = tiny_models.gemma2() if layout == "zero3-tied" else tiny_models.llama(tie_word_embeddings=False)
    if patched == "before":
        patch_model(model)
    if layout in ZERO_3:
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, config=DEEPSPEED)
        parallel, backward, optimize = engine, engine.backward, engine.step
    else:
        wrap, options = LAYOUTS[layout]
        parallel = wrap(model, **options)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.3)

        def backward(loss: torch.Tensor) -> None:
            loss.backward()

        def optimize() -> None:
            optimizer.step()
            optimizer.zero_grad()

    if patched == "after":
        patch_model(model)
    found = []
    inputs = {name: value[rank : rank + 1] for name, value in tokens().items()}
    for _ in range(STEPS):
        loss = parallel(**inputs).loss
        backward(loss)
        optimize()
        with torch.no_grad():
            output = parallel(**inputs)
        found += [output.logits.dtype.itemsize, loss.item(), output.loss.item()]
    if patched != "never":
        assert model.chunked_head.fused == 2 * STEPS, str(model.chunked_head)
        assert model.chunked_head.materialised == 0, str(model.chunked_head)
    return found


def outside(layout: str) -> list[str]:
    """What is said of a loss outside of a sharded forward, which is computed as ever."""
    wrap, options = LAYOUTS[layout]
    model = patch_model(tiny_models.llama(tie_word_embeddings=False), when="training")
    parallel = wrap(model, **options)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            logits = parallel(input_ids=tokens()["input_ids"]).logits
            logits.float().logsumexp(-1).mean().backward()
    assert type(logits) is torch.Tensor and model.chunked_head.fused == 0
    return [str(one.message) for one in said if "chunked_head" in str(one.message)]


def rounded() -> list[float]:
    """Dtypes' sizes and errors of a loss and of log-probabilities where FSDP2 casts what the head gives to bf16."""
    model = tiny_models.llama(tie_word_embeddings=False)
    ids = tokens()["input_ids"]
    exact = model(**tokens()), model(input_ids=ids).logits.log_softmax(-1).gather(-1, ids[..., None])
    patch_model(model, when="always")
    parallel = sharded(model, "own", mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    output = parallel(**tokens())
    logp = output.logits.float().log_softmax(-1).gather(-1, ids[..., None])
    errors = output.loss - exact[0].loss, (logp - exact[1]).abs().max()
    return [output.logits.dtype.itemsize, output.loss.dtype.itemsize, logp.dtype.itemsize, *(e.item() for e in errors)]


def late() -> str:
    """What is said of logits read when the root has its weights back."""
    model = patch_model(tiny_models.llama(tie_word_embeddings=False))
    output = sharded(model)(**tokens())
    early = output.logits.clone().materialise().shape
    output.loss.backward()
    try:
        output.logits.materialise()
    except RuntimeError as error:
        return f"{list(early)} {error}"
    return "nothing"


def tensor_parallel(folder: str, patched: bool) -> tuple[float, float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").train()
    if patched:
        patch_model(model)
    found = tiny_models.step(model)
    if patched:
        assert model.chunked_head.fused == 1 and model.chunked_head.materialised == 0, str(model.chunked_head)
    norms = sum(full(grad).norm().item() for grad in found.grads.values())
    return found.loss.item(), norms


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def work(rank: int, folder: str, port: int, layouts: tuple[str, ...] = (*LAYOUTS, "others")) -> None:
    """All layouts in one process: to start one costs more than to run them."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if layouts == ZERO_3:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
        warnings.filterwarnings("error", message="chunked_head")
    for layout in layouts:
        for patched in ("never", "before", "after") if layout != "others" else ():
            found[f"{layout} {patched}"] = ranks.outcome(losses_of, layout, patched, rank)
    if "others" in layouts:
        for layout in ("fsdp2-root", "fsdp2-own", "fsdp1"):
            found[f"outside {layout}"] = ranks.outcome(outside, layout)
        found["rounded"] = ranks.outcome(rounded)
        found["late"] = ranks.outcome(late)
        for patched in (False, True):
            found[f"tp {patched}"] = ranks.outcome(tensor_parallel, f"{folder}/model", patched)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    tiny_models.llama(vocab_size=98).save_pretrained(folder / "model")
    ranks.spawn(work, (str(folder), 29500 + os.getpid() % 1000), RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def hold(found: list[dict[str, Any]], layout: str) -> None:
    for rank in found:
        plain = rank[f"{layout} never"]
        assert not isinstance(plain, str), plain
        for patched in ("before", "after"):
            ours = rank[f"{layout} {patched}"]
            assert not isinstance(ours, str), ours
            assert ours == pytest.approx(plain, rel=1e-5)
        assert plain[-1] < plain[1] - 0.1  # it learns


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks(found: list[dict[str, Any]], layout: str) -> None:
    hold(found, layout)


@pytest.mark.deepspeed
def test_zero_3(tmp_path: Path) -> None:
    """A head whose weight is whole inside of its call only."""
    torch.multiprocessing.spawn(work, (str(tmp_path), 30500 + os.getpid() % 1000, ZERO_3), RANKS)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    for layout in ZERO_3:
        hold(found, layout)


@pytest.mark.parametrize("layout", ["fsdp2-root", "fsdp2-own", "fsdp1"])
def test_losses_outside_of_a_sharded_forward(found: list[dict[str, Any]], layout: str) -> None:
    for rank in found:
        said = rank[f"outside {layout}"]
        assert isinstance(said, list), said
        assert len(said) == 1 and "takes its weights away" in said[0]


def test_a_head_whose_output_is_cast(found: list[dict[str, Any]]) -> None:
    """The logits are bf16, and what is made of them without them is exact."""
    for rank in found:
        assert not isinstance(rank["rounded"], str), rank["rounded"]
        *sizes, loss, logprobs = rank["rounded"]
        assert sizes == [2, 4, 4] and abs(loss) < 1e-5 and logprobs < 1e-5


def test_tensor_parallel(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert not isinstance(rank["tp False"], str), rank["tp False"]
        assert not isinstance(rank["tp True"], str), rank["tp True"]
        assert rank["tp True"] == pytest.approx(rank["tp False"], rel=1e-5)


def test_logits_read_too_late(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["late"].startswith(
            "[2, 11, 97] LlamaForCausalLM's logits could not be computed: its head is sharded"
        )
