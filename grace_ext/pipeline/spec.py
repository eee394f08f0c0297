"""Spec strings: "topk:0.01/rice/qsgd:7" <-> stages; the same as a dict for JSON and YAML.

Grammar: `[transform/]sparsifier[/index][/value]`, or a low-rank method alone ("powersgd:4"); a stage is `name`,
`name:value` for its first option, or `name:key=value:key=value`. If the index codec is omitted it is `auto`; if the value
codec is omitted it is `raw`. A preset's name stands for its spec.
"""

from typing import Any

from .. import registry
from ..errors import ConfigError
from ..registry import Stage
from . import presets

GRAMMAR = "[transform/]sparsifier[/index][/value], for example topk:0.01/rice/qsgd:7"
DEFAULTS = {"index": "auto", "value": "raw"}


def parse(spec: str | dict) -> dict[str, Stage]:
    """Parse a spec.

    Args:
        spec: A spec string, the name of a preset, or the dict form of a spec.

    Returns:
        The stages by kind.

    Raises:
        ConfigError: A stage or option is unknown, or the spec does not follow the grammar.
    """
    if isinstance(spec, str):
        return _parse_string(spec)
    if isinstance(spec, dict):
        return _parse_dict(spec)
    raise ConfigError(f"a spec is a string or a dict, not {type(spec).__name__}; grammar: {GRAMMAR}")


def parse_stage(kind: str, text: str) -> Stage:
    """Parse one stage of a known kind, for example ("memory", "residual").

    Args:
        kind: The kind of stage, one of registry.KINDS.
        text: The stage as in a spec: its name and options.

    Returns:
        The stage.

    Raises:
        ConfigError: The name or an option is unknown.
    """
    if not isinstance(text, str):
        known = ", ".join(registry.names(kind)) or "none"
        raise ConfigError(f"{kind}: expected a string, got {type(text).__name__}; known: {known}")
    name, *options = text.split(":")
    keys = list(registry.parameters(registry.lookup(kind, name)))
    given = {}
    for position, option in enumerate(options):
        key, equals, value = option.partition("=")
        if not equals:
            if position > 0 or not keys:
                raise ConfigError(
                    f"{kind} {text!r}: only the first option may stand without a name; options: {', '.join(keys) or 'none'}"
                )
            key, value = keys[0], key
        if key in given:
            raise ConfigError(f"{kind} {text!r}: option {key!r} is given twice")
        given[key] = value
    return registry.build(kind, name, given)


def _parse_string(spec: str) -> dict[str, Stage]:
    parts = (presets.expand(spec) or spec).strip().split("/")
    stages = {}
    if parts[0].split(":")[0] in registry.names("lowrank"):
        if len(parts) > 1:
            raise ConfigError(f"spec {spec!r}: {parts[0]!r} stands alone, its factors are summed without codecs")
        return {"lowrank": parse_stage("lowrank", parts[0])}
    if parts[0].split(":")[0] in registry.names("transform"):
        stages["transform"] = parse_stage("transform", parts.pop(0))
    if not parts or not parts[0]:
        raise ConfigError(f"spec {spec!r} has no sparsifier; known: {', '.join(registry.names('sparsifier'))}")
    name = parts[0].split(":")[0]
    if name not in registry.names("sparsifier"):
        raise ConfigError(
            f"spec {spec!r}: unknown sparsifier {name!r}; known: {', '.join(registry.names('sparsifier'))}; "
            f"low-rank methods: {', '.join(registry.names('lowrank'))}"
        )
    stages["sparsifier"] = parse_stage("sparsifier", parts.pop(0))
    if len(parts) == 1:
        name = parts[0].split(":")[0]
        if name not in registry.names("index") + registry.names("value"):
            raise ConfigError(
                f"spec {spec!r}: unknown codec {name!r}; index codecs: {', '.join(registry.names('index'))}; "
                f"value codecs: {', '.join(registry.names('value'))}"
            )
        if name not in registry.names("index"):
            parts.insert(0, DEFAULTS["index"])  # topk:0.01/qsgd: the index codec is the omitted one
    if len(parts) > 2:
        raise ConfigError(f"spec {spec!r} has {len(parts) - 2} stages too many; grammar: {GRAMMAR}")
    for kind, part in zip(("index", "value"), parts, strict=False):
        stages[kind] = parse_stage(kind, part)
    return _with_defaults(stages)


def _parse_dict(spec: dict) -> dict[str, Stage]:
    if set(spec) == {"lowrank"}:
        return {"lowrank": _stage("lowrank", spec["lowrank"])}
    allowed = ("transform", "sparsifier", "index", "value")
    unknown = [key for key in spec if key not in allowed]
    if unknown or "sparsifier" not in spec:
        wrong = f"unknown keys {unknown}" if unknown else "no sparsifier"
        raise ConfigError(f"spec dict: {wrong}; keys: {', '.join(allowed)}, or lowrank alone")
    return _with_defaults({kind: _stage(kind, stage) for kind, stage in spec.items()})


def _stage(kind: str, stage: str | dict) -> Stage:
    if isinstance(stage, dict):
        options = {key: value for key, value in stage.items() if key != "name"}
        return registry.build(kind, stage.get("name"), options)  # type: ignore[arg-type]
    return parse_stage(kind, stage)


def _with_defaults(stages: dict[str, Any]) -> dict[str, Any]:
    for kind, name in DEFAULTS.items():
        stages.setdefault(kind, registry.build(kind, name))
    return stages


def to_string(stages: dict[str, Stage]) -> str:
    """Write stages as a spec string.

    Args:
        stages: The stages by kind; kinds with None are left out.

    Returns:
        The string that `parse` turns back into equal stages.
    """
    kinds = ("lowrank", "transform", "sparsifier", "index", "value")
    return "/".join(str(stages[kind]) for kind in kinds if stages.get(kind) is not None)


def to_dict(stages: dict[str, Stage]) -> dict:
    """Write stages as a dict that JSON can hold.

    Args:
        stages: The stages by kind; kinds with None are left out.

    Returns:
        kind -> {"name": name, option: value, ...}.
    """
    return {kind: {"name": stage.name, **stage.options()} for kind, stage in stages.items() if stage is not None}
