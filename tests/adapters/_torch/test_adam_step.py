"""Which optimizers leave a part of their step to a memory."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from grace_ext.adapters._torch import adam_step  # noqa: E402
from grace_ext.adapters._torch.adam_step import own_memory  # noqa: E402

WITHOUT_MUON = """
import torch
torch.optim.__dict__.pop("Muon", None)
from grace_ext.adapters._torch.adam_step import own_memory
weight = [torch.nn.Parameter(torch.zeros(2, 2))]
assert own_memory(torch.optim.AdamW(weight)) == "adam" and own_memory(torch.optim.SGD(weight, 0.1)) is None
"""


def test_each_kind_has_its_memory():
    weight = [torch.nn.Parameter(torch.zeros(2, 2))]
    assert own_memory(torch.optim.Adam(weight)) == "adam"
    assert own_memory(torch.optim.Adam(weight, amsgrad=True)) is None
    assert own_memory(torch.optim.NAdam(weight)) is None
    if hasattr(torch.optim, "Muon"):
        assert own_memory(torch.optim.Muon(weight, momentum=0.9)) == "muon:0.9:nesterov=true:steps=5:adjust=original"


def test_a_torch_without_muon_will_do():
    subprocess.run([sys.executable, "-c", WITHOUT_MUON], check=True, timeout=120)


OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, maximize=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), weight_decay=0.1),
    "without decay": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_kernel_makes_the_step_of_torch(make, monkeypatch):
    """For a matrix, a tensor of four dimensions, a scalar, and what the kernel leaves to torch: other types and layouts."""
    steps = []
    for by_kernel in (False, True):
        monkeypatch.setattr(adam_step, "kernels_are_faster", lambda by_kernel=by_kernel: by_kernel)
        generator = torch.Generator().manual_seed(0)
        shapes = [(30, 40), (5, 4, 3, 2), (), (40, 30), (16, 8)]
        parameters = [torch.randn(shape, generator=generator) for shape in shapes]
        parameters[3], parameters[4] = parameters[3].t(), parameters[4].to(torch.bfloat16)
        parameters = [torch.nn.Parameter(p) for p in parameters]
        optimizer = make(parameters)
        moments = adam_step.MomentsInMemory(optimizer, [], {})
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            rows = p.shape[0] if p.ndim else 1
            roots = [torch.rand(n, generator=generator).numpy() for n in (rows, p.numel() // rows)]
            moments._kept[id(p)] = None, None
            version = p._version
            with torch.no_grad():
                moments._step(p, p.grad, roots, moments._options(optimizer.param_groups[0]))
            assert p._version > version, "autograd knows that it has changed"
        steps.append([p.detach().clone() for p in parameters])
    assert all(map(torch.equal, *steps)), "a rank may have another number of threads"
