"""Training loops drawn at random: some of each kind, and that a difference is found. `make fuzz` goes on with others."""

import program_jobs
import programs
import programs_worker
import pytest

pytestmark = pytest.mark.tier("test")


@pytest.mark.parametrize(
    "kind, launcher, count",
    [("horovod", "mpirun-2", 20), ("horovod", "mpirun-4", 8), ("ddp", "torchrun-2", 20), ("tensorflow", "mpirun-2", 4)],
)
def test_our_loop_does_what_the_plain_one_does(kind, launcher, count):
    assert program_jobs.run(kind, launcher, 0, count).total() == count


def test_a_program_is_a_script_that_tells_a_difference(tmp_path):
    lossy = {name: options[0] for name, options in programs.choices_of("ddp").items()} | {"spec": "dense/fp16"}
    text = programs.source("ddp", programs.settled("ddp", lossy, 2), 2)
    assert text.count("CompressionState(net.named_parameters(), 'dense/fp16'") == 1
    for spec, says in (("'dense/fp16'", "no difference"), ("'dense/bf16'", "differs by")):
        (tmp_path / "program.py").write_text(text.replace("named_parameters(), 'dense/fp16'", f"named_parameters(), {spec}"))
        job = program_jobs.launch.run("torchrun-2", tmp_path / "program.py")
        assert (job.returncode == 0) == (says == "no difference") and says in job.stdout, job.stdout


class Ranks:
    """Of which something goes wrong with programs that have all of `wrong`."""

    def __init__(self, kind, ranks, wrong):
        self.kind, self.ranks, self.wrong = kind, ranks, wrong

    def errors(self, program):
        return ["wrong" if self.wrong.items() <= program.items() else None] * self.ranks


@pytest.mark.parametrize(
    "kind, wrong",
    [
        ("horovod", {"passes": 3, "model": "lstm"}),
        ("ddp", {"frozen": "always", "clip": "value"}),
        ("tensorflow", {"way": "optimizer", "communicator": "tree"}),
    ],
)
def test_what_fails_is_made_simple(kind, wrong):
    ranks = Ranks(kind, 2, wrong)
    program = next(
        program for program in (programs.draw(kind, seed, 2) for seed in range(10_000)) if any(ranks.errors(program))
    )
    simple, errors = programs_worker.made_simple(ranks, program, ranks.errors(program))
    assert any(errors)
    others = {name: choice for name, choice in simple.items() if name not in wrong}
    assert others == {name: options[0] for name, options in programs.choices_of(kind).items() if name not in wrong}


@pytest.mark.parametrize("kind", programs.KINDS)
def test_programs_that_go_together_are_scripts(kind):
    for seed in range(200):
        program = programs.draw(kind, seed, 2 + seed % 3)
        assert programs.settled(kind, program, 2 + seed % 3) == program
        compile(programs.source(kind, program, 2 + seed % 3), "program.py", "exec")
        for simpler in programs.simpler(kind, program, 2 + seed % 3):
            assert simpler != program
