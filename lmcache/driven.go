// SPDX-License-Identifier: Apache-2.0

package lmcache

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvasir-kv/kvasir/internal/safelog"
)

// Limits on a register_kv_cache and on the block ids of a transfer. A message beyond one of them is an error.
const (
	maxLayers = 8192 // descriptors
	maxGroups = 256  // KV groups
	maxDims   = 16   // dimensions of a tensor
)

// EngineGroup is LMCache's EngineGroupInfo: layers that share block ids and a kind of attention.
type EngineGroup struct {
	ID             int
	Layers         []int // indices of descriptors
	TokensPerBlock int   // 0: unknown
	WindowTokens   int   // -1: no sliding window
	ExtraTag       int   // not 0: the group is a connector's own and does not count in hits
	Recurrent      bool  // the layers keep states (Mamba), not KV per token
}

// Descriptor says how a worker lends the memory of one layer: 0.5.6's msgpack ext of code 1. Its fields are those of the type cpu_shm. Of a
// descriptor of another type only the type is kept.
type Descriptor struct {
	Type    string // cpu_shm, cuda, cuda_raw, cuda_vmm, musa, npu; PickledDescriptor
	ShmName string // POSIX name, with its slash
	Bytes   int64  // of the whole segment
	DType   string
	Shape   []int64
	Stride  []int64 // elements
	Offset  int64   // elements
	Device  string
}

// The descriptor types that matter here. Before 0.5.6 an ext of code 1 held a
// Python pickle.
const (
	CPUShm            = "cpu_shm"
	PickledDescriptor = "pickle"
)

// KVCache is the payload of register_kv_cache: a worker whose KV the server
// copies.
type KVCache struct {
	InstanceID  int64
	Descriptors []Descriptor // by layer
	Model       string
	WorldSize   int
	EngineType  string
	KVLayout    string        // layout_hints: NHD, HND, BLHNC, BLNHC; empty when not given
	ListLayout  string        // layout_hints of SGLang, kv_list_layout: unified, k_v; empty when not given
	PageTokens  int           // layout_hints of SGLang, tokens_per_block: of a page, which the shape does not show; 0 when not given
	Groups      []EngineGroup // in the order of a transfer's block ids; empty: one group of all layers
	Unread      UnreadFields  // names of layout_hints and group fields that have a value which this package does not read
}

// UnreadFields names the fields of a registration that have a value which this package does not read. Such a field may change what the
// bytes mean, so a server refuses the registration. At most maxUnread fields are named.
type UnreadFields []string

const (
	maxUnread      = 8  // names of fields; further ones are left out
	maxUnreadBytes = 64 // bytes of a name; the rest is cut off
)

// Err returns an error that names the fields, or nil.
func (u UnreadFields) Err() error {
	if len(u) == 0 {
		return nil
	}
	return fmt.Errorf("the registration has a value for %s, which this server does not read and which may change the meaning of its bytes", strings.Join(u, ", "))
}

// add adds the name of a field of the map `in`, unless the field's value b is nil, an empty list or an empty map.
func (u *UnreadFields) add(in string, name, b []byte) {
	if len(b) > 0 && (b[0] == 0xc0 || b[0] == 0x90 || b[0] == 0x80) || len(*u) == maxUnread {
		return
	}
	field := in + safelog.Text(string(name[:min(len(name), maxUnreadBytes)]), maxUnreadBytes)
	if !slices.Contains(*u, field) {
		*u = append(*u, field)
	}
}

// OnCPU reports whether all of the worker's KV is in CPU memory.
func (c *KVCache) OnCPU() bool {
	return !slices.ContainsFunc(c.Descriptors, func(d Descriptor) bool { return d.Type != CPUShm && d.Device != "cpu" })
}

// Frames returns the seven payload frames of register_kv_cache.
func (c *KVCache) Frames() [][]byte {
	layers := msgp.AppendArrayHeader(nil, uint32(len(c.Descriptors)))
	for i := range c.Descriptors {
		layers, _ = msgp.AppendExtension(layers, &msgp.RawExtension{Type: 1, Data: c.Descriptors[i].append(nil)})
	}
	n := uint32(0)
	var hints []byte
	if c.KVLayout != "" {
		n, hints = n+1, msgp.AppendString(msgp.AppendString(hints, "kv_layout"), c.KVLayout)
	}
	if c.PageTokens != 0 {
		n, hints = n+1, appendInt(msgp.AppendString(hints, "tokens_per_block"), c.PageTokens)
	}
	if c.ListLayout != "" {
		n, hints = n+1, msgp.AppendString(msgp.AppendString(hints, "kv_list_layout"), c.ListLayout)
	}
	hints = append(msgp.AppendMapHeader(nil, n), hints...)
	groups := msgp.AppendArrayHeader(nil, uint32(len(c.Groups)))
	for i := range c.Groups {
		g := &c.Groups[i]
		groups = msgp.AppendMapHeader(groups, 6)
		groups = appendInt(msgp.AppendString(groups, "engine_group_id"), g.ID)
		groups = appendInts(msgp.AppendString(groups, "layer_indices"), g.Layers)
		groups = appendInt(msgp.AppendString(groups, "tokens_per_block"), g.TokensPerBlock)
		groups = appendInt(msgp.AppendString(groups, "sw_size_tokens"), g.WindowTokens)
		groups = appendInt(msgp.AppendString(groups, "extra_object_group_tag"), g.ExtraTag)
		groups = msgp.AppendBool(msgp.AppendString(groups, "recurrent_state"), g.Recurrent)
	}
	return [][]byte{
		AppendInt(nil, c.InstanceID), layers, AppendString(nil, c.Model), AppendInt(nil, int64(c.WorldSize)),
		AppendString(nil, c.EngineType), hints, groups,
	}
}

func (d *Descriptor) append(b []byte) []byte {
	b = msgp.AppendMapHeader(b, 5)
	b = msgp.AppendString(msgp.AppendString(b, "type"), d.Type)
	b = msgp.AppendString(msgp.AppendString(b, "shm_name"), d.ShmName)
	b = appendInt(msgp.AppendString(b, "nbytes"), d.Bytes)
	b = appendInt(msgp.AppendString(b, "version"), 1)
	b = msgp.AppendMapHeader(msgp.AppendString(b, "metadata"), 5)
	b = msgp.AppendString(msgp.AppendString(b, "dtype"), d.DType)
	b = appendInts(msgp.AppendString(b, "shape"), d.Shape)
	b = appendInts(msgp.AppendString(b, "stride"), d.Stride)
	b = appendInt(msgp.AppendString(b, "storage_offset"), d.Offset)
	return msgp.AppendString(msgp.AppendString(b, "device_uuid"), d.Device)
}

// decodeKVCache reads the seven payload frames of register_kv_cache. Clients of 0.4.6 send six, without groups. It accepts descriptors of
// an unknown type, such as pickled ones.
func decodeKVCache(frames [][]byte) (c KVCache, err error) {
	if err := AllGenerations.CheckPayloads(OpRegisterKVCache, len(frames)); err != nil {
		return c, err
	}
	if c.InstanceID, err = DecodeInt(frames[0]); err != nil {
		return c, fmt.Errorf("instance_id: %w", err)
	}
	rest, err := readList(frames[1], func(i int, b []byte) ([]byte, error) {
		if i >= maxLayers {
			return b, fmt.Errorf("more than %d layers", maxLayers)
		}
		var ext msgp.RawExtension
		rest, err := msgp.ReadExtensionBytes(b, withType(&ext, b))
		if err != nil {
			return b, err
		}
		if ext.Type != 1 {
			return b, fmt.Errorf("an IPC wrapper has the msgpack extension type %d, only 1 is known", ext.Type)
		}
		d, err := decodeDescriptor(ext.Data)
		if max(len(d.Type), len(d.DType), len(d.Device)) > maxNameBytes || len(d.ShmName) > maxShmNameBytes {
			err = errLongName
		}
		c.Descriptors = append(c.Descriptors, d)
		return rest, err
	})
	if err = noRest(rest, err); err != nil {
		return c, fmt.Errorf("IPC wrappers: %w", err)
	}
	model, err := decodeString(frames[2])
	if err != nil || len(model) > maxModelBytes {
		return c, fmt.Errorf("model_name: %w", errOr(err, fmt.Errorf("longer than %d bytes", maxModelBytes)))
	}
	if !utf8.Valid(model) { // as in keys
		return c, errors.New("model_name: not UTF-8")
	}
	world, err := DecodeInt(frames[3])
	if err != nil {
		return c, fmt.Errorf("world_size: %w", err)
	}
	engine, err := decodeString(frames[4])
	if err != nil {
		return c, fmt.Errorf("engine_type: %w", err)
	}
	if err = c.decodeHints(frames[5]); err == nil && max(len(c.KVLayout), len(engine)) > maxNameBytes {
		err = errLongName
	}
	if err != nil {
		return c, fmt.Errorf("layout_hints or engine_type: %w", err)
	}
	groups := []byte{0x90}
	if len(frames) > 6 {
		groups = frames[6]
	}
	rest, err = readList(groups, func(i int, b []byte) ([]byte, error) {
		if i >= maxGroups {
			return b, fmt.Errorf("more than %d groups", maxGroups)
		}
		g := EngineGroup{WindowTokens: -1}
		rest, err := decodeEngineGroup(b, &g, &c.Unread)
		c.Groups = append(c.Groups, g)
		return rest, err
	})
	if err = noRest(rest, err); err != nil {
		return c, fmt.Errorf("engine groups: %w", err)
	}
	c.Model, c.WorldSize, c.EngineType = string(model), int(world), string(engine)
	return c, nil
}

// Limits on the strings of a registration, in bytes. A longer one is errLongName.
const (
	maxNameBytes    = 256
	maxShmNameBytes = 255
)

var errLongName = errors.New("a name has more than 256 bytes, or a shm_name more than 255")

// withType sets the type of ext to that of the extension at b, because msgp requires it before it reads the extension.
func withType(ext *msgp.RawExtension, b []byte) *msgp.RawExtension {
	switch {
	case len(b) > 1 && b[0] >= 0xd4 && b[0] <= 0xd8: // fixext
		ext.Type = int8(b[1])
	case len(b) > 0 && b[0] >= 0xc7 && b[0] <= 0xc9: // ext 8, 16, 32
		if at := 1 + 1<<(b[0]-0xc7); len(b) > at {
			ext.Type = int8(b[at])
		}
	}
	return ext
}

// decodeDescriptor reads the data of one ext. It keeps only the type of a descriptor that is not cpu_shm. It refuses an unknown field of a
// cpu_shm descriptor, as LMCache does, because such a field could change what the others mean.
func decodeDescriptor(data []byte) (d Descriptor, err error) {
	if len(data) > 1 && data[0] == 0x80 { // pickle's PROTO; as msgpack an empty map
		d.Type = PickledDescriptor
		if bytes.Contains(data, []byte("CpuShmTensorWrapper")) { // the class
			d.Device = "cpu"
		}
		return d, nil
	}
	rest, err := readMap(data, func(name, b []byte) ([]byte, error) {
		if string(name) == "type" {
			return stringInto(&d.Type, b)
		}
		return b, nil
	})
	if err = noRest(rest, err); err != nil || d.Type != CPUShm {
		return d, err
	}
	version, seen := 0, 0
	_, err = readMap(data, func(name, b []byte) ([]byte, error) {
		seen++
		switch string(name) {
		case "type":
			return b, nil
		case "version":
			return intInto(&version, b)
		case "shm_name":
			return stringInto(&d.ShmName, b)
		case "nbytes":
			return intInto(&d.Bytes, b)
		case "metadata":
			return d.decodeMetadata(b)
		}
		return b, errors.New("unknown field")
	})
	if err == nil && seen != 5 {
		err = ErrMissing
	}
	if err == nil && version != 1 {
		err = fmt.Errorf("its version is %d, only 1 is known", version)
	}
	return d, err
}

func (d *Descriptor) decodeMetadata(b []byte) ([]byte, error) {
	seen := 0
	rest, err := readMap(b, func(name, b []byte) ([]byte, error) {
		seen++
		switch string(name) {
		case "dtype":
			return stringInto(&d.DType, b)
		case "shape":
			return intsInto(&d.Shape, maxDims, b)
		case "stride":
			return intsInto(&d.Stride, maxDims, b)
		case "storage_offset":
			return intInto(&d.Offset, b)
		case "device_uuid":
			return stringInto(&d.Device, b)
		}
		return b, errors.New("unknown field")
	})
	if err == nil && seen != 5 {
		err = ErrMissing
	}
	return rest, err
}

// decodeHints reads layout_hints, a map or nil. Of the hints that releases know
// (kv_layout, num_kv_heads, tokens_per_block, kv_list_layout, head_dim) vLLM sends
// kv_layout at most, SGLang kv_list_layout and tokens_per_block (lmcache 0.5.6).
func (c *KVCache) decodeHints(frame []byte) error {
	if msgp.NextType(frame) == msgp.NilType {
		return noRest(frame[1:], nil)
	}
	rest, err := readMap(frame, func(name, b []byte) ([]byte, error) {
		known := msgp.NextType(b) != msgp.NilType
		switch string(name) {
		case "kv_layout":
			if known {
				return stringInto(&c.KVLayout, b)
			}
		case "kv_list_layout":
			if known {
				return stringInto(&c.ListLayout, b)
			}
		case "tokens_per_block":
			if known {
				return intInto(&c.PageTokens, b)
			}
		default:
			c.Unread.add("layout_hints.", name, b)
		}
		return b, nil
	})
	return noRest(rest, err)
}

func decodeEngineGroup(b []byte, g *EngineGroup, unread *UnreadFields) ([]byte, error) {
	return readMap(b, func(name, b []byte) ([]byte, error) {
		switch string(name) {
		case "engine_group_id":
			return intInto(&g.ID, b)
		case "layer_indices":
			return intsInto(&g.Layers, maxLayers, b)
		case "tokens_per_block":
			return intInto(&g.TokensPerBlock, b)
		case "sw_size_tokens":
			return intInto(&g.WindowTokens, b)
		case "extra_object_group_tag":
			return intInto(&g.ExtraTag, b)
		case "recurrent_state":
			return boolInto(&g.Recurrent, b)
		}
		unread.add("group.", name, b)
		return b, nil
	})
}

// decodeBlockIDs reads the third payload of store and retrieve: a list of engine block ids for each KV group. More than MaxTokens ids in
// all are an error.
func decodeBlockIDs(frame []byte) (ids [][]int, err error) {
	total := 0
	rest, err := readList(frame, func(i int, b []byte) ([]byte, error) {
		if i >= maxGroups {
			return b, fmt.Errorf("more than %d groups", maxGroups)
		}
		var of []int
		rest, err := intsInto(&of, MaxTokens-total, b)
		ids, total = append(ids, of), total+len(of)
		return rest, err
	})
	if err = noRest(rest, err); err != nil {
		return nil, fmt.Errorf("block_ids: %w", err)
	}
	return ids, nil
}

// AppendBlockIDs appends to b the encoded block ids, which are the third payload of a store or retrieve message.
func AppendBlockIDs(b []byte, ids [][]int) []byte {
	b = msgp.AppendArrayHeader(b, uint32(len(ids)))
	for _, of := range ids {
		b = appendInts(b, of)
	}
	return b
}

// StubEvent is the event handle of workers without a device. Worker and server send it, and neither reads it.
const StubEvent = "stub_ipc_handle"

// Copied is the result of store and retrieve.
type Copied struct {
	Event string // the event to wait for; empty: the server did not try the copy
	OK    bool
}

// Append appends the result frame of store and retrieve.
func (c Copied) Append(b []byte) []byte {
	return msgp.AppendBool(msgp.AppendBytes(msgp.AppendArrayHeader(b, 2), []byte(c.Event)), c.OK)
}

// DecodeCopied reads the result frame of store and retrieve.
func DecodeCopied(frame []byte) (c Copied, err error) {
	n := 0
	rest, err := readList(frame, func(i int, b []byte) ([]byte, error) {
		n++
		switch i {
		case 0:
			event, rest, err := msgp.ReadBytesZC(b)
			c.Event = string(event)
			return rest, err
		case 1:
			return boolInto(&c.OK, b)
		}
		return b, errors.New("a third element, where only event and result are possible")
	})
	if err = noRest(rest, err); err == nil && n != 2 {
		err = ErrMissing
	}
	return c, err
}
