"""What a federated job of tests/adapters/mpi does, as its ranks and its test know it."""

D, SPEC = 2000, "topk:0.1/rice/qsgd:8"
ROUNDS, TIMEOUT = 100, 5.0
LATE, LEAVING, HOSTILE = 0, 1, 2  # clients
LATE_IN, OVER = 8, "round-is-over"  # the round that ends without the late client, and the file that says so
