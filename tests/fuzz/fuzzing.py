class Found(AssertionError):
    """What a fuzz run found: its message is a script or a command that shows it again."""
