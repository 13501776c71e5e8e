"""Frameworks as they may be after an upgrade: a name renamed, with other parameters, or in another module. Modules with
the names that an integration uses stand for its framework; what is on a changed name stays the framework's own, and a
warning names it. ``tests/frameworks/real`` has the names as they are."""

import contextlib
import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest

pytest.importorskip("pydantic", reason="Axolotl's plugin has its options by it")
pytest.importorskip("transformers", reason="ms-swift's callback is one of its")

import transformers

from chunked_head.integrations import llamafactory, megatron, ms_swift, trl, verl
from chunked_head.integrations.frameworks import REPLACEMENTS, Framework, ObjectPath, object_at

HERE, VERSION = "chunked_head.integrations", "99.1"
Uses = Mapping[ObjectPath, str]


def stand_ins(uses: Uses) -> dict[str, ModuleType]:
    """Modules that have the names, each with its parameters."""
    found: dict[str, ModuleType] = {}
    for (path, dotted), wanted in uses.items():
        owner: Any = found.setdefault(path, ModuleType(path))
        *outer, name = dotted.split(".")
        for each in outer:
            if not hasattr(owner, each):
                setattr(owner, each, type(each, (), {}))
            owner = getattr(owner, each)
        given: dict[str, Any] = {}
        exec(f"def forward({', '.join(re.findall(r'[a-z_]+', wanted.split(' | ')[0]))}): ...", given)
        made: Any = given["forward"]
        if name.strip("_")[0].isupper():  # a class, which ours may be derived from
            made = type(name, (), {"forward": staticmethod(made), "__init__": lambda self, *args: None})
        setattr(owner, name, {} if name == "callbacks_map" else made)
    return found


@contextlib.contextmanager
def installed(package: str, modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """These modules, and packages around them, in the place of a framework."""
    real = importlib.metadata.version
    tops = {path.split(".")[0] for path in modules}
    with (
        mock.patch.dict(sys.modules),
        mock.patch.object(importlib.metadata, "version", lambda name: VERSION if name == package else real(name)),
    ):
        for name in [name for name in sys.modules if name.split(".")[0] in tops]:
            del sys.modules[name]
        for path, module in modules.items():
            names = path.split(".")
            for end in range(1, len(names)):
                around = ModuleType(".".join(names[:end]))
                around.__path__ = []
                sys.modules.setdefault(around.__name__, around)
            sys.modules[path] = module
        yield


def imported(name: str) -> Any:
    """A module of an integration, which looks at its framework when it is imported."""
    with mock.patch.dict(sys.modules):
        sys.modules.pop(f"{HERE}.{name}", None)
        return importlib.import_module(f"{HERE}.{name}")


class Seam(NamedTuple):
    """An integration's framework, and what switches ours on and says in which places it then is."""

    framework: Framework
    ours: Callable[[], set[ObjectPath]]
    one_by_one: bool = False  # names that are as they were are taken without the others


def framework_in(name: str, package: str) -> Framework:
    with installed(package, {}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return next(value for value in vars(imported(name)).values() if isinstance(value, Framework))


def replaced(framework: Framework, switch_on: Callable[[], Any]) -> Seam:
    """Ours stand in the framework's modules, a name at a time."""

    def ours() -> set[ObjectPath]:
        assert not REPLACEMENTS.keys() & framework.parameters_by_path.keys()
        before = {place: object_at(place) for place in framework.parameters_by_path}
        switch_on()
        found = {place for place, theirs in before.items() if object_at(place) is not theirs}
        assert found == REPLACEMENTS.keys() & framework.parameters_by_path.keys()
        framework.restore()
        assert all(object_at(place) is theirs for place, theirs in before.items())
        return found

    return Seam(framework, ours, one_by_one=True)


def of_class(name: str, package: str, cls: str, make: Callable[[Any], Any]) -> Seam:
    """Ours is a class that is made where all names are there."""
    framework = framework_in(name, package)

    def ours() -> set[ObjectPath]:
        module = imported(name)
        found = getattr(module, cls)
        if module.IS_SUPPORTED:
            make(found)
            return set(framework.parameters_by_path)
        with pytest.raises(RuntimeError, match=rf"{cls} is not there for .*own loss, or install one of the versions"):
            make(found)
        return set()

    return Seam(framework, ours)


def of_axolotl() -> set[ObjectPath]:
    """Axolotl's class is the plugin's base, and its methods are what Axolotl calls."""
    module = imported("axolotl")
    plugin = module.ChunkedHeadPlugin()
    base = object_at((module.BASE, "BasePlugin")) or type(None)
    ours = {"get_input_args", "post_model_load"} & vars(type(plugin)).keys()
    assert len(ours) in (0, 2) and (not ours or isinstance(plugin, base))
    return set(module.AXOLOTL.parameters_by_path) if ours else set()


def of_megatron() -> set[ObjectPath]:
    """The hook on a model, where Megatron's own class takes it."""
    model = SimpleNamespace(forward=lambda labels=None, output_processor=None: output_processor, hooks=[])
    model.register_forward_pre_hook = lambda hook, with_kwargs: model.hooks.append(hook)
    assert megatron.attach_head(model) is model
    return set(megatron.MEGATRON.parameters_by_path) if model.hooks else set()


def of_swift() -> set[ObjectPath]:
    """ms-swift makes a callback by its name, for a trainer with a model; ours is one that patches it."""
    ms_swift.register()
    made = (object_at(next(iter(ms_swift.SWIFT.parameters_by_path))) or {}).get("chunked_head", lambda *given: None)
    callback, args = made(None, SimpleNamespace(model=None)), SimpleNamespace(use_liger_kernel=True)
    if callback is None or type(callback) is transformers.TrainerCallback:
        return set()
    with pytest.raises(ValueError, match="use_liger_kernel brings Liger's head"):
        callback.on_init_end(args, None, None)
    return set(ms_swift.SWIFT.parameters_by_path)


LLAMAFACTORY = llamafactory.LLAMAFACTORY
SEAMS = [
    replaced(trl.TRL, trl.patch_trl),
    replaced(trl.SFT, lambda: trl.SFT.replace(trl.with_sft_step)),
    replaced(verl.VERL, verl.patch_verl),
    replaced(LLAMAFACTORY, lambda: LLAMAFACTORY.replace(lambda place, theirs: object())),
    of_class("torchtitan", "torchtitan", "ChunkedHeadLoss", lambda cls: cls.Config()),
    of_class("nemo_automodel", "nemo-automodel", "ChunkedHeadCrossEntropy", lambda cls: cls()),
    Seam(framework_in("axolotl", "axolotl"), of_axolotl),
    Seam(megatron.MEGATRON, of_megatron),
    Seam(ms_swift.SWIFT, of_swift),
]


def switched_on(seam: Seam, modules: Mapping[str, ModuleType]) -> tuple[set[ObjectPath], list[str]]:
    """The places that ours is in, and what was said of it."""
    with installed(seam.framework.package, modules), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        return seam.ours(), [str(one.message) for one in said]


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.framework.package)
def test_another_version_of_the_same_names(seam: Seam) -> None:
    assert switched_on(seam, stand_ins(seam.framework.parameters_by_path)) == (
        set(seam.framework.parameters_by_path),
        [],
    )


CHANGES = [
    pytest.param(seam, place, how, id=f"{seam.framework.package}-{'.'.join(place)}-{how}")
    for seam in SEAMS
    for place, wanted in seam.framework.parameters_by_path.items()
    for how in ("renamed", "moved", "other parameters")[: 2 if wanted == "*" else 3]
]


@pytest.mark.parametrize(("seam", "place", "how"), CHANGES)
def test_a_name_that_changed(seam: Seam, place: ObjectPath, how: str) -> None:
    uses, gone, (path, name) = dict(seam.framework.parameters_by_path), {place}, place
    if how == "other parameters":
        uses[place] = f"another, {uses[place]}"
    modules = stand_ins(uses)
    if how == "renamed":
        *outer, last = name.split(".")
        delattr(functools.reduce(getattr, outer, modules[path]), last)
    if how == "moved":
        modules[f"{path}_of_another_name"] = modules.pop(path)
        gone = {other for other in uses if other[0] == path}
    found, said = switched_on(seam, modules)
    assert found == (set(uses) - gone if seam.one_by_one else set())
    assert len(said) == 1 and said[0].startswith(f"{seam.framework.package} {VERSION}: ")
    assert ".".join(place) in said[0] and (" is missing" in said[0] or "instead of (" in said[0])
    assert "Its own loss stays on there, without chunked_head, which was tested with " in said[0]


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
