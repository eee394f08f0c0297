"""The catalogue of all registered stages, compiled from the classes themselves and the docstrings of their modules."""

import re
import sys

from . import registry

_YEAR = re.compile(r"\b(19|20)\d\d\b")
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
        container id or None), "options" (option -> default), "traits" (list of texts), "summary" (the first paragraph of
        the module's docstring), "notes" (the first paragraph of the class's docstring) and "papers" (those other paragraphs
        of the module's docstring that mention a year).
    """
    found = []
    for kind in registry.KINDS:
        for name in registry.names(kind):
            cls = registry.lookup(kind, name)
            summary, *others = _paragraphs(sys.modules[cls.__module__].__doc__) or [""]
            found.append(
                {
                    "kind": kind,
                    "name": name,
                    "id": cls.id,
                    "options": {key: parameter.default for key, parameter in registry.parameters(cls).items()},
                    "traits": _traits(cls),
                    "summary": summary,
                    "notes": (_paragraphs(cls.__doc__) or [""])[0],
                    "papers": [text for text in others if _YEAR.search(text)],
                }
            )
    return found


def _traits(cls: type) -> list[str]:
    texts = []
    for attribute, (if_true, if_false) in _TRAITS.items():
        if hasattr(cls, attribute):
            value = getattr(cls, attribute)
            texts.append(if_true.format(value) if value else if_false)
    return [text for text in texts if text]


def _paragraphs(docstring: str | None) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in (docstring or "").split("\n\n") if paragraph.strip()]
