"""Find what Horovod needs for NCCL operations: a CUDA compiler, and NCCL's header and library."""

import contextlib
import glob
import os
import shutil

WITHOUT_NVTX = {"HOROVOD_WITHOUT_NVTX": "1"}


def build_settings(torch_cuda, site_packages, link_folder):
    """Return Horovod's build options for this machine's GPUs or the lack of them, and a remark for the user.

    HOROVOD_WITHOUT_CUDA is an option of our patch.
    `torch_cuda` is torch.version.cuda; `link_folder` is made if NCCL comes as a Python package, whose
    libnccl.so.2 needs a link named libnccl.so to be linked with.
    """
    if not torch_cuda:
        return {"HOROVOD_WITHOUT_CUDA": "1", **WITHOUT_NVTX}, "for CPUs"
    if not _has_nvcc():
        return WITHOUT_NVTX, f"without GPU operations (torch has CUDA {torch_cuda}, but there is no nvcc)"
    nccl = _find_nccl(site_packages, link_folder)
    if nccl is None:
        return WITHOUT_NVTX, f"without NCCL (torch has CUDA {torch_cuda}, but NCCL's header and library were not found)"
    include, lib = nccl
    settings = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_LINK": "SHARED"}
    settings.update(HOROVOD_NCCL_INCLUDE=include, HOROVOD_NCCL_LIB=lib)
    return settings, f"with NCCL and CUDA {torch_cuda}"


def _has_nvcc():
    homes = (os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    return shutil.which("nvcc") or any(home and os.path.exists(f"{home}/bin/nvcc") for home in homes)


def _find_nccl(site_packages, link_folder):
    """Find the folders of nccl.h and of libnccl.so; return None if one is missing."""
    wheel, own = f"{site_packages}/nvidia/nccl", os.environ.get("HOROVOD_NCCL_HOME")
    for home in filter(None, (own, wheel, "/usr", "/usr/local", "/usr/local/cuda")):
        found = glob.glob(f"{home}/lib*/libnccl.so*") + glob.glob(f"{home}/lib/*-linux-gnu/libnccl.so*")
        if found and os.path.exists(f"{home}/include/nccl.h"):
            return f"{home}/include", _linkable(min(found, key=len), link_folder)
    return None


def _linkable(library, link_folder):
    """Return a folder in which the linker finds `library` under the name libnccl.so."""
    if os.path.basename(library) == "libnccl.so":
        return os.path.dirname(library)
    os.makedirs(link_folder, exist_ok=True)
    link = os.path.join(link_folder, "libnccl.so")
    with contextlib.suppress(FileNotFoundError):
        os.remove(link)
    os.symlink(library, link)
    return link_folder
