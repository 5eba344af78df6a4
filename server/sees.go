package server

import (
	"fmt"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/peercred"
)

// A process of this user on this host may still have another /dev/shm than this
// server: a container with the host's network. Under the pool's name it could find
// a file that another server left there, and copy into that.

// looks paces searches for the process behind a connection, which read all of /proc.
type looks struct {
	mu   sync.Mutex
	next time.Time
}

// seesPool reports why the process behind c does not see this pool's file under its
// name; nil when it does, or when that cannot be told.
func (s *Server) seesPool(c *caller) error {
	if c.pid == 0 {
		if c.pid = s.processOf(c); c.pid == 0 {
			return nil
		}
	}
	return notSame(c.pid, s.store.PoolPath())
}

// processOf returns the process that has the other end of the connection open; 0
// when that is not known, or too many were looked for already.
func (s *Server) processOf(c *caller) int {
	if c.peer.PID != 0 || !c.peer.Known() || c.peer.Socket == 0 {
		return c.peer.PID
	}
	s.looks.mu.Lock()
	defer s.looks.mu.Unlock()
	began := time.Now()
	if began.Before(s.looks.next) {
		return 0
	}
	p := peercred.Owners(c.peer.UID, map[uint64]bool{c.peer.Socket: true})[c.peer.Socket]
	s.looks.next = time.Now().Add(time.Since(began)) // at most half of the time
	return p.PID
}

// notSame returns an error when process pid finds another file than this process, or
// none, at path. Where that cannot be looked at, it returns nil.
func notSame(pid int, path string) error {
	var ours, theirs unix.Stat_t
	if unix.Stat(path, &ours) != nil {
		return nil
	}
	switch err := unix.Stat(filepath.Join("/proc", strconv.Itoa(pid), "root", path), &theirs); {
	case err == unix.ENOENT && unix.Stat(filepath.Join("/proc", strconv.Itoa(pid), "root"), &theirs) == nil:
	case err != nil || ours.Dev == theirs.Dev && ours.Ino == theirs.Ino:
		return nil
	}
	return fmt.Errorf("%w: process %d has another %s than this server (containers: --ipc=host, or one shared volume)", errNotTold, pid, filepath.Dir(path))
}
