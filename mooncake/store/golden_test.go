// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
	sp "github.com/kvasir-kv/kvasir/mooncake/store/structpack"
)

// vector is a call that a real master answered.
type vector struct {
	Version    string
	Case       string
	Method     string
	FunctionID string `json:"function_id"`
	Request    string `json:"request_hex"`
	Response   string `json:"response_hex"`
}

func (v *vector) version() Version {
	for _, k := range Versions {
		if strings.HasPrefix(v.Version+".", k.String()+".") {
			return k
		}
	}
	return V0_3_13 // of captures that do not name it
}

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func vectors(t testing.TB) (all []vector) {
	t.Helper()
	for _, name := range []string{"rpc-capture", "rpc-capture-older", "errors", "node-life", "independent-client", "rpc-capture-0.3.14", "errors-0.3.14", "node-life-0.3.14"} {
		var file struct{ Vectors []vector }
		text, err := os.ReadFile("testdata/" + name + ".json")
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(text, &file); err != nil {
			t.Fatal(err)
		}
		all = append(all, file.Vectors...)
	}
	return all
}

func methodOf(name string) (method, bool) {
	for m, n := range methodNames {
		if n == name {
			return method(m), true
		}
	}
	return 0, false
}

// older returns a message as a release writes it that knows no later fields: without its length and without those fields.
// Messages without a literal, and those whose payload is cut, stay as they are.
func older(body []byte) []byte {
	if len(body) < 6 || body[4]&3 == 0 || body[4]&4 == 0 || 5+1<<(body[4]&3) > len(body) {
		return body
	}
	plain := append(append(bytes.Clone(body[:4]), body[4]&^3), body[5+1<<(body[4]&3):]...)
	for n := len(plain); n > 0; n-- {
		r, typ, err := sp.Open(plain[:n])
		if err != nil {
			break
		}
		if r.Skip(typ); r.End() == nil {
			return plain[:n]
		}
	}
	return body
}

// Every request that a real client or node sent has the type that the tables say, and every answer can be read.
func TestRecordedMessagesMatchWireForms(t *testing.T) {
	seen := map[Version]map[method]bool{}
	for _, v := range vectors(t) {
		m, ok := methodOf(v.Method)
		if !ok {
			continue
		}
		q, a := unhex(t, v.Request), unhex(t, v.Response)
		if id := binary.LittleEndian.Uint32(q[8:]); id != functionIDs[m] {
			t.Errorf("%s: function %#x, want %#x", v.Method, functionIDs[m], id)
		}
		if a[2] == 0 && len(a) > responseHeader {
			r, typ, err := sp.Open(a[responseHeader:])
			if err != nil {
				t.Fatal(v.Version, v.Method, err)
			}
			if r.Skip(typ); r.End() != nil {
				t.Errorf("%s %s: %v", v.Version, v.Method, r.End())
			}
		}
		if body := older(q[requestHeader:]); len(body) > 5 && body[0]&1 == 1 && body[4]&4 != 0 && a[2] == 0 {
			form := codecs[v.version()].forms[m]
			if literal, _, _ := bytes.Cut(body[5:], []byte{0}); string(literal) != form.Literal() {
				t.Errorf("%s %s: literal %x, want %x", v.Version, v.Method, form.Literal(), literal)
			}
			if seen[v.version()] == nil {
				seen[v.version()] = map[method]bool{}
			}
			seen[v.version()][m] = true
		}
	}
	for _, v := range Versions {
		if len(seen[v]) < 8 {
			t.Errorf("%v: only %d methods were looked at", v, len(seen[v]))
		}
	}
}

func id(v any) UUID { return UUID{v.([]any)[0].(uint64), v.([]any)[1].(uint64)} }

// replay is a master of one release that knows one call.
type replay struct {
	t       *testing.T
	version Version
	mu      sync.Mutex
	want    []byte // the body of the request
	answer  []byte // the frame
	met     bool
}

func (p *replay) serve(c net.Conn) {
	defer c.Close()
	var h [requestHeader]byte
	for {
		if _, err := io.ReadFull(c, h[:]); err != nil {
			return
		}
		body := make([]byte, binary.LittleEndian.Uint32(h[12:]))
		if _, err := io.ReadFull(c, body); err != nil {
			return
		}
		answer := p.frame(h, body)
		copy(answer[4:8], h[4:8])
		if _, err := c.Write(answer); err != nil {
			return
		}
	}
}

// frame returns the answer to a request; its sequence number is still to be set.
func (p *replay) frame(h [requestHeader]byte, body []byte) []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch f := binary.LittleEndian.Uint32(h[8:]); {
	case p.want != nil && bytes.Equal(body, p.want):
		p.met = true
		return bytes.Clone(p.answer)
	case f == functionIDs[serviceReady]:
		return answerOf(0, sp.Expected(sp.Void), func(w *sp.Writer) { w.Bool(true) })
	case f == functionIDs[putStart]:
		if want := codecs[p.version].forms[putStart]; !bytes.Contains(body, []byte(want.Literal()+"\x00")) {
			return answerOf(badArguments, sp.String, func(w *sp.Writer) { w.String("invalid rpc arg") })
		}
		a := answerOf(0, sp.Expected(sp.Void), func(w *sp.Writer) {
			w.Bool(false)
			w.I32(int32(BadArgument))
		})
		if p.version == V0_3_14 { // it names its length
			body := a[responseHeader:]
			a = slices.Concat(a[:responseHeader+4], []byte{body[4] | 1, byte(len(body) + 2), 0}, body[5:])
			a[8] += 2
		}
		return a
	}
	p.t.Errorf("an unknown request:\n%x, want\n%x", body, p.want)
	return answerOf(noFunction, sp.String, func(w *sp.Writer) { w.String("?") })
}

// answerOf returns a frame.
func answerOf(code byte, literal string, f func(*sp.Writer)) []byte {
	w := &sp.Writer{B: make([]byte, responseHeader)}
	w.Begin(sp.FormOf(literal), 255)
	f(w)
	w.B[0], w.B[2] = magic, code
	binary.LittleEndian.PutUint32(w.B[8:], uint32(len(w.B)-responseHeader))
	return w.B
}

func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var conns sync.WaitGroup
	done := make(chan struct{})
	var mu sync.Mutex
	var open []net.Conn
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			conns.Go(func() { serve(c) })
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		conns.Wait()
	})
	return l.Addr().String()
}

// What real clients, real nodes and an independent client sent is what a Master sends, byte for byte, and the masters'
// answers mean what they were recorded for.
func TestRecordedCalls(t *testing.T) {
	made := map[string]int{}
	for i, v := range vectors(t) {
		q, a := unhex(t, v.Request), unhex(t, v.Response)
		body := older(q[requestHeader:])
		_, ours := methodOf(v.Method)
		if !ours || a[2] != 0 || len(body) < 6 || body[0]&1 == 0 || body[4]&4 == 0 {
			continue // never called, refused by the RPC, or without a literal
		}
		r, typ, err := sp.Open(body)
		if err != nil {
			t.Fatal(err)
		}
		var x []any
		if typ.Kind == sp.KindStruct && v.Method != "Ping" {
			x = storetest.Values(r, typ).([]any)
		} else {
			x = []any{storetest.Values(r, typ)}
		}
		if err := r.End(); err != nil {
			t.Fatal(v.Version, v.Case, v.Method, err)
		}
		p := &replay{t: t, version: v.version(), want: body, answer: a}
		m := masterOf(t, MasterOptions{Addresses: []string{listen(t, p.serve)}})
		got, known := call(context.Background(), m, v.version(), v.Method, x)
		m.Close()
		if !known {
			continue
		}
		made[v.Version+" "+v.Method]++
		p.mu.Lock()
		if !p.met {
			t.Errorf("%d %s %s: the request was not sent", i, v.Version, v.Method)
		}
		p.mu.Unlock()
		if want := meaning(t, a); got != want {
			t.Errorf("%d %s %s (%s): %s, want %s", i, v.Version, v.Method, v.Case, got, want)
		}
	}
	if len(made) < 30 {
		t.Errorf("only %d calls were made: %v", len(made), made)
	}
}

// meaning returns the content of an answer as text: the codes of its errors, true for a value.
func meaning(t *testing.T, frame []byte) string {
	r, typ, err := sp.Open(frame[responseHeader:])
	if err != nil {
		t.Fatal(err)
	}
	one := func(typ *sp.Type) string {
		if !r.Bool() {
			return fmt.Sprint(r.I32())
		}
		r.Skip(typ.Parts[0])
		return "ok"
	}
	if typ.Kind == sp.KindExpected {
		return one(typ)
	}
	var out []string
	for range r.Size(1) {
		out = append(out, one(typ.Parts[0]))
	}
	return strings.Join(out, " ")
}

func codeOf(err error) string {
	if c, ok := err.(Code); ok {
		return fmt.Sprint(int32(c))
	}
	if err != nil {
		return err.Error()
	}
	return "ok"
}

func codesOf(err error, errs []error) string {
	if err != nil {
		return err.Error()
	}
	var out []string
	for _, err := range errs {
		out = append(out, codeOf(err))
	}
	return strings.Join(out, " ")
}

// call makes the call of a recorded request; known is false for calls that a Master makes otherwise, or not.
func call(ctx context.Context, m *Master, v Version, name string, x []any) (got string, known bool) {
	client, rest := UUID{}, x
	if v != V0_3_7 && strings.HasPrefix(name, "BatchPut") {
		client, rest = id(x[0]), x[1:]
	}
	switch name {
	case "BatchExistKey":
		keys := storetest.Texts(x[0])
		present := make([]bool, len(keys))
		if err := m.Exists(ctx, keys, present); err != nil {
			return err.Error(), true
		}
		return strings.TrimSpace(strings.Repeat("ok ", len(keys))), true
	case "BatchGetReplicaList":
		found, err := m.Replicas(ctx, storetest.Texts(x[0]))
		var errs []error
		for _, f := range found {
			errs = append(errs, f.Err)
			if f.Err == nil && (len(f.Replicas) == 0 || f.Lease <= 0) {
				return fmt.Sprintf("%+v", f), true
			}
		}
		return codesOf(err, errs), true
	case "BatchPutStart":
		config := rest[2].([]any)
		o := PutOptions{Replicas: int(config[0].(uint64))}
		for _, c := range config {
			if names, ok := c.([]any); ok && len(names) > 0 {
				return "", false // preferred segments, which a Master does not name
			}
			if text, ok := c.(string); ok && o.Segment == "" {
				o.Segment = text
			}
		}
		var sizes []uint64
		for _, n := range rest[1].([]any) {
			if many, ok := n.([]any); ok {
				if len(many) != 1 {
					return "", false // an object in pieces
				}
				n = many[0]
			}
			sizes = append(sizes, n.(uint64))
		}
		started, err := m.PutStart(ctx, client, storetest.Texts(rest[0]), sizes, &o)
		var errs []error
		for _, s := range started {
			errs = append(errs, s.Err)
		}
		return codesOf(err, errs), true
	case "BatchPutEnd", "BatchPutRevoke":
		keys := rest
		if v == V0_3_7 {
			keys = x
			if list, ok := x[0].([]any); ok {
				keys = []any{list}
			}
		} else if rest[1].(int32) != allKinds {
			return "", false // of memory alone
		}
		errs := make([]error, len(storetest.Texts(keys[0])))
		f := m.PutRevoke
		if name == "BatchPutEnd" {
			f = m.PutEnd
		}
		err := f(ctx, client, storetest.Texts(keys[0]), errs)
		return codesOf(err, errs), true
	case "Remove":
		force := len(x) > 1 && x[1].(uint8) == 1
		return codeOf(m.Remove(ctx, x[0].(string), force)), true
	case "Ping":
		_, err := m.Ping(ctx, id(x[0]))
		return codeOf(err), true
	case "MountSegment":
		s, plain := segment(x[0])
		return codeOf(m.Mount(ctx, id(x[1]), &s)), plain
	case "ReMountSegment":
		var all []Segment
		for _, v := range x[0].([]any) {
			s, plain := segment(v)
			if !plain {
				return "", false
			}
			all = append(all, s)
		}
		return codeOf(m.Remount(ctx, id(x[1]), all...)), true
	case "UnmountSegment":
		return codeOf(m.Unmount(ctx, id(x[1]), id(x[0]))), true
	}
	return "", false
}

func segment(v any) (s Segment, plain bool) {
	x := v.([]any)
	s = Segment{ID: id(x[0]), Name: x[1].(string), Base: x[2].(uint64), Bytes: x[3].(uint64), Endpoint: x[4].(string)}
	return s, (len(x) < 6 || x[5] == "tcp") && (len(x) < 7 || x[6] == "")
}
