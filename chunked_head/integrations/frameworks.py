"""``Framework``: a training framework's tested versions, and the names in it that this library replaces.

``call_through`` runs a function in place of a module's forward, between the module's hooks.
"""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from torch import nn

from ..call.options import CHECKS
from ..core.checks import nearest

Place = tuple[str, str]  # a framework's module, and a name in it; for a method, the class's and its name with a dot
REPLACED: dict[Place, tuple[Any, Any]] = {}  # by place: the framework's object, and ours that has replaced it


@dataclass(frozen=True)
class Framework:
    """A training framework. An untested version is supported if the names in ``uses`` have the same parameters.

    Attributes:
        package: its name on the package index.
        tested: versions that the tests ran with.
        uses: the names in it that this library replaces or builds on. Each has the names of its parameters, in order
            and without ``self`` and ``ctx``: ``"a, b"``. ``"a, *, c"`` begins with a and has c; ``"*"`` may be
            anything; ``"a, b | c"`` is either of two.
        module: its module, whose ``__version__`` counts where that has been imported (a checkout).
        bound: modules that have the same names too, where they are imported already.
    """

    package: str
    tested: tuple[str, ...]
    uses: Mapping[Place, str]
    module: str = ""
    bound: tuple[str, ...] = ()

    def version(self) -> str:
        """The installed version; ImportError without one."""
        version = getattr(sys.modules.get(self.module), "__version__", None)
        try:
            return version or metadata.version(self.package)
        except metadata.PackageNotFoundError:
            command = f"pip install '{self.package}=={self.tested[-1]}'"
            raise ImportError(f"{self.package} is not installed: {command}") from None

    def tested_objects(self) -> dict[Place, Any]:
        """The framework's objects in those places whose parameters are as tested. Warns of the other places, and says
        how they differ."""
        version, objects, differences = self.version(), dict[Place, Any](), []
        for place, parameters in self.uses.items():
            theirs = REPLACED[place][0] if place in REPLACED else looked_up(place)
            difference = "is missing" if theirs is None else differs(theirs, parameters)
            if difference:
                differences.append(f"{'.'.join(place)} {difference}")
            else:
                objects[place] = theirs
        if differences:
            warnings.warn(
                f"{self.package} {version}: {'; '.join(differences)}. Its own loss stays on there, without "
                f"chunked_head, which was tested with {self.package} {', '.join(self.tested)}",
                stacklevel=4,
            )
        return objects

    def fits(self) -> bool:
        """True where all names are as tested; else a warning says which are not."""
        return len(self.tested_objects()) == len(self.uses)

    def require(self, fits: bool, name: str) -> None:
        """Raises RuntimeError unless ``fits``: class ``name`` cannot subclass the framework's class, whose names are
        not as tested."""
        if not fits:
            raise RuntimeError(
                f"{name} is not there for {self.package} {self.version()}, as the warning at its import says; leave it "
                f"out for {self.package}'s own loss, or install one of the versions {', '.join(self.tested)}"
            )

    def replace(self, ours: Callable[[Place, Any], Any]) -> None:
        """Replaces the object ``theirs`` of each place that is as tested by ``ours(place, theirs)``."""
        for place, theirs in self.tested_objects().items():
            REPLACED[place] = theirs, ours(place, theirs)
            self.assign(place, REPLACED[place][1])

    def give_back(self) -> None:
        """Puts the framework's functions back; RuntimeError where somebody has replaced ours since."""
        for place in REPLACED.keys() & self.uses.keys():
            (theirs, ours), current = REPLACED[place], looked_up(place)
            if current is not ours:
                name = ".".join(place)
                raise RuntimeError(f"{name} is {current!r}, not what chunked_head put there; undo that first")
            self.assign(place, theirs)
            del REPLACED[place]

    def assign(self, place: Place, value: Any) -> None:
        *outer, name = place[1].split(".")
        for path in (place[0], *self.bound):
            owner = sys.modules.get(path)
            for outer_name in outer:
                owner = getattr(owner, outer_name, None)
            if hasattr(owner, name):
                setattr(owner, name, value)


def looked_up(place: Place) -> Any:
    """The object in a place of a framework; None where its module or name is missing."""
    try:
        value: Any = importlib.import_module(place[0])
    except ImportError:
        return None
    for name in place[1].split("."):
        value = getattr(value, name, None)
    return value


def differs(theirs: Any, tested: str) -> str:
    """The difference of a callable's parameters from those in ``Framework.uses``; empty where there is none."""
    if tested == "*":
        return ""
    owner = getattr(theirs, "__self__", theirs)  # an autograd function, of its apply
    try:
        parameters = inspect.signature(getattr(owner, "forward", theirs)).parameters
    except (TypeError, ValueError):
        return f"is {theirs!r}"
    names = [name for name in parameters if name not in ("self", "ctx")]
    for alternative in tested.split(" | "):
        first, *starred = ([*filter(None, half.replace(",", " ").split())] for half in alternative.split("*"))
        if names[: len(first) if starred else None] == first and set(names) >= set(*starred):
            return ""
    return f"takes ({', '.join(names)}) instead of ({tested})"


def call_through(module: nn.Module, compute: Callable[..., Any], *args: Any) -> Any:
    """Calls ``module(*args)`` with ``compute(*args)`` in place of its forward, and returns the result.

    The module's hooks run before and after it: they gather a sharded weight before its use and free it afterwards
    (FSDP, Megatron's overlapped parameter gather), in backward too.
    """
    instance_forward = vars(module).get("forward")
    module.forward = compute
    try:
        return module(*args)
    finally:
        del module.forward
        if instance_forward is not None:
            module.forward = instance_forward


def check_named(options: Mapping[str, Any], names: Collection[str], note: str = "") -> None:
    """Checks options by name. TypeError for a name that is not among ``names``; TypeError or ValueError for a wrong
    value. ``note``: the end of the former's text."""
    for name, value in options.items():
        if name not in names:
            listing = ", ".join(sorted(names))
            raise TypeError(f"unknown option {name!r}; options are {listing}{note}{nearest(name, set(names))}")
        CHECKS[name](value)
