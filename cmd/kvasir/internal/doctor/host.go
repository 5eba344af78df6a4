// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/hostmem"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store/pool"
)

// smallShm is the size of /dev/shm, in bytes, below which hardly any pool fits. A container gets less than this by default.
const smallShm = 256 << 20

func (d *doctor) sharedMemory() {
	mark := d.mark()
	var fs unix.Statfs_t
	if err := unix.Statfs(d.Shm, &fs); err != nil {
		d.add(Error, sharedMemory, "there is no "+d.Shm, err.Error(), "mount -t tmpfs -o size=50% tmpfs "+d.Shm)
		return
	}
	total, free := int64(fs.Blocks)*fs.Bsize, int64(fs.Bavail)*fs.Bsize
	more := fmt.Sprintf("docker run --shm-size SIZE (Kubernetes: an emptyDir with medium: Memory at %s), or mount -o remount,size=SIZE %s", d.Shm, d.Shm)
	if fs.Type != unix.TMPFS_MAGIC {
		d.add(Error, sharedMemory, d.Shm+" is not in memory: the pool would be on a disk", "its file system is no tmpfs", "mount -t tmpfs -o size=50% tmpfs "+d.Shm)
	}
	if err := unix.Access(d.Shm, unix.W_OK); err != nil {
		d.add(Error, sharedMemory, "this user may not write to "+d.Shm, err.Error(), "chmod 1777 "+d.Shm)
	}
	unused := d.unusedPools()
	switch {
	case d.PoolBytes > total:
		d.add(Error, sharedMemory, fmt.Sprintf("%s has %s in all, less than a pool of %s", d.Shm, kv.FormatBytes(total), kv.FormatBytes(d.PoolBytes)), "the mount limits its size", more)
	case d.PoolBytes > free+unused:
		d.add(Warning, sharedMemory, fmt.Sprintf("%s has %s free, less than a pool of %s", d.Shm, kv.FormatBytes(free), kv.FormatBytes(d.PoolBytes)), "other files take the rest, such as the pool of a server that runs", "kvasir pool ls; ls -l "+d.Shm)
	case d.PoolBytes == 0 && total < smallShm:
		d.add(Warning, sharedMemory, fmt.Sprintf("%s has only %s in all", d.Shm, kv.FormatBytes(total)), "the default of containers is 64 MiB", more)
	}
	if unused > total/10 {
		d.add(Warning, sharedMemory, fmt.Sprintf("pools that no process uses take %s of %s", kv.FormatBytes(unused), d.Shm), "a pool outlives its server, so that the next one begins with it", "kvasir pool rm --all (those that you do not want back)")
	}
	d.okIfNone(mark, sharedMemory, "%s has %s free of %s", d.Shm, kv.FormatBytes(free), kv.FormatBytes(total))
}

// unusedPools returns how many bytes the pools of this user take that no process uses.
func (d *doctor) unusedPools() (bytes int64) {
	found, err := pool.List(d.Shm)
	if err != nil {
		return 0
	}
	for _, f := range found {
		if f.Ours && f.Server == 0 && len(f.Mappers) == 0 {
			bytes += f.Taken
		}
	}
	return bytes
}

// wantFiles is how many open files a server should be allowed: it may have 4,096 connections on each kind of listener.
const wantFiles = 16384

func (d *doctor) limits() {
	mark := d.mark()
	text := read(filepath.Join(d.Proc, "self/limits"))
	// hard returns a hard limit of the process; -1: there is none.
	hard := func(name string) int64 {
		for line := range strings.Lines(text) {
			rest, ok := strings.CutPrefix(line, name)
			if words := strings.Fields(rest); ok && len(words) >= 2 {
				if n, err := strconv.ParseInt(words[1], 10, 64); err == nil {
					return n
				}
			}
		}
		return -1
	}
	if text == "" {
		d.add(Info, limits, "not looked at: "+d.Proc+"/self/limits cannot be read", "", "")
	}
	if n := hard("Max open files"); n >= 0 && n < wantFiles {
		d.add(Warning, limits, fmt.Sprintf("a process may have %d files open, connections included; a busy server wants %d", n, wantFiles), "the hard limit of open files", "ulimit -Hn 65536, or LimitNOFILE=65536 in the systemd unit, or docker run --ulimit nofile=65536")
	}
	want := max(d.PoolBytes, 64<<20)
	for name, what := range map[string]string{"Max file size": "file", "Max address space": "address space"} {
		if n := hard(name); n >= 0 && n < want {
			d.add(Error, limits, fmt.Sprintf("a process may have %s of %s, less than a pool of %s", kv.FormatBytes(n), what, kv.FormatBytes(want)), "the hard limit "+strings.ToLower(name[4:]), "ulimit -f unlimited; ulimit -v unlimited (LimitFSIZE=, LimitAS= in the systemd unit)")
		}
	}
	if n, _, limited := hostmem.Limit(d.Proc, d.Sys); limited && n < d.PoolBytes {
		d.add(Error, limits, fmt.Sprintf("the control group may use %s of memory, less than a pool of %s", kv.FormatBytes(n), kv.FormatBytes(d.PoolBytes)), "the pool's memory in "+d.Shm+" counts, and the kernel ends processes at the limit", "docker run --memory, resources.limits.memory of the container, or MemoryMax= of the systemd unit")
	}
	d.okIfNone(mark, limits, "open files, file size, address space and memory suffice")
}

func (d *doctor) hugePages() {
	mark := d.mark()
	at := filepath.Join(d.Sys, "kernel/mm/transparent_hugepage")
	shmem, enabled := chosen(read(filepath.Join(at, "shmem_enabled"))), chosen(read(filepath.Join(at, "enabled")))
	switch {
	case shmem == "" && enabled == "":
		d.add(Info, hugePages, "the kernel has no transparent huge pages: direct I/O of tiers is slower", "", "")
	case shmem == "deny":
		d.add(Warning, hugePages, "shared memory gets no huge pages: direct I/O of tiers takes 1.4 to 1.8 times as long", "shmem_enabled is deny", "echo never > "+filepath.Join(at, "shmem_enabled")+" (the server asks for huge pages itself)")
	case enabled == "never":
		d.add(Info, hugePages, "transparent huge pages are off", "enabled is never", "echo madvise > "+filepath.Join(at, "enabled"))
	}
	var total, unused, size, memory int64
	for line := range strings.Lines(read(filepath.Join(d.Proc, "meminfo"))) {
		words := strings.Fields(line)
		if len(words) < 2 {
			continue
		}
		n, _ := strconv.ParseInt(words[1], 10, 64)
		switch words[0] {
		case "MemTotal:":
			memory = n
		case "HugePages_Total:":
			total = n
		case "HugePages_Free:":
			unused = n
		case "Hugepagesize:":
			size = n
		}
	}
	if total > 0 && unused*size > memory/8 {
		d.add(Warning, hugePages, fmt.Sprintf("%s of memory are reserved as huge pages that no process uses", kv.FormatBytes(unused*size<<10)), "vm.nr_hugepages; Kvasir uses transparent huge pages, and cannot use these", "sysctl -w vm.nr_hugepages=0")
	}
	d.okIfNone(mark, hugePages, "shared memory may have huge pages (shmem_enabled is %s)", shmem)
}

// chosen returns the word in brackets in a text. The kernel marks the chosen one of several values so.
func chosen(text string) string {
	_, rest, _ := strings.Cut(text, "[")
	word, _, _ := strings.Cut(rest, "]")
	return word
}

// firstDay is a day before every release that has this command. A clock that shows an earlier time is wrong.
var firstDay = time.Date(2026, 6, 1, 0, 0, 0, 0, time.UTC)

// The differences between two clocks from which on the doctor reports a Warning or an Error.
const (
	clockWarning = 5 * time.Second
	clockError   = 5 * time.Minute
)

func (d *doctor) clocks(ctx context.Context) {
	mark := d.mark()
	const mend = "timedatectl set-ntp true (or chronyd, or the hypervisor's clock)"
	if now := d.Now(); now.Before(firstDay) {
		d.add(Error, clocks, "the clock says "+now.UTC().Format(time.DateOnly)+": it is wrong", "certificates are not valid yet, tokens do not end, S3 refuses signatures", mend)
	}
	var t unix.Timex
	if _, err := unix.Adjtimex(&t); err == nil && t.Status&unix.STA_UNSYNC != 0 && len(d.Peers) == 0 {
		d.add(Info, clocks, "the kernel's clock is not disciplined by a time service in this machine or container; --peer URL compares it with another machine's", "", mend)
	}
	for _, url := range d.Peers {
		off, err := d.offset(ctx, url)
		switch {
		case err != nil:
			d.add(Warning, clocks, "the clock at "+safeURL(url)+" cannot be asked", err.Error(), "")
		case off.Abs() >= clockError:
			d.add(Error, clocks, fmt.Sprintf("this clock and that of %s differ by %s", safeURL(url), off.Abs().Round(time.Second)), "S3 refuses requests that are 15 minutes off; certificates, tokens with an end and the times to live of tiers go by it", mend)
		case off.Abs() >= clockWarning:
			d.add(Warning, clocks, fmt.Sprintf("this clock and that of %s differ by %s", safeURL(url), off.Abs().Round(time.Second)), "tokens with an end and the times to live of tiers go by it", mend)
		}
	}
	d.okIfNone(mark, clocks, "%d other clocks agree", len(d.Peers))
}

// offset returns how far another machine's clock and this one differ, never below 0. It compares with the Date of the machine's answer,
// which is exact to a second.
func (d *doctor) offset(ctx context.Context, url string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodHead, url, nil)
	if err != nil {
		return 0, err
	}
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	began := d.Now()
	answer, err := client.Do(r)
	if err != nil {
		return 0, err
	}
	ended := d.Now()
	_, _ = io.CopyN(io.Discard, answer.Body, 1<<10)
	answer.Body.Close()
	theirs, err := http.ParseTime(answer.Header.Get("Date"))
	if err != nil {
		return 0, fmt.Errorf("the answer has no Date: %w", err)
	}
	switch { // a Date may be up to a second old
	case theirs.Add(time.Second).Before(began):
		return theirs.Add(time.Second).Sub(began), nil
	case theirs.After(ended):
		return theirs.Sub(ended), nil
	}
	return 0, nil
}

func (d *doctor) congestion() {
	switch name := strings.TrimSpace(read(filepath.Join(d.Proc, "sys/net/ipv4/tcp_congestion_control"))); name {
	case "":
		d.add(Info, congestion, "not looked at: the kernel does not say which it uses", "", "")
	case "bbr":
		d.add(Info, congestion, "bbr paces loopback too: transfers within one host take 1.2 to 1.7 times as long", "net.ipv4.tcp_congestion_control is bbr", "sysctl -w net.ipv4.tcp_congestion_control=cubic, where P and D share a host")
	case "lp", "vegas", "nv":
		d.add(Warning, congestion, name+" gives way to every other connection: transfers of KV take longer", "net.ipv4.tcp_congestion_control is "+name, "sysctl -w net.ipv4.tcp_congestion_control=cubic")
	default:
		d.add(OK, congestion, name, "", "")
	}
}
