"""What is checked inside the ranks of one job: communicator="auto"."""

from contextlib import nullcontext
from unittest import mock

import horovod.torch as hvd
import torch
from checks_join import uneven
from checks_loop_features import close, loss_of, small
from harness import batches, compressed, flat, horovod, same_on_all_ranks, train
from support.auto_control import always, hurried
from support.checking import check, check_under_every_launcher
from support.exchanges import arrays_of

from grace_ext.adapters.horovod_torch import DistributedOptimizer
from grace_ext.adapters.onebit_adam import OneBitAdam
from grace_ext.observe.dispatch import ObserverDispatcher

DENSE = {"float32": 5e-6, "fp16": 3e-3}


def gradients(loss, net):
    """Those of this rank: after backward() they may already be those of all."""
    return torch.autograd.grad(loss, list(net.parameters()), retain_graph=True, allow_unused=True)


@check
def auto_measures_chooses_and_looks_again():
    with hurried() as plans:
        weights, optimizer, _ = train(compressed(communicator="auto", bucket_bytes=1), steps=130)
    same_on_all_ranks(weights)
    assert torch.isfinite(weights).all()
    same_on_all_ranks(torch.tensor(len(plans)))
    assert plans.count(plans[0]) > 2, "it did not look again"
    assert {way for plan in plans for way in plan} >= {"allgather", "fp16", "float32"}, plans
    ways = optimizer.compression_stats()["ways"]
    assert sorted(ways) == ["5.weight"], ways
    assert len(plans[0]) == len(ways)


@check_under_every_launcher
def a_dense_way_gives_what_horovod_gives():
    for way, options in (
        ("float32", {"gradient_predivide_factor": 2.0, "backward_passes_per_step": 2}),
        ("float32", {"op": hvd.Sum}),
        ("fp16", {}),
    ):
        passes = options.get("backward_passes_per_step", 1)
        with always(way):
            ours, optimizer, _ = train(compressed(communicator="auto", **options), steps=4, passes=passes)
        fp16 = {"compression": hvd.Compression.fp16} if way == "fp16" else {}
        theirs, *_ = train(horovod(**fp16, **options), steps=4, passes=passes)
        stats = optimizer.compression_stats()
        assert set(stats["ways"].values()) == {way}
        off = (ours - theirs).abs().max()
        assert off < DENSE[way], (way, options, off)
        assert stats["last_step"]["compressed"]["ratio"] == (2 if way == "fp16" else 1), stats
        assert way == "fp16" or not any(
            array.any() for name, array in arrays_of(optimizer._grace.exchange).items() if name.startswith("residual")
        )


class _Odd(torch.nn.Module):
    """Gradients of all kinds: one in channels_last, one sparse, one of float64, one that some ranks lack."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.image = torch.nn.Conv2d(4, 40, 3).to(memory_format=torch.channels_last)
        self.table = torch.nn.Embedding(50, 40, sparse=True)
        self.wide = torch.nn.Linear(40, 40).double()
        self.some = torch.nn.Linear(40, 40)

    def forward(self, image, words, some):
        hidden = self.image(image).mean((2, 3)) + self.table(words)
        hidden = self.wide(hidden.double()).float()
        return (self.some(hidden) if some else hidden).square().mean()


@check
def gradients_of_all_kinds_go_a_dense_way():
    generator = torch.Generator().manual_seed(hvd.rank())
    for way, tolerance in DENSE.items():
        with always(way):
            net = _Odd()
            optimizer = compressed(communicator="auto", sparse_as_dense=True, rules={"*": "topk:0.1/rice/raw"})(
                torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters()
            )
            for step in range(4):
                optimizer.zero_grad()
                image = torch.randn(2, 4, 5, 5, generator=generator).to(memory_format=torch.channels_last)
                loss = net(image, torch.randint(50, (2,), generator=generator), step != 2 or hvd.rank() == 0)
                own = gradients(loss, net)
                loss.backward()
                optimizer.synchronize()
                given = torch.cat(
                    [
                        (torch.zeros_like(p) if gradient is None else gradient.to_dense()).double().flatten()
                        for p, gradient in zip(net.parameters(), own, strict=True)
                    ]
                )
                mean = hvd.allreduce(given, name="mean")
                got = torch.cat([p.grad.double().flatten() for p in net.parameters()])
                assert (got - mean).abs().max() < tolerance * mean.abs().max(), (way, step)
                assert all(p.grad.stride() == p.stride() for p in net.parameters()), (way, step)
                same_on_all_ranks(got)


def _train_adam(spec=None, memory=None, **options):
    net = small()
    optimizer = DistributedOptimizer(
        torch.optim.AdamW(net.parameters(), lr=1e-3), net.named_parameters(), spec, memory=memory, **options
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    for x, y in batches(5):
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()
    same_on_all_ranks(flat(net))
    return flat(net), optimizer


@check
def adam_keeps_its_moments_whatever_auto_chooses():
    found, rules = {}, {"*weight": "topk:0.04/rice/raw"}  # a density without a first moment
    for way in ("allgather", "float32", "fp16"):
        with always(way):
            found[way], optimizer = _train_adam("topk:0.04/rice/raw", "adam", rules=rules, communicator="auto")
            _, default = _train_adam(communicator="auto")
        stats = optimizer.compression_stats()
        assert set(stats["ways"].values()) == {way}, stats["ways"]
        fields = {name.split(":")[0] for name in arrays_of(optimizer._grace.exchange)}
        assert fields == {"residual", "second_moment"} | ({"held"} if way != "allgather" else set()), (way, fields)
        assert all(
            bucket.memory.name != "none" for bucket in default._grace.exchange.buckets if bucket.compressor.has_density
        )
    difference = (found["float32"] - found["fp16"]).abs().max()
    assert difference < 1e-4 < (found["float32"] - found["allgather"]).abs().max(), difference


@check
def muon_makes_its_updates_whatever_auto_chooses():
    """A dense step sends this rank's update and what waited, so that it is what a density of 1 gives."""
    found = {}
    for way in ("float32", "fp16", "allgather", None):
        net = small()
        muon = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.02)
        spec = "topk:1/rice/raw" if way is None else "topk:0.1/rice/raw"
        options = {} if way is None else {"communicator": "auto"}
        with always(way) if way else nullcontext():
            optimizer = DistributedOptimizer(
                muon, net.named_parameters(), spec, memory="muon", rules={"*weight": spec}, **options
            )
            for x, y in batches(3):
                optimizer.zero_grad()
                loss_of(net, x, y).backward()
                optimizer.step()
        same_on_all_ranks(flat(net))
        found[way] = flat(net)
    for way, tolerance in (("float32", 1e-5), ("fp16", 1e-3)):
        assert torch.allclose(found[way], found[None], rtol=0, atol=tolerance), (way, (found[way] - found[None]).abs().max())
    assert not torch.allclose(found["allgather"], found[None], rtol=0, atol=1e-3)


@check
def what_is_owed_is_paid_before_the_first_dense_step_ends():
    """Three compressed steps, three dense ones: the ranks' gradients and what they got have the same sum."""
    given, got, net = 0, 0, small()
    with always("allgather"):
        optimizer = compressed("topk:0.05/rice/raw", communicator="auto")(
            torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters()
        )
        for step, (x, y) in enumerate(batches(6)):
            if step == 3:
                for bucket in optimizer._grace.exchange.buckets:
                    if bucket.communicator.switches:
                        bucket.communicator.switch_to("float32")
            optimizer.zero_grad()
            loss = loss_of(net, x, y)
            given = given + torch.cat([gradient.flatten() for gradient in gradients(loss, net)])
            loss.backward()
            optimizer.synchronize()
            got = got + torch.cat([p.grad.flatten() for p in net.parameters()])
    close(got, hvd.allreduce(given, name="given"))


@check
def ranks_that_join_go_a_dense_way_as_well():
    for way in DENSE:
        with always(way):
            ours, optimizer, last, _ = uneven(compressed(communicator="auto"), 2 + 2 * hvd.rank())
        assert last == hvd.size() - 1
        assert optimizer.compression_stats()["steps"] == 2 * hvd.size()
        if way == "float32":
            theirs, _, _, _ = uneven(horovod(), 2 + 2 * hvd.rank(), join=hvd.join)
            close(flat(ours), flat(theirs))


@check
def momenta_do_not_pass_for_gradients():
    """The compressed stage of 1-bit Adam exchanges something else."""
    with always("float32"):
        results = []
        for options in ({"compression": "topk:0.1/rice/raw", "communicator": "auto"}, {"compression": "dense/raw"}):
            net = small()
            optimizer = OneBitAdam(
                torch.optim.Adam(net.parameters(), lr=1e-3), net.named_parameters(), warmup_steps=2, **options
            )
            for x, y in batches(6):
                optimizer.zero_grad()
                loss_of(net, x, y).backward()
                optimizer.step()
            results.append(flat(net))
    assert optimizer.compression_stats()["ways"] == {}
    close(*results, atol=1e-5)


@check
def who_looks_on_sees_gradients_that_pass():
    """Here on one rank only."""
    seen, wants = [], hvd.rank() == 0

    def callback(self, step, bucket):
        return (lambda gradient, residual: seen.append((bucket.sizes, gradient.copy()))) if wants else None

    with always("float32"), mock.patch.object(ObserverDispatcher, "gradient_callback", callback):
        net = small()
        optimizer = compressed(communicator="auto", rules={"*": "topk:0.1/rice/raw"})(
            torch.optim.SGD(net.parameters(), lr=0.0), net.named_parameters()
        )
        for x, y in batches(3):
            seen.clear()
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.synchronize()
    assert not wants or sorted(size for sizes, _ in seen for size in sizes) == sorted(p.numel() for p in net.parameters())
    own = {p.numel(): p.grad for p in net.parameters()}
    for sizes, gradient in seen:
        assert not torch.equal(torch.from_numpy(gradient), torch.cat([own[size].flatten() for size in sizes]))
        assert gradient.any()
