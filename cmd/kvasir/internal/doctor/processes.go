// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// process is a running process, as /proc shows it.
type process struct {
	dir     string // its directory, /proc/PID
	pid     int
	args    []string
	environ map[string]string // only of an engine; empty if this user may not read it
	uid     int               // the effective user; -1: not known
}

// processes returns all processes that this user may see, except this one.
func (d *doctor) processes() (out []*process) {
	entries, err := os.ReadDir(d.Proc)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		p := &process{dir: filepath.Join(d.Proc, e.Name()), pid: pid, uid: -1, environ: map[string]string{}}
		p.args = strings.Split(strings.TrimRight(read(filepath.Join(p.dir, "cmdline")), "\x00"), "\x00")
		for line := range strings.Lines(read(filepath.Join(p.dir, "status"))) {
			if rest, ok := strings.CutPrefix(line, "Uid:"); ok {
				if words := strings.Fields(rest); len(words) > 1 {
					p.uid, _ = strconv.Atoi(words[1]) // the effective user
				}
			}
		}
		if p.isEngine() {
			for entry := range strings.SplitSeq(read(filepath.Join(p.dir, "environ")), "\x00") {
				if name, value, ok := strings.Cut(entry, "="); ok {
					p.environ[name] = value
				}
			}
		}
		out = append(out, p)
	}
	return out
}

// name returns the name of the process's command.
func (p *process) name() string {
	if name := strings.TrimSpace(read(filepath.Join(p.dir, "comm"))); name != "" {
		return name
	}
	return filepath.Base(p.args[0])
}

func (p *process) isKvasir() bool { return filepath.Base(p.args[0]) == "kvasir" }

// isServer reports whether the process is a Kvasir node: kvasir server or kvasir all.
func (p *process) isServer() bool {
	return p.isKvasir() && (slices.Contains(p.args, "server") || slices.Contains(p.args, "all"))
}

// isEngine reports whether the process is vLLM or SGLang. It knows their commands, their Python modules, and the titles that they give
// their processes.
func (p *process) isEngine() bool {
	if strings.HasPrefix(p.args[0], "VLLM::") || strings.HasPrefix(p.args[0], "sglang::") {
		return true
	}
	for i, a := range p.args[:min(len(p.args), 6)] {
		module := i > 0 && p.args[i-1] == "-m"
		for _, name := range []string{"vllm", "sglang"} {
			if module && (a == name || strings.HasPrefix(a, name+".")) {
				return true
			}
			if !strings.HasPrefix(a, "-") && filepath.Base(a) == name && i+1 < len(p.args) && slices.Contains([]string{"serve", "launch_server"}, p.args[i+1]) {
				return true
			}
		}
	}
	return false
}

// hasSocket reports whether the process has one of the sockets with these inodes open.
func (p *process) hasSocket(inodes []string) bool {
	if len(inodes) == 0 {
		return false
	}
	fds, _ := os.ReadDir(filepath.Join(p.dir, "fd")) // the list is empty for another user's process
	for _, fd := range fds {
		if to, err := os.Readlink(filepath.Join(p.dir, "fd", fd.Name())); err == nil && slices.Contains(inodes, to) {
			return true
		}
	}
	return false
}

// view is what a process sees of the machine. Two processes can share a pool only if their views agree.
type view struct {
	who         string
	uid         int
	shm, shmErr string // the ID of the file system at /dev/shm, or why it is not known
	network     string
}

func (d *doctor) viewOf(p *process) view {
	v := view{who: fmt.Sprintf("process %d (%s)", p.pid, p.name()), uid: p.uid}
	v.network, _ = os.Readlink(filepath.Join(p.dir, "ns/net")) // empty: not known
	v.shm, v.shmErr = fileID(filepath.Join(p.dir, "root/dev/shm"))
	return v
}

// fileID returns a text that identifies a file by its device and inode, or says in fault why it cannot.
func fileID(path string) (id, fault string) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", err.Error()
	}
	return fmt.Sprint(st.Dev, " ", st.Ino), ""
}

// users compares the view of each engine with that of each server, because an engine maps the server's pool. If no server runs, this
// process stands for one.
func (d *doctor) users(all []*process) {
	mark := d.mark()
	var servers []view
	engines := 0
	for _, p := range all {
		if p.isServer() {
			servers = append(servers, d.viewOf(p))
		}
	}
	if len(servers) == 0 {
		own := view{who: "this command, in the place of a server,", uid: os.Getuid()}
		own.network, _ = os.Readlink(filepath.Join(d.Proc, "self/ns/net")) // empty: not known
		own.shm, own.shmErr = fileID(d.Shm)
		servers = []view{own}
	}
	for _, p := range all {
		if !p.isEngine() {
			continue
		}
		engines++
		e := d.viewOf(p)
		for _, s := range servers {
			d.compare(&e, &s)
		}
	}
	d.okIfNone(mark, users, "engines: %d; each shares user and /dev/shm with the server", engines)
}

func (d *doctor) compare(e, s *view) {
	switch {
	case e.shm == "" || s.shm == "":
		d.add(Info, users, "not looked at: which /dev/shm "+e.who+" and "+s.who+" have", e.shmErr+s.shmErr, "sudo kvasir doctor")
	case e.shm != s.shm:
		d.add(Error, users, e.who+" has another /dev/shm than "+s.who+": it cannot map the pool", "they are in different containers", "give both containers one (--ipc host, or a shared volume at /dev/shm), or let the engine store through the socket (--pickle on)")
	}
	if e.uid >= 0 && s.uid >= 0 && e.uid != s.uid && e.uid != 0 {
		d.add(Error, users, fmt.Sprintf("%s has user %d, %s has user %d: the engine may not open the pool", e.who, e.uid, s.who, s.uid), "the pool's file has mode 0600", "run both as one user (docker run --user, User= of the systemd unit)")
	}
	if e.network != "" && s.network != "" && e.network != s.network {
		d.add(Info, users, e.who+" has a network of its own: over TCP "+s.who+" cannot see its user", "the kernel names users within one network namespace", "--network host for the engine's container, or kvasir server --trust-address of its network")
	}
}
