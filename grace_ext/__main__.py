"""`python -m grace_ext`; the commands are in cli.py."""

import sys

from .cli import main

sys.exit(main())
