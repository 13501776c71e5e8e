"""``Framework``: a training framework's tested versions, and the framework's objects that this library replaces.

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

ObjectPath = tuple[str, str]  # a framework's module, and a name in it; "Class.method" for a method
REPLACEMENTS: dict[ObjectPath, tuple[Any, Any]] = {}  # the framework's object, and our object in its place


@dataclass(frozen=True)
class Framework:
    """A training framework. An untested version is supported if its objects have the parameters of a tested version.

    Attributes:
        package: name of the framework on the package index.
        tested_versions: versions that the tests ran with.
        parameters_by_path: for each object that this library replaces or builds on, the names of the object's
            parameters in order, such as ``"a, b"``, without ``self`` and ``ctx``. ``"a, *, c"``: a comes first, and c
            among the others. ``"*"``: any parameters. ``"a, b | c"``: either ``"a, b"`` or ``"c"``.
        module: name of the framework's module. ``__version__`` of the imported module, which may be a checkout, comes
            before the version of the installed package.
        importing_modules: further modules that import the objects by their names.
    """

    package: str
    tested_versions: tuple[str, ...]
    parameters_by_path: Mapping[ObjectPath, str]
    module: str = ""
    importing_modules: tuple[str, ...] = ()

    def version(self) -> str:
        """The installed version. ImportError if the framework is not installed."""
        version = getattr(sys.modules.get(self.module), "__version__", None)
        try:
            return version or metadata.version(self.package)
        except metadata.PackageNotFoundError:
            command = f"pip install '{self.package}=={self.tested_versions[-1]}'"
            raise ImportError(f"{self.package} is not installed: {command}") from None

    def tested_objects(self) -> dict[ObjectPath, Any]:
        """The framework's objects whose parameters are the tested ones, by path. A warning names all other objects, and
        says how their parameters differ."""
        version, objects, differences = self.version(), dict[ObjectPath, Any](), []
        for object_path, parameter_names in self.parameters_by_path.items():
            original = REPLACEMENTS[object_path][0] if object_path in REPLACEMENTS else object_at(object_path)
            difference = "is missing" if original is None else parameters_difference(original, parameter_names)
            if difference:
                differences.append(f"{'.'.join(object_path)} {difference}")
            else:
                objects[object_path] = original
        if differences:
            warnings.warn(
                f"{self.package} {version}: {'; '.join(differences)}. Its own loss stays on there, without "
                f"chunked_head, which was tested with {self.package} {', '.join(self.tested_versions)}",
                stacklevel=4,
            )
        return objects

    def has_tested_parameters(self) -> bool:
        """True if all objects have the tested parameters. Otherwise a warning names the objects that differ."""
        return len(self.tested_objects()) == len(self.parameters_by_path)

    def require(self, has_tested_parameters: bool, name: str) -> None:
        """RuntimeError unless ``has_tested_parameters``: our class ``name`` can only subclass a class with the tested
        parameters."""
        if not has_tested_parameters:
            raise RuntimeError(
                f"{name} is not there for {self.package} {self.version()}, as the warning at its import says; leave it "
                f"out for {self.package}'s own loss, or install one of the versions {', '.join(self.tested_versions)}"
            )

    def replace(self, replacement_of: Callable[[ObjectPath, Any], Any]) -> None:
        """Puts ``replacement_of(object_path, object)`` in place of each object with the tested parameters."""
        for object_path, original in self.tested_objects().items():
            REPLACEMENTS[object_path] = original, replacement_of(object_path, original)
            self.set_object(object_path, REPLACEMENTS[object_path][1])

    def restore(self) -> None:
        """Puts the framework's objects back in place of ours. RuntimeError if other code has replaced our objects."""
        for object_path in REPLACEMENTS.keys() & self.parameters_by_path.keys():
            (original, replacement), current_object = REPLACEMENTS[object_path], object_at(object_path)
            if current_object is not replacement:
                name = ".".join(object_path)
                raise RuntimeError(f"{name} is {current_object!r}, not what chunked_head put there; undo that first")
            self.set_object(object_path, original)
            del REPLACEMENTS[object_path]

    def set_object(self, object_path: ObjectPath, value: Any) -> None:
        """Sets the name at ``object_path`` to ``value``, also in all imported modules of ``importing_modules``."""
        *owner_names, name = object_path[1].split(".")
        for module_name in (object_path[0], *self.importing_modules):
            owner = sys.modules.get(module_name)  # the module, then the class inside of it that has the object
            for owner_name in owner_names:
                owner = getattr(owner, owner_name, None)
            if hasattr(owner, name):
                setattr(owner, name, value)


def object_at(object_path: ObjectPath) -> Any:
    """The object at a path; None if the module or the name is missing."""
    try:
        value: Any = importlib.import_module(object_path[0])
    except ImportError:
        return None
    for name in object_path[1].split("."):
        value = getattr(value, name, None)
    return value


def parameters_difference(original: Any, tested_names: str) -> str:
    """Text that says how the parameters of ``original`` differ from ``tested_names``; "" if they do not differ.

    ``tested_names``: a value of ``Framework.parameters_by_path``."""
    if tested_names == "*":
        return ""
    owner = getattr(original, "__self__", original)  # the autograd Function of a bound ``apply``
    try:
        parameters = inspect.signature(getattr(owner, "forward", original)).parameters
    except (TypeError, ValueError):
        return f"is {original!r}"
    parameter_names = [name for name in parameters if name not in ("self", "ctx")]
    for alternative in tested_names.split(" | "):
        # a list of names before the first "*", and one behind each "*"
        leading_names, *further_names = (text.replace(",", " ").split() for text in alternative.split("*"))
        num_leading = len(leading_names) if further_names else None
        if parameter_names[:num_leading] == leading_names and set(parameter_names) >= set(*further_names):
            return ""
    return f"takes ({', '.join(parameter_names)}) instead of ({tested_names})"


def call_through(module: nn.Module, compute: Callable[..., Any], *args: Any) -> Any:
    """Calls ``module(*args)`` with ``compute(*args)`` in place of the module's forward, and returns the result.

    The module's hooks run before and after ``compute``. They gather a sharded weight before its use and free the weight
    afterwards (FSDP, Megatron's overlapped parameter gather), in backward too.
    """
    instance_forward = vars(module).get("forward")
    module.forward = compute
    try:
        return module(*args)
    finally:
        del module.forward
        if instance_forward is not None:
            module.forward = instance_forward


def check_named(options: Mapping[str, Any], known_names: Collection[str], note: str = "") -> None:
    """Checks options by name. TypeError for a name that is not among ``known_names``; the error's text contains
    ``note``. TypeError or ValueError for a wrong value."""
    for name, value in options.items():
        if name not in known_names:
            listing = ", ".join(sorted(known_names))
            raise TypeError(f"unknown option {name!r}; options are {listing}{note}{nearest(name, set(known_names))}")
        CHECKS[name](value)
