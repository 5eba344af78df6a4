// SPDX-License-Identifier: Apache-2.0

package store

import (
	"crypto/md5"
	"encoding/binary"
	"strings"

	sp "github.com/kvasir-kv/kvasir/mooncake/store/structpack"
)

// Version is a release of Mooncake. Releases with the same calls are one Version.
type Version uint8

// The known releases. Releases between them were not measured.
const (
	Unknown Version = iota
	V0_3_7
	V0_3_11
	V0_3_12
	V0_3_13
	V0_3_14
)

var versionNames = [...]string{"unknown", "0.3.7", "0.3.11", "0.3.12", "0.3.13", "0.3.14"}

func (v Version) String() string {
	if int(v) < len(versionNames) {
		return versionNames[v]
	}
	return versionNames[Unknown]
}

// Versions are the known releases, the newest first.
var Versions = [...]Version{V0_3_14, V0_3_13, V0_3_12, V0_3_11, V0_3_7}

// method is a call of the master.
type method uint8

const (
	serviceReady method = iota
	batchExist
	batchReplicas
	putStart // used only to find out the release
	batchPutStart
	batchPutEnd
	batchPutRevoke
	removeOne
	batchRemove
	removeAll
	mountSegment
	remountSegment
	unmountSegment
	gracefulUnmount
	ping
	methods
)

var methodNames = [methods]string{
	"ServiceReady", "BatchExistKey", "BatchGetReplicaList", "PutStart", "BatchPutStart", "BatchPutEnd", "BatchPutRevoke", "Remove", "BatchRemove", "RemoveAll",
	"MountSegment", "ReMountSegment", "UnmountSegment", "GracefulUnmountSegment", "Ping",
}

// functionIDs are the numbers by which requests name their methods: the first four bytes of the MD5 of the full name, read big-endian.
var functionIDs = func() (ids [methods]uint32) {
	for m, name := range methodNames {
		sum := md5.Sum([]byte("mooncake::WrappedMasterService::" + name))
		ids[m] = binary.BigEndian.Uint32(sum[:])
	}
	return ids
}()

// codec has the forms of the requests of one release.
type codec struct {
	version Version
	forms   [methods]sp.Form // types of the arguments; empty: the release has no such call, or the call has no arguments
	has     [methods]bool
}

// The differences between the releases' requests.
func (c *codec) pieces() bool   { return c.version == V0_3_7 } // requests list an object's pieces, and carry no client id
func (c *codec) tenants() bool  { return c.version >= V0_3_12 }
func (c *codec) checksum() bool { return c.version >= V0_3_13 } // PutEnd may carry a checksum

// allKinds is the number that the batch calls of the real clients send for "all kinds of replicas".
const allKinds int32 = 4

var codecs = func() (all [len(versionNames)]*codec) {
	for _, v := range Versions {
		all[v] = newCodec(v)
	}
	return all
}()

func newCodec(v Version) *codec {
	c := &codec{version: v}
	tenant := ""
	if c.tenants() {
		tenant = sp.String
	}
	key := sp.String
	if c.checksum() {
		key = sp.Struct(sp.String, sp.Optional(sp.U64))
	}
	client, sizes := sp.UUID, sp.Vector(sp.U64)
	if c.pieces() {
		client, sizes = "", sp.Vector(sp.Vector(sp.U64))
	}
	config, segment := configForm(v), segmentForm(v)
	set := func(m method, literal string) { c.forms[m], c.has[m] = sp.FormOf(literal), true }
	args := func(parts ...string) string { // one argument is not wrapped in a struct
		n := 0
		for _, p := range parts {
			if p != "" {
				n++
			}
		}
		if n == 1 {
			return strings.Join(parts, "")
		}
		return sp.Struct(parts...)
	}
	keys := sp.Vector(sp.String)
	c.has[serviceReady] = true
	set(batchExist, args(keys, tenant))
	set(batchReplicas, args(keys, tenant))
	set(unmountSegment, sp.Struct(sp.UUID, sp.UUID))
	set(ping, sp.UUID)
	set(mountSegment, sp.Struct(segment, sp.UUID))
	set(remountSegment, sp.Struct(sp.Vector(segment), sp.UUID))
	if c.pieces() {
		set(putStart, sp.Struct(sp.String, sp.Vector(sp.U64), config))
		set(batchPutStart, sp.Struct(keys, sizes, config))
		set(batchPutEnd, keys)
		set(batchPutRevoke, keys)
		set(removeOne, sp.String)
		return c // RemoveAll has no arguments in that release, and runs with any body: it is never called
	}
	set(putStart, args(client, sp.String, sp.U64, config, tenant))
	set(batchPutStart, args(client, keys, sizes, config, tenant))
	set(batchPutEnd, args(client, sp.Vector(key), sp.I32, tenant))
	set(batchPutRevoke, args(client, keys, sp.I32, tenant))
	set(removeOne, args(sp.String, sp.Bool, tenant))
	set(batchRemove, args(keys, sp.Bool, tenant))
	set(removeAll, args(sp.Bool, tenant))
	set(gracefulUnmount, sp.Struct(sp.UUID, sp.UUID, sp.U64))
	return c
}

func configForm(v Version) string {
	names := sp.Vector(sp.String)
	switch v {
	case V0_3_7:
		return sp.Struct(sp.U64, sp.Bool, sp.String, sp.Bool)
	case V0_3_11:
		return sp.Struct(sp.U64, sp.U64, sp.Bool, sp.Bool, names, sp.String, names, sp.Bool, sp.U8)
	case V0_3_12:
		return sp.Struct(sp.U64, sp.U64, sp.Bool, sp.Bool, names, sp.String, names, sp.Bool, sp.U8, sp.String, sp.Optional(names))
	}
	return sp.Struct(sp.U64, sp.U64, sp.U64, sp.U8, sp.Optional(sp.U64), sp.Bool, names, sp.String, names, sp.Bool, sp.U8, sp.String, sp.Optional(names))
}

func segmentForm(v Version) string {
	switch v {
	case V0_3_7:
		return sp.Struct(sp.UUID, sp.String, sp.U64, sp.U64, sp.String)
	case V0_3_11:
		return sp.Struct(sp.UUID, sp.String, sp.U64, sp.U64, sp.String, sp.String)
	}
	return sp.Struct(sp.UUID, sp.String, sp.U64, sp.U64, sp.String, sp.String, sp.String)
}

// config appends the options o of a put in the form of this release.
func (c *codec) config(w *sp.Writer, o *PutOptions) {
	w.U64(uint64(max(o.Replicas, 1)))
	switch c.version {
	case V0_3_7:
		w.Bool(o.SoftPin)
		w.String(o.Segment)
		w.Bool(false) // all pieces on one node
		return
	case V0_3_11, V0_3_12:
		w.U64(0) // replicas on NVMe over fabrics
		w.Bool(o.SoftPin)
		w.Bool(false) // pinned for good
	default:
		w.U64(0)
		w.U64(0) // replicas in a file system
		pin := uint8(0)
		if o.SoftPin {
			pin = 1
		}
		w.U8(pin)
		w.Bool(false) // how long: as the master has it
		w.Bool(false)
	}
	w.Size(0) // number of preferred segments
	w.String(o.Segment)
	w.Size(0)     // segments of NVMe over fabrics
	w.Bool(false) // all on one node
	w.U8(0)       // kind of data
	if c.tenants() {
		w.String("")  // no host
		w.Bool(false) // no list of groups follows
	}
}

// segment appends the Segment s in the form of this release.
func (c *codec) segment(w *sp.Writer, s *Segment) {
	uuid(w, s.ID)
	w.String(s.Name)
	w.U64(s.Base)
	w.U64(s.Bytes)
	w.String(s.Endpoint)
	if c.version >= V0_3_11 {
		w.String("tcp")
	}
	if c.version >= V0_3_12 {
		w.String("") // no host
	}
}
