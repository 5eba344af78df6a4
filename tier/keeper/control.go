// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/takeover"
)

// control listens on one abstract Unix socket for each root. The socket prevents a second keeper, and answers with the figures.
// Reads of a process that is connected to it do not count as reads of an engine.
type control struct {
	listeners map[*rootDir]net.Listener // owned by Open's goroutine, then by the goroutine that looks at the directories
	figures   func() Stats
	done      sync.WaitGroup

	mu struct {
		sync.Mutex
		helpers map[net.Conn]int // connection → process id
		closed  bool
	}
}

// maxHelpers bounds the connected processes. A further connection is closed at once.
const maxHelpers = 32

func socketOf(dir *os.File) (string, error) {
	var s unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &s); err != nil {
		return "", err
	}
	return fmt.Sprintf("@kvasir-keeper-%x-%d", s.Dev, s.Ino), nil
}

func openControl(roots []*rootDir, figures func() Stats) (_ *control, err error) {
	c := &control{figures: figures, listeners: map[*rootDir]net.Listener{}}
	c.mu.helpers = map[net.Conn]int{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	for _, r := range roots {
		if err := c.take(r, r.dir); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// take makes dir the directory of a root, in place of its former one.
func (c *control) take(r *rootDir, dir *os.File) error {
	name, err := socketOf(dir)
	if err != nil {
		return err
	}
	l, err := listen(name)
	if errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("another keeper on this host already keeps %s%s", r.path, process(holder(name)))
	}
	if err != nil {
		return err
	}
	// Abstract sockets do not cross containers. On a file system of this host alone, a lock keeps keepers in two containers apart.
	lock := func() error { return unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
	if isShared(dir) {
		_ = lock()
	} else if err := takeover.LockAfter(0, unix.EWOULDBLOCK, lock); errors.Is(err, unix.EWOULDBLOCK) {
		return errors.Join(fmt.Errorf("another process has locked %s: is a keeper running in a container?", r.path), l.Close())
	}
	if had := c.listeners[r]; had != nil {
		_ = had.Close() // the socket of the former directory
	}
	c.listeners[r] = l
	c.done.Go(func() { c.serve(l) })
	return nil
}

// listen listens on a socket. It waits while a keeper that was killed may still hold the socket.
func listen(name string) (l net.Listener, err error) {
	if l, err = net.Listen("unix", name); !errors.Is(err, unix.EADDRINUSE) {
		return l, err
	}
	err = takeover.LockAfter(holder(name), unix.EADDRINUSE, func() error {
		l, err = net.Listen("unix", name)
		return err
	})
	return l, err
}

// holder returns the process that listens on a socket, 0 if it is not known.
func holder(name string) int {
	c, err := net.DialTimeout("unix", name, time.Second)
	if err != nil {
		return 0
	}
	defer c.Close()
	return peercred.Of(c).PID
}

// process names a process for a message.
func process(pid int) string {
	if pid == 0 {
		return ""
	}
	return fmt.Sprintf(" (process %d)", pid)
}

func (c *control) serve(l net.Listener) {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // for example too many open files
			time.Sleep(100 * time.Millisecond)
			continue
		}
		if !c.admit(conn) {
			conn.Close()
			continue
		}
		c.done.Go(func() {
			defer c.leave(conn)
			_ = conn.SetWriteDeadline(time.Now().Add(5 * time.Second))
			if json.NewEncoder(conn).Encode(c.figures()) == nil {
				_, _ = conn.Read(make([]byte, 1)) // until the process disconnects
			}
		})
	}
}

// admit reports whether to accept a connection: only from a process of the keeper's own user or of root, and at most maxHelpers of them. It
// counts the accepted ones; leave ends that.
func (c *control) admit(conn net.Conn) bool {
	p := peercred.Of(conn)
	uid := os.Getuid()
	c.mu.Lock()
	defer c.mu.Unlock()
	if !p.Known() || p.UID != uid && p.UID != 0 || len(c.mu.helpers) >= maxHelpers || c.mu.closed {
		return false
	}
	c.mu.helpers[conn] = p.PID
	return true
}

func (c *control) leave(conn net.Conn) {
	c.mu.Lock()
	delete(c.mu.helpers, conn)
	c.mu.Unlock()
	conn.Close()
}

// own reports whether a thread belongs to this process or to a connected one.
func (c *control) own(thread int32) bool {
	if thread <= 0 {
		return false
	}
	if isThread(os.Getpid(), int(thread)) {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, pid := range c.mu.helpers {
		if pid != 0 && isThread(pid, int(thread)) {
			return true
		}
	}
	return false
}

// helping reports whether a process is connected. inotify cannot tell the reads of such a process from an engine's.
func (c *control) helping() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.mu.helpers) > 0
}

func isThread(pid, thread int) bool { return unix.Tgkill(pid, thread, 0) == nil }

func (c *control) close() error {
	var errs []error
	for _, l := range c.listeners {
		errs = append(errs, l.Close())
	}
	c.mu.Lock()
	c.mu.closed = true
	for conn := range c.mu.helpers {
		errs = append(errs, conn.SetDeadline(time.Unix(1, 0)))
	}
	c.mu.Unlock()
	c.done.Wait()
	return errors.Join(errs...)
}

// Ask returns the figures of the keeper of a directory. It fails with os.ErrNotExist if none runs on this host.
func Ask(ctx context.Context, root string) (Stats, error) {
	conn, s, err := join(ctx, root)
	if err != nil {
		return Stats{}, err
	}
	return s, conn.Close()
}

// join connects to the keeper of a directory. Until the connection ends, the keeper ignores this process's reads, as it ignores its own.
func join(ctx context.Context, root string) (net.Conn, Stats, error) {
	dir, err := os.Open(root)
	if err != nil {
		return nil, Stats{}, err
	}
	defer dir.Close()
	name, err := socketOf(dir)
	if err != nil {
		return nil, Stats{}, err
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", name)
	if errors.Is(err, unix.ECONNREFUSED) {
		return nil, Stats{}, fmt.Errorf("%w: no keeper of this host has %s", os.ErrNotExist, root)
	}
	if err != nil {
		return nil, Stats{}, err
	}
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	var s Stats
	if err := json.NewDecoder(conn).Decode(&s); err != nil {
		return nil, Stats{}, errors.Join(fmt.Errorf("the keeper of %s does not answer (is it another user's?): %w", root, err), conn.Close())
	}
	return conn, s, nil
}

// networkSystems are file systems to which other hosts can write without an event on this host.
var networkSystems = []int64{
	unix.NFS_SUPER_MAGIC, unix.SMB_SUPER_MAGIC, 0xfe534d42 /* SMB 2 */, unix.CEPH_SUPER_MAGIC, unix.FUSE_SUPER_MAGIC,
	0x0bd00bd0 /* Lustre */, 0x47504653 /* GPFS */, 0x19830326 /* BeeGFS */, unix.V9FS_MAGIC,
}

// shared reports whether other hosts may write to the root's file system.
func (r *rootDir) shared() bool { return isShared(r.dir) }

func isShared(dir *os.File) bool {
	var s unix.Statfs_t
	return unix.Fstatfs(int(dir.Fd()), &s) == nil && slices.Contains(networkSystems, int64(s.Type))
}
