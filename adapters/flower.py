"""Federated training under Flower: containers in the messages of its superlink and supernodes, in both directions.

    # server_app.py: in the place of FedAvg(...)
    strategy = CompressedFedAvg("topk:0.1/rice/lloyd:0.05")

    # client_app.py: in the place of ClientApp()
    app = ClientApp(mods=[CompressionMod()])

Everything else of a Flower app stays as it is.
"""

from ._common.versions import check_version

check_version("flwr", "flower")

from ._flower.mod import CompressionMod  # noqa: E402
from ._flower.strategy import CompressedFedAvg  # noqa: E402

__all__ = ["CompressedFedAvg", "CompressionMod"]
