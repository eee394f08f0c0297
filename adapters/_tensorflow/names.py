"""Names of variables: unique on a rank, and the same on all ranks."""

import re


def name_of(variable) -> str:
    """A variable's name: its path in Keras 3, the name without ":0" elsewhere, "source" for tensors."""
    return getattr(variable, "path", None) or getattr(variable, "name", "source").removesuffix(":0")


def unique(names: list[str]) -> list[str]:
    """Names that are there twice get a number."""
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        unique.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return unique


def common_names(names: list[str]) -> list[str]:
    """The same names on ranks that made other layers before: Keras calls a layer without a name dense_2 if the process has
    made two of the class before. Here such numbers count what is in the list: dense, dense_1, and so on."""
    numbers: dict[str, list[str]] = {}

    def counted(part: str) -> str:
        base, number = re.fullmatch(r"(.*?)(_\d+)?", part, re.DOTALL).groups(default="")
        known = numbers.setdefault(base, [])
        if number not in known:
            known.append(number)
        place = known.index(number)
        return f"{base}_{place}" if place else base

    return ["/".join(map(counted, name.split("/"))) for name in names]
