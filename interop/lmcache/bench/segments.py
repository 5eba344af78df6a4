"""Removes shared-memory segments under /dev/shm that clients and servers leave behind."""
import contextlib
import glob
import os

POOLS = "/dev/shm/lmcache_l1_pool_"


def unlink_kv(kv):
    """The shared-memory segments behind these tensors (lmcache_driven mode moved them there) lose their names."""
    with contextlib.suppress(OSError, RuntimeError):
        where = {x.untyped_storage().data_ptr() for x in kv.values()}
        with open("/proc/self/maps") as f:
            maps = [ln.split() for ln in f if f"/dev/shm/lmcache_kv_{os.getpid()}_" in ln]
        for m in maps:
            lo, hi = (int(v, 16) for v in m[0].split("-"))
            if any(lo <= a < hi for a in where) and os.path.exists(m[5]):
                os.unlink(m[5])


def remove_own_segments():
    """In lmcache_driven mode the client leaves its KV tensors in /dev/shm; only this process's own are removed."""
    remove(glob.glob(f"/dev/shm/lmcache_kv_{os.getpid()}_*"))


def remove(paths):
    for f in paths:
        with contextlib.suppress(OSError):
            os.unlink(f)


class NewPools:
    """The pools that a server creates. Make it before the server starts: pools that exist by then are never removed."""

    def __init__(self):
        self.before, self.created = set(glob.glob(POOLS + "*")), set()

    def note(self, pid):
        """Reads which pools the process and its children have mapped."""
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            p = psutil.Process(pid)
            for x in [p, *p.children(recursive=True)]:
                with open(f"/proc/{x.pid}/maps") as f:
                    mapped = {ln.split()[5] for ln in f if POOLS in ln}
                self.created |= mapped - self.before

    def remove(self):
        """Removes the pools of a server that was stopped, with the files beside them."""
        for path in self.created:
            remove([path, *glob.glob(glob.escape(path) + ".*")])
        self.created = set()
