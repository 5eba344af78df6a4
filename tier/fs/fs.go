// SPDX-License-Identifier: Apache-2.0

// Package fs keeps objects as files in a directory that LMCache servers may share: names
// and bytes are those of LMCache's fs and fs_native adapters (0.5.6). Beside each file's
// bytes, where LMCache does not look, an extended attribute keeps its checksum.
//
//	MODEL@0xRANK@GROUP@HASH[@SALT].data    the model's slashes are "-SEP-"; rank 8 digits, group and hash hexadecimal
//
// A file appears whole, by a rename. A file of a wrong length counts as missing, and is replaced.
package fs

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	iofs "io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvasir-kv/kvasir/internal/options"
	"github.com/kvasir-kv/kvasir/internal/rawio"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// Trust is what a file must show before it is served.
type Trust uint8

// What a file can be required to show.
const (
	TrustLength   Trust = iota // the right length; the checksum too, where it has one
	TrustChecksum              // a checksum: files that LMCache servers wrote count as missing
)

// Options configures a Dir. A zero field means its default.
type Options struct {
	Path    string // made if it does not exist
	TempDir string // below Path, where files are written before they get their names; default Path
	Direct  bool   // direct I/O, past the page cache, if the file system can do it
	Pad     bool   // fill files up to whole pages with zeros: LMCache's fs_native with use_odirect reads only such files
	Trust   Trust
	Limit   int64 // bytes of all files, those of other servers included; 0 for no limit
	MinFree int64 // bytes that are left free in the file system

	// When the files use more than EvictAt of Limit, the least recently used ones are deleted
	// until they use EvictAt-EvictShare of Limit. With EvictAt 0 no file is deleted, and an
	// object that would pass the limit is not kept.
	EvictAt, EvictShare float64

	NoMake bool        // fail if Path does not exist
	Names  *tier.Names // names of the namespaces; required
	Log    *slog.Logger

	// Changes receives evictions whose file name identifies the object, as those of tier Number. tier.Recorded reports the
	// other changes.
	Changes *tier.Changes
	Number  uint8
}

// Validate reports every field that cannot be used, as options.Errors.
func (o Options) Validate() error {
	var c options.Checks
	c.That(o.TempDir == "" || filepath.IsLocal(o.TempDir), "TempDir", "%q does not lie below the directory", o.TempDir)
	c.That(o.Trust <= TrustChecksum, "Trust", "%d is no known trust level", o.Trust)
	options.Within(&c, "Limit", o.Limit, 0, 1<<60)
	options.Within(&c, "MinFree", o.MinFree, 0, 1<<60)
	options.Within(&c, "EvictAt", o.EvictAt, 0, 1)
	options.Within(&c, "EvictShare", o.EvictShare, 0, 1)
	return c.Err()
}

// Dir is a Tier in a directory. Its methods are safe for concurrent use.
type Dir struct {
	o        Options
	log      *slog.Logger
	temp     string
	readOnly bool
	attrs    attrs
	queue    *rawio.Queue // nil where the kernel has none

	noDirect atomic.Bool
	noSums   atomic.Bool   // the file system has no place for checksums
	gone     atomic.Bool   // the last write found no directory
	temps    atomic.Uint64 // counts temporary names
	written  atomic.Int64
	usage    usage
	warned   sync.Map // which warnings were logged

	stop func()
	done sync.WaitGroup
}

// ErrNoChecksums means that a directory cannot store checksums, although TrustChecksum
// requires them.
var ErrNoChecksums = errors.New("fs: the file system keeps no extended attributes, so no file can show a checksum")

// Open returns the Tier of a directory. It removes the temporary files that ended servers left, once they are an hour old. If the directory
// cannot be written, the Tier only reads.
func Open(o Options) (*Dir, error) { return openWith(o, kernel) }

// openWith is Open with other functions for the extended attributes.
func openWith(o Options, a attrs) (*Dir, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.Path == "" || o.Names == nil {
		return nil, errors.New("fs: Options.Path or Options.Names is missing")
	}
	d := &Dir{o: o, log: o.Log, attrs: a, temp: filepath.Join(o.Path, o.TempDir)}
	d.usage.changed, d.usage.counted = make(chan struct{}, 1), make(chan struct{})
	if d.log == nil {
		d.log = slog.New(slog.DiscardHandler)
	}
	if !o.NoMake {
		if err := os.MkdirAll(d.temp, 0o777); err != nil && !unwritable(err) {
			return nil, fmt.Errorf("fs: %w", err)
		}
	}
	if st, err := os.Stat(o.Path); err != nil {
		return nil, fmt.Errorf("fs: %w", err)
	} else if !st.IsDir() {
		return nil, fmt.Errorf("fs: %s is no directory", o.Path)
	}
	if err := d.try(); err != nil {
		return nil, err
	}
	if o.Direct {
		var err error
		if d.queue, err = rawio.NewQueue(readsAtOnce); err != nil {
			d.log.Info("the kernel gives no queue for reads (AIO): each read takes a thread", "path", o.Path, "err", err)
		}
	}
	life, stop := context.WithCancel(context.Background())
	d.stop = stop
	d.statfs()
	d.done.Go(func() { d.watch(life) })
	return d, nil
}

// readsAtOnce is how many reads of one directory the kernel has at once; others wait.
const readsAtOnce = 64

func unwritable(err error) bool {
	return errors.Is(err, iofs.ErrPermission) || errors.Is(err, unix.EROFS)
}

// try writes a file, to learn whether the directory can be written and can store checksums.
func (d *Dir) try() error {
	path := d.tempName()
	fd, err := unix.Open(path, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
	switch {
	case unwritable(err):
		d.readOnly = true
		d.log.Warn("the directory cannot be written: its objects are served, and none is added", "path", d.o.Path, "err", err)
		return nil
	case noRoom(err): // the file system is full now, and may have room later
		return nil
	case err != nil:
		return fmt.Errorf("fs: write to %s: %w", d.temp, err)
	}
	err = d.setSum(fd, attr{})
	_ = unix.Close(fd)
	_ = unix.Unlink(path)
	if noRoom(err) || errors.Is(err, unix.EIO) { // only this file got no attribute; others may get one
		return nil
	}
	return err
}

// setSum sets a file's attribute. If the file system has no attributes, this file and all later ones get
// none; with TrustChecksum that is an error.
func (d *Dir) setSum(fd int, a attr) error {
	if d.noSums.Load() {
		return nil
	}
	err := d.attrs.set(fd, a.bytes())
	switch {
	case err == nil, noRoom(err), errors.Is(err, unix.EIO):
		return err
	case d.o.Trust == TrustChecksum:
		return fmt.Errorf("%w: %s", ErrNoChecksums, d.o.Path)
	}
	if !d.noSums.Swap(true) {
		d.log.Warn("the file system keeps no extended attributes, so files are compared by their length alone", "path", d.o.Path, "err", err)
	}
	return nil
}

// firstWarning reports whether the warning `what` was not logged before.
func (d *Dir) firstWarning(what string) bool {
	_, said := d.warned.LoadOrStore(what, true)
	return !said
}

const (
	suffix     = ".data"
	tempPrefix = "kvasir-"
	tempSuffix = ".tmp" // LMCache does not read such names
	slash      = "-SEP-"
)

// tempName returns a name that no other file has.
func (d *Dir) tempName() string {
	return filepath.Join(d.temp, fmt.Sprintf("%s%x-%x-%x%s", tempPrefix, os.Getpid(), time.Now().UnixNano(), d.temps.Add(1), tempSuffix))
}

// BesideObjects reports whether a server writes files of this name into a tier's directory that are no objects: the notes of
// clears, and temporary files.
func BesideObjects(name string) bool {
	return strings.HasPrefix(name, tier.NoteName) || strings.HasPrefix(name, tempPrefix) && strings.HasSuffix(name, tempSuffix)
}

// FileName returns the name of an object's file: LMCache's name, or if that is too long or not allowed as a file name,
// the name made of tier.Name.Digested. It reports false for an object without a model.
func FileName(n tier.Name, k kv.Key) (string, bool) {
	name, ok := fileName(n, k)
	if !ok && n.Model != "" {
		return fileName(n.Digested(), k)
	}
	return name, ok
}

// fileName is the name of an object's file as LMCache has it.
func fileName(n tier.Name, k kv.Key) (string, bool) {
	model := strings.ReplaceAll(n.Kept(), "/", slash)
	name := model + fmt.Sprintf("@0x%08x@%x@%s", uint32(k.Rank), k.Group, k.Chunk)
	if n.Salt != "" {
		name += "@" + n.Salt
	}
	name += suffix
	ok := model != "" && len(name) <= unix.NAME_MAX-len(suffix) && !strings.ContainsAny(model, "@\x00") && !strings.ContainsAny(n.Salt, "@/\x00")
	return name, ok
}

// ParseFileName parses a file's name into the name and key of its object, all but the namespace.
func ParseFileName(name string) (n tier.Name, k kv.Key, ok bool) {
	name, ok = strings.CutSuffix(name, suffix)
	parts := strings.Split(name, "@")
	if !ok || len(parts) < 4 || len(parts) > 5 {
		return n, k, false
	}
	rank, err1 := strconv.ParseUint(strings.TrimPrefix(parts[1], "0x"), 16, 32)
	group, err2 := strconv.ParseUint(parts[2], 16, 32)
	hash, err3 := hex.DecodeString(parts[3])
	if err1 != nil || err2 != nil || err3 != nil || len(hash) != len(k.Chunk) {
		return n, k, false
	}
	n.Model = strings.ReplaceAll(parts[0], slash, "/")
	if len(parts) == 5 {
		n.Salt = parts[4]
	}
	k.Rank, k.Group, k.Chunk = kv.Rank(rank), uint32(group), kv.Hash(hash)
	again, ok := fileName(n, k)
	return n, k, ok && again == name+suffix
}

// path returns the path of an object. It reports false if the object's name is not known or cannot be a file name.
func (d *Dir) path(k kv.Key) (string, bool) {
	n, ok := d.o.Names.Of(k.Namespace)
	if !ok {
		return "", false
	}
	name, ok := FileName(n, k)
	if !ok && d.firstWarning("name") {
		d.log.Warn("a model's chunks cannot be named as files, so they are not written; further models are not logged", "model", n.Model, "salt", n.Salt)
	}
	return filepath.Join(d.o.Path, name), ok
}

// Space implements tier.Sized.
func (d *Dir) Space() tier.Space {
	return tier.Space{
		Objects: d.usage.objects.Load(), Used: d.usage.bytes.Load(), Limit: d.o.Limit, Free: d.usage.free.Load(), Written: d.written.Load(),
	}
}

// Close implements tier.Tier.
func (d *Dir) Close() error {
	d.stop()
	d.done.Wait()
	if d.queue != nil {
		return d.queue.Close()
	}
	return nil
}
