package server

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/kvasir-kv/kvasir/coordinator"
	"github.com/kvasir-kv/kvasir/internal/peercred"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/paged"
	"github.com/kvasir-kv/kvasir/shm"
	"github.com/kvasir-kv/kvasir/store"
)

// driven is a worker whose KV the server copies (lmcache_driven). It is immutable
// but for its memory's end.
type driven struct {
	memory   lentMemory
	segments []lent // as they were at the registration
	once     sync.Once
	json     json.RawMessage  // of reg, once
	process  peercred.Process // the worker's, where that is proved; else zero
	reg      lmcache.KVCache  // what it registered, for the note
	kernels  []kernel         // KV groups, in the order of a transfer's block ids
	objects  []objectGroup
	groups   *store.Groups // the same objects as the store sees them
	bytes    int64         // of a chunk, all objects
	layout   kv.Layout     // of the first KV group, for people
}

// kernel is one KV group: layers whose blocks go by one list of ids.
type kernel struct {
	paged.Group
	dtype          string
	layers         []int // which of the worker's, in this order
	tokensPerBlock int
	rule           coordinator.ChunkGroup
}

// objectGroup says what one object of a chunk holds.
type objectGroup struct {
	kernels []int // in this order
	rule    coordinator.ChunkGroup
	bytes   int64
}

var errDriven = errors.New("lmcache_driven registration")

// newDriven opens the memory of the worker who and works out its groups. With separate
// each kind of attention gets objects of its own, without it a chunk is one
// object, as LMCache 0.5.6 does both.
func newDriven(reg *lmcache.KVCache, chunkTokens int, separate bool, shmDir string, who *caller) (*driven, error) {
	d := &driven{reg: *reg}
	err := d.open(chunkTokens, separate, shmDir, who)
	if err == nil {
		d.memory.prove(nil)
		d.segments = d.memory.list()
		d.process, err = d.memory.ownProcess(who)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%w: %w", errDriven, err), d.memory.close())
	}
	return d, nil
}

// encoded returns the registration for the note.
func (d *driven) encoded() json.RawMessage {
	d.once.Do(func() {
		b, err := json.Marshal(&d.reg)
		if err != nil {
			panic(fmt.Sprintf("BUG: server: a registration that JSON cannot say: %v", err))
		}
		d.json = b
	})
	return d.json
}

func (d *driven) open(chunkTokens int, separate bool, shmDir string, who *caller) error {
	if d.reg.WorldSize < 1 || d.reg.WorldSize > kv.MaxWorldSize {
		return fmt.Errorf("world_size %d is outside 1 to %d", d.reg.WorldSize, kv.MaxWorldSize)
	}
	if err := who.isSeen(); err != nil { // before any file is touched for it
		return err
	}
	may := func(f shm.File) error { return who.mayLend(f.UID) }
	layers := make([]paged.Layer, len(d.reg.Descriptors))
	for i := range d.reg.Descriptors {
		var err error
		if layers[i], err = d.layer(&d.reg.Descriptors[i], shmDir, may); err != nil {
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
		k, err := d.kernel(&infos[i], layers, taken, chunkTokens)
		if err != nil {
			return fmt.Errorf("KV group %d: %w", i, err)
		}
		d.kernels = append(d.kernels, k)
	}
	return d.split(chunkTokens, separate)
}

// layer maps one layer's memory and checks that the tensor lies in it.
func (d *driven) layer(desc *lmcache.Descriptor, shmDir string, may func(shm.File) error) (paged.Layer, error) {
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
	memory, err := d.memory.attach(shmDir, desc.ShmName, desc.Bytes, may)
	if err != nil {
		return paged.Layer{}, err
	}
	view, err := paged.NewView(paged.Tensor{Shape: desc.Shape, Stride: desc.Stride, Offset: desc.Offset, ElementBytes: size}, hnd, desc.Bytes)
	return paged.Layer{Memory: memory, View: view}, err
}

// headsFirst reads the kv_layout hint. Without one, CPU backends are HND.
func headsFirst(hint string) (bool, error) {
	switch hint {
	case "HND", "BLHNC", "":
		return true, nil
	case "NHD", "BLNHC":
		return false, nil
	}
	return false, fmt.Errorf("unknown kv_layout %q: NHD, HND, BLNHC and BLHNC are known", hint)
}

// kernel makes one KV group out of its layers.
func (d *driven) kernel(info *lmcache.EngineGroup, layers []paged.Layer, taken []bool, chunkTokens int) (kernel, error) {
	var k kernel
	for _, i := range info.Layers {
		if i < 0 || i >= len(layers) || taken[i] {
			return k, fmt.Errorf("layer %d of %d does not exist or is in two groups", i, len(layers))
		}
		taken[i] = true
		if dtype := d.reg.Descriptors[i].DType; k.dtype != "" && k.dtype != dtype {
			return k, fmt.Errorf("layers of %s and of %s", k.dtype, dtype)
		}
		k.dtype = d.reg.Descriptors[i].DType
		k.Layers = append(k.Layers, layers[i])
		k.layers = append(k.layers, i)
	}
	if len(k.Layers) == 0 {
		return k, errors.New("no layers")
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
		k.Keep = 1 // the state after the last block
	case w == -1:
	case w < 1:
		return k, fmt.Errorf("sw_size_tokens %d", w)
	default: // rounded up: the engine reads the last w-1 tokens
		k.Keep = min(k.PerChunk, (w-1)/k.tokensPerBlock+1)
	}
	k.Sparse = info.Recurrent || info.WindowTokens != -1
	k.rule = coordinator.ChunkGroup{Window: info.WindowTokens, Recurrent: info.Recurrent, Apart: info.ExtraTag != 0}
	return k, k.Check()
}

// split forms the object groups: one of all KV groups, or one for each number of
// chunks that a window needs. A connector's own groups (a tag other than 0) are
// never loaded, so nothing of them is kept.
func (d *driven) split(chunkTokens int, separate bool) error {
	type kind struct {
		recurrent bool
		chunks    int // -1: all
	}
	at := map[kind]int{}
	for i := range d.kernels {
		k := &d.kernels[i]
		if k.rule.Apart {
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
			n = len(d.objects)
			at[of] = n
			d.objects = append(d.objects, objectGroup{rule: rule})
		}
		d.objects[n].kernels = append(d.objects[n].kernels, i)
		d.objects[n].bytes += k.Bytes()
	}
	if len(d.objects) == 0 {
		return errors.New("no KV group takes part in hits")
	}
	var list []store.Group
	for i := range d.objects {
		o := &d.objects[i]
		if o.bytes > kv.MaxChunkBytes {
			return fmt.Errorf("a chunk takes %s, at most %s are possible", kv.FormatBytes(o.bytes), kv.FormatBytes(kv.MaxChunkBytes))
		}
		d.bytes += o.bytes
		list = append(list, store.Group{ChunkGroup: o.rule, Bytes: o.bytes})
	}
	d.layout = d.kernels[d.objects[0].kernels[0]].layout()
	var err error
	d.groups, err = store.NewGroups(chunkTokens, list)
	return err
}

// layout is what a chunk holds of the KV group.
func (k *kernel) layout() kv.Layout {
	v := &k.Layers[0].View
	return kv.Layout{
		SinglePlane: v.Planes == 1, Layers: len(k.Layers), Slots: k.Keep * v.Slots, Hidden: v.Heads * v.Row / kv.DTypeBytes(k.dtype), DType: k.dtype,
	}
}

// fingerprint is equal for two workers exactly when their objects mean the same
// bytes: which layers an object holds, in which order and form. With one group of
// full attention over all layers in order it is that of an engine-driven worker of
// the same model: they share chunks.
func (d *driven) fingerprint() string {
	if len(d.objects) == 1 && len(d.objects[0].kernels) == 1 && d.objects[0].rule.Window == -1 {
		if k := &d.kernels[d.objects[0].kernels[0]]; !k.Sparse && len(k.layers) == len(d.reg.Descriptors) && slices.IsSorted(k.layers) {
			return d.layout.Fingerprint()
		}
	}
	var parts []string
	for i := range d.objects {
		o := &d.objects[i]
		var in []string
		for _, k := range o.kernels {
			of := &d.kernels[k]
			in = append(in, fmt.Sprintf("%s of %d, keep %d of %d, layers %v", of.layout().Fingerprint(), of.tokensPerBlock, of.Keep, of.PerChunk, of.layers))
		}
		parts = append(parts, fmt.Sprintf("%+v {%s}", o.rule, strings.Join(in, "; ")))
	}
	return strings.Join(parts, " ")
}

// objectBytes returns the bytes of each object of a chunk.
func (d *driven) objectBytes() []int64 {
	out := make([]int64, len(d.objects))
	for i := range d.objects {
		out[i] = d.objects[i].bytes
	}
	return out
}

// merged reports whether groups that need less than the whole prefix share
// objects with others: their chunks are then needed all.
func (d *driven) merged() bool {
	return slices.ContainsFunc(d.objects, func(o objectGroup) bool {
		return o.rule.Window == -1 && !o.rule.Recurrent && slices.ContainsFunc(o.kernels, func(k int) bool { return d.kernels[k].Sparse })
	})
}
