import ctypes
import hashlib
import threading

from grace_ext.adapters._torch import gloo_exit


def test_waits_for_a_thread_of_gloo_that_runs():
    events = []
    begun = threading.Event()

    def work():
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME, as PyTorch names its threads
        begun.set()
        for _ in range(20):
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)  # without the interpreter lock
        events.append("worked")

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    gloo_exit._wait()
    events.append("waited")
    thread.join()
    assert events == ["worked", "waited"]


def test_does_not_wait_for_threads_that_sleep(monkeypatch):
    monkeypatch.setattr(gloo_exit, "_SECONDS", 1e9)
    release = threading.Event()

    def sleep():
        ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)
        release.wait()

    thread = threading.Thread(target=sleep)
    thread.start()
    gloo_exit._wait()
    assert thread.is_alive()
    release.set()
    thread.join()


def test_ends_in_time(monkeypatch):
    monkeypatch.setattr(gloo_exit, "_busy", lambda: True)
    monkeypatch.setattr(gloo_exit, "_SECONDS", 0.01)
    gloo_exit._wait()
