#!/usr/bin/env python3
"""Conformance and performance driver for the tiers below the pool of an LMCache multiprocess (MP) server.

Two servers A and B work over one shared L2 (a directory, Redis/Valkey, S3, or a private one). Prompts are stored
through one with the real ``lmcache`` 0.5.6 client, awaited in L2 (the driver computes every name itself), forgotten
in RAM, loaded through the other, and compared byte by byte. Faults are injected into the L2. Every wait is bounded.
One JSON line on standard output with pass/fail per check; progress on standard error.

The server commands are templates: {port} {http} {shm} are chosen by the driver; {dir} is the shared directory,
{l2port} the port of Redis or S3 (a proxy of the driver while faults are tested), {bucket} the bucket.

    python l2_bench.py --l2 dir --a "$S '{\\"type\\":\\"fs\\",\\"base_path\\":\\"{dir}\\"}'" --b "$S ..."
    python l2_bench.py --l2 redis --redis redis-server --a ... --b ...
    python l2_bench.py --l2 s3 --s3-cmd 'moto_server -H 127.0.0.1 -p {s3port}' --a ... --b ...
    python l2_bench.py --l2 private --a ... --b ...        (names not known: only round trips and restarts)

Exit status: 0 all checks passed, 1 some failed, 2 a server did not start, 3 the time limit ended the run.
"""

import argparse
import atexit
import json
import os
import signal
import sys
import threading

from bench.l2.backends import Slow
from bench.l2.checks import (
    abandon,
    clear_self,
    content,
    cross,
    gap,
    once,
    op9_prompt,
    parallel,
    pins,
    restart_self,
    tail_in_l1,
)
from bench.l2.faults import full, gone_dir, killed, resized, silent, vanish
from bench.l2.figures import measure
from bench.l2.run import Run
from bench.process import log
from bench.segments import remove_own_segments


def play(run):
    """Runs the phases."""
    args = run.args
    phases = args.phases.split(",")
    small, odd = run.small, run.odd
    A, B = run.A, run.B
    if "basic" in phases or "fault" in phases:
        A.start()
        B.start()
    if "basic" in phases:
        run.check("a_to_b", cross, A, B, small)
        if run.l2.kind != "private" or args.shared_private:
            run.check("b_to_a", cross, B, A, small)
            run.check("odd_length_a_to_b", cross, A, B, odd)
            run.check("odd_length_b_to_a", cross, B, A, odd)
            run.check("salt_a_to_b", cross, A, B, odd, salt="tenantA")
            run.check("long_a_to_b", cross, A, B, odd, chunks=100)
            run.check("parallel_loads", parallel)
            run.check("status_once", once)
            run.check("abandoned_loads", abandon)
            run.check("op9_answered_while_loading", op9_prompt)
        if run.l2.kind != "private":
            run.check("value_is_the_plain_chunk", content, odd, nodes=(A,))
            run.check("gap_ends_the_hit", gap)
            if run.l2.kind != "s3":  # the reference keeps positive answers: it would try to load
                run.check("no_pins_after_load", pins, False)
                run.check("no_pins_after_abandoned_load", pins, True)
        run.check("head_l2_tail_l1", tail_in_l1, nodes=(A,))
        run.check("a_clear_a", clear_self, A, nodes=(A,))
        run.check("b_clear_b", clear_self, B, nodes=(B,))
        run.check("a_restart_a", restart_self, A, None, nodes=(A,))
        run.check("a_kill9_a", restart_self, A, signal.SIGKILL, nodes=(A,))
    if "fault" in phases and run.l2.kind != "private":
        for how in ("half", "zero", "minus1", "plus100", "plus4096", "double") + (("pad",) if run.l2.kind == "dir" else ()):
            run.check(f"length_{how}", resized, how)
        run.check("deleted_between_lookup_and_load", vanish)
        if run.l2.kind == "dir":
            run.check("directory_gone", gone_dir)
            run.skipped += ["backend_killed", "backend_silent"]
        else:
            run.check("backend_silent", silent)
            for n in (A, B):
                if n.alive() and not n.sick:
                    run.healthy(n, 5)
            run.check("backend_killed", killed)
    if "fault" in phases:
        if run.l2.kind == "redis":
            run.check("l2_full", full)
        elif args.full_dir and run.l2.kind in ("dir", "private"):
            A.stop()
            B.stop()
            run.check("l2_full", full, nodes=())
        else:
            run.skipped.append("l2_full")
    if "perf" in phases:
        measure(run)


def parse_args():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--a", required=True, help="command template of server A")
    ap.add_argument("--b", default="", help="command template of server B (default: as A)")
    ap.add_argument("--l2", choices=("dir", "redis", "s3", "private"), required=True)
    ap.add_argument("--dir", default="", help="directory for --l2 dir or private (default: a temporary one)")
    ap.add_argument("--redis", default="redis-server", help="program for --l2 redis, started without persistence")
    ap.add_argument("--s3-cmd", default="", help="command for --l2 s3; {s3port}; must accept unsigned requests of the driver")
    ap.add_argument("--full-dir", default="", help="an empty directory on a small filesystem (64 MB or less) for the "
                    "check l2_full; its content is removed")
    ap.add_argument("--shared-private", action="store_true", help="a private L2 that A and B share")
    ap.add_argument("--mode", default="engine_driven", choices=("engine_driven", "lmcache_driven"))
    ap.add_argument("--phases", default="basic,fault", help="comma list of basic, fault, perf (perf uses A only)")
    ap.add_argument("--only", default="", help="comma list of check names (prefixes)")
    ap.add_argument("--limit", type=float, default=60.0, help="seconds for any wait without a fault")
    ap.add_argument("--fault-limit", type=float, default=15.0, help="seconds until a lookup under a fault must be decided")
    ap.add_argument("--recover", type=float, default=40.0, help="seconds until a repaired L2 must be in use again")
    ap.add_argument("--heal", type=float, default=5.0, help="seconds until a bad value must be replaced after a new store")
    ap.add_argument("--settle", type=float, default=2.0, help="wait where names in L2 are not known")
    ap.add_argument("--op9-limit", type=float, default=0.5, help="seconds an answer of operation 9 may take")
    ap.add_argument("--op9-chunks", type=int, default=48)
    ap.add_argument("--start-timeout", type=float, default=300.0)
    ap.add_argument("--max-seconds", type=float, default=1800.0, help="the whole run; ends with status 3")
    ap.add_argument("--mib", default="1,4", help="perf: chunk sizes in MiB")
    ap.add_argument("--tokens", default="8192,32768", help="perf: prompt lengths")
    ap.add_argument("--rounds", type=int, default=3, help="perf: rounds per row")
    ap.add_argument("--lookups", type=int, default=100, help="perf: lookups per row in RAM")
    ap.add_argument("--label", default="")
    ap.add_argument("--out", default="")
    ap.add_argument("--keep-logs", default="", help="directory for the servers' logs")
    ap.add_argument("--verbose", action="store_true")
    return ap.parse_args()


def main():
    args = parse_args()
    atexit.register(remove_own_segments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped and pools removed
    run = Run(args)

    def finish(rc=None, note=None):
        res, r = run.result()
        if note:
            res["ended"] = note
        line = json.dumps(res)
        print(line, flush=True)
        if args.out:
            with open(args.out, "w") as f:
                f.write(line + "\n")
        return r if rc is None else rc

    def too_long():
        finish(note=f"stopped after {args.max_seconds} s")
        try:
            run.close()
        finally:
            remove_own_segments()
            os._exit(3)

    dog = threading.Timer(args.max_seconds, too_long)
    dog.daemon = True
    dog.start()
    rc = None
    try:
        play(run)
    except Slow as e:
        log(e)
        rc = 2
    except SystemExit as e:
        rc = e.code
    finally:
        dog.cancel()
        rc = finish(rc)
        run.close()
    sys.stdout.flush()
    remove_own_segments()
    os._exit(rc)  # client threads that wait for a dead server must not hold this process up


if __name__ == "__main__":
    main()
