"""Frameworks as they may be after an upgrade: a name renamed, with other parameters, or in another module. Modules of a
few lines stand for each framework; what is on a changed name stays the framework's own, and a warning names it."""

import contextlib
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers

from chunked_head.integrations import llamafactory, megatron, ms_swift, trl, verl
from chunked_head.integrations.frameworks import REPLACED, Framework, looked_up

HERE = "chunked_head.integrations"
TRL_LOGPROBS = """
class _ChunkedLogProbFunction:
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None,
                logit_scale=1.0, outputs=()): ...
"""
TRL_DIVERGENCE = """
class ChunkedDivergenceFunction:
    @staticmethod
    def forward(ctx, student_hidden, student_weight, student_bias, teacher_hidden, teacher_weight, teacher_bias, beta,
                temperature=1.0, student_logit_scale=1.0, student_final_logit_softcapping=None, teacher_logit_scale=1.0,
                teacher_final_logit_softcapping=None): ...
"""
TRL_SFT = """
class SFTTrainer:
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None): ...
"""
VERL_FUNCTION = """
class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature=1.0, reduction="none", dist_process_group=None): ...
linear_cross_entropy = LinearCrossEntropy.apply
"""
VERL_MODULE = """
class FusedLinearForPPO(torch.nn.Module):
    def forward(self, hidden_states, vocab_weights, input_ids, temperature=1.0): ...
"""
LOAD = "def load_model(tokenizer, model_args, finetuning_args, is_trainable=False, add_valuehead=False): ..."
GPT = """
class GPTModel(torch.nn.Module):
    def forward(self, input_ids, position_ids, attention_mask, decoder_input=None, labels=None,
                inference_context=None, *, output_processor=None, output_processor_context=None): ...
"""
TITAN = """
class BaseLoss:
    class Config: ...
class ChunkedLossWrapper(BaseLoss):
    def __init__(self, config, *, compile_config=None): ...
    def set_lm_head(self, lm_head): ...
    def __call__(self, pred, labels, global_valid_tokens=None, **loss_inputs): ...
"""
AXOLOTL = """
class BasePlugin:
    def get_input_args(self): ...
    def post_model_load(self, cfg, model): ...
"""
AUTOMODEL = """
class FusedLinearCrossEntropy(torch.nn.Module):
    def forward(self, hidden_states, labels, lm_weight, num_label_tokens=None, grad_reduce_group=None,
                loss_weights=None): ...
"""
AUTOMODEL_BASE = """
class LinearCrossEntropy(torch.nn.Module):
    @staticmethod
    def materialize_lm_weight(lm_weight, *, grad_reduce_group=None): ...
"""
SWIFT = "class TrainerCallback:\n    def __init__(self, args, trainer): self.args, self.trainer = args, trainer"


@dataclass
class Seam:
    """An integration's framework, as modules of a few lines, and what shows whether ours is there."""

    package: str
    version: str
    modules: dict[str, str]
    ours: Callable[[], set[str]]  # switches ours on; the names that it took, of the modules above
    changes: list[tuple[str, str, str]]  # a module, and what is written otherwise in it


def taken(framework: Framework, switch_on: Callable[[], Any]) -> set[str]:
    """Where something of ours stands, in the framework's modules themselves."""
    assert not REPLACED.keys() & framework.uses.keys()
    before = {place: looked_up(place) for place in framework.uses}
    switch_on()
    found = {place[0] for place, theirs in before.items() if looked_up(place) is not theirs}
    assert found == {path for path, _ in REPLACED.keys() & framework.uses.keys()}
    framework.give_back()
    assert all(looked_up(place) is theirs for place, theirs in before.items())
    return found


def of_llamafactory() -> set[str]:
    def load() -> None:
        llamafactory.LLAMAFACTORY.replace(lambda place, theirs: object())

    return taken(llamafactory.LLAMAFACTORY, load)


def of_megatron() -> set[str]:
    """The hook on a model, where Megatron's own class takes it."""
    model = SimpleNamespace(forward=lambda labels=None, output_processor=None: output_processor, hooks=[])
    model.register_forward_pre_hook = lambda hook, with_kwargs: model.hooks.append(hook)
    assert megatron.attach_head(model) is model
    return {megatron.MODEL[0]} if model.hooks else set()


def imported(name: str, cls: str) -> Any:
    """A class of an integration's module, which looks at its framework when it is imported."""
    before = sys.modules.pop(f"{HERE}.{name}", None)
    try:
        return getattr(importlib.import_module(f"{HERE}.{name}"), cls)
    finally:
        sys.modules.pop(f"{HERE}.{name}", None)
        if before is not None:
            sys.modules[f"{HERE}.{name}"] = before


def of_class(name: str, cls: str, path: str, make: Callable[[Any], Any]) -> Callable[[], set[str]]:
    def ours() -> set[str]:
        found = imported(name, cls)
        if isinstance(found, type):
            make(found)
            return {path}
        with pytest.raises(RuntimeError, match=rf"{cls} is not there for .*own loss, or install one of the versions"):
            make(found)
        return set()

    return ours


def of_axolotl() -> set[str]:
    """Axolotl's class is the plugin's base, and its method is what Axolotl calls behind the adapters."""
    plugin = imported("axolotl", "ChunkedHeadPlugin")()
    base = getattr(sys.modules.get("axolotl.integrations.base"), "BasePlugin", type(None))
    ours = {"get_input_args", "post_model_load"} & vars(type(plugin)).keys()
    assert len(ours) in (0, 2) and (not ours or isinstance(plugin, base))
    return {"axolotl.integrations.base"} if ours else set()


def of_swift() -> set[str]:
    """ms-swift makes a callback by its name, for a trainer with a model; ours is one that patches it."""
    ms_swift.register()
    if "swift.callbacks.mapping" not in sys.modules:
        return set()
    made = sys.modules["swift.callbacks.mapping"].callbacks_map["chunked_head"]
    callback = made(SimpleNamespace(use_liger_kernel=True), SimpleNamespace(model=None))
    if type(callback) is transformers.TrainerCallback:
        return set()
    with pytest.raises(ValueError, match="use_liger_kernel brings Liger's head"):
        callback.on_init_end(callback.args, None, None)
    return {"swift.callbacks.mapping", "swift.callbacks.base"}


def of_trl_losses() -> set[str]:
    return taken(trl.SFT, lambda: trl.SFT.replace(trl.with_step))


UTILS, KERNELS, SFT = "trl.trainer.utils", "trl.kernels.chunked_divergence", "trl.trainer.sft_trainer"
SEAMS = [
    Seam(
        "trl", "1.17.0", {UTILS: TRL_LOGPROBS, KERNELS: TRL_DIVERGENCE}, lambda: taken(trl.TRL, trl.patch_trl),
        [(UTILS, "class _Chunked", "class _Tiled"), (UTILS, "temperature,", "inverse_temperature,"),
         (UTILS, "outputs=()", "outputs=(), token_chunk=8"), (KERNELS, "beta,", "alpha, beta,"), (KERNELS, "", "")],
    ),
    Seam(
        "trl", "1.14.2",
        {UTILS: TRL_LOGPROBS.replace("ctx, hidden", "ctx, last_hidden").replace(", outputs=()", "")},
        lambda: taken(trl.TRL, trl.patch_trl), [(UTILS, "class _Chunked", "class _Tiled")],
    ),
    Seam(
        "trl", "1.18.0", {SFT: TRL_SFT}, of_trl_losses,
        [(SFT, "class SFT", "class Supervised"), (SFT, "model, inputs", "inputs, model"), (SFT, "", "")],
    ),
    Seam(
        "verl", "0.10.0",
        {"verl.utils.kernel.linear_cross_entropy": VERL_FUNCTION,
         "verl.utils.experimental.torch_functional": VERL_MODULE},
        lambda: taken(verl.VERL, verl.patch_verl),
        [("verl.utils.kernel.linear_cross_entropy", "temperature=1.0, reduction", "reduction"),
         ("verl.utils.kernel.linear_cross_entropy", "\nlinear_cross_entropy =", "\nlinear_ce ="),
         ("verl.utils.experimental.torch_functional", "", ""),
         ("verl.utils.experimental.torch_functional", "input_ids", "input_ids, mask")],
    ),
    Seam(
        "llamafactory", "0.10.0", dict.fromkeys(llamafactory.IMPORTERS, LOAD), of_llamafactory,
        [("llamafactory.train.dpo.workflow", "", ""), ("llamafactory.train.sft.workflow", "load_model", "get_model"),
         ("llamafactory.train.kto.workflow", "tokenizer, ", "")],
    ),
    Seam(
        "megatron-core", "0.21.0", {megatron.MODEL[0]: GPT}, of_megatron,
        [(megatron.MODEL[0], "output_processor=None", "processor=None"), (megatron.MODEL[0], "", ""),
         (megatron.MODEL[0], "decoder_input=None, labels=None", "labels=None, decoder_input=None")],
    ),
    Seam(
        "torchtitan", "0.4.0",
        {"torchtitan.components.loss": TITAN, "torchtitan.config": "class CompileConfig: ...",
         "torchtitan.distributed.spmd_types": "def current_spmd_mesh(): ...\ndef spmd_mesh_size(axis_name): ...",
         "torchtitan.distributed.utils": "def get_spmd_backend(): ...",
         "spmd_types": "def no_typecheck(): ...\ndef is_type_checking(): ...\ndef assert_type(*args): ..."},
        of_class("torchtitan", "ChunkedHeadLoss", "torchtitan.components.loss", lambda cls: cls.Config()),
        [("torchtitan.components.loss", "labels, ", "labels, weights, "), ("torchtitan.components.loss", "", ""),
         ("torchtitan.components.loss", "ChunkedLossWrapper", "TiledLoss"),
         ("torchtitan.distributed.utils", "", "")],
    ),
    Seam(
        "nemo-automodel", "0.8.0",
        {"nemo_automodel.components.loss.linear_ce": AUTOMODEL,
         "nemo_automodel.components.loss.linear_ce_base": AUTOMODEL_BASE},
        of_class("nemo_automodel", "ChunkedHeadCrossEntropy", "nemo_automodel.components.loss.linear_ce_base",
                 lambda cls: cls()),
        [("nemo_automodel.components.loss.linear_ce_base", "", ""),
         ("nemo_automodel.components.loss.linear_ce_base", "materialize_lm_weight", "gather_lm_weight"),
         ("nemo_automodel.components.loss.linear_ce", "lm_weight, num", "lm_head, num")],
    ),
    Seam(
        "axolotl", "0.22.0", {"axolotl.integrations.base": AXOLOTL}, of_axolotl,
        [("axolotl.integrations.base", "", ""), ("axolotl.integrations.base", "post_model_load", "post_adapter_load"),
         ("axolotl.integrations.base", "cfg, model", "cfg, model, trainer")],
    ),
    Seam(
        "ms-swift", "4.7.0", {"swift.callbacks.base": SWIFT, "swift.callbacks.mapping": "callbacks_map = {}"}, of_swift,
        [("swift.callbacks.base", "args, trainer)", "trainer)"), ("swift.callbacks.mapping", "", "")],
    ),
]  # fmt: skip


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str, dict[str, str]], None]]:
    """Puts modules of these texts in the place of a framework's."""
    real = importlib.metadata.version

    def install(package: str, version: str, modules: dict[str, str]) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == package else real(name))
        tops = {path.split(".")[0] for path in modules}
        for name in [name for name in sys.modules if name.split(".")[0] in tops]:
            monkeypatch.delitem(sys.modules, name)
        for path, text in modules.items():
            names = path.split(".")
            for end in range(1, len(names) + 1):
                name = ".".join(names[:end])
                if name not in sys.modules:
                    module = ModuleType(name)
                    module.__path__ = []  # a package: its modules are those here
                    monkeypatch.setitem(sys.modules, name, module)
            exec(f"import torch\n{text}", vars(sys.modules[path]))

    yield install


def switched_on(seam: Seam) -> tuple[set[str], list[str]]:
    """The modules that ours is in, and what was said of it."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = seam.ours()
    return found, [str(one.message) for one in said]


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.package} {seam.version}")
def test_another_version_of_the_same_names(seam: Seam, installed: Any) -> None:
    installed(seam.package, seam.version, seam.modules)
    found, said = switched_on(seam)
    assert found and found <= seam.modules.keys()
    missing = [] if seam.version != "1.14.2" else [KERNELS]
    assert len(said) == len(missing) and all(
        f"{path}.ChunkedDivergenceFunction is missing" in said[0] for path in missing
    )


CHANGES = [(seam, change) for seam in SEAMS for change in seam.changes]


@pytest.mark.parametrize(
    ("seam", "change"), CHANGES, ids=[f"{seam.package}-{change[0]}-{change[1] or 'moved'}" for seam, change in CHANGES]
)
def test_a_name_that_changed(seam: Seam, change: tuple[str, str, str], installed: Any) -> None:
    path, before, after = change
    modules = dict(seam.modules)
    text = modules.pop(path)
    assert before in text
    if before:
        modules[path] = text.replace(before, after)
    else:
        modules[f"{path}_of_another_name"] = text
    installed(seam.package, seam.version, seam.modules)
    whole, _ = switched_on(seam)
    installed(seam.package, seam.version, modules)
    found, said = switched_on(seam)
    assert path not in found and found <= whole
    replaces = seam.package in ("trl", "verl", "llamafactory")  # a function at a time
    assert found == (whole - {path} if replaces else set())
    assert len(said) == 1
    assert said[0].startswith(f"{seam.package} {seam.version}: ")
    assert path in said[0] and ("is missing" in said[0] or "instead of (" in said[0])
    assert f"Its own loss stays on there, without chunked_head, which was tested with {seam.package} " in said[0]


def test_what_a_version_gives_to_megatrons_hook(recwarn: pytest.WarningsRecorder) -> None:
    """One name less is an error, one more a warning: either may be a loss of another meaning."""
    names = "hidden_states output_layer output_weight labels loss_mask context config inference_context"
    given: dict[str, Any] = dict.fromkeys(names.split())
    with contextlib.suppress(ValueError):
        megatron.OutputProcessor()(**given, bias_of_logits=None)
    assert "gives output_processor bias_of_logits too" in str(recwarn.pop().message)
    del given["loss_mask"]
    with pytest.raises(TypeError, match="loss_mask"):
        megatron.OutputProcessor()(**given)
