"""The callbacks for model.fit by themselves; horovod_tensorflow has them, too."""

from ._tensorflow.callbacks import *  # noqa: F403
from ._tensorflow.callbacks import __all__ as __all__
