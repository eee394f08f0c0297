"""The catalogue of all registered stages, compiled from the classes and their docstrings."""

import inspect
import re

from . import registry

_SECTION = re.compile(r"^(Args|Attributes|Raises|Source):$", re.M)
#: Properties that a class may declare: attribute -> the text for a true value, the text for a false one.
_TRAITS = {
    "lossless": ("lossless", "lossy"),
    "reducible_dtype": ("summable as {}", None),
    "shared": ("the same positions on all ranks", None),
    "stateful": ("keeps state", "keeps no state"),
    "needs_reducible": ("needs summable values", None),
}


def catalogue() -> list[dict]:
    """Describe every registered stage.

    Returns:
        One dict per stage, in the order of registry.KINDS and then by name, with the keys "kind", "name", "id" (the
        container id or None), "options" (option -> default), "traits" (list of texts), and from the class's docstring
        "summary" (its first paragraph), "notes" (its options) and "papers" (a list with its section "Source").
    """
    found = []
    for kind in registry.KINDS:
        for name in registry.names(kind):
            cls = registry.lookup(kind, name)
            found.append(
                {
                    "kind": kind,
                    "name": name,
                    "id": cls.id,
                    "options": {key: parameter.default for key, parameter in registry.parameters(cls).items()},
                    "traits": _traits(cls),
                    **_description(cls),
                }
            )
    return found


def _description(cls: type) -> dict:
    """Return the summary, the notes and the papers of a stage."""
    text, *others = _SECTION.split(inspect.cleandoc(cls.__doc__ or ""))
    sections = dict(zip(others[::2], map(_paragraphs, others[1::2]), strict=True))
    summary = (_paragraphs(text) or [""])[0]
    return {"summary": summary, "notes": " ".join(sections.get("Args", [])), "papers": sections.get("Source", [])}


def _traits(cls: type) -> list[str]:
    texts = []
    for attribute, (if_true, if_false) in _TRAITS.items():
        if hasattr(cls, attribute):
            value = getattr(cls, attribute)
            texts.append(if_true.format(value) if value else if_false)
    return [text for text in texts if text]


def _paragraphs(docstring: str) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in docstring.split("\n\n") if paragraph.strip()]
