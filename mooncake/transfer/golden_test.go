// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

func unhex(t *testing.T, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestGoldenHeaders(t *testing.T) {
	var v struct {
		Headers []struct {
			Name, Hex  string
			Size, Addr uint64
		}
		Status []struct{ Name, Hex string }
	}
	testkit.ReadVector(t, "mooncake-te/header-unit.json", &v)
	for _, c := range v.Headers {
		raw := unhex(t, c.Hex)
		h := parseHeader(raw)
		if h.size != c.Size || h.addr != c.Addr {
			t.Errorf("%s: decoded %+v", c.Name, h)
		}
		clear(raw[17:]) // padding is free; ours is zero
		if got := h.appendTo(nil); !bytes.Equal(got, raw) {
			t.Errorf("%s: encoded %x, want %x", c.Name, got, raw)
		}
	}
	for _, c := range v.Status {
		raw := unhex(t, c.Hex)
		code, ok := parseStatus(raw)
		if magic := binary.LittleEndian.Uint32(raw[4:]); ok != (magic == statusMagic) {
			t.Errorf("%s: magic accepted: %v", c.Name, ok)
		}
		if got := statusFrame(code); ok && !bytes.Equal(got[:], raw) {
			t.Errorf("%s: encoded %x, want %x", c.Name, got, raw)
		}
	}
	t.Logf("%d cases", len(v.Headers)+len(v.Status))
}

type handshakeVector struct {
	Engine, Kind, Note string
	RequestHex         string `json:"request_hex"`
	ResponseHex        string `json:"response_hex"`
}

// Every captured frame decodes, and encodes to the same bytes again: as a
// request of ours, and as our reply.
func TestGoldenHandshakeFrames(t *testing.T) {
	var file struct{ Vectors []handshakeVector }
	testkit.ReadVector(t, "mooncake-te/handshake.json", &file)
	cases := 0
	again := func(v handshakeVector, frame []byte, into any) {
		t.Helper()
		cases++
		kind, text, err := readFrame(bytes.NewReader(frame))
		if err != nil {
			t.Fatalf("%s %s: %v", v.Engine, v.Kind, err)
		}
		if err := json.Unmarshal(text, into); err != nil {
			t.Fatalf("%s %s: %v", v.Engine, v.Kind, err)
		}
		got, err := appendFrame(nil, kind, into)
		if err != nil || !bytes.Equal(got, frame) {
			t.Errorf("%s %s: encoded\n%q, want\n%q", v.Engine, v.Kind, got, frame)
		}
	}
	for _, v := range file.Vectors {
		req, resp := unhex(t, v.RequestHex), unhex(t, v.ResponseHex)
		switch v.Kind {
		case "metadata":
			if len(req) > 12 { // the shortest one is ours: {}
				again(v, req, new(Descriptor))
			} else {
				again(v, req, &struct{}{})
			}
			again(v, resp, new(Descriptor))
			_, text, _ := readFrame(bytes.NewReader(resp))
			if d, err := parseDescriptor(text); err != nil || d.acked() != (strings.HasPrefix(v.Engine, "0.3.12") || strings.HasPrefix(v.Engine, "0.3.13")) {
				t.Errorf("%s: descriptor %+v, %v", v.Engine, d, err)
			}
		case "notify":
			again(v, req, new(notice))
			again(v, resp, new(notice))
		case "probe":
			again(v, req, &struct{}{})
			again(v, resp, new(probeReply))
		case "connection", "old-protocol":
			again(v, resp, new(connectionReply))
		}
	}
	t.Logf("%d cases", cases)
}

// A live target gives the captured answer to each captured request.
func TestGoldenHandshakeTarget(t *testing.T) {
	var file struct{ Vectors []handshakeVector }
	testkit.ReadVector(t, "mooncake-te/handshake.json", &file)
	target, _ := listen(t, 4096, TargetOptions{})
	for _, v := range file.Vectors {
		c, err := net.Dial("tcp", target.Name())
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(60 * time.Second))
		c.Write(unhex(t, v.RequestHex))
		got, err := io.ReadAll(c)
		c.Close()
		want := unhex(t, v.ResponseHex)
		if v.Kind == "metadata" {
			// Names, ports, buffers and time are ours: put them into the capture.
			kind, text, err := readFrame(bytes.NewReader(got))
			if err != nil || kind != frameMetadata {
				t.Fatalf("%s: metadata reply %q: %v", v.Engine, got, err)
			}
			d, err := parseDescriptor(text)
			if err != nil || d.Name != target.Name() || d.ProtoVersion != 2 || len(d.Buffers) != 1 || d.Buffers[0].Addr != testBase {
				t.Errorf("%s: descriptor %s: %v", v.Engine, text, err)
			}
			continue
		}
		if err != nil && len(want) > 0 || !bytes.Equal(got, want) {
			t.Errorf("%s %s (%s): reply %q (%v), want %q", v.Engine, v.Kind, v.Note, got, err, want)
		}
	}
	t.Logf("%d cases", len(file.Vectors))
}

type dataVector struct {
	Engine     string
	Connection int
	Ops        []dataOp
}

type dataOp struct {
	HeaderHex string `json:"header_hex"`
	Size      uint64
	Addr      string
	Op        string
	V2        bool
	StatusHex string `json:"status_hex"`
	Status    int
	BodyHex   string `json:"body_hex"`
	BodySHA   string `json:"body_sha256"`
}

func (o dataOp) addr() uint64 {
	a, _ := strconv.ParseUint(o.Addr, 0, 64)
	return a
}

// body returns the captured body; long ones are given by their hash and rule.
func (o dataOp) body(t *testing.T) []byte {
	t.Helper()
	if o.BodySHA == "" {
		return unhex(t, o.BodyHex)
	}
	b := make([]byte, o.Size)
	for i := range b {
		b[i] = byte(i * 7 % 251)
	}
	copy(b[1000:], b[:32]) // the captured read put its bytes there before
	if sum := sha256.Sum256(b); hex.EncodeToString(sum[:]) != o.BodySHA {
		t.Fatal("the rule of the source buffer does not give the captured hash")
	}
	return b
}

// engineRegion returns the 200,000 bytes that the engine of v had registered:
// everything it accepted lies in the first 64 KiB after the lowest address, but
// for the requests that are meant to fail.
func engineRegion(all []dataVector, engine string) Range {
	low := uint64(1 << 63)
	for _, v := range all {
		for _, o := range v.Ops {
			if v.Engine == engine && o.addr() > 0x1000 {
				low = min(low, o.addr())
			}
		}
	}
	return Range{low, 200000}
}

// refused says whether the vector's operation must be refused by us. Engines
// before 0.3.12 do not check; there the straddling write counts as refused too.
func (o dataOp) refused(at Range) bool {
	return o.Size > 0 && (o.addr() < at.Addr || o.addr()+o.Size > at.end())
}

// The captured initiators, played against our target.
func TestGoldenDataTarget(t *testing.T) {
	var file struct{ Vectors []dataVector }
	testkit.ReadVector(t, "mooncake-te/data.json", &file)
	cases := 0
	for _, engine := range []string{"0.3.13.post1", "0.3.12.post1", "0.3.11.post1", "0.3.7.post2"} {
		at := engineRegion(file.Vectors, engine)
		table, mem := NewTable(), make([]byte, at.Len)
		if _, err := table.Register(at.Addr, mem); err != nil {
			t.Fatal(err)
		}
		target, err := Listen(TargetOptions{}, table)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range file.Vectors {
			if v.Engine != engine {
				continue
			}
			c, err := net.Dial("tcp", target.data.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			c.SetDeadline(time.Now().Add(60 * time.Second))
			for i := range v.Ops {
				cases++
				playOp(t, c.(*net.TCPConn), table, v, i, at, mem)
			}
			c.Close()
		}
		target.Close()
	}
	t.Logf("%d cases", cases)
}

// playOp plays one captured request. The memory keeps what earlier ones wrote,
// so that a read finds what it found in the capture.
func playOp(t *testing.T, c *net.TCPConn, table *Table, v dataVector, i int, at Range, mem []byte) {
	t.Helper()
	o := v.Ops[i]
	fail := func(what string, args ...any) {
		t.Helper()
		t.Errorf("%s connection %d op %d: "+what, append([]any{v.Engine, v.Connection, i}, args...)...)
	}
	request, body := unhex(t, o.HeaderHex), o.body(t)
	if o.Op == "write" {
		request = append(request, body...)
	}
	c.Write(request) // at once: a second write could meet the reset
	if o.V2 && o.refused(at) != (o.Status != 0) {
		fail("our refusal differs from the capture")
	}
	if o.V2 {
		got := make([]byte, statusBytes)
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, unhex(t, o.StatusHex)) {
			fail("status %x (%v), want %s", got, err, o.StatusHex)
			return
		}
	}
	switch {
	case o.refused(at):
		n, err := c.Read(make([]byte, 1))
		if n != 0 || err == nil || o.V2 && err != io.EOF || !o.V2 && err == io.EOF {
			fail("after the refusal: %d bytes, %v", n, err)
		}
	case o.Op == "read":
		got := make([]byte, len(body))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, body) {
			fail("read %x (%v)", got, err)
		}
	default:
		if !o.V2 { // the half-close barrier
			c.CloseWrite()
			if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
				fail("barrier: %d bytes, %v", n, err)
			}
		}
		table.Observe()
		if off := o.addr() - at.Addr; !bytes.Equal(mem[off:off+o.Size], body) {
			fail("memory differs")
		}
		table.Observe()
	}
}

// Our initiator against the captured targets: what it sends is what the engine
// sent, with zeroes for padding.
func TestGoldenDataInitiator(t *testing.T) {
	var file struct{ Vectors []dataVector }
	testkit.ReadVector(t, "mooncake-te/data.json", &file)
	cases := 0
	for _, v := range file.Vectors {
		version := 0
		if v.Ops[0].V2 {
			version = 2
		}
		for i, o := range v.Ops {
			if o.Size == 0 {
				continue // nothing goes on the wire
			}
			cases++
			body := o.body(t)
			script := fakeTarget(t, version, Range{o.addr(), o.Size})
			c := client(t, Options{})
			var err error
			sent := make(chan []byte, 1)
			reply := unhex(t, o.StatusHex)
			go script.once(func(conn *net.TCPConn) {
				n := headerBytes
				if o.Op == "write" {
					n += len(body)
				}
				b := make([]byte, n)
				io.ReadFull(conn, b)
				sent <- b
				if o.Op == "read" && o.Status == 0 {
					reply = append(reply, body...)
				}
				conn.Write(reply)
			})
			local := bytes.Clone(body)
			if o.Op == "write" {
				err = c.Write(timeout(t, 60*time.Second), script.name, []Entry{{local, o.addr()}})
			} else {
				local = make([]byte, o.Size)
				err = c.Read(timeout(t, 60*time.Second), script.name, []Entry{{local, o.addr()}})
			}
			want := unhex(t, o.HeaderHex)
			clear(want[17:])
			if o.Op == "write" {
				want = append(want, body...)
			}
			if got := <-sent; !bytes.Equal(got, want) {
				t.Errorf("%s connection %d op %d: sent %x", v.Engine, v.Connection, i, got[:headerBytes])
			}
			if o.Status == 1 != errors.Is(err, ErrRejected) || o.Status == 0 && err != nil {
				t.Errorf("%s connection %d op %d: %v", v.Engine, v.Connection, i, err)
			}
			if o.Op == "read" && o.Status == 0 && !bytes.Equal(local, body) {
				t.Errorf("%s connection %d op %d: read differs", v.Engine, v.Connection, i)
			}
		}
	}
	t.Logf("%d cases", cases)
}
