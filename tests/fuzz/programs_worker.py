"""Runs programs in every rank of a job: programs_worker.py KIND OUT FIRST COUNT.

OUT/running.py is the program that runs, OUT/tried what was tried so far, and OUT/found.py the simplest that failed.
"""

import functools
import importlib
import os
import random
import sys
import time
import traceback
from pathlib import Path

import programs


class Job:
    """The ranks of one library."""

    def __init__(self, kind: str):
        self.kind = kind
        if kind in ("horovod", "tensorflow"):
            hvd = importlib.import_module(f"horovod.{'torch' if kind == 'horovod' else kind}")
            hvd.init(process_sets="dynamic")
            self.rank, self.ranks = hvd.rank(), hvd.size()
            self.names = {"SOME": hvd.add_process_set([0, 1])} if hvd.size() > 2 else {}
            self._gather = functools.partial(hvd.allgather_object, name="fuzz")
            self._close = hvd.shutdown
        else:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            self.rank, self.ranks, self.names = dist.get_rank(), dist.get_world_size(), {}
            self._gather, self._close = self._gather_by_group, dist.destroy_process_group

    def _gather_by_group(self, value):
        import torch.distributed as dist

        gathered = [None] * self.ranks
        dist.all_gather_object(gathered, value)
        return gathered

    def close(self) -> None:
        """Ends this process, whatever the programs left behind in it."""
        self._close()
        sys.stdout.flush()
        os._exit(0)

    def errors(self, program: dict) -> list[str | None]:
        """What went wrong on each rank."""
        names = {"__name__": "program", **self.names}
        error = None
        try:
            exec(compile(programs.source(self.kind, program, self.ranks), "program.py", "exec"), names)
            names["check"]()
        except Exception:
            error = traceback.format_exc()
        return self._gather(error)


class Pauses:
    """Random pauses in the threads that start a bucket, those of hooks, and around packing, in the worker's thread."""

    def __init__(self):
        from grace_ext.exchange.engine import Exchange

        start = Exchange.start

        def start_with_pauses(exchange, bucket, pack, *out):
            def slow_pack(*args):
                self._pause()
                result = pack(*args)
                self._pause()
                return result

            self._pause()
            return start(exchange, bucket, slow_pack, *out)

        Exchange.start = start_with_pauses

    def draw(self, seed: int) -> None:
        """Threads take turns in other intervals, and in every other program they pause."""
        self._random = random.Random(seed)
        sys.setswitchinterval(10 ** self._random.uniform(-6, -2.3))
        self._share = self._random.random() if seed % 2 else 0.0
        self._longest = 10 ** self._random.uniform(-5, -2)

    def _pause(self) -> None:
        if self._random.random() < self._share:
            time.sleep(self._random.random() * self._longest)


def main() -> None:
    kind, out, first, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    job, pauses = Job(kind), Pauses()
    for seed in range(first, first + count):
        pauses.draw(seed + 1000003 * job.rank)
        program = programs.draw(kind, seed, job.ranks)
        if job.rank == 0:
            (out / "running.py").write_text(programs.source(kind, program, job.ranks))
        errors = job.errors(program)
        if any(errors):
            simplest, errors = made_simple(job, program, errors)
            if job.rank == 0:
                told = "".join(f"rank {rank}:\n{error}\n" for rank, error in enumerate(errors) if error)
                script = programs.source(kind, simplest, job.ranks)
                (out / "found.py").write_text(f'"""Seed {seed}.\n\n{told}"""\n\n{script}')
            break
        if job.rank == 0:
            (out / "tried").write_text(str(seed + 1 - first))
    job.close()


def made_simple(job: Job, program: dict, errors: list) -> tuple[dict, list]:
    """As long as something goes wrong, on any rank, with a simpler program."""
    for _ in range(40):
        for candidate in programs.simpler(job.kind, program, job.ranks):
            found = job.errors(candidate)
            if any(found):
                program, errors = candidate, found
                break
        else:
            break
    return program, errors


if __name__ == "__main__":
    main()
