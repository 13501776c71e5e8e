"""For the API reference: public functions as a user calls them. They return what they compute, not the record that
stands for it in the code, and take the keywords of ``**options`` one by one, each with its default and a text."""

import importlib
import inspect
import re
from typing import Any

import griffe

# where else a parameter is described, in this order; before these, by linear_NAME for logits_NAME
PLACES = {
    "LogitsOptions": ("chunked_head.logits_loss", "chunked_head.linear_cross_entropy"),
    "HeadOptions": ("chunked_head.linear_cross_entropy", "chunked_head.Execution"),
}


class PublicApi(griffe.Extension):
    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """``Call[Tensor]`` becomes ``Tensor``, as ``chunked_head.compile.operation`` does at run time."""
        if is_operation(func):
            first = str(func.returns).split(" | Streams[")[0]
            func.returns = first.removeprefix("Call[").removesuffix("]") if first.startswith("Call[") else first

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """``**options`` becomes its keywords; those without a text of their own get one, and "The rest" goes."""
        if not is_operation(func) or func.docstring is None:
            return
        kind = str(func.parameters["options"].annotation).removeprefix("Unpack[").removesuffix("]")
        annotations = attributes(func.package, kind)
        signature = inspect.signature(getattr(importlib.import_module(func.module.path), func.name))
        del func.parameters["options"]
        section = section_of(func)
        texts = descriptions(func)
        section.value.clear()
        for name, parameter in signature.parameters.items():
            if name not in func.parameters:
                default, keyword = repr(parameter.default), griffe.ParameterKind.keyword_only
                func.parameters.add(griffe.Parameter(name, annotation=annotations[name], kind=keyword, default=default))
            public, text = func.parameters[name], texts.get(name) or text_elsewhere(func, name, kind)
            typed = {"annotation": public.annotation, "value": public.default}
            section.value.append(griffe.DocstringParameter(name, description=text, **typed))


def is_operation(func: griffe.Function) -> bool:
    return any(str(decorator.value) == "operation" for decorator in func.decorators)


def attributes(package: griffe.Module, kind: str) -> dict[str, Any]:
    """Annotations of a TypedDict's keys, those of its bases first."""
    cls = package["call.options"][kind]
    bases = [attributes(package, str(base)) for base in cls.bases if str(base) != "TypedDict"]
    own = {name: attribute.annotation for name, attribute in cls.attributes.items()}
    return {name: annotation for base in bases for name, annotation in base.items()} | own


def section_of(documented: griffe.Function | griffe.Class) -> Any:
    """The section of parameters, or of attributes, of what is documented; a new one where there is none."""
    kinds = griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes
    assert documented.docstring is not None
    sections = documented.docstring.parsed
    if not any(section.kind in kinds for section in sections):
        sections.append(griffe.DocstringSectionParameters([]))
    return next(section for section in sections if section.kind in kinds)


def descriptions(documented: griffe.Function | griffe.Class) -> dict[str, str]:
    """Texts by name; several names, such as "entropy, lse", share theirs."""
    items = section_of(documented).value
    return {name: item.description for item in items for name in re.findall(r"\w+", item.name)}


def text_elsewhere(func: griffe.Function, name: str, kind: str) -> str:
    """The first sentence of a parameter's description elsewhere, and where that is."""
    for path in (f"chunked_head.{func.name.replace('logits_', 'linear_')}", *PLACES[kind]):
        place = func.package[path.removeprefix("chunked_head.")].final_target
        text = descriptions(place).get(name) if place is not func else None
        if text:
            sentence = re.split(r"(?<=[.;:])\s", text.replace("\n", " "), maxsplit=1)[0].rstrip(".;:")
            return f"{sentence}. More: [`{path.rpartition('.')[2]}`][{path}]."
    raise ValueError(f"{func.path}: {name} is described nowhere")
