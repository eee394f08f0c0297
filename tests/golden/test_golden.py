"""Containers that were written once still decode to the same arrays, and the same input still gives the same bytes."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from support import reference_decoder

import grace_ext
from grace_ext import registry
from grace_ext.pipeline import container

GOLDEN = Path(__file__).parent
CASES = json.loads((GOLDEN / "cases.json").read_text())

_spec = importlib.util.spec_from_file_location("golden_make", GOLDEN / "make.py")
make = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make)


def stored(name):
    """(container uint8[m], the array it decodes to)."""
    return np.fromfile(GOLDEN / f"{name}.bin", np.uint8), np.fromfile(GOLDEN / f"{name}.out.f4", "<f4")


@pytest.mark.parametrize("name", CASES)
def test_decodes_to_the_stored_array(name):
    blob, expected = stored(name)
    assert grace_ext.decompress(blob, expected.size).tobytes() == expected.tobytes()
    parsed = container.parse(blob)
    if parsed.value_id in (0, *reference_decoder.VALUE) and parsed.index_id in (0, *reference_decoder.INDEX):
        assert np.array(reference_decoder.decode(blob)[0], np.float32).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case and not case["decode_only"]])
def test_encodes_to_the_stored_bytes(name):
    arrays = {key: np.fromfile(GOLDEN / f"{key}.f4", "<f4") for key in ("normal", "levels")}
    assert make.encode(CASES[name], arrays).tobytes() == stored(name)[0].tobytes()


def test_every_registered_codec_has_a_golden_file():
    parsed = [container.parse(stored(name)[0]) for name in CASES]
    for kind, found in (
        ("index", {p.index_id for p in parsed}),
        ("value", {p.value_id for p in parsed}),
        ("transform", {p.transform[0] for p in parsed if p.transform}),
    ):
        ids = {name: registry.lookup(kind, name).id for name in registry.names(kind)}
        missing = [name for name, id_ in ids.items() if id_ is not None and id_ not in found]
        assert not missing, f"{kind} codecs without a golden file: {missing}; run python tests/golden/make.py"


def test_the_cases_cover_the_flags_and_dtypes():
    headers = {stored(name)[0][2] for name in CASES}
    assert {header & 0xF0 for header in headers} == {0, 0x80, 0x40, 0x20, 0x10}
    assert {header & 15 for header in headers} >= {0, 1, 3}


def test_no_stray_files():
    names = {path.name for path in GOLDEN.iterdir() if path.is_file()}
    expected = {f"{name}{suffix}" for name in CASES for suffix in (".bin", ".out.f4")}
    assert names == expected | {"make.py", "test_golden.py", "cases.json", "normal.f4", "levels.f4"}
