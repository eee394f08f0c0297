"""Federated training on Fashion-MNIST under Flower: a superlink and supernodes on this machine, with TLS over loopback.

    python examples/flower_fashion_mnist.py --data DIR

It is the training of fedavg_fashion_mnist.py --method fedavg. The app is in flower_app; this script starts Flower's processes,
and counts the bytes of the connections between the superlink and its supernodes.
"""

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path

from _flower import HERE, Federation

from grace_ext import ConfigError, compressor

APP = HERE / "flower_app"
PLAIN = "flower"
NOT_KEPT = ("data", "out", "limit", "folder")  # options that are not in the result


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder of the data set (see mpirun/fetch_fashion_mnist.py)")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument(
        "--compression",
        metavar="SPEC",
        default="topk:0.1/rice/lloyd:0.05",
        help="compression in both directions, or 'flower': Flower's own FedAvg, float32 (default: %(default)s)",
    )
    parser.add_argument("--memory", choices=("residual", "ef21", "none"), default="residual", help="memory of the clients")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--local-epochs", type=int, default=1, help="epochs per round")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate of Adam on the clients")
    parser.add_argument(
        "--alpha", type=float, default=0.5, help="parameter of the split: the smaller, the more clients differ"
    )
    parser.add_argument("--model", choices=("mlp", "small"), default="mlp")
    parser.add_argument("--train-samples", type=int, default=60000, metavar="N", help="use only this many samples in all")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="how long a round waits for updates")
    parser.add_argument("--limit", type=float, default=4 * 3600, metavar="SECONDS", help="how long the whole run may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="keep there what the processes print (default: a temporary folder)")
    parser.add_argument("--out", metavar="FILE", help="write a JSON object: options, accuracy, bytes")
    args = parser.parse_args()
    try:
        if args.compression != PLAIN:
            compressor(args.compression)
    except ConfigError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and so it ends what it has started
    with tempfile.TemporaryDirectory() as temporary, Federation(Path(args.folder or temporary)) as federation:
        for number in range(args.clients):
            federation.add(f"client{number}", partition_id=number, num_partitions=args.clients)
        written = federation.folder / "out.json"
        options = {key: value for key, value in vars(args).items() if key not in NOT_KEPT}
        config = options | {"data": str(Path(args.data).resolve()), "out": str(written)}
        federation.start(APP, config)
        federation.finish(args.limit)
        if not written.exists():  # `flwr run` ends well even if the app does not
            sys.exit(f"the app has failed:\n{federation.output('run')[-4000:]}")
        result = json.loads(written.read_text())
        result |= {"options": options, "socket_bytes": {"down": federation.relay.down, "up": federation.relay.up}}
    accuracy = result["accuracy"][-1][1]
    print(f"accuracy {accuracy:.2%}; bytes on the sockets: {result['socket_bytes']}")
    if args.out:
        Path(args.out).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
