"""What is checked inside the ranks of one job: communicators that sum containers on the way."""

import numpy as np
import torch
import torch.distributed as dist
from harness import close, same_on_all_ranks, train
from support.checking import check, check_under_every_launcher
from support.summing_reference import CASES, check_against_one_process, on_two_hosts
from support.tensor_messages import check_tensor_messages

from grace_ext.adapters._torch.ddp_transport import GroupTransport
from grace_ext.transport.equal_lengths import HEAD, capacity_for


@check
def sums_on_the_way_are_what_one_process_gives():
    check_against_one_process(GroupTransport(dist.new_group(), torch.device("cpu")))
    halves = [dist.new_group(list(range(odd, dist.get_world_size(), 2))) for odd in (0, 1)]
    check_against_one_process(GroupTransport(halves[dist.get_rank() % 2], torch.device("cpu")), CASES[:3])


@check
def sums_on_the_way_train_alike_on_all_ranks():
    plain = train(steps=4)[0]
    for communicator in ("sharded", "tree", "hierarchical"):
        with on_two_hosts(dist.get_rank()):
            weights, state = train("topk:0.01/rice/qsgd:7", steps=12, communicator=communicator)
            every = train("dense/deflate", steps=4, memory="none", communicator=communicator)[0]
        same_on_all_ranks(weights)
        assert torch.isfinite(weights).all()
        assert len(state._buckets.bucket_names) == 2, "DDP's buckets were not rebuilt"
        stats = state.compression_stats()
        assert stats["steps"] == 12 and stats["compressed"]["ratio"] > 100, stats
        # With all elements sent, nothing but rounding tells it from plain DDP.
        close(every, plain)


@check_under_every_launcher
def payloads_of_any_lengths_go_to_their_ranks():
    transport = GroupTransport(dist.new_group(), torch.device("cpu"))
    ranks, own = range(transport.size), transport.rank
    lengths = np.random.default_rng(0).integers(0, 300, (60, transport.size, transport.size))  # step, sender, receiver
    lengths[10], lengths[11], lengths[12] = 0, 1, 5000
    lengths[13, 0] = 20_000
    lengths[14, :, 1] = 30_000
    for step, table in enumerate(lengths):
        parts = [
            [
                np.random.default_rng([step, *pair]).integers(0, 256, n, np.uint8)
                for pair, n in (((sender, receiver), table[sender, receiver]) for receiver in ranks)
            ]
            for sender in ranks
        ]
        handle = transport.alltoall("x", np.concatenate(parts[own]), table[own].tolist())
        assert np.array_equal(handle.wait(), np.concatenate([row[own] for row in parts])), (step, table)
        longest = lengths[max(0, step - 8) : step, own].max(axis=0) if step else 0 * table[own]
        capacities = [max(capacity_for(n) if step else 0, length) for n, length in zip(longest, table[own], strict=True)]
        sent = sum(HEAD + capacity for rank, capacity in enumerate(capacities) if rank != own)
        assert handle.padding == sent - table[own].sum(), step


@check
def tensors_go_as_arrays_do_and_stay_where_they_are():
    check_tensor_messages(GroupTransport(dist.new_group(), torch.device("cpu")))
