"""The PyTorch adapter under real launchers. The checks themselves are in checks*.py and run inside the ranks."""

import ast
import json
from pathlib import Path

import pytest
from launch import LAUNCHERS, run

pytestmark = pytest.mark.mpi
SOURCES = [ast.parse(path.read_text()) for path in sorted(Path(__file__).parent.glob("checks*.py"))]
CHECKS = [node.name for source in SOURCES for node in source.body if isinstance(node, ast.FunctionDef)
          and any(getattr(decorator, "id", None) == "check" for decorator in node.decorator_list)]


@pytest.fixture(scope="module", params=LAUNCHERS)
def job(request, tmp_path_factory):
    """Run all checks once under a launcher: results by rank, and the output."""
    folder = tmp_path_factory.mktemp(request.param)
    done = run(request.param, "worker.py", str(folder), timeout=400)
    ranks = int(request.param.rsplit("-", 1)[1])
    files = [folder / f"rank{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files], done


@pytest.mark.parametrize("name", CHECKS)
def test_check(job, name):
    results, done = job
    for rank, result in enumerate(results):
        assert result.get(name) == "ok", f"rank {rank}: {result.get(name, 'did not get there')}\n{done.stdout[-4000:]}"


def test_job_ends_well(job):
    _, done = job
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("where", ["user", "worker", "stuck"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_rank_that_raises_ends_the_job(launcher, where):
    done = run(launcher, "failing.py", where, timeout=60)
    assert done.returncode != 0
    assert ("TypeError" if where == "worker" else "rank 1 gives up") in done.stdout
    assert "this line must not be reached" not in done.stdout
