"""What is checked inside the ranks of one job: sparse gradients of embeddings, which travel as rows."""

from unittest import mock

import horovod.torch as hvd
import torch
from harness import compressed, flat, horovod, same_on_all_ranks
from support.checking import check, check_under_every_launcher, raises

from grace_ext import ConfigError
from grace_ext.adapters._torch import rows

ROWS, WIDTH = 3000, 16


class Words(torch.nn.Module):
    def __init__(self, sparse=True):
        super().__init__()
        torch.manual_seed(4)
        self.table = torch.nn.Embedding(ROWS, WIDTH, sparse=sparse)
        self.layer = torch.nn.Linear(WIDTH, 40)

    def forward(self, words):
        return self.layer(self.table(words).mean(dim=1))


def sentences(steps, count=30):
    """Other words, with duplicates, on every rank."""
    generator = torch.Generator().manual_seed(50 + hvd.rank())
    for _ in range(steps):
        words = (torch.rand(count, 8, generator=generator) ** 3 * ROWS).long()
        yield words, words[:, 0] % 40


def loss_of(net, words, labels):
    return torch.nn.functional.cross_entropy(net(words), labels)


def fit(wrap, kind=torch.optim.SGD, steps=5, net=None):
    """Tables and layers have an optimizer each, since SparseAdam takes tables only."""
    net = net or Words()
    tables = wrap(kind(net.table.parameters(), lr=0.1), net.named_parameters())
    layers = wrap(torch.optim.SGD(net.layer.parameters(), lr=0.1), net.named_parameters())
    for words, labels in sentences(steps):
        tables.zero_grad()
        layers.zero_grad()
        loss_of(net, words, labels).backward()
        tables.step()
        layers.step()
    return flat(net), tables, net


@check
def sparse_rows_are_what_horovod_gives():
    for kind in (torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad):
        ours, optimizer, net = fit(compressed("dense/raw"), kind)
        theirs, _, _ = fit(horovod(), kind)
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-5), (kind, (ours - theirs).abs().max())
        same_on_all_ranks(ours)
        gradient = net.table.weight.grad
        assert gradient.is_sparse and gradient.is_coalesced(), gradient
        assert (gradient.indices()[0].diff() > 0).all(), "a row is there twice, or rows do not ascend"


@check_under_every_launcher
def sparse_rows_compressed_are_identical_and_add_up():
    for kind, spec in ((torch.optim.SGD, "topk:0.01/rice/qsgd:7"), (torch.optim.SparseAdam, "topk:0.1/rice/raw")):
        ours, optimizer, _ = fit(compressed(spec), kind)
        same_on_all_ranks(ours)
        assert [str(b.compressor.index.name) for b in optimizer._grace.exchange.buckets] == ["rows"]
        assert optimizer.compression_stats()["compressed"]["ratio"] > 3, optimizer.compression_stats()
    net = Words()
    optimizer = compressed("topk:0.1/rice/raw")(torch.optim.SGD(net.table.parameters(), lr=0.1), net.named_parameters())
    given = received = torch.zeros(ROWS, WIDTH)
    for words, labels in sentences(4):
        optimizer.zero_grad()
        loss_of(net, words, labels).backward()
        given = given + net.table.weight.grad.to_dense()
        optimizer.synchronize()
        received = received + net.table.weight.grad.to_dense()
        with optimizer.skip_synchronize():
            optimizer.step()
    kept = torch.from_numpy(_residual(optimizer)).reshape(ROWS, WIDTH)
    total = hvd.allreduce(given - kept, op=hvd.Average, name="rows.kept")
    assert kept.abs().max() > 0 and torch.allclose(received, total, rtol=0, atol=1e-6)


def _residual(optimizer):
    return optimizer._grace.exchange.state_dict()["residual"]["table.weight"]


@check
def a_table_without_gradient_on_a_rank_is_a_table():
    for spec in ("dense/raw", "topk:0.1/rice/qsgd:7"):
        net = Words()
        optimizer = compressed(spec)(torch.optim.SparseAdam(net.table.parameters(), lr=0.1), net.named_parameters())
        for step, (words, labels) in enumerate(sentences(6)):
            optimizer.zero_grad()
            if step == 3:
                words = words[:, :0]  # no words: a gradient without rows, on all ranks
                net.table(words).sum().backward()
            elif hvd.rank() != step % 2:  # in the first step, rank 0 has no gradient
                loss_of(net, words, labels).backward()
            optimizer.step()
            gradient = net.table.weight.grad
            assert gradient.is_sparse and gradient._nnz() == 0 if step == 3 else gradient._nnz() > 0, (step, gradient)
        same_on_all_ranks(flat(net))


@check
def a_non_finite_row_reaches_all_ranks_and_no_memory():
    _, optimizer, net = fit(compressed(), steps=2)
    before = _residual(optimizer).copy()
    words, labels = next(sentences(1))
    optimizer.zero_grad()
    loss = loss_of(net, words, labels) * (float("inf") if hvd.rank() == hvd.size() - 1 else 1.0)
    loss.backward()
    optimizer.synchronize()
    assert not torch.isfinite(net.table.weight.grad.values()).any()
    assert (before == _residual(optimizer)).all(), "the memory changed"


@check
def a_table_that_is_a_layer_too_is_dense():
    class Tied(torch.nn.Module):
        """Also on rank 0 only: what is a dense gradient on one rank is dense on all."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.table = torch.nn.Embedding(200, WIDTH, sparse=True)

        def forward(self, words):
            x = self.table(words).mean(dim=1)
            return x @ self.table.weight[:40].T if hvd.rank() == 0 else x

    for spec in ("dense/raw", "topk:0.1/rice/qsgd:7"):
        net = Tied()
        optimizer = compressed(spec)(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        for words, labels in sentences(3):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(words % 200), labels % WIDTH).backward()
            own = net.table.weight.grad.to_dense() if net.table.weight.grad.is_sparse else net.table.weight.grad.clone()
            optimizer.step()
            assert not net.table.weight.grad.is_sparse
            if spec == "dense/raw":
                mean = hvd.allreduce(own, op=hvd.Average, name="tied")
                assert torch.allclose(net.table.weight.grad, mean, rtol=0, atol=1e-6)
        same_on_all_ranks(flat(net))


@check
def a_table_without_gradient_in_the_first_step_is_dense_and_the_log_says_so():
    for spec in ("dense/raw", "topk:0.1/rice/qsgd:7"):
        rows._say_dense.cache_clear()
        net = Words()
        optimizer = compressed(spec)(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        with mock.patch.object(rows._LOG, "warning") as warning:
            for step, (words, labels) in enumerate(sentences(4)):
                optimizer.zero_grad()
                if step:
                    loss_of(net, words, labels).backward()
                else:
                    net.layer(torch.ones(1, WIDTH)).sum().backward()
                optimizer.step()
        assert not net.table.weight.grad.is_sparse
        assert [call.args[1] for call in warning.call_args_list] == ["table.weight"], warning.call_args_list
        same_on_all_ranks(flat(net))
    with mock.patch.object(rows._LOG, "warning") as warning:
        fit(compressed("dense/raw"))
        fit(compressed("dense/raw", sparse_as_dense=True))
    assert not warning.called


@check
def sparse_gradients_as_dense():
    ours, optimizer, net = fit(compressed("dense/raw", sparse_as_dense=True))
    theirs, _, _ = fit(horovod(), net=Words(sparse=False))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
    assert not net.table.weight.grad.is_sparse
    p = torch.nn.Parameter(torch.zeros(40, 40))
    optimizer = compressed()(torch.optim.SGD([p], lr=0.1), [("p", p)])
    with raises(ConfigError, "sparse_as_dense=True"):
        Elements.apply(p).backward()
    assert optimizer.compression_stats()["steps"] == 0


class Elements(torch.autograd.Function):
    """Has a gradient that is sparse in single elements."""

    @staticmethod
    def forward(_, p):
        return p.trace()

    @staticmethod
    def backward(_, __):
        return torch.eye(40).to_sparse()
