"""The least that holds a directory at a limit: unlinks the oldest files, whose names come by a pipe, while the file system holds more.

It hears of no reads and keeps no books. What it costs beside an engine is what any process costs that unlinks as much: the floor of a keeper."""

import collections
import os
import select
import sys


def main():
    root, limit, pipe = sys.argv[1], int(sys.argv[2]), os.open(sys.argv[3], os.O_RDONLY)
    os.nice(-10)  # as the keeper
    names, rest = collections.deque(), b""

    def used():
        s = os.statvfs(root)
        return (s.f_blocks - s.f_bfree) * s.f_frsize

    while True:
        ready, _, _ = select.select([pipe], [], [], 0.005)
        if ready:
            more = os.read(pipe, 1 << 16)
            if not more:
                return
            *lines, rest = (rest + more).split(b"\n")
            names.extend(lines)
        while names and used() > limit:
            try:
                os.unlink(names.popleft())
            except FileNotFoundError:
                pass


if __name__ == "__main__":
    main()
