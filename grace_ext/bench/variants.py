"""The stages that are measured, at which settings, and how figures name them."""

import itertools

from .. import registry


def variants(kind: str, sweep: bool = True) -> list[registry.Stage]:
    """List the stages of a kind that are measured.

    Args:
        kind: One of registry.KINDS.
        sweep: Whether to add the settings of each class's `sweep`, in all combinations.

    Returns:
        Each stage with its defaults, and at the settings of its sweep.
    """
    found = []
    for name in registry.names(kind):
        default, options = registry.build(kind, name), registry.lookup(kind, name).sweep if sweep else {}
        swept = [
            registry.build(kind, name, dict(zip(options, values, strict=True)))
            for values in itertools.product(*options.values())
        ]
        found += swept if default in swept else [default, *swept]
    return found


def label(stage: registry.Stage) -> str:
    """Name a stage as a spec does, but always with its first option.

    Args:
        stage: The stage.

    Returns:
        The name.
    """
    text = stage.name
    for place, (key, parameter) in enumerate(registry.parameters(type(stage)).items()):
        value = getattr(stage, key)
        if place == 0:
            text += f":{value}"
        elif value != parameter.default:
            text += f":{key}={value}"
    return text


def curve(stage: registry.Stage) -> str:
    """Name the curve that a stage is a point of: the settings of its sweep, without the first option.

    Args:
        stage: The stage.

    Returns:
        The name.
    """
    others = list(type(stage).sweep)[1:]
    return stage.name + "".join(
        f":{key}={value}"
        for key, value in stage.options().items()
        if key in others and value != registry.parameters(type(stage))[key].default
    )
