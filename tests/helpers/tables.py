"""The library's caches: a search for all of them, and a function that empties them."""

import importlib
import sys
from collections import deque
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from chunked_head.core.memory import Cache

TABLES = (dict, list, set, deque, WeakKeyDictionary, WeakValueDictionary, WeakSet)
ROOT = Path(__file__).resolve().parents[2]
# caches and results of functions, each where it is made, without the package's name
EMPTIED = (
    "arithmetic.evaluate.KERNELS", "call.spec.SPECS", "compile.operators.autocast_keys", "core.divergences.TRACED",
    "core.private.nan_filter", "core.private.private", "core.stats.LAYOUTS", "functions.cross_entropy.LOSS_CACHE",
    "core.statistics.statistics_at", "core.stats.vectors_at",
    "core.gpus.SPLITS", "core.gpus.gpu_of", "core.gpus.multiprocessors_of",
    "kernels.common.operands.DESCRIPTORS", "kernels.common.sums.KERNELS", "losses.base.FACTORY_RESULTS",
    "losses.sums.SUM_FUNCTIONS", "losses.user_checks.CHECK_RESULTS", "parallel.agreement.HISTORIES",
    "plan.planner.PLANS",
)  # fmt: skip
# what is no result of an earlier call
STAYING = {
    "call.planning.NOTES": "a note is given once in a process",
    "metrics.values.GROUP_NUMBERS": "a group keeps its number as long as it lives",
    "stores.quantised.watch_optimizers": "it has an effect, once: optimizers' steps outdate copies",
    "stores.quantised.CURRENT": "copies of weights, which are alive as long as the caller holds them",
}


def modules() -> list[Any]:
    """All modules of the library but its integrations, which take a minute to import."""
    for folder in ("chunked_head", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if not {"integrations", "__init__", "__main__"}.intersection(parts):
                importlib.import_module(".".join(parts if folder == "chunked_head" else ("chunked_head", *parts)))
    return [module for name, module in sys.modules.items() if name.partition(".")[0] == "chunked_head"]


def tables(holders: list[Any]) -> dict[str, Any]:
    """Tables, caches and cached functions by name: those of modules, and of classes and objects in modules."""
    found: dict[str, Any] = {}
    for module in holders:
        for name, value in list(vars(module).items()):
            kind = value if isinstance(value, type) else type(value)
            ours = kind.__module__.partition(".")[0] == "chunked_head" and not isinstance(value, Cache)
            inside = dict(vars(value)) if ours and hasattr(value, "__dict__") else {}
            for part, each in ({name: value} | {f"{name}.{key}": each for key, each in inside.items()}).items():
                table = isinstance(each, (*TABLES, Cache)) or hasattr(each, "cache_info")
                if table and not part.rpartition(".")[2].startswith("__"):
                    found[f"{module.__name__}.{part}"] = each
    return found


def object_at(name: str) -> Any:
    module, _, part = name.rpartition(".")
    return getattr(importlib.import_module(f"chunked_head.{module}"), part)


def launchers() -> list[Cache]:
    """The caches of compiled code, one for each kernel of a module. Kernels of the arithmetic are in another cache."""
    return [each for name, each in tables(modules()).items() if name.endswith(".compiled_by_key")]


class Emptying:
    """A function that empties all caches in which a call may find results of another call."""

    def __init__(self, compiled: bool = False):
        """``compiled``: empties the launchers' compiled kernels too, which takes time on a GPU."""
        self.everything = [object_at(name) for name in EMPTIED] + (launchers() if compiled else [])

    def __call__(self) -> None:
        for each in self.everything:
            (each.cache_clear if hasattr(each, "cache_clear") else each.clear)()
