"""A user's object becomes an instance of a subclass of its class that is made on the fly."""

_OF_EVERY_CLASS = ("__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__annotations__")


def subclass(plain: type, *mixins: type, bases: tuple[type, ...] = (), **attributes) -> type:
    """A class below `plain` that looks like it from outside, and has what the mixins define and these attributes.

    What the mixins define is copied, so that the new class owns it: libraries look for methods there, and change them there.
    Its methods call those of the wrapped class by `self._plain`. bases: more classes above it, after `plain`.
    """
    methods = {name: value for mixin in mixins for name, value in vars(mixin).items() if name not in _OF_EVERY_CLASS}
    own = {"__module__": plain.__module__, "__doc__": plain.__doc__, "_plain": plain, **methods, **attributes}
    return type(plain)(plain.__name__, (plain, *bases), own)


def instance_like(cls: type, instance):
    """An object of the class that starts with the attributes of `instance`, and shares their values."""
    made = cls.__new__(cls)
    made.__dict__.update(vars(instance))
    return made
