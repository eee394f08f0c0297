"""Triton's interpreter without what it does anew in each call of each function."""

from triton import language
from triton.runtime import interpreter


def patch_once() -> None:
    """Let the interpreter patch triton.language once in this process, in which nothing else may use Triton then.

    By itself it looks through all names of the package in each launch and in each call of a function of Triton, and sets what
    is set already, which takes a third of the time.
    """
    patch, patched = interpreter._patch_lang, {}

    def patch_lang(function):
        packages = frozenset(
            p.__name__ for p in (language, language.core) if any(p is value for value in function.__globals__.values())
        )
        if packages not in patched:
            patched[packages] = patch(function)
        return type(patched[packages])()  # a scope that restores nothing when the launch is over

    interpreter._patch_lang = patch_lang
