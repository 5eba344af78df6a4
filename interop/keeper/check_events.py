"""Compares the KV events of kvasir keeper with those of vLLM's real fs offloading tier, decoded with vLLM's own classes.

The tier stores rows into a directory that the keeper holds at a limit, and publishes its own events; what the keeper says of the same
rows must be equal, field by field. Then rows are unlinked by the keeper and by hand: what a reader knows that was there from the start, of
one that comes late, and of one that asks the replay socket must be what the directory has. Prints one JSON line."""

import argparse
import glob
import hashlib
import json
import os
import time

import msgspec
import zmq
from play_trace import manager
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventsTracker,
)
from vllm.v1.kv_offload.base import (
    OffloadingKVEventsConfig,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

decoder = msgspec.msgpack.Decoder(KVEventBatch)
LIMIT = 60.0  # seconds for what comes soon


class Reader:
    """What the keeper's events name. Each number follows the one before."""

    def __init__(self, endpoint):
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.set_hwm(0)
        self.socket.subscribe(b"kv@")
        self.socket.connect(endpoint)
        self.has, self.stored, self.removed, self.number = {}, [], 0, None

    def read(self):
        while self.socket.poll(10):
            _, sequence, payload = self.socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if self.number is not None and number != self.number + 1:
                raise SystemExit(f"message {number} after {self.number}")
            self.number = number
            self.apply(payload)

    def apply(self, payload):
        for e in decoder.decode(payload).events:
            if isinstance(e, AllBlocksCleared):
                self.has.clear()
            elif isinstance(e, BlockStored):
                (h,) = e.block_hashes
                if h in self.has:
                    raise SystemExit(f"{h} is stored twice")
                self.has[h] = e
                self.stored.append(e)
            elif isinstance(e, BlockRemoved):
                for h in e.block_hashes:
                    self.removed += 1
                    del self.has[h]


def there(root):
    names = glob.glob(f"{root}/*/*/*/*.bin")
    return {int(os.path.basename(n)[:-4][-16:], 16) for n in names}


def settle(what, root, *readers):
    end = time.monotonic() + LIMIT
    while True:
        for r in readers:
            r.read()
        want = there(root)
        if all(set(r.has) == want for r in readers):
            return len(want)
        if time.monotonic() > end:
            raise SystemExit(f"{what}: the directory has {len(want)} rows, readers know {[len(r.has) for r in readers]}")


def replayed(endpoint):
    s = zmq.Context.instance().socket(zmq.DEALER)
    s.linger, s.rcvtimeo = 0, int(LIMIT * 1000)
    s.connect(endpoint)
    s.send_multipart([b"", (0).to_bytes(8, "big")])
    r = Reader.__new__(Reader)
    r.has, r.stored, r.removed = {}, [], 0
    while True:
        _, _, sequence, payload = s.recv_multipart()
        if sequence == b"\xff" * 8:
            s.close()
            return set(r.has)
        r.apply(payload)


def main():
    a = argparse.ArgumentParser(description=__doc__)
    a.add_argument("--root", required=True)
    a.add_argument("--events", required=True)
    a.add_argument("--replay", required=True)
    a.add_argument("--row", type=int, default=65536)
    a.add_argument("--rows", type=int, default=600, help="that the tier stores; more than the keeper leaves")
    o = a.parse_args()
    first = Reader(o.events)
    m = manager(o.root, o.row, 64, events=True)
    tracker = OffloadingEventsTracker(OffloadingKVEventsConfig(True, False))
    own = []

    def step(new=()):
        m.on_schedule_end(ScheduleEndContext(new_req_ids=tuple(new), preempted_req_ids=()))
        own.extend(e for e in tracker.take_events(m.take_events()) if e.medium == "STORAGE")

    def store(name, numbers):
        keys = [make_offload_key(hashlib.sha256(b"%d" % i).digest(), i % 3) for i in numbers]
        context = ReqContext(name)
        m.on_new_request(context)
        step([name])
        while (out := m.prepare_store(keys, context)) is None:
            step()
            time.sleep(0.001)
        m.complete_store(out.keys_to_store, context, True)
        m.on_request_finished(context)
        while m.has_pending_work():
            step()
            time.sleep(0.001)

    store("few", range(20))
    few = settle("a few rows", o.root, first)
    for at in range(20, o.rows, 20):
        store(f"r{at}", range(at, at + 20))
    left = settle("rows beyond the limit", o.root, first)
    said = {e.block_hashes[0]: e for e in first.stored}
    different = [(e, said.get(e.block_hashes[0])) for e in own if said.get(e.block_hashes[0]) != e]
    by_keeper = first.removed
    late = Reader(o.events)
    settle("a late reader", o.root, first, late)
    for name in glob.glob(f"{o.root}/*/*/*/*.bin")[:10]:
        os.unlink(name)
    end = settle("rows unlinked by hand", o.root, first, late)
    again = replayed(o.replay) == there(o.root)
    m.shutdown()
    print(json.dumps({
        "own_events": len(own), "different": len(different), "few": few, "left": left, "unlinked_by_keeper": by_keeper,
        "after_unlinks_by_hand": end, "replay": again,
    }))  # fmt: skip
    if different:
        print("vLLM: {!r}\nkeeper: {!r}".format(*different[0]))
    if different or len(own) != o.rows or few != 20 or by_keeper == 0 or end != left - 10 or not again:
        raise SystemExit("the keeper's events are not those of vLLM's tier")


if __name__ == "__main__":
    main()
