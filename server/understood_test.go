// SPDX-License-Identifier: Apache-2.0

package server_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/server"
)

// worker returns what the server makes of a registration: the worker, or why it is
// refused. Both stand in the status.
func (n *drivenNode) worker(id int64) string {
	n.t.Helper()
	st := n.Status()
	for _, w := range st.Workers {
		if w.Instance == id {
			if w.Refused != "" {
				return "refused: " + w.Refused
			}
			return fmt.Sprintf("%s of %d: %d bytes a chunk, %s", w.Model, w.World, w.ChunkBytes, n.Fingerprint(id))
		}
	}
	if len(st.TurnedAway) == 0 {
		return "not registered"
	}
	return "refused: " + st.TurnedAway[len(st.TurnedAway)-1].Why
}

// appendField adds a field to a msgpack map of fewer than 15 fields.
func appendField(m []byte, name string, value []byte) []byte {
	m = append([]byte{m[0] + 1}, m[1:]...)
	return append(msgp.AppendString(m, name), value...)
}

// readers lists every field of every registration and who reads it. The change of a
// field must change what the worker is, or end in a refusal. A field with a reason
// in unread is the exception.
type fieldReader[T any] struct {
	reader string
	change func(*T)
	same   string // why the change of the value does not change what the chunk's bytes mean
}

func checkReaders[T any](t *testing.T, fields map[string]fieldReader[T], baseline string, register func(change func(*T)) string) {
	t.Helper()
	typ := reflect.TypeFor[T]()
	for i := range typ.NumField() {
		name := typ.Field(i).Name
		f, ok := fields[name]
		if !ok {
			t.Errorf("%s.%s has no reader: say who reads it, or refuse registrations that have a value there", typ, name)
			continue
		}
		if got := register(f.change); (got == baseline) != (f.same != "") {
			t.Errorf("%s.%s, read by %s: the worker is %q, before the change it was %q", typ, name, f.reader, got, baseline)
		}
	}
	if len(fields) != typ.NumField() {
		t.Errorf("%d readers for the %d fields of %s", len(fields), typ.NumField(), typ)
	}
}

func TestEveryFieldOfARegistrationHasAReader(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()

	id := int64(100)
	driven := func(change func(*lmcache.KVCache)) string {
		id++
		e := n.newEngine(lmcache.EngineGroup{Layers: []int{0, 1}, TokensPerBlock: 16, WindowTokens: -1})
		e.reg.InstanceID = id
		change(&e.reg)
		want := e.reg.InstanceID
		frames := e.reg.Frames()
		if len(e.reg.Unread) > 0 {
			frames[5] = appendField(frames[5], e.reg.Unread[0], msgp.AppendInt(nil, 16))
		}
		n.call(lmcache.OpRegisterKVCache, frames...)
		got := n.worker(want)
		n.call(lmcache.OpUnregisterKVCache, lmcache.AppendInt(nil, want))
		return got
	}
	baseline := driven(func(*lmcache.KVCache) {})
	if strings.Contains(baseline, "refused") {
		t.Fatal(baseline)
	}
	checkReaders(t, map[string]fieldReader[lmcache.KVCache]{
		"InstanceID":  {"workers.Registry", func(c *lmcache.KVCache) { c.InstanceID += 1 << 40 }, "it names the worker"},
		"Descriptors": {"lent.KV.layer", func(c *lmcache.KVCache) { c.Descriptors = c.Descriptors[:1] }, ""},
		"Model":       {"kv.NamespaceOf", func(c *lmcache.KVCache) { c.Model = "other" }, ""},
		"WorldSize":   {"workers.Registry", func(c *lmcache.KVCache) { c.WorldSize = 2 }, ""},
		"EngineType":  {"lent.understood", func(c *lmcache.KVCache) { c.EngineType = "sglang" }, ""},
		"KVLayout":    {"lent.headsFirst", func(c *lmcache.KVCache) { c.KVLayout = "HND"; rows(c) }, ""},
		"ListLayout":  {"lent.understood", func(c *lmcache.KVCache) { c.ListLayout = "k_v" }, ""},
		"PageTokens":  {"lent.understood", func(c *lmcache.KVCache) { c.PageTokens = 16 }, ""},
		"Groups":      {"lent.KV.group", func(c *lmcache.KVCache) { c.Groups[0].Layers = []int{1} }, ""},
		"Unread":      {"lent.understood", func(c *lmcache.KVCache) { c.Unread = lmcache.UnreadFields{"head_dim"} }, ""},
	}, baseline, driven)
	group := func(change func(*lmcache.EngineGroup)) string {
		return driven(func(c *lmcache.KVCache) { change(&c.Groups[0]) })
	}
	checkReaders(t, map[string]fieldReader[lmcache.EngineGroup]{
		"ID":             {"nothing", func(g *lmcache.EngineGroup) { g.ID = 5 }, "a transfer lists block ids in the order of the groups, not by this id"},
		"Layers":         {"lent.KV.group", func(g *lmcache.EngineGroup) { g.Layers = []int{1, 0} }, ""},
		"TokensPerBlock": {"lent.KV.group", func(g *lmcache.EngineGroup) { g.TokensPerBlock = 24 }, ""},
		"WindowTokens":   {"lent.KV.group", func(g *lmcache.EngineGroup) { g.WindowTokens = 16 }, ""},
		"ExtraTag":       {"lent.KV.split", func(g *lmcache.EngineGroup) { g.ExtraTag = 1 }, ""},
		"Recurrent":      {"lent.KV.group", func(g *lmcache.EngineGroup) { g.Recurrent = true }, ""},
	}, baseline, group)
	layer := func(change func(*lmcache.Descriptor)) string {
		return driven(func(c *lmcache.KVCache) {
			for i := range c.Descriptors {
				change(&c.Descriptors[i])
			}
		})
	}
	checkReaders(t, map[string]fieldReader[lmcache.Descriptor]{
		"Type":    {"lent.KV.layer", func(d *lmcache.Descriptor) { d.Type = "cuda" }, ""},
		"ShmName": {"lent.KV.layer", func(d *lmcache.Descriptor) { d.ShmName += "_none" }, ""},
		"Bytes":   {"lent.KV.layer", func(d *lmcache.Descriptor) { d.Bytes++ }, ""},
		"DType":   {"lent.KV.layer", func(d *lmcache.Descriptor) { d.DType = "bfloat16" }, ""},
		"Shape":   {"paged.NewView", func(d *lmcache.Descriptor) { d.Shape[2] = 8 }, ""},
		"Stride":  {"paged.NewView", func(d *lmcache.Descriptor) { d.Stride[1] *= 2 }, ""},
		"Offset":  {"paged.NewView", func(d *lmcache.Descriptor) { d.Offset = 1 }, ""},
		"Device":  {"lmcache.KVCache.OnCPU", func(d *lmcache.Descriptor) { d.Device = "cuda:0" }, "a segment of shared memory is the same bytes for each device; releases whose client waits for a device event are refused by it"},
	}, baseline, layer)

	copies := func(change func(*lmcache.EngineDriven)) string {
		id++
		r := lmcache.EngineDriven{InstanceID: id, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 2, Hidden: 4, DType: "float16"}
		change(&r)
		frame := r.Append(nil)
		if len(r.Unread) > 0 {
			frame = appendField(frame, r.Unread[0], msgp.AppendInt(nil, 16))
		}
		n.call(lmcache.OpRegisterEngineDriven, frame)
		got := n.worker(r.InstanceID)
		n.call(lmcache.OpUnregisterEngineDriven, lmcache.AppendInt(nil, r.InstanceID))
		return got
	}
	checkReaders(t, map[string]fieldReader[lmcache.EngineDriven]{
		"InstanceID":    {"workers.Registry", func(r *lmcache.EngineDriven) { r.InstanceID += 1 << 40 }, "it names the worker"},
		"Model":         {"kv.NamespaceOf", func(r *lmcache.EngineDriven) { r.Model = "other" }, ""},
		"WorldSize":     {"workers.Registry", func(r *lmcache.EngineDriven) { r.WorldSize = 2 }, ""},
		"BlockSize":     {"nothing", func(r *lmcache.EngineDriven) { r.BlockSize = 32 }, "the engine writes a chunk's slots in the order of its tokens, for each size of block"},
		"Layers":        {"lmcache.EngineDriven.Layout", func(r *lmcache.EngineDriven) { r.Layers++ }, ""},
		"Hidden":        {"lmcache.EngineDriven.Layout", func(r *lmcache.EngineDriven) { r.Hidden++ }, ""},
		"DType":         {"lmcache.EngineDriven.Layout", func(r *lmcache.EngineDriven) { r.DType = "bfloat16" }, ""},
		"SinglePlane":   {"lmcache.EngineDriven.Layout", func(r *lmcache.EngineDriven) { r.SinglePlane = true }, ""},
		"PhysicalSlots": {"lmcache.EngineDriven.Layout", func(r *lmcache.EngineDriven) { r.PhysicalSlots = 8 }, ""},
		"Groups": {"lmcache.EngineDriven.Layouts", func(r *lmcache.EngineDriven) {
			r.HasGroups = true
			r.Groups = []lmcache.GroupLayout{{Layers: 1, Hidden: 4, DType: "float16"}, {Layers: 1, Hidden: 4, DType: "float16", WindowChunks: 1}}
		}, ""},
		"HasGroups": {"server.registerEngineDriven", func(r *lmcache.EngineDriven) { r.HasGroups = true }, "an empty list is one group; the answer names the null block"},
		"Unread":    {"server.registerEngineDriven", func(r *lmcache.EngineDriven) { r.Unread = lmcache.UnreadFields{"shard_layouts"} }, ""},
	}, copies(func(*lmcache.EngineDriven) {}), copies)
}

// rows halves the layers' planes so that the tensor has the same bytes with heads
// before slots.
func rows(c *lmcache.KVCache) {
	for i := range c.Descriptors {
		d := &c.Descriptors[i]
		d.Shape, d.Stride = slices.Clone(d.Shape), slices.Clone(d.Stride)
		d.Shape[2], d.Shape[3] = 1, 16
	}
}

// A value that the server does not read and that may change the meaning of bytes is
// refused in each place of each registration; an absent one is not.
func TestUnreadValuesAreRefused(t *testing.T) {
	n := startDriven(t, t.TempDir(), "pool", server.Options{})
	defer n.stop()
	f := func(want string, op lmcache.Op, id int64, frames ...[]byte) {
		t.Helper()
		n.call(op, frames...)
		got := n.worker(id)
		if want == "" && strings.HasPrefix(got, "refused") || want != "" && !strings.Contains(got, want) || (want != "") != strings.HasPrefix(got, "refused") {
			t.Errorf("the worker is %q, want %q", got, want)
		}
	}
	hint := func(name string, value []byte) [][]byte {
		e := n.newEngine()
		frames := e.reg.Frames()
		frames[5] = appendField(frames[5], name, value)
		return append(frames, lmcache.AppendInt(nil, e.reg.InstanceID))
	}
	driven := func(want string, frames [][]byte) {
		t.Helper()
		id, err := lmcache.DecodeInt(frames[7])
		if err != nil {
			t.Fatal(err)
		}
		f(want, lmcache.OpRegisterKVCache, id, frames[:7]...)
	}
	sixteen := msgp.AppendInt(nil, 16)
	for _, name := range []string{"tokens_per_block", "num_kv_heads", "head_dim", "future_hint"} {
		driven("layout_hints."+name, hint(name, sixteen))
		driven("", hint(name, msgp.AppendNil(nil)))
	}
	driven("layout_hints.kv_list_layout", hint("kv_list_layout", msgp.AppendString(nil, "k_v")))
	for _, engine := range []string{"sglang", "trtllm", "atom", "mock", "VLLM", "vllm "} {
		e := n.newEngine()
		e.reg.EngineType = engine
		f("only", lmcache.OpRegisterKVCache, e.reg.InstanceID, e.reg.Frames()...)
	}
	e := n.newEngine(lmcache.EngineGroup{Layers: []int{0, 1}, WindowTokens: -1})
	frames := e.reg.Frames()
	frames[6] = append([]byte{0x91}, appendField(frames[6][1:], "future", sixteen)...)
	f("group.future", lmcache.OpRegisterKVCache, e.reg.InstanceID, frames...)

	e = n.newEngine() // no type and no hints
	e.reg.EngineType, e.reg.KVLayout = "", ""
	f("", lmcache.OpRegisterKVCache, e.reg.InstanceID, e.reg.Frames()...)

	r := lmcache.EngineDriven{InstanceID: 1, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 2, Hidden: 4, DType: "float16"}
	f("", lmcache.OpRegisterEngineDriven, 1, appendField(r.Append(nil), "group_layouts", []byte{0x90}))
	r.InstanceID = 2
	f("group_layouts", lmcache.OpRegisterEngineDriven, 2, appendField(r.Append(nil), "group_layouts", []byte{0x91, 0x80}))
	// A registered worker that registers again with such a value is refused too.
	e = n.newEngine()
	f("", lmcache.OpRegisterKVCache, e.reg.InstanceID, e.reg.Frames()...)
	e.reg.EngineType = "sglang"
	f("only", lmcache.OpRegisterKVCache, e.reg.InstanceID, e.reg.Frames()...)
	if got := e.storeBlocks(tokens(32, 1), 0, 32, span(1, 2)); got != (lmcache.Copied{}) {
		t.Errorf("a store of a refused worker: %+v", got)
	}
}
