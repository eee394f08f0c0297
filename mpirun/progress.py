"""Progress lines for the set-up, and commands whose output goes to a log file. Standard library only."""

import os
import re
import subprocess
import sys
import time

HEARTBEAT_SECONDS = 30
TAIL_LINES = 40


def fail(message):
    """End the set-up with one line that says what is wrong and what to do."""
    sys.exit(f"[setup] error: {message}")


class Progress:
    """Numbered steps on the terminal; everything that a command prints goes to a file in `log_dir`."""

    def __init__(self, total, log_dir):
        self.total = total
        self.log_dir = log_dir
        self.begun = []  # (name of a step, when it began)

    def step(self, name, text):
        self.begun.append((name, time.monotonic()))
        print(f"[setup {len(self.begun)}/{self.total}] {text}", flush=True)

    def seconds(self):
        """Return the seconds of each step by its name; of the last one those until now."""
        ends = [began for _, began in self.begun[1:]] + [time.monotonic()]
        return {name: round(end - began, 1) for (name, began), end in zip(self.begun, ends, strict=True)}

    def say(self, text):
        print(f"            {text}", flush=True)

    def run(self, command, log, env=None, cwd=None, hint=""):
        """Run a command, with a sign of life every half minute; on failure print the log's tail and exit."""
        path = os.path.join(self.log_dir, log)
        code = self.attempt(command, log, env, cwd)
        if code:
            print(f"--- the last lines of {path}", *_tail(path, TAIL_LINES), "---", sep="\n", flush=True)
            fail(f"this command ended with status {code}: {' '.join(map(str, command))}. {hint}".rstrip())

    def attempt(self, command, log, env=None, cwd=None):
        """Like `run`, but gives back the exit status."""
        os.makedirs(self.log_dir, exist_ok=True)
        path = os.path.join(self.log_dir, log)
        started = time.monotonic()
        with open(path, "wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=cwd)
        try:
            while True:
                try:
                    return process.wait(HEARTBEAT_SECONDS)
                except subprocess.TimeoutExpired:
                    self.say(f"... {_clock(time.monotonic() - started)}  {_last_sign(path)}")
        finally:
            if process.poll() is None:  # interrupted: take the command along
                process.terminate()
                process.wait()


def _clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _tail(path, count):
    with open(path, errors="replace") as lines:
        return [line.rstrip("\n") for line in lines][-count:]


def _last_sign(path):
    """CMake's last "[ 42%] Building ..." line if there is one, else the log's last line, shortened."""
    lines = [line.strip() for line in _tail(path, 400) if line.strip()]
    steps = [line for line in lines if re.match(r"\[ *\d+%\]", line)]
    return (steps or lines or ["waiting"])[-1][:90]
