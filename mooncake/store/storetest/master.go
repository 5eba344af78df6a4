// SPDX-License-Identifier: Apache-2.0

// Package storetest has a fake master of a Mooncake Store for tests. It implements as much of 0.3.13 and 0.3.14 as the tests need, and
// fails on purpose when told so.
package storetest

import (
	"crypto/md5"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	sp "github.com/kvasir-kv/kvasir/mooncake/store/structpack"
)

// Master is a fake master. Change its fields only inside Set.
type Master struct {
	Addr string

	Lease    time.Duration // granted by every call that leases objects
	Segments []Segment
	Objects  map[string]*Object
	NoRoom   int           // how many of the next starts of a put find no room
	Copies   int           // number of replicas of an object
	Delay    time.Duration // delay before an answer about replicas
	Revoked  int

	Lengths bool            // answer as 0.3.14 does: with the length of the message and with later fields
	Hidden  map[string]bool // objects of silent nodes, hidden as 0.3.14 does
	Discard time.Duration   // time after which another put may replace a put that has not ended; 0: never

	// Before is called when a request has come. Answered is called when the request was carried out, with the frame of its answer: it
	// returns the frame to send, or nil to break the connection. Both may block, and may call Set.
	Before   func(method string)
	Answered func(method string, frame []byte) []byte

	t       testing.TB
	mu      sync.Mutex
	clients map[uuid]bool
	used    uint64
	conns   map[net.Conn]bool
}

type uuid [2]uint64

// Segment is memory that a node gives to the cluster.
type Segment struct {
	ID          uuid
	Name        string
	Base, Bytes uint64
	Endpoint    string
}

// Object is an object whose put has begun or is complete.
type Object struct {
	Owner    uuid
	Pieces   []Piece
	Complete bool
	Started  time.Time
}

// Piece is the place of one replica.
type Piece struct {
	Addr, Bytes uint64
	Endpoint    string
	Writing     bool // the replica is still being written, whatever the object's state is
}

// New starts a Master that serves until the test ends.
func New(t testing.TB) *Master {
	t.Helper()
	m := &Master{t: t, Lease: 10 * time.Second, Copies: 1, conns: map[net.Conn]bool{}}
	m.Forget()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m.Addr = l.Addr().String()
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			m.Set(func() { m.conns[c] = true })
			serving.Go(func() { m.serve(c) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		m.Set(m.closeConns)
		serving.Wait()
	})
	return m
}

func (m *Master) closeConns() {
	for c := range m.conns {
		c.Close()
	}
}

// Forget makes the Master forget all, as a restarted master does.
func (m *Master) Forget() {
	m.Set(func() {
		m.Segments, m.clients, m.Objects, m.used = nil, map[uuid]bool{}, map[string]*Object{}, 0
		m.closeConns()
	})
}

// ForgetClients makes the master treat all nodes as unknown, although it keeps their segments. Call it within Set.
func (m *Master) ForgetClients() { m.clients = map[uuid]bool{} }

// Set calls f while no call is being answered.
func (m *Master) Set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

const (
	requestHeader  = 20
	responseHeader = 16
	badArguments   = 4
	noFunction     = 11
)

var methods = func() map[uint32]string {
	ids := map[uint32]string{}
	for _, name := range []string{
		"ServiceReady", "BatchExistKey", "BatchGetReplicaList", "PutStart", "BatchPutStart", "BatchPutEnd", "BatchPutRevoke", "Remove",
		"MountSegment", "ReMountSegment", "UnmountSegment", "GracefulUnmountSegment", "Ping",
	} {
		sum := md5.Sum([]byte("mooncake::WrappedMasterService::" + name))
		ids[binary.BigEndian.Uint32(sum[:])] = name
	}
	return ids
}()

func (m *Master) serve(c net.Conn) {
	defer c.Close()
	defer m.Set(func() { delete(m.conns, c) })
	var h [requestHeader]byte
	for {
		if _, err := io.ReadFull(c, h[:]); err != nil {
			return
		}
		body := make([]byte, binary.LittleEndian.Uint32(h[12:]))
		if _, err := io.ReadFull(c, body); err != nil {
			return
		}
		method := methods[binary.LittleEndian.Uint32(h[8:])]
		var before func(string)
		var answered func(string, []byte) []byte
		m.Set(func() { before, answered = m.Before, m.Answered })
		if before != nil {
			before(method)
		}
		answer := m.answer(method, body)
		if answered != nil {
			answer = answered(method, answer)
		}
		if answer == nil {
			return
		}
		copy(answer[4:8], h[4:8])
		if _, err := c.Write(answer); err != nil {
			return
		}
	}
}

// The codes of its errors.
const (
	noRoom      = -200
	badArgument = -600
	notYours    = -601
	complete    = -700
	notReady    = -703
	notFound    = -704
	exists      = -705
)

var descriptor = "\xfd" + sp.U64 + "\x86" + "\xfd\xfd" + sp.U64 + sp.U64 + sp.String + sp.String + "\xff\xff" + "\xff" + sp.I32 + "\xff"

func (m *Master) answer(method string, body []byte) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	var x []any
	if len(body) > 0 {
		r, typ, err := sp.Open(body)
		if err != nil {
			m.t.Error(err)
			return answer(badArguments, sp.Bool, func(w *sp.Writer) { w.Bool(false) })
		}
		if typ.Kind == sp.KindStruct && method != "Ping" {
			x = Values(r, typ).([]any)
		} else {
			x = []any{Values(r, typ)}
		}
		if err := r.End(); err != nil {
			m.t.Error(err)
		}
	}
	void := func(code int32) []byte {
		return answer(0, sp.Expected(sp.Void), func(w *sp.Writer) { outcome(w, code) })
	}
	switch method {
	case "ServiceReady":
		return void(0)
	case "PutStart":
		if _, named := x[0].([]any); !named { // the form of 0.3.7, whose calls this master does not answer
			return Refusal(badArguments)
		}
		return m.withLength(void(badArgument), nil)
	case "Ping":
		known := int32(2)
		if m.clients[id(x[0])] {
			known = 1
		}
		return answer(0, sp.Expected(sp.Struct(sp.I64, sp.I32)), func(w *sp.Writer) {
			w.Bool(true)
			w.U64(0)
			w.I32(known)
		})
	case "MountSegment", "ReMountSegment", "GracefulUnmountSegment", "UnmountSegment":
		m.segments(method, x)
		return void(0)
	case "Remove":
		switch o := m.Objects[x[0].(string)]; {
		case o == nil:
			return void(notFound)
		case !o.Complete:
			return void(notReady)
		}
		delete(m.Objects, x[0].(string))
		return void(0)
	case "BatchExistKey":
		keys := Texts(x[0])
		return answer(0, sp.Vector(sp.Expected(sp.Bool)), func(w *sp.Writer) {
			w.Size(len(keys))
			for _, k := range keys {
				w.Bool(true)
				w.Bool(m.Objects[k] != nil && m.Objects[k].Complete && !m.Hidden[k])
			}
		})
	case "BatchGetReplicaList":
		time.Sleep(m.Delay)
		return m.replicas(Texts(x[0]))
	case "BatchPutStart":
		return m.start(id(x[0]), Texts(x[1]), x[2].([]any))
	case "BatchPutEnd", "BatchPutRevoke":
		return m.end(method == "BatchPutRevoke", id(x[0]), Texts(x[1]))
	}
	return answer(noFunction, sp.String, func(w *sp.Writer) { w.String("the rpc function not registered") })
}

// segments carries out a request about segments.
func (m *Master) segments(method string, x []any) {
	switch method {
	case "MountSegment":
		s := x[0].([]any)
		m.Segments = append(m.Segments, Segment{id(s[0]), s[1].(string), s[2].(uint64), s[3].(uint64), s[4].(string)})
	case "ReMountSegment":
		m.clients[id(x[1])] = true
	case "UnmountSegment":
		m.Segments = slices.DeleteFunc(m.Segments, func(s Segment) bool { return s.ID == id(x[0]) })
	}
}

func (m *Master) replicas(keys []string) []byte {
	found := sp.Struct(sp.Vector(descriptor), sp.U64, sp.Optional(sp.U64))
	var later []byte
	a := answer(0, sp.Vector(sp.Expected(found)), func(w *sp.Writer) {
		w.Size(len(keys))
		for _, k := range keys {
			o := m.Objects[k]
			switch {
			case o == nil:
				outcome(w, notFound)
			case !o.Complete || m.Hidden[k]:
				outcome(w, notReady)
			default:
				w.Bool(true)
				o.write(w)
				w.U64(uint64(m.Lease.Milliseconds()))
				w.Bool(false)
				if m.Lengths {
					later = append(later, make([]byte, len(o.Pieces))...) // no locality: one zero byte per replica
					later = append(later, "\x01\x07\x00default"...)
				}
			}
		}
	})
	return m.withLength(a, later)
}

// withLength turns a into an answer of 0.3.14 if Lengths is set: with its length before the literal, and with later fields after the
// payload.
func (m *Master) withLength(a, later []byte) []byte {
	if !m.Lengths {
		return a
	}
	body := a[responseHeader:]
	n := uint32(len(body) + 4 + len(later))
	out := append(append([]byte(nil), a[:responseHeader+4]...), body[4]|2)
	out = binary.LittleEndian.AppendUint32(out, n)
	out = append(append(out, body[5:]...), later...)
	binary.LittleEndian.PutUint32(out[8:], n)
	return out
}

func (m *Master) start(owner uuid, keys []string, sizes []any) []byte {
	var later []byte
	a := answer(0, sp.Vector(sp.Expected(sp.Vector(descriptor))), func(w *sp.Writer) {
		w.Size(len(keys))
		for i, k := range keys {
			n := sizes[i].(uint64)
			o := m.Objects[k]
			if o != nil && !o.Complete && m.Discard > 0 && time.Since(o.Started) > m.Discard {
				o = nil
			}
			switch {
			case o != nil:
				outcome(w, exists)
			case m.NoRoom > 0 || len(m.Segments) == 0 || m.used+n > m.Segments[0].Bytes:
				m.NoRoom--
				outcome(w, noRoom)
			default:
				o = &Object{Owner: owner, Started: time.Now()}
				for j := range min(m.Copies, len(m.Segments)) {
					s := m.Segments[j]
					o.Pieces = append(o.Pieces, Piece{Addr: s.Base + m.used, Bytes: n, Endpoint: s.Endpoint})
				}
				m.used += n
				m.Objects[k] = o
				w.Bool(true)
				o.write(w)
				later = append(later, make([]byte, len(o.Pieces))...)
			}
		}
	})
	return m.withLength(a, later)
}

func (m *Master) end(revoke bool, owner uuid, keys []string) []byte {
	return answer(0, sp.Vector(sp.Expected(sp.Void)), func(w *sp.Writer) {
		w.Size(len(keys))
		for _, k := range keys {
			o := m.Objects[k]
			switch {
			case o == nil:
				outcome(w, notFound)
			case o.Owner != owner:
				outcome(w, notYours)
			case revoke && o.Complete:
				outcome(w, complete)
			case revoke:
				delete(m.Objects, k)
				m.Revoked++
				outcome(w, 0)
			default:
				o.Complete = true
				outcome(w, 0)
			}
		}
	})
}

func (o *Object) write(w *sp.Writer) {
	w.Size(len(o.Pieces))
	for i, p := range o.Pieces {
		w.U64(uint64(i))
		w.U8(0)
		w.U64(p.Bytes)
		w.U64(p.Addr)
		w.String("tcp")
		w.String(p.Endpoint)
		status := int32(2) // being written
		if o.Complete && !p.Writing {
			status = 3
		}
		w.I32(status)
	}
}

// answer returns the frame of an answer, without its sequence number. f writes the payload.
func answer(code byte, literal string, f func(*sp.Writer)) []byte {
	w := &sp.Writer{B: make([]byte, responseHeader)}
	w.Begin(sp.FormOf(literal), 1<<16-1)
	f(w)
	w.B[0], w.B[2] = 21, code
	binary.LittleEndian.PutUint32(w.B[8:], uint32(len(w.B)-responseHeader))
	return w.B
}

func outcome(w *sp.Writer, code int32) {
	w.Bool(code == 0)
	if code != 0 {
		w.I32(code)
	}
}

// Refusal returns the frame of an error of the RPC itself.
func Refusal(code byte) []byte {
	return answer(code, sp.String, func(w *sp.Writer) { w.String("refused") })
}

// Values reads a value of any type: numbers of 8 bytes as uint64, of 4 as int32, others as uint8, vectors and structs as []any.
func Values(r *sp.Reader, t *sp.Type) any {
	switch t.Kind {
	case sp.KindFixed:
		switch t.Size {
		case 8:
			return r.U64()
		case 4:
			return r.I32()
		}
		return r.U8()
	case sp.KindString:
		return r.String()
	case sp.KindVector:
		out := []any{}
		for range r.Size(t.Parts[0].Least()) {
			out = append(out, Values(r, t.Parts[0]))
		}
		return out
	case sp.KindOptional:
		if r.Bool() {
			return Values(r, t.Parts[0])
		}
		return nil
	case sp.KindStruct:
		out := []any{}
		for _, p := range t.Parts {
			out = append(out, Values(r, p))
		}
		return out
	}
	panic(t.Kind)
}

// Texts returns a vector of strings as a slice. For a vector of pairs of a key and its checksum, it returns the keys.
func Texts(v any) (out []string) {
	for _, x := range v.([]any) {
		if pair, ok := x.([]any); ok {
			x = pair[0] // a key and its checksum
		}
		out = append(out, x.(string))
	}
	return out
}

func id(v any) uuid { return uuid{v.([]any)[0].(uint64), v.([]any)[1].(uint64)} }
