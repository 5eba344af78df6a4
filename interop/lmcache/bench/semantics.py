"""Checks of what a lookup, a store and a clear mean: prefixes, salts, locks, readers, statuses."""
import time

BS = 16  # tokens of an engine block


class Semantics:
    """Two workers of one model: what the first one stores, the second one retrieves. Each check is a method; its name is the row's."""

    def __init__(self, client, mode):
        torch, self.C = client.torch, client.chunk
        self.client, self.model = client, client.model(f"sem-{mode}")
        blocks = 8 * (self.C // BS)
        self.src = client.kv(2, 2, 8, torch.float16, blocks, BS)
        self.dst = client.kv(2, 2, 8, torch.float16, blocks, BS, fill=False)
        self.w1 = client.worker(self.src, self.model, mode, BS)
        self.w2 = client.worker(self.dst, self.model, mode, BS)

    def close(self):
        self.client.drop(self.w1)
        self.client.drop(self.w2)

    def checks(self):
        return (self.partial, self.skip_first, self.extend, self.salt, self.locks, self.readers, self.status_once,
                self.no_lookup_no_read, self.subchunk, self.unknown_model, self.clear_all)

    # -- steps of the checks
    def blocks(self, start, end):
        """The blocks of the tokens start to end."""
        return list(range(start // BS, end // BS))

    def tokens(self, chunks):
        return self.client.tokens(chunks * self.C)

    def store(self, req, t, start, end, salt=""):
        k = self.client.key(t, start, end, req, self.model, salt=salt)
        return self.client.store(self.w1, self.src, k, self.blocks(start, end), BS)

    def lookup(self, req, t, end, **more):
        return self.client.lookup(t, end, req, self.model, **more)

    def retrieve(self, req, t, start, end, skip=0, **more):
        k = self.client.key(t, start, end, req, self.model, **more)
        return self.client.retrieve(self.w2, self.dst, k, self.blocks(start, end), BS, skip=skip)

    def free(self, req, t, start, end, salt=""):
        k = self.client.key(t, start, end, req, self.model, worker=None, salt=salt)
        self.client.c.free_lookup_locks(k, 1).result(timeout=self.client.T)

    def end(self, *reqs):
        for r in reqs:
            self.client.end(r)

    def forget(self):
        for x in self.dst.values():
            x.zero_()

    def equal(self, blocks):
        return self.client.same(self.src, blocks, self.dst, blocks)

    # -- checks
    def partial(self):
        C, t = self.C, self.tokens(6)
        self.store("p0", t, 0, 3 * C)
        self.end("p0")
        t2 = t[: 2 * C] + self.tokens(4)
        h = self.lookup("p1", t2, 6 * C)
        if h != 2:
            return False, f"shared 2 chunks, hit {h}"
        if not self.retrieve("p1", t2, 0, 2 * C):
            return False, "retrieve of the shared prefix failed"
        self.end("p1")
        return self.equal(self.blocks(0, 2 * C))

    def skip_first(self):
        C, t = self.C, self.tokens(2)
        self.store("k0", t, 0, 2 * C)
        self.end("k0")
        self.forget()
        if self.lookup("k1", t, 2 * C) != 2:
            return False, "no hit"
        self.retrieve("k1", t, 0, 2 * C, skip=3 * BS)
        self.end("k1")
        untouched = all(bool((x[:, :3] == 0).all()) for x in self.dst.values())
        return untouched and self.equal(self.blocks(3 * BS, 2 * C))

    def extend(self):
        C, t = self.C, self.tokens(4)
        self.store("e0", t, 0, 2 * C)
        self.store("e0", t, C, 4 * C)
        self.end("e0")
        if self.lookup("e1", t, 4 * C) != 4:
            return False, "not 4 chunks"
        if not self.retrieve("e1", t, 0, 4 * C):
            return False, "retrieve failed"
        self.end("e1")
        return self.equal(self.blocks(0, 4 * C))

    def salt(self):
        C, t = self.C, self.tokens(1)
        self.store("z0", t, 0, C, salt="tenantA")
        self.end("z0")
        without = self.lookup("z1", t, C)
        other = self.lookup("z2", t, C, salt="tenantB")
        right = self.lookup("z3", t, C, salt="tenantA")
        self.free("z3", t, 0, C, salt="tenantA")
        self.end("z1", "z2", "z3")
        return (without, other, right) == (0, 0, 1), f"{without},{other},{right}"

    def locks(self):
        """A looked-up chunk survives a soft clear; a freed one does not."""
        C, t = self.C, self.tokens(2)
        no_clear = self.client.args.no_clear
        self.store("l0", t, 0, 2 * C)
        self.end("l0")
        if self.lookup("l1", t, 2 * C) != 2:
            return False, "no hit"
        self.free("l1", t, C, 2 * C)
        if not no_clear:
            self.client.clear(False)
        self.forget()
        if not self.retrieve("l1", t, 0, C):
            return False, "a read-locked chunk vanished in a soft clear"
        self.end("l1")
        if not self.equal(self.blocks(0, C)):
            return False, "bytes differ"
        if no_clear:
            return True, "without clear"
        h = self.lookup("l2", t, 2 * C)
        self.free("l2", t, 0, 2 * C)
        self.end("l2")
        self.client.clear(False)
        h2 = self.lookup("l3", t, 2 * C)
        self.end("l3")
        return (h, h2) == (1, 0), f"{h},{h2}"

    def readers(self):
        C, t = self.C, self.tokens(1)
        self.store("d0", t, 0, C)
        self.end("d0")
        if self.lookup("d1", t, C, readers=2) != 1:
            return False, "no hit"
        first = self.retrieve("d1", t, 0, C, readers=2)
        if self.client.args.no_clear:
            second = self.retrieve("d1", t, 0, C, readers=2)
            self.end("d1")
            return first and second, f"{first},{second}, without clear"
        self.client.clear(False)
        second = self.retrieve("d1", t, 0, C, readers=2)
        self.end("d1")
        h, n, end = None, 0, time.monotonic() + 60
        while h != 0 and time.monotonic() < end:  # the reference releases read locks after its reply
            n += 1
            self.client.clear(False)
            h = self.lookup(f"d2-{n}", t, C)
            self.end(f"d2-{n}")
        return first and second and h == 0, f"{first},{second},{h}"

    def status_once(self):
        """A status can be asked for once, and that of an unknown request is 0."""
        c, timeout = self.client.c, self.client.T
        self.lookup("o1", self.tokens(1), self.C)
        again = c.query_prefetch_status(self.client.rid("o1")).result(timeout=timeout)
        unknown = c.query_prefetch_status("never-seen").result(timeout=timeout)
        self.end("o1")
        return again == 0 and unknown == 0, f"{again},{unknown}"

    def no_lookup_no_read(self):
        C, t = self.C, self.tokens(1)
        self.store("n0", t, 0, C)
        self.end("n0")
        return not self.retrieve("n1", t, 0, C)

    def subchunk(self):
        h = self.lookup("u1", self.client.tokens(self.C - 1), 0)
        self.end("u1")
        return h == 0

    def unknown_model(self):
        return self.client.lookup(self.tokens(1), self.C, "v1", self.client.model("never-registered")) == 0

    def clear_all(self):
        C, t = self.C, self.tokens(1)
        self.store("c0", t, 0, C)
        self.end("c0")
        self.lookup("c1", t, C)
        self.client.clear(True)
        return self.lookup("c2", t, C) == 0


def check_semantics(client, mode):
    s = Semantics(client, mode)
    for f in s.checks():
        if f.__name__ == "clear_all" and client.args.no_clear:
            client.skipped.append(f"{mode}/clear_all")
            continue
        client.check(f"{mode}/{f.__name__}", f)
    s.close()
