"""Runs programs in every rank of a job: programs_worker.py KIND OUT FIRST COUNT.

OUT/running.py is the program that runs, OUT/tried what was tried so far, and OUT/found.py the simplest that failed.
"""

import os
import random
import sys
import threading
import time
import traceback
from pathlib import Path

import programs
import torch


class Job:
    """The ranks of one library."""

    def __init__(self, kind: str):
        self.kind = kind
        torch.set_num_threads(1)
        if kind == "horovod":
            import horovod.torch as hvd

            hvd.init(process_sets="dynamic")
            self.rank, self.ranks = hvd.rank(), hvd.size()
            self.names = {"SOME": hvd.add_process_set([0, 1])} if hvd.size() > 2 else {}
            self._gather = lambda value: hvd.allgather_object(value, name="fuzz")
            self._close = hvd.shutdown
        else:
            import torch.distributed as dist

            dist.init_process_group("gloo")
            self.rank, self.ranks, self.names = dist.get_rank(), dist.get_world_size(), {}
            self._gather, self._close = self._gather_by_group, dist.destroy_process_group

    def _gather_by_group(self, value):
        gathered = [None] * self.ranks
        torch.distributed.all_gather_object(gathered, value)
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


def disturb(seed: int) -> None:
    """Threads take turns at other moments: from the seed, a switch interval of its own, and pauses in the worker's thread and
    before collectives."""
    rng = random.Random(seed)
    sys.setswitchinterval(10 ** rng.uniform(-6, -2.3))
    if rng.random() < 0.5:
        return
    from grace_ext.exchange import Exchange

    plain = getattr(Exchange, "_plain_start", Exchange.start)
    Exchange._plain_start = plain
    share, longest = rng.random(), 10 ** rng.uniform(-5, -2)

    def pause():
        if rng.random() < share:
            time.sleep(rng.random() * longest)

    def start(self, bucket, pack, *out):
        def slow_pack(*args):
            pause()
            result = pack(*args)
            pause()
            return result

        pause()
        return plain(self, bucket, slow_pack, *out)

    Exchange.start = start


def main() -> None:
    kind, out, first, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    job = Job(kind)
    for seed in range(first, first + count):
        disturb(seed + 1000003 * job.rank)
        program = programs.draw(kind, seed, job.ranks)
        if job.rank == 0:
            (out / "running.py").write_text(programs.source(kind, program, job.ranks))
        errors = job.errors(program)
        if any(errors):
            simplest, errors = made_simple(job, program, errors)
            if job.rank == 0:
                told = "".join(f"rank {rank}:\n{error}\n" for rank, error in enumerate(errors) if error)
                (out / "found.py").write_text(f'"""Seed {seed}.\n\n{told}"""\n\n' + programs.source(kind, simplest, job.ranks))
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
    threading.current_thread().name = "main"
    main()
