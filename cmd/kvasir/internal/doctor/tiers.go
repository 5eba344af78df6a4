// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	tiertool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/tier"
	"github.com/kvasir-kv/kvasir/internal/safelog"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/redis"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// The size and number of the objects that the check of a tier writes.
const (
	checkBytes   = 256 << 10
	checkObjects = 2
)

func (d *doctor) tiers(ctx context.Context) {
	if len(d.Tiers) == 0 {
		d.add(Info, tiers, "not looked at: --tier TIER names one, as kvasir tier check takes it", "", "")
	}
	for _, text := range d.Tiers {
		mark := d.mark()
		kind, path := kindOf(text)
		name := safelog.HideLogin(adapter.Text(text).String())
		switch kind {
		case "disk":
			d.directory(name, path, true)
		case "fs", "fs_native":
			if d.directory(name, path, false) {
				d.attributes(name, path)
				d.try(ctx, name, text)
			}
		case "s3", "s3_native":
			if d.try(ctx, name, text) == tiertool.Useless {
				d.style(ctx, name, text)
			}
		default:
			d.try(ctx, name, text)
			if kind == "redis" || kind == "resp" || kind == "valkey" {
				d.policy(ctx, name, kind, text)
			}
		}
		d.okIfNone(mark, tiers, "%s works", name)
	}
}

// kindOf returns the type of a tier, and the directory that it stores files in; empty: it has no directory.
func kindOf(text string) (kind, path string) {
	if strings.HasPrefix(strings.TrimSpace(text), "{") {
		a, err := adapter.Parse(text)
		if err != nil {
			return "", ""
		}
		return a.Type, a.Path
	}
	kind, path, _ = strings.Cut(text, ":")
	return kind, path
}

// try runs the check of kvasir tier check on the tier that text describes, and adds a finding for each fault. name names the tier in the
// findings. It returns the verdict of the check.
func (d *doctor) try(ctx context.Context, name, text string) tiertool.Verdict {
	v, faults := d.TryTier(ctx, text)
	for _, f := range faults {
		level := Warning
		if v == tiertool.Useless {
			level = Error
		}
		d.add(level, tiers, name+": "+f, "", "kvasir tier check '"+name+"' has the details; docs/operate/tiers.md has the rights that a tier needs")
	}
	return v
}

// directory checks what a tier of files needs: a directory that this user can use, free space, and direct I/O if direct is set. It
// returns false if the directory cannot be used.
func (d *doctor) directory(name, path string, direct bool) bool {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		d.add(Error, tiers, name+": the directory cannot be used", err.Error(), "mkdir -p "+path+"; chown $(id -un) "+path)
		return false
	case !info.IsDir():
		d.add(Error, tiers, name+": "+path+" is no directory", "", "")
		return false
	case unix.Access(path, unix.W_OK|unix.X_OK) != nil:
		d.add(Error, tiers, name+": this user may not write", "the mode or the owner of the directory, or a mount that is read-only", "chown $(id -un) "+path)
		return false
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err == nil {
		if free := int64(fs.Bavail) * fs.Bsize; free < 1<<30 {
			d.add(Warning, tiers, name+": only "+kv.FormatBytes(free)+" are free", "", "choose a larger file system, or a smaller --disk-gb or max_capacity_gb")
		}
		if fs.Type == unix.TMPFS_MAGIC {
			d.add(Warning, tiers, name+": the directory is in memory, and takes the pool's", "its file system is a tmpfs", "choose a directory on a disk")
		}
	}
	if !direct {
		return true
	}
	if err := d.onFile(path, unix.O_DIRECT, nil); errors.Is(err, unix.EINVAL) {
		d.add(Warning, tiers, name+": its file system has no direct I/O: chunks pass through the page cache, and take memory from others", "open with O_DIRECT is refused", "ext4 and XFS have it; overlay file systems of containers often do not: mount a volume")
	} else if err != nil {
		d.add(Error, tiers, name+": no file can be made", err.Error(), "")
	}
	return true
}

// onFile makes a file in a directory, calls f with its descriptor, and removes the file.
func (d *doctor) onFile(dir string, flags int, f func(fd int) error) (err error) {
	path := filepath.Join(dir, fmt.Sprintf(".kvasir-doctor-%d", os.Getpid()))
	fd, err := d.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NOFOLLOW|flags, 0o600)
	defer func() { _ = unix.Unlink(path) }() // Linux makes the file even if it then refuses O_DIRECT
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if f != nil {
		return f(fd)
	}
	return nil
}

// attributes checks whether files in the directory can have extended attributes. One holds the checksum of an object.
func (d *doctor) attributes(name, path string) {
	err := d.onFile(path, 0, func(fd int) error { return d.SetAttribute(fd, "user.kvasir.doctor", []byte("x"), 0) })
	if errors.Is(err, unix.ENOTSUP) {
		d.add(Warning, tiers, name+": objects have no checksums there: a damaged one of the right length would be served", "its file system has no extended attributes (user_xattr)", "choose ext4, XFS or NFS 4.2, or kvasir server --disk, which keeps checksums itself")
	}
}

// style is for a bucket that does not answer under a domain of its own (BUCKET.HOST). It reports an Error if the bucket answers in path
// style (HOST/BUCKET).
func (d *doctor) style(ctx context.Context, name, text string) {
	keys := map[string]any{}
	if strings.HasPrefix(strings.TrimSpace(text), "{") {
		if json.Unmarshal([]byte(text), &keys) != nil || keys["s3_addressing_style"] == "path" {
			return
		}
	} else {
		kind, rest, _ := strings.Cut(text, ":")
		bucket, prefix, _ := strings.Cut(rest, "/")
		keys["type"], keys["s3_bucket"] = kind, bucket
		if prefix != "" {
			keys["s3_prefix"] = prefix
		}
	}
	keys["s3_addressing_style"] = "path"
	other, err := json.Marshal(keys)
	if err != nil {
		return
	}
	if v, _ := d.TryTier(ctx, string(other)); v != tiertool.Useless {
		d.add(Error, tiers, name+": the bucket answers in path style alone", "the store has no domain for buckets (BUCKET.HOST)", `"s3_addressing_style":"path"`)
	}
}

// policyTime is how long the requests to the servers of a Redis tier may take together.
const policyTime = 15 * time.Second

// policy checks what the Redis servers of a tier do when their memory is full.
func (d *doctor) policy(ctx context.Context, name, kind, text string) {
	err := tiertool.With(text, seal.Source{}, d.Log, func(t tier.Tier) error {
		if s, ok := t.(interface{ Below() tier.Tier }); ok { // for an encrypted tier, the tier below it knows the servers
			t = s.Below()
		}
		r, ok := t.(interface {
			Servers(context.Context) ([]redis.ServerMemory, error)
		})
		if !ok {
			return errors.New("this kind of tier cannot list its Redis servers")
		}
		ctx, cancel := context.WithTimeout(ctx, policyTime)
		defer cancel()
		servers, err := r.Servers(ctx)
		for _, s := range servers {
			d.judgeRedis(name, kind, &s)
		}
		return err
	})
	if err != nil {
		d.add(Info, tiers, name+": not looked at: what Redis evicts", err.Error(), "")
	}
}

func (d *doctor) judgeRedis(name, kind string, s *redis.ServerMemory) {
	set := "redis-cli CONFIG SET maxmemory-policy allkeys-lru"
	switch {
	case !s.Known:
		d.add(Warning, tiers, fmt.Sprintf("%s: %s does not report its memory: nothing is written there", name, s.Addr), "its user may not call INFO", "ACL SETUSER NAME +info")
	case s.Limit == 0:
		d.add(Warning, tiers, fmt.Sprintf("%s: %s has no limit of memory: it grows until the kernel ends it", name, s.Addr), "maxmemory is 0", "redis-cli CONFIG SET maxmemory SIZE, and "+set)
	case kind == "resp" && s.Policy != "noeviction":
		d.add(Warning, tiers, fmt.Sprintf("%s: %s evicts objects, and LMCache's resp adapter (0.5.6) may then hang", name, s.Addr), "maxmemory-policy is "+s.Policy, "redis-cli CONFIG SET maxmemory-policy noeviction")
	case kind == "resp": // nothing to report: the tier stops writing before the limit
	case strings.HasPrefix(s.Policy, "volatile-"):
		d.add(Warning, tiers, fmt.Sprintf("%s: %s evicts only objects that have a time to live: when it is full, it takes nothing", name, s.Addr), "maxmemory-policy is "+s.Policy, set)
	case s.Policy == "noeviction":
		d.add(Warning, tiers, fmt.Sprintf("%s: %s evicts nothing: when it is full, it takes nothing", name, s.Addr), "maxmemory-policy is noeviction", set+", or give the tier an eviction of its own (docs/operate/redis.md)")
	}
}
