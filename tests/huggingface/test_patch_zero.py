"""Patched models under DeepSpeed ZeRO-3 over two ranks (gloo): a head whose weight is whole inside of its call only."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from tiny_models import tokens

from chunked_head import patch_model

pytestmark = pytest.mark.deepspeed
RANKS, STEPS = 2, 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


def losses_of(make: Any, patched: str, rank: int) -> list[float]:
    import deepspeed

    model = make()
    if patched == "before":
        patch_model(model)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    if patched == "after":
        patch_model(model)
    inputs = {name: value[rank : rank + 1] for name, value in tokens().items()}
    found = []
    for _ in range(STEPS):
        loss = engine(**inputs).loss
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            found += [loss.item(), engine(**inputs).loss.item()]
    if patched != "never":
        assert (model.chunked_head.fused, model.chunked_head.materialised) == (2 * STEPS, 0), str(model.chunked_head)
    return found


def untied() -> Any:
    return tiny_models.llama(tie_word_embeddings=False)


def work(rank: int, folder: str, port: int) -> None:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "localhost",
                   "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}  # fmt: skip
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed("gloo")
    found = {
        f"{make.__name__} {patched}": losses_of(make, patched, rank)
        for make in (untied, tiny_models.gemma2)
        for patched in ("never", "before", "after")
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_zero_3(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(work, (str(tmp_path), 30500 + os.getpid() % 1000), RANKS)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for make in ("untied", "gemma2"):
            for patched in ("before", "after"):
                assert found[f"{make} {patched}"] == pytest.approx(found[f"{make} never"], rel=1e-5)
            assert found[f"{make} never"][-1] < found[f"{make} never"][0] - 0.1
