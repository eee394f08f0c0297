"""The import path that the callbacks for model.fit had at first. It stays; horovod_tensorflow has them."""

from .horovod_tensorflow import *  # noqa: F403
from .horovod_tensorflow import __all__ as __all__
