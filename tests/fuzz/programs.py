"""Programs of training loops, drawn at random: plain PyTorch, TensorFlow or Keras, and the same with our wrapper.

A program is a choice for each of the `CHOICES` of its kind, of which the first is the simplest. Its source is a script that
trains twice, once with the plain library and once with ours, and compares. Ranks run many of them, one after the other
(programs_worker.py); one that fails is made simpler as long as it fails, and what is left is a script for a reader.

    python tests/fuzz/programs.py horovod 5 --ranks 2 > program.py && mpirun -np 2 python program.py

Hypothesis draws values by itself in each process. Here all ranks have to draw the same, and to agree on what failed before
they go on, so a program comes from a seed, and `simpler` does what shrinking does.
"""

import argparse

import numpy as np
import programs_tensorflow
import programs_torch

#: By kind, where its choices and its script are.
KINDS = {"horovod": programs_torch, "ddp": programs_torch, "tensorflow": programs_tensorflow}


def choices_of(kind: str) -> dict[str, tuple]:
    return KINDS[kind].CHOICES[kind]


def draw(kind: str, seed: int, ranks: int) -> dict:
    """A program of a seed: about a third of its choices are not the simplest, and its model and optimizer are any."""
    rng = np.random.default_rng([seed, ranks])
    program = {
        name: options[rng.integers(1, len(options))] if rng.random() < 0.35 else options[0]
        for name, options in choices_of(kind).items()
    }
    for name in ("model", "optimizer"):
        options = choices_of(kind)[name]
        program[name] = options[rng.integers(len(options))]
    return settled(kind, program, ranks)


def settled(kind: str, program: dict, ranks: int) -> dict:
    """The same with the simplest choice wherever two do not go together."""
    before = None
    while program != before:
        before, program = program, KINDS[kind].settled(kind, program, ranks)
    return program


def simpler(kind: str, program: dict, ranks: int):
    """Programs with one choice that is simpler, the simplest first."""
    for name, options in choices_of(kind).items():
        for option in options[: options.index(program[name])]:
            changed = settled(kind, {**program, name: option}, ranks)
            if changed != program:
                yield changed


def source(kind: str, program: dict, ranks: int) -> str:
    """A script for so many ranks. Without being started as one it defines `check`, which raises if the two loops differ."""
    return KINDS[kind].source(kind, program, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description="print a program")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    print(source(args.kind, draw(args.kind, args.seed, args.ranks), args.ranks), end="")


if __name__ == "__main__":
    main()
