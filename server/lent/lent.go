// SPDX-License-Identifier: Apache-2.0

// Package lent has the KV memory that CPU engines lend to a server which copies it (lmcache_driven): named segments that are mapped,
// checked against what the engine described, divided into groups of objects, and removed after their owner's end.
package lent

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/coordinator"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/kv/paged"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server/access"
)

// KV is the memory that one worker lends. It is immutable, except that Recognise sets owners and Close unmaps the memory.
type KV struct {
	Segments []Segment        // the segments at the registration
	Process  peercred.Process // the worker's process, if that is proved; else zero
	Objects  []Object         // the objects of a chunk
	Groups   *object.Groups   // the same objects in the store's form
	Bytes    int64            // of a chunk, in all its objects
	Layout   kv.Layout        // of the first KV group, for people

	memory memory
	once   sync.Once
	json   json.RawMessage // JSON of reg, made once
	reg    lmcache.KVCache // the worker's registration
	groups []group         // KV groups, in the order of a transfer's block ids
}

// group is one KV group: layers that share one list of block ids.
type group struct {
	paged.Group
	dtype          string
	layers         []int // indices of the worker's layers, in this order
	tokensPerBlock int
	rule           coordinator.ChunkGroup
}

// Object describes one object of a chunk.
type Object struct {
	Groups []int // its KV groups, in this order
	Rule   coordinator.ChunkGroup
	Bytes  int64
}

// ErrRegistration means that this server cannot serve a registration.
var ErrRegistration = errors.New("lmcache_driven registration")

// Options says how lent KV is opened.
type Options struct {
	ChunkTokens int
	Separate    bool   // each kind of attention gets its own objects; else a chunk is one object. LMCache 0.5.6 can do both
	Dir         string // folder of the segments; empty: shm.Dir
	// CPUViews accepts SGLang's unified layout in the memory of a CPU, for tests. With this layout the client moves views, and the engine's
	// own memory stays where it was.
	CPUViews bool
}

// Open maps the memory of a worker, which the caller `who` lends, and finds out its groups. The error wraps ErrRegistration, and
// access.ErrLender for memory that `who` may not lend.
func Open(reg *lmcache.KVCache, o Options, who *access.Caller) (*KV, error) {
	d := &KV{reg: *reg}
	err := d.open(o, who)
	if err == nil {
		d.Recognise(nil)
		d.Process, err = d.memory.ownProcess(who)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", ErrRegistration, err), d.memory.close())
	}
	return d, nil
}

// Recognise finds out which processes made the segments. known are owners that were proved before. Call it before other goroutines use d.
func (d *KV) Recognise(known []Segment) {
	d.memory.findOwners(known)
	d.Segments = d.memory.list()
}

// Use calls f while the memory is mapped. It reports false if the memory is no longer mapped.
func (d *KV) Use(f func()) bool { return d.memory.use(f) }

// Maps reports whether a segment is one of the mapped ones.
func (d *KV) Maps(seg Segment) bool { return d.memory.has(seg) }

// Close waits for the copies in progress, then unmaps the memory.
func (d *KV) Close() error { return d.memory.close() }

// Registration returns the worker's registration as JSON.
func (d *KV) Registration() json.RawMessage {
	d.once.Do(func() {
		b, err := json.Marshal(&d.reg)
		if err != nil {
			panic(fmt.Sprintf("BUG: lent: a registration that JSON cannot say: %v", err))
		}
		d.json = b
	})
	return d.json
}

func (d *KV) open(o Options, who *access.Caller) error {
	if d.reg.WorldSize < 1 || d.reg.WorldSize > kv.MaxWorldSize {
		return fmt.Errorf("world_size %d is outside 1 to %d", d.reg.WorldSize, kv.MaxWorldSize)
	}
	if err := understood(&d.reg, o.CPUViews); err != nil {
		return err
	}
	if err := who.Seen(); err != nil { // before any file is opened for it
		return err
	}
	may := func(f shm.File) error { return who.MayLend(f.UID) }
	layers := make([]paged.Layer, len(d.reg.Descriptors))
	for i := range d.reg.Descriptors {
		var err error
		if layers[i], err = d.layer(&d.reg.Descriptors[i], o.Dir, may); err != nil {
			return fmt.Errorf("layer %d: %w", i, err)
		}
	}
	infos := d.reg.Groups
	if len(infos) == 0 {
		all := lmcache.EngineGroup{WindowTokens: -1}
		for i := range layers {
			all.Layers = append(all.Layers, i)
		}
		infos = []lmcache.EngineGroup{all}
	}
	taken := make([]bool, len(layers))
	for i := range infos {
		k, err := d.group(&infos[i], layers, taken, o.ChunkTokens)
		if err != nil {
			return fmt.Errorf("KV group %d: %w", i, err)
		}
		d.groups = append(d.groups, k)
	}
	return d.split(o.ChunkTokens, o.Separate)
}

// understood returns an error for an engine whose arrangement of blocks this package does not know. vLLM's releases send their engine type;
// an empty type counts as vLLM.
func understood(reg *lmcache.KVCache, cpuViews bool) error {
	switch reg.EngineType {
	case "", "vllm":
		var unread lmcache.UnreadFields
		if reg.ListLayout != "" {
			unread = append(unread, "layout_hints.kv_list_layout")
		}
		if reg.PageTokens != 0 {
			unread = append(unread, "layout_hints.tokens_per_block")
		}
		if err := unread.Err(); err != nil {
			return err
		}
	case sglang:
		if err := understoodSGLang(reg, cpuViews); err != nil {
			return err
		}
	default:
		return fmt.Errorf("the engine is of type %q, this server reads the KV of vllm and sglang only", reg.EngineType)
	}
	return reg.Unread.Err()
}

// layer maps the memory of one layer, a segment in shmDir, and checks that the tensor lies within it. `may` returns an error for a file that
// the worker may not lend.
func (d *KV) layer(desc *lmcache.Descriptor, shmDir string, may func(shm.File) error) (paged.Layer, error) {
	switch desc.Type {
	case lmcache.CPUShm:
	case lmcache.PickledDescriptor:
		return paged.Layer{}, errors.New("a pickled descriptor, as lmcache before 0.5.6 sends them: upgrade the client's lmcache to 0.5.6, " +
			"or set lmcache.mp.mp_transfer_mode=engine_driven in kv_connector_extra_config")
	default:
		return paged.Layer{}, fmt.Errorf("%s memory cannot be opened here: set lmcache.mp.mp_transfer_mode=engine_driven in "+
			"kv_connector_extra_config (the engine then copies itself)", cmp.Or(desc.Type, "unnamed"))
	}
	size := kv.DTypeBytes(desc.DType)
	if size == 0 {
		return paged.Layer{}, fmt.Errorf("unknown dtype %q", desc.DType)
	}
	hnd, err := headsFirst(d.reg.KVLayout)
	if err != nil {
		return paged.Layer{}, err
	}
	tensor := paged.Tensor{Shape: desc.Shape, Stride: desc.Stride, Offset: desc.Offset, ElementBytes: size}
	form := paged.Form(0)
	if d.reg.EngineType == sglang {
		if form, tensor, err = sglangTensor(&d.reg, tensor); err != nil {
			return paged.Layer{}, err
		}
	}
	memory, err := d.memory.attach(shmDir, desc.ShmName, desc.Bytes, may)
	if err != nil {
		return paged.Layer{}, err
	}
	var view paged.View
	if d.reg.EngineType == sglang {
		view, err = paged.NewViewOf(form, tensor, desc.Bytes)
	} else {
		view, err = paged.NewView(tensor, hnd, desc.Bytes)
	}
	return paged.Layer{Memory: memory, View: view}, err
}

// headsFirst reads the kv_layout hint. It returns true if a block has one head after the other, as CPU backends do without a hint, and false
// if it has one token after the other.
func headsFirst(hint string) (bool, error) {
	switch hint {
	case "HND", "BLHNC", "":
		return true, nil
	case "NHD", "BLNHC":
		return false, nil
	}
	return false, fmt.Errorf("unknown kv_layout %q: NHD, HND, BLNHC and BLHNC are known", hint)
}

// group makes a KV group of the layers that info names. `taken` marks the layers of earlier groups, and now also those of this one: a layer
// in two groups is an error.
func (d *KV) group(info *lmcache.EngineGroup, layers []paged.Layer, taken []bool, chunkTokens int) (group, error) {
	var k group
	for _, i := range info.Layers {
		if i < 0 || i >= len(layers) || taken[i] {
			return k, fmt.Errorf("layer %d of %d does not exist or is in two groups", i, len(layers))
		}
		taken[i] = true
		if dtype := d.reg.Descriptors[i].DType; k.dtype != "" && k.dtype != dtype {
			return k, fmt.Errorf("its layers have different dtypes, %s and %s", k.dtype, dtype)
		}
		k.dtype = d.reg.Descriptors[i].DType
		k.Layers = append(k.Layers, layers[i])
		k.layers = append(k.layers, i)
	}
	if len(k.Layers) == 0 {
		return k, errors.New("it names no layers")
	}
	slots := k.Layers[0].View.Slots
	k.tokensPerBlock = cmp.Or(info.TokensPerBlock, slots)
	if k.tokensPerBlock < 1 || k.tokensPerBlock%slots != 0 || chunkTokens%k.tokensPerBlock != 0 {
		return k, fmt.Errorf("blocks of %d tokens (%d slots) do not divide a chunk of %d: the server's --chunk-size must be a multiple",
			k.tokensPerBlock, slots, chunkTokens)
	}
	k.PerChunk = chunkTokens / k.tokensPerBlock
	k.Keep = k.PerChunk
	switch w := info.WindowTokens; {
	case info.Recurrent:
		k.Keep = 1 // only the block with the last state
	case w == -1:
	case w < 1:
		return k, fmt.Errorf("sw_size_tokens %d is neither -1 nor above 0", w)
	default: // rounded up: the engine reads the last w-1 tokens
		k.Keep = min(k.PerChunk, (w-1)/k.tokensPerBlock+1)
	}
	k.Sparse = info.Recurrent || info.WindowTokens != -1
	k.rule = coordinator.ChunkGroup{Window: info.WindowTokens, Recurrent: info.Recurrent, Excluded: info.ExtraTag != 0}
	return k, k.Check()
}

// split forms the object groups: one with all KV groups or, with separate, one for each number of chunks that a window needs. A connector's
// own groups (with a tag other than 0) are never loaded, so they are not stored.
func (d *KV) split(chunkTokens int, separate bool) error {
	type kind struct {
		recurrent bool
		chunks    int // -1: all chunks
	}
	at := map[kind]int{}
	for i := range d.groups {
		k := &d.groups[i]
		if k.rule.Excluded {
			continue
		}
		of := kind{chunks: -1}
		rule := coordinator.ChunkGroup{Window: -1}
		if separate {
			of.recurrent, rule = k.rule.Recurrent, k.rule
			if k.rule.Window != -1 {
				of.chunks = (k.rule.Window-1)/chunkTokens + 1
			}
		}
		n, ok := at[of]
		if !ok {
			n = len(d.Objects)
			at[of] = n
			d.Objects = append(d.Objects, Object{Rule: rule})
		}
		d.Objects[n].Groups = append(d.Objects[n].Groups, i)
		d.Objects[n].Bytes += k.Bytes()
	}
	if len(d.Objects) == 0 {
		return errors.New("no KV group takes part in hits")
	}
	var list []object.Group
	for i := range d.Objects {
		o := &d.Objects[i]
		if o.Bytes > kv.MaxChunkBytes {
			return fmt.Errorf("a chunk takes %s, at most %s are possible", kv.FormatBytes(o.Bytes), kv.FormatBytes(kv.MaxChunkBytes))
		}
		d.Bytes += o.Bytes
		list = append(list, object.Group{ChunkGroup: o.Rule, Bytes: o.Bytes})
	}
	d.Layout = d.groups[d.Objects[0].Groups[0]].layout()
	var err error
	d.Groups, err = object.NewGroups(chunkTokens, list)
	return err
}

// layout returns the layout of a chunk of the KV group.
func (k *group) layout() kv.Layout {
	v := &k.Layers[0].View
	return kv.Layout{
		SinglePlane: v.Planes == 1, Layers: len(k.Layers), Slots: k.Keep * v.Slots, Hidden: v.Heads * v.Row / kv.DTypeBytes(k.dtype), DType: k.dtype,
	}
}

// Fingerprint returns a text that is equal for two workers exactly when the bytes of their objects mean the same: which layers an object
// has, in which order and form. With one group of full attention over all layers in order, it is the fingerprint of an engine-driven worker
// of the same model, so that the two share chunks.
func (d *KV) Fingerprint() string {
	if len(d.Objects) == 1 && len(d.Objects[0].Groups) == 1 && d.Objects[0].Rule.Window == -1 {
		if k := &d.groups[d.Objects[0].Groups[0]]; !k.Sparse && len(k.layers) == len(d.reg.Descriptors) && slices.IsSorted(k.layers) {
			return d.Layout.Fingerprint()
		}
	}
	var parts []string
	for i := range d.Objects {
		o := &d.Objects[i]
		var in []string
		for _, k := range o.Groups {
			of := &d.groups[k]
			in = append(in, fmt.Sprintf("%s of %d, keep %d of %d, layers %v", of.layout().Fingerprint(), of.tokensPerBlock, of.Keep, of.PerChunk, of.layers))
		}
		parts = append(parts, fmt.Sprintf("%+v {%s}", o.Rule, strings.Join(in, "; ")))
	}
	return strings.Join(parts, " ")
}

// KVGroups returns how many KV groups the worker has.
func (d *KV) KVGroups() int { return len(d.groups) }

// EngineType returns the type of the engine that lends the memory; vllm if the registration names none.
func (d *KV) EngineType() string { return cmp.Or(d.reg.EngineType, "vllm") }

// Merged reports whether a group that needs less than the whole prefix shares its objects with other groups. A hit then needs all chunks.
func (d *KV) Merged() bool {
	return slices.ContainsFunc(d.Objects, func(o Object) bool {
		return o.Rule.Window == -1 && !o.Rule.Recurrent && slices.ContainsFunc(o.Groups, func(k int) bool { return d.groups[k].Sparse })
	})
}
