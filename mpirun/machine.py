"""The machine's own programs: find them, run them, install what is missing. Standard library only."""

import os
import shutil
import subprocess

CANNOT = 3  # the exit status where the machine or the user can't do what was asked for


class Failure(Exception):
    """What the user should read; `status` is the exit status."""

    def __init__(self, message, status=1):
        super().__init__(message)
        self.status = status


def install_missing(packages):
    """Install Debian's packages of tools ({tool: package}) that are missing, where that starts no server; else say which."""
    missing = list(dict.fromkeys(package for tool, package in packages.items() if not which(tool)))
    if not missing:
        return
    command = f"apt-get install {' '.join(missing)}"
    if not shutil.which("apt-get"):
        raise Failure(f"needs what Debian has in the packages {' '.join(missing)}", status=CANNOT)
    if os.path.exists("/run/systemd/system"):
        # Debian would start sshd on this machine's own network, now and at each boot. That is for its owner to decide.
        raise Failure(f"needs {' '.join(missing)}. Run: {command}", status=CANNOT)
    print(f"[hosts] {command}", flush=True)
    policy = "/usr/sbin/policy-rc.d"  # asked before a package starts a service
    is_ours = not os.path.exists(policy)
    if is_ours:
        with open(os.open(policy, os.O_WRONLY | os.O_CREAT, 0o755), "w") as file:
            file.write("#!/bin/sh\nexit 101\n")
    try:
        env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        run("apt-get", "update", "-q", env=env)
        run("apt-get", "install", "-q", "-y", "--no-install-recommends", *missing, env=env)
    finally:
        if is_ours:
            os.remove(policy)


def which(tool):
    """Find a tool; sbin belongs to root, but not always to root's PATH."""
    return shutil.which(tool, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def run(tool, *arguments, check=True, env=None):
    """Return what a command prints. Raises Failure if it fails."""
    command = [which(tool) or tool, *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    if check and done.returncode:
        what = done.stderr.strip() or f"status {done.returncode}"
        raise Failure(f"this fails: {tool} {' '.join(arguments)}: {what}")
    return done.stdout
