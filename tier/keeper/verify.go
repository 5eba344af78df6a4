// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/statefile"
)

// VerifyOptions configures Verify.
type VerifyOptions struct {
	Roots    []string
	StateDir string // where checksums are saved; required
	Log      *slog.Logger
}

// Fault is what is wrong with a file.
type Fault struct {
	Path   string `json:"path"`
	Reason string `json:"reason"`
}

// Report is what Verify found.
type Report struct {
	Files  int     `json:"files"` // files that were read whole
	Bytes  int64   `json:"bytes"`
	New    int     `json:"new"`    // files whose checksums are saved for the first time
	Faults []Fault `json:"faults"` // in the order of their paths
}

// Verify reads all files, saves the checksum of each new file, and reports the files whose bytes differ from their saved
// checksum. It neither writes to the directories nor changes the order in which a running keeper evicts. vLLM compares no
// checksums: it serves a file that was replaced by another one of the same length.
func Verify(ctx context.Context, o VerifyOptions) (Report, error) {
	var report Report
	for _, path := range o.Roots {
		v := &verifier{report: &report, log: o.Log}
		if v.log == nil {
			v.log = slog.New(slog.DiscardHandler)
		}
		if err := v.run(ctx, path, o.StateDir); err != nil {
			return report, err
		}
	}
	slices.SortFunc(report.Faults, func(x, y Fault) int { return bytes.Compare([]byte(x.Path), []byte(y.Path)) })
	return report, nil
}

// A saved sum is: hash 32 bytes, its length u8, group u16, and xxh3-64 of the directory's name; then inode u64, time of the last write
// in nanoseconds i64, length i64, xxh3-128.
const (
	sumsMagic   = "kvasir-keeper-sums-1"
	sumKeyBytes = keyBytes + 8
	sumBytes    = sumKeyBytes + 8 + 8 + 8 + 16
)

type verifier struct {
	root   *rootDir
	log    *slog.Logger
	before []byte // the sums that the last Verify saved, sorted
	report *Report
	said   time.Time

	mu      sync.Mutex
	sums    [][sumBytes]byte
	lengths map[string]map[int64]int    // number of files of each length, by the rank's directory
	odd     map[string]map[int64]string // by the rank's directory and a length: the path of a file of that length
}

func (v *verifier) run(ctx context.Context, path, stateDir string) (err error) {
	if v.root, err = openRoot(path); err != nil {
		return err
	}
	defer v.root.dir.Close()
	conn, _, err := join(ctx, path) // so that a running keeper does not count these reads as an engine's
	switch {
	case err == nil:
		defer conn.Close()
	case !errors.Is(err, os.ErrNotExist):
		return err
	}
	if err := makeStateDir(stateDir, []*rootDir{v.root}); err != nil {
		return err
	}
	f, doc, err := statefile.Open(filepath.Join(stateDir, stateName("sums", v.root)), sumsMagic, maxNotes)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	v.before = doc[:len(doc)/sumBytes*sumBytes]
	v.lengths, v.odd = map[string]map[int64]int{}, map[string]map[int64]string{}
	err = v.root.walk(ctx, nil, func(rank, leaf string, fd int) error { return v.files(ctx, rank, leaf, fd) })
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil { // keep the saved sums of the files that were not read
		v.report.Faults = append(v.report.Faults, Fault{path, fmt.Sprintf("it cannot be read whole: %v", err)})
		v.keepRest()
	}
	v.reportLengths()
	slices.SortFunc(v.sums, func(x, y [sumBytes]byte) int { return bytes.Compare(x[:sumKeyBytes], y[:sumKeyBytes]) })
	all := make([]byte, 0, len(v.sums)*sumBytes)
	for i := range v.sums {
		all = append(all, v.sums[i][:]...)
	}
	return f.Write(all)
}

// files compares the files of one directory.
func (v *verifier) files(ctx context.Context, rank, leaf string, fd int) error {
	return readDirectory(fd, func(name []byte, _ byte) error {
		text := string(name)
		k, ok := idIn(rank, leaf, text)
		if !ok {
			return nil
		}
		at := path.Join(rank, leaf, text)
		if err := v.file(ctx, k, rank, at, fd, text); err != nil && ctx.Err() == nil {
			v.fault(at, fmt.Sprintf("it cannot be read: %v", err))
			v.keep(k, rank)
		}
		return ctx.Err()
	})
}

// file compares one file, whose path below the root is `at`. It ignores a file that was removed meanwhile, and a file that is being written.
func (v *verifier) file(ctx context.Context, k id, rank, at string, fd int, name string) error {
	n, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOATIME, 0)
	if errors.Is(err, unix.EPERM) { // another user's file
		n, err = unix.Openat(fd, name, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	}
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(n), name)
	defer f.Close()
	var s, after unix.Stat_t
	if err := unix.Fstat(n, &s); err != nil || s.Mode&unix.S_IFMT != unix.S_IFREG {
		return err
	}
	h := xxh3.New()
	length, err := io.Copy(h, readerUntil{ctx, f})
	if err == nil {
		err = unix.Fstat(n, &after)
	}
	if err != nil {
		return err
	}
	if after.Mtim != s.Mtim || after.Size != s.Size || length != s.Size {
		v.keep(k, rank)
		return nil
	}
	var e [sumBytes]byte
	b := binary.LittleEndian.AppendUint64(appendKey(e[:0], k), xxh3.HashString(rank))
	b = binary.LittleEndian.AppendUint64(b, s.Ino)
	b = binary.LittleEndian.AppendUint64(b, uint64(s.Mtim.Nano()))
	b = binary.LittleEndian.AppendUint64(b, uint64(length))
	sum := h.Sum128().Bytes()
	_ = append(b, sum[:]...)
	v.enter(e, rank, at, length)
	return nil
}

// readerUntil is a Reader that ends with its context, since a sparse file may be as long as the file system allows.
type readerUntil struct {
	ctx context.Context
	r   io.Reader
}

func (r readerUntil) Read(b []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(b)
}

// noted returns the sum that the last Verify saved under a key.
func (v *verifier) noted(key []byte) (was [sumBytes]byte, known bool) {
	n := len(v.before) / sumBytes
	i := sort.Search(n, func(i int) bool { return bytes.Compare(v.before[i*sumBytes:i*sumBytes+sumKeyBytes], key) >= 0 })
	if i == n || !bytes.Equal(v.before[i*sumBytes:i*sumBytes+sumKeyBytes], key) {
		return was, false
	}
	return [sumBytes]byte(v.before[i*sumBytes : (i+1)*sumBytes]), true
}

// keep saves the old sum again for a file that cannot be compared now.
func (v *verifier) keep(k id, rank string) {
	if was, known := v.noted(binary.LittleEndian.AppendUint64(appendKey(nil, k), xxh3.HashString(rank))); known {
		v.mu.Lock()
		defer v.mu.Unlock()
		v.sums = append(v.sums, was)
	}
}

// keepRest saves the old sums again for all files that were not seen.
func (v *verifier) keepRest() {
	seen := make(map[[sumKeyBytes]byte]bool, len(v.sums))
	for i := range v.sums {
		seen[[sumKeyBytes]byte(v.sums[i][:])] = true
	}
	for b := v.before; len(b) > 0; b = b[sumBytes:] {
		if !seen[[sumKeyBytes]byte(b)] {
			v.sums = append(v.sums, [sumBytes]byte(b))
		}
	}
}

// enter compares the sum of the file at the path `at` with the saved one, and reports a fault if they differ.
func (v *verifier) enter(e [sumBytes]byte, rank, at string, length int64) {
	was, known := v.noted(e[:sumKeyBytes])
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Files++
	v.report.Bytes += length
	if v.lengths[rank] == nil {
		v.lengths[rank], v.odd[rank] = map[int64]int{}, map[int64]string{}
	}
	v.lengths[rank][length]++
	v.odd[rank][length] = at
	if time.Since(v.said) > 5*time.Second {
		v.log.Info("comparing files with their checksums", "files", v.report.Files, "bytes", v.report.Bytes, "faults", len(v.report.Faults))
		v.said = time.Now()
	}
	if !known {
		v.report.New++
		v.sums = append(v.sums, e)
		return
	}
	const inodeEnd, sumFrom = sumKeyBytes + 8, sumKeyBytes + 24
	same, equal := bytes.Equal(was[:inodeEnd], e[:inodeEnd]), bytes.Equal(was[sumFrom:], e[sumFrom:])
	switch {
	case !equal && same: // keep the old sum, so that each Verify reports the file until it is removed
		v.report.Faults = append(v.report.Faults, Fault{v.root.join(at), "its bytes changed in place"})
		e = was
	case !equal:
		v.report.Faults = append(v.report.Faults, Fault{v.root.join(at), "another file with other bytes took its place: an engine computed it again, or it was replaced"})
	}
	v.sums = append(v.sums, e)
}

func (v *verifier) fault(at, reason string) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Faults = append(v.report.Faults, Fault{v.root.join(at), reason})
}

// reportLengths reports a file for each length that is not the usual one of its rank: all files of one rank should have one length.
func (v *verifier) reportLengths() {
	for rank, lengths := range v.lengths {
		if rank == "" || len(lengths) < 2 {
			continue
		}
		usual, most := int64(0), 0
		for length, n := range lengths {
			if n > most {
				usual, most = length, n
			}
		}
		for length, n := range lengths {
			if length != usual && n < most {
				v.fault(v.odd[rank][length], fmt.Sprintf("it has %d bytes, as %d files; %d others have %d", length, n, most, usual))
			}
		}
	}
}
