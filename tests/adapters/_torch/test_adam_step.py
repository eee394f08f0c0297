"""Which optimizers leave a part of their step to a memory."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

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
