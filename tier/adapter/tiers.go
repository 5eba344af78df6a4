// SPDX-License-Identifier: Apache-2.0

package adapter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/generation"
	"github.com/kvasir-kv/kvasir/tier/mooncakestore"
	"github.com/kvasir-kv/kvasir/tier/seal"
)

// Options says which tiers to open.
type Options struct {
	Disk     disk.Options // without a directory there is no disk; the disk is asked before the others
	Adapters []Adapter    // the first is asked first
	Trust    fs.Trust
	Existing bool // directories must exist
	Names    *tier.Names
	Changes  *tier.Changes // records what the tiers have; nil for no record
	Log      *slog.Logger  // nil discards
	Keys     seal.Source   // encrypt the disks, redis and s3_native; without keys objects are not encrypted

	keys   *seal.Keys // of Keys, opened
	number uint8      // number of the next tier in Changes
}

// Set is the tiers of one server.
type Set struct {
	Tier  tier.Tier        // all tiers as one; nil for none
	Each  []*tier.Counting // in the order in which they are asked
	Place string           // identifies the tiers, for store.Options.Place
	Disk  *disk.Disk       // nil for none

	Clusters map[string]*mooncakestore.Tier // by the name of the tier
	Contents map[string]tier.Tier           // the tiers below Bounded and Counted, by their names, for tier.RemoveIf
	Numbers  map[string]uint8               // by the name of an adapter's tier: its number in Options.Changes
	Seals    map[string]*seal.Tier          // the tiers that are encrypted if there are keys, by their names
	Keys     *seal.Keys                     // nil for none; the owner of the Set must watch them
	probes   []func(context.Context)
	Shared   []generation.Place // the tiers that other servers may share and that keep a note

	// ReadFiles is how often the files of generations must be read, if another server may share a directory and write its file; else 0.
	ReadFiles time.Duration
}

// noteEvery and paidNoteEvery are the intervals at which the notes of shared tiers are read. Each read of an S3 note costs money.
const noteEvery, paidNoteEvery = 250 * time.Millisecond, time.Second

// noteOf returns the place where a tier keeps the generations for the servers that share it. It reports false for a tier that keeps none.
func noteOf(a *Adapter, name string, d tier.Tier) (p generation.Place, ok bool) {
	note, ok := d.(tier.Notebook)
	if !ok {
		return p, false
	}
	p = generation.Place{Name: name, Note: note, Every: noteEvery, Foreign: a.Type != "redis" && a.Type != "s3_native"}
	if a.S3 != nil {
		p.Every = paidNoteEvery
	}
	return p, true
}

// readFiles returns Set.ReadFiles. Servers may share the directories of adapters, but no --disk.
func readFiles(adapters []Adapter) time.Duration {
	if slices.ContainsFunc(adapters, func(a Adapter) bool { return len(a.Shared()) == 0 }) {
		return noteEvery
	}
	return 0
}

// Open opens the tiers. If it cannot open one, it closes the others.
func Open(o Options) (s Set, err error) {
	var opened []tier.Tier
	defer func() {
		if err != nil {
			for _, t := range opened {
				err = errors.Join(err, t.Close())
			}
		}
	}()
	var places []string
	if len(o.Disk.Dirs)+len(o.Adapters) > tier.MaxTiers {
		return Set{}, errTooMany
	}
	if len(o.Disk.Dirs)+len(o.Adapters) > 0 {
		if s.Keys, err = seal.OpenKeys(context.Background(), o.Keys); err != nil {
			return Set{}, err
		}
		o.keys, s.Seals = s.Keys, make(map[string]*seal.Tier)
		defer func() {
			if err == nil {
				logSealed(&s, o.Log)
			}
		}()
	}
	o.number = 1
	if len(o.Disk.Dirs) > 0 {
		o.Disk.Changes, o.Disk.Number = o.Changes, o.number
		if o.keys != nil {
			o.Disk.Sealed, o.Disk.VerifySealed = true, o.keys.Verify
		}
		o.number += uint8(len(o.Disk.Dirs))
		if s.Disk, err = disk.Open(o.Disk); err != nil {
			return Set{}, explain(err)
		}
		opened = append(opened, s.Disk)
		logRooms(s.Disk, o.Log)
		sealed := seal.New(s.Disk, o.keys, seal.Options{Name: "disk", Log: o.Log})
		s.Seals["disk"] = sealed.Sealed()
		s.Each = append(s.Each, tier.Counted(tier.Bounded(sealed, tier.Limits{}), "disk"))
		s.Each[0].Watch(o.Log)
		s.Contents = map[string]tier.Tier{"disk": sealed}
		for _, d := range o.Disk.Dirs {
			places = append(places, "disk:"+absolute(d.Path))
		}
	}
	for _, a := range o.Adapters {
		d, err := openAdapter(a, o)
		if err != nil {
			return Set{}, fmt.Errorf("--l2-adapter: %w", err)
		}
		opened = append(opened, d)
		name := uniqueName(s.Each, a.Type)
		if a.ownLayout() {
			sealed := seal.New(d, o.keys, seal.Options{Name: name, Log: o.Log})
			d, s.Seals[name] = sealed, sealed.Sealed()
		}
		used := tier.Recorded(d, o.Changes, o.number)
		if s.Numbers == nil {
			s.Numbers = make(map[string]uint8)
		}
		s.Numbers[name] = o.number
		o.number++
		if a.Admission != (tier.Admission{}) {
			used = tier.Admitted(used, a.Admission)
		}
		used = tier.Bounded(used, a.limits())
		if a.Absence.For > 0 {
			used = tier.Remembered(used, a.Absence)
		}
		s.Each = append(s.Each, tier.Counted(used, name))
		counted := s.Each[len(s.Each)-1]
		counted.Watch(o.Log)
		s.probes = append(s.probes, func(ctx context.Context) {
			counted.Probe(ctx, func(ctx context.Context) error { return askOnce(ctx, d) })
		})
		if s.Contents == nil {
			s.Contents = make(map[string]tier.Tier)
		}
		s.Contents[name] = d
		if p, ok := noteOf(&a, name, d); ok {
			s.Shared = append(s.Shared, p)
		}
		if c, ok := d.(*mooncakestore.Tier); ok {
			if s.Clusters == nil {
				s.Clusters = make(map[string]*mooncakestore.Tier)
			}
			s.Clusters[name] = c
		}
		places = append(places, a.Type+":"+a.place())
	}
	if s.Keys != nil { // another Place, so that the pool writes objects again that it wrote unencrypted
		places = append(places, "encrypted")
	}
	s.Place, s.ReadFiles = strings.Join(places, " "), readFiles(o.Adapters)
	switch len(s.Each) {
	case 0:
	case 1:
		s.Tier = s.Each[0]
	default:
		all := make([]tier.Tier, len(s.Each))
		for i, t := range s.Each {
			all[i] = t
		}
		s.Tier = tier.Cascade(tier.CascadeOptions{}, all...)
	}
	return s, nil
}

// ownLayout reports whether the adapter stores objects in Kvasir's own layout. Only such objects can be encrypted.
func (a *Adapter) ownLayout() bool { return a.Type == "redis" || a.Type == "s3_native" }

// logSealed logs which tiers are encrypted, and which are not.
func logSealed(s *Set, log *slog.Logger) {
	if s.Keys == nil || log == nil {
		return
	}
	var sealed, plain []string
	for _, t := range s.Each {
		if s.Seals[t.Name()] != nil {
			sealed = append(sealed, t.Name())
		} else {
			plain = append(plain, t.Name())
		}
	}
	say := log.Info
	if len(plain) > 0 {
		say = log.Warn
	}
	say("tiers are encrypted at rest; the pool in /dev/shm and layouts of LMCache and Mooncake are plain", "encrypted", sealed, "plain", plain, "keys", s.Keys.IDs())
}

var errTooMany = fmt.Errorf("more than %d directories of --disk and tiers of --l2-adapter", tier.MaxTiers)

// probeTime bounds the time of Probe. A tier that has not answered by then counts as failed.
const probeTime = 10 * time.Second

// Probe asks each tier once, so that a fault shows at the start and not with the first prompt.
func (s *Set) Probe(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, probeTime)
	defer cancel()
	var wg sync.WaitGroup
	for _, p := range s.probes {
		wg.Go(func() { p(ctx) })
	}
	wg.Wait()
}

// askOnce sends a tier a request that changes nothing.
func askOnce(ctx context.Context, d tier.Tier) error {
	if n, ok := d.(tier.Notebook); ok {
		_, err := n.Note(ctx)
		return err
	}
	return d.Stat(ctx, []kv.Key{{}}, make([]tier.Meta, 1))
}

// logRooms logs how much each disk may take, and warns of disks with less room.
func logRooms(d *disk.Disk, log *slog.Logger) {
	if log == nil {
		return
	}
	rooms, err := d.Rooms()
	if err != nil {
		log.Warn("the free space of a disk is unknown", "err", err)
	}
	for _, r := range rooms {
		say := log.Info
		text := "chunks are kept on disk"
		if r.Now < r.Bytes {
			say, text = log.Warn, "the disk has less room than --disk-gb: it takes what its file system has beside --disk-min-free-gb"
		}
		say(text, "path", r.Path, "limit_bytes", r.Bytes, "room_bytes", r.Now, "min_free_bytes", r.MinFree)
	}
}

// errDiskLimit means that a tool cannot make or fill a disk's directory.
var errDiskLimit = errors.New("only a server writes to a disk tier, within its --disk-gb")

// OpenOne opens one tier for a tool: an --l2-adapter, TYPE:PATH, redis:HOST:PORT,
// s3_native:BUCKET/PREFIX, or disk:PATH for a disk that no server uses.
func OpenOne(text string, o Options) (tier.Tier, error) {
	if path, ok := strings.CutPrefix(text, "disk:"); ok {
		if !o.Existing {
			return nil, errDiskLimit
		}
		d, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: path, Bytes: 1 << 50}}, Inspect: true, Log: o.Log})
		if err != nil {
			return nil, err
		}
		<-d.Opened()
		return openSealed(d, "disk", o)
	}
	a, err := parseShort(text)
	if err != nil {
		return nil, err
	}
	t, err := openAdapter(a, o)
	if err != nil || !a.ownLayout() {
		return t, err
	}
	return openSealed(t, a.Type, o)
}

// openSealed wraps a tier of a tool with its keys. On an error it closes the tier.
func openSealed(t tier.Tier, name string, o Options) (tier.Tier, error) {
	keys, err := seal.OpenKeys(context.Background(), o.Keys)
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return seal.New(t, keys, seal.Options{Name: name, Log: o.Log}), nil
}

// PlaceOf identifies the place of the tier that OpenOne opens for text.
func PlaceOf(text string) (string, error) {
	if path, ok := strings.CutPrefix(text, "disk:"); ok {
		return absolute(path), nil
	}
	a, err := parseShort(text)
	if err != nil {
		return "", err
	}
	return a.place(), nil
}

func parseShort(text string) (Adapter, error) {
	kind, path, ok := strings.Cut(text, ":")
	if !ok || strings.HasPrefix(text, "{") {
		return Parse(text)
	}
	keys := map[string]string{"type": kind}
	switch _, isRedis := redisLayouts[kind]; {
	case isRedis:
		keys["startup_nodes"] = path
	case kind == "s3" || kind == "s3_native":
		keys["s3_bucket"], keys["s3_prefix"], _ = strings.Cut(path, "/")
	case kind == mooncakeType:
		keys["master_server_addr"] = path
	default:
		keys["base_path"] = path
	}
	b, err := json.Marshal(keys)
	if err != nil {
		return Adapter{}, err
	}
	return Parse(string(b))
}

func openAdapter(a Adapter, o Options) (tier.Tier, error) {
	switch {
	case a.Redis != nil:
		return openRedis(a, o)
	case a.Mooncake != nil:
		return openMooncake(a, o)
	case a.S3 != nil:
		return openS3(a, o)
	}
	return openDir(a, o)
}

const usualTime = 30 * time.Second // longest time of a call

// limits returns the bounds on the use of an adapter. A call may take usualTime more than the operator's timeouts of a request and of a
// connection together.
func (a *Adapter) limits() tier.Limits {
	l := tier.Limits{Calls: max(a.Calls, 64), Bytes: a.Bytes, Timeout: usualTime}
	var asked time.Duration
	switch {
	case a.Redis != nil:
		asked = a.Redis.Timeout + a.Redis.DialTimeout
	case a.S3 != nil:
		asked = a.S3.Timeout + a.S3.DialTimeout
	}
	if asked > 0 {
		l.Timeout += asked
	}
	return l
}

// place identifies the place where an adapter keeps objects.
func (a *Adapter) place() string {
	switch {
	case a.Redis != nil:
		return redisPlace(a.Redis)
	case a.Mooncake != nil:
		return mooncakePlace(a.Mooncake)
	case a.S3 != nil:
		return a.S3.URL + "/" + a.S3.Prefix
	}
	return absolute(a.Path)
}

// Shared returns the names of the places where an adapter keeps objects, one for each address; none for a directory of this host. A name
// does not depend on other adapters and other addresses.
func (a *Adapter) Shared() (names []string) {
	switch {
	case a.Redis != nil:
		for _, addr := range a.Redis.Addrs {
			names = append(names, fmt.Sprintf("redis:%s/%d/%s%s", addr, a.Redis.Database, a.Redis.Sentinel, a.Redis.Prefix))
		}
	case a.Mooncake != nil:
		for _, addr := range a.Mooncake.Masters {
			names = append(names, "mooncake:"+addr+"/"+a.Mooncake.Tenant)
		}
	case a.S3 != nil:
		names = append(names, "s3:"+a.S3.URL+"/"+a.S3.Prefix)
	}
	return names
}

func openDir(a Adapter, o Options) (*fs.Dir, error) {
	return fs.Open(fs.Options{
		Path: a.Path, TempDir: a.TempDir, Direct: a.Direct, Pad: a.Pad, Trust: o.Trust, NoMake: o.Existing, Names: o.Names, Changes: o.Changes, Number: o.number, Log: o.Log,
		Limit: int64(a.LimitGB * gib), MinFree: int64(a.MinFreeGB * gib), EvictAt: a.EvictAt, EvictShare: a.Evict,
	})
}

// explain adds to the error of a disk that cannot be opened what the operator can do.
func explain(err error) error {
	switch {
	case errors.Is(err, disk.ErrInUse):
		return fmt.Errorf("--disk: %w: choose another one; each server needs its own", err)
	case errors.Is(err, disk.ErrNotOurs):
		return fmt.Errorf("--disk: %w: choose an empty one", err)
	case errors.Is(err, disk.ErrNewer):
		return fmt.Errorf("--disk: %w: start that build, or choose another directory", err)
	}
	return fmt.Errorf("--disk: %w", err)
}

// uniqueName returns the name of a further tier beside those of `of`. It numbers tiers of one type: fs, fs-2, fs-3.
func uniqueName(of []*tier.Counting, kind string) string {
	n := 1
	for _, t := range of {
		if t.Name() == kind || strings.HasPrefix(t.Name(), kind+"-") {
			n++
		}
	}
	if n == 1 {
		return kind
	}
	return fmt.Sprintf("%s-%d", kind, n)
}

// absolute returns the absolute path, or path itself if the working directory is not known.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		path = abs
	}
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	return path
}
