// SPDX-License-Identifier: Apache-2.0

package access

import (
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// A process of this user on this host may still have another /dev/shm than this server: a container with the host's network. Under the
// pool's name it could find a file of another server there, and copy into that.

// Finder looks for the processes behind connections. A search reads all of /proc, so searches take at most half of the time. One search
// serves all callers that wait for it.
type Finder struct {
	mu    sync.Mutex
	next  time.Time // earliest time of the next search
	uid   int       // the user whose sockets the last search found
	found map[uint64]peercred.Process
}

// patience bounds how long a caller of Process waits, for the callers before it and for the next search. A caller that would have to wait
// longer gets 0: its process is not known.
const patience = 2 * time.Second

// Process returns the id of the process that has the other end of the connection open. It returns 0 if that process is not known, or if the
// next search for it would begin only after more than patience.
func (f *Finder) Process(c *Caller) int {
	if c.Peer.PID != 0 || !c.Peer.Known() || c.Peer.Socket == 0 {
		return c.Peer.PID
	}
	asked := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	if p, ok := f.found[c.Peer.Socket]; ok && f.uid == c.Peer.UID {
		if has, _ := peercred.HasSocket(p.PID, c.Peer.Socket); has && !p.Gone() {
			return p.PID
		}
	}
	wait := time.Until(f.next)
	if time.Since(asked)+wait > patience {
		return 0
	}
	time.Sleep(wait)
	began := time.Now()
	f.uid, f.found = c.Peer.UID, peercred.Owners(c.Peer.UID, nil)
	f.next = time.Now().Add(time.Since(began)) // at most half of the time
	return f.found[c.Peer.Socket].PID
}

// SameFile returns an error if process pid finds another file than this process at path, or none. It returns nil if it cannot look.
func SameFile(pid int, path string) error {
	var ours, theirs unix.Stat_t
	if unix.Stat(path, &ours) != nil {
		return nil
	}
	switch err := unix.Stat(filepath.Join("/proc", strconv.Itoa(pid), "root", path), &theirs); {
	case err == unix.ENOENT && unix.Stat(filepath.Join("/proc", strconv.Itoa(pid), "root"), &theirs) == nil:
	case err != nil || ours.Dev == theirs.Dev && ours.Ino == theirs.Ino:
		return nil
	}
	return fmt.Errorf("%w: process %d has another %s than this server (containers: --ipc=host, or one shared volume)", ErrMayNotOpen, pid, filepath.Dir(path))
}
