// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"testing"
)

func readFile(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile("testdata/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What a libzmq ROUTER sends is, byte for byte, what ours sends.
func TestGoldenRouter(t *testing.T) {
	want := readFile(t, "router-libzmq-4.3.5.bin")
	got := appendReady(appendGreeting(nil), typeRouter, nil)
	if !bytes.Equal(got, want) {
		t.Fatalf("greeting and READY\n got %x\nwant %x", got, want)
	}
}

// What a libzmq DEALER sends differs from ours in its padding only, which is
// the length of its identity + 1, for ZMTP 1.0.
func TestGoldenDealer(t *testing.T) {
	recorded := readFile(t, "dealer-libzmq-4.3.5.bin")
	ours := appendReady(appendGreeting(nil), typeDealer, []byte("kv-1"))
	ours[8] = 5
	var q queue
	q.copyFrames([][]byte{[]byte("a")})
	q.copyFrames([][]byte{nil, bytes.Repeat([]byte("x"), 300), []byte("end")})
	q.copyFrames([][]byte{bytes.Repeat([]byte("y"), 70000)})
	ours = appendPing(append(ours, q.buf...), 25, nil)
	if !bytes.Equal(ours, recorded) {
		t.Fatalf("%d bytes built, %d recorded, or they differ", len(ours), len(recorded))
	}
	got, err := decodeAll(recorded, []int{1, 7, 1000}, testDecoder())
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 5 || got[0] != "cmd READY" || got[4] != "cmd PING" || !strings.HasPrefix(got[2], "msg ||xxx") {
		t.Fatalf("decoded %d events: %.80q", len(got), got)
	}
}

func TestGreeting(t *testing.T) {
	whole := appendGreeting(nil)
	f := func(change func(b []byte) []byte, want error, hint string) {
		t.Helper()
		_, err := checkGreeting(change(bytes.Clone(whole)), mechanismNull)
		if !errors.Is(err, want) || err != nil && !strings.Contains(err.Error(), hint) {
			t.Fatalf("got %v, want %v with %q", err, want, hint)
		}
	}
	set := func(i int, v byte) func([]byte) []byte {
		return func(b []byte) []byte { b[i] = v; return b }
	}
	text := func(s string) func([]byte) []byte { return func([]byte) []byte { return []byte(s) } }
	f(set(0, 0xFF), nil, "")
	f(set(8, 77), nil, "")
	f(set(10, 4), nil, "")
	f(set(11, 9), nil, "")
	f(set(32, 1), nil, "")
	f(set(10, 1), errVersion, "1")
	f(set(12, 'P'), errMechanism, "PULL")
	f(set(20, 'x'), errMechanism, "NULL")
	f(set(9, 0x7E), errNotZMTP, "")
	f(text("GET / HTTP/1.1\r\n"), errNotZMTP, "HTTP")
	f(text("\x16\x03\x01\x02\x00"), errNotZMTP, "TLS")
	f(text("\x01\x00"), errNotZMTP, "ZMTP 1.0")
	f(text(""), nil, "")
	f(text("\xff\x00"), nil, "")
}

func TestReady(t *testing.T) {
	f := func(body string, wantType, wantIdentity string, want error) {
		t.Helper()
		r, err := parseReady([]byte(body))
		if !errors.Is(err, want) || r.socketType != wantType || r.identity != wantIdentity {
			t.Fatalf("%q: %+v, %v", body, r, err)
		}
	}
	f("", "", "", nil)
	f("\x0bSocket-Type\x00\x00\x00\x06DEALER", "DEALER", "", nil)
	f("\x0bSOCKET-TYPE\x00\x00\x00\x03REQ\x08identity\x00\x00\x00\x02ab\x05X-New\x00\x00\x00\x01z", "REQ", "ab", nil)
	f("\x0bSocket-Type\x00\x00\x00\x07DEALER", "", "", errProtocol)
	f("\x0bSocket-Type\xff\xff\xff\xffDEALER", "", "", errProtocol)
	f("\x00", "", "", errProtocol)
	f("\x05ab", "", "", errProtocol)
	f(string(appendProperty(nil, "Identity", make([]byte, 256))), "", "", errProtocol)
	f(strings.Repeat("\x01a\x00\x00\x00\x00", maxProperties+1), "", "", errProtocol)
}

func TestCommands(t *testing.T) {
	body := func(frame []byte) []byte { return frame[2:] }
	name, data, err := splitCommand(body(appendError(nil, "no")))
	if err != nil || string(name) != "ERROR" {
		t.Fatal(string(name), err)
	}
	if e, ok := errors.AsType[*peerError](parseError(data)); !ok || e.Text != "no" || Reason(e) != "refused" {
		t.Fatal(parseError(data))
	}
	_, data, _ = splitCommand(body(append(appendPing(nil, 25, nil), "0123456789abcdef"...)))
	if ttl, context, err := parsePing(data); err != nil || ttl != 25 || len(context) != 16 {
		t.Fatal(ttl, context, err)
	}
	if got := appendPong(nil, []byte("xy")); string(got) != "\x04\x07\x04PONGxy" {
		t.Fatalf("%q", got)
	}
	for _, bad := range []string{"", "\x00", "\x05PING"} {
		if _, _, err := splitCommand([]byte(bad)); !errors.Is(err, errProtocol) {
			t.Fatalf("%q: %v", bad, err)
		}
	}
	for _, bad := range []string{"", "a", "ab0123456789abcdefg"} {
		if _, _, err := parsePing([]byte(bad)); !errors.Is(err, errProtocol) {
			t.Fatalf("%q: %v", bad, err)
		}
	}
	if err := parseError([]byte("\x09short")); !errors.Is(err, errProtocol) {
		t.Fatal(err)
	}
}

func TestEndpoint(t *testing.T) {
	f := func(in, network, address string) {
		t.Helper()
		n, a, err := parseEndpoint(in)
		if n != network || a != address || (err == nil) != (network != "") {
			t.Fatalf("%s: %q %q %v", in, n, a, err)
		}
	}
	f("tcp://127.0.0.1:5555", "tcp", "127.0.0.1:5555")
	f("tcp://*:5555", "tcp", ":5555")
	f("tcp://*:*", "tcp", ":0")
	f("tcp://[::1]:7", "tcp", "[::1]:7")
	f("ipc:///run/k.sock", "unix", "/run/k.sock")
	f("ipc://@name", "unix", "@name")
	for _, bad := range []string{"", "tcp://", "tcp://host", "ipc://", "ipc://@", "inproc://x", "127.0.0.1:5"} {
		f(bad, "", "")
	}
}
