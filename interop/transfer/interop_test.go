// SPDX-License-Identifier: Apache-2.0

package transfer_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/mooncake/transfer"
)

const (
	room     = 64 << 20
	testBase = 0x5a00_0000_0000
)

func itoa(n int) string { return strconv.Itoa(n) }

func listen(t *testing.T, o transfer.TargetOptions) (*transfer.Target, []byte) {
	t.Helper()
	table, mem := transfer.NewTable(), make([]byte, room)
	if _, err := table.Register(testBase, mem); err != nil {
		t.Fatal(err)
	}
	target, err := transfer.Listen(o, table)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close() })
	return target, mem
}

func limited(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 120*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// shape is one batch: n blocks of size bytes.
type shape struct {
	size, n   int
	scattered bool
}

var shapes = []shape{
	{1, 1, false},
	{4096, 1, false},
	{4096, 64, true},
	{4096, 1024, false},
	{4096, 2000, true},
	{4096, 4096, true},
	{4096, 4096, false},
	{16 << 10, 256, true},
	{64 << 10, 64, true},
	{64 << 10, 512, true},
	{100_003, 50, true},
	{256 << 10, 64, true},
	{1 << 20, 1, false},
	{1 << 20, 32, true},
	{4 << 20, 8, true},
	{16 << 20, 2, true},
}

// pieces shuffles the blocks at the target; a scattered batch leaves gaps.
func (s shape) pieces() []piece {
	list, place := make([]piece, s.n), rand.Perm(s.n)
	step := s.size
	if s.scattered && (s.size+512)*s.n <= room {
		step += 512
	}
	for i := range list {
		list[i] = piece{uint64(i * s.size), uint64(place[i] * step), s.size}
		if !s.scattered {
			list[i].remote = list[i].local
		}
	}
	return list
}

// checkTarget compares the whole memory of the target.
func checkTarget(t *testing.T, target *transfer.Target, mem, src []byte, list []piece) {
	t.Helper()
	want := make([]byte, room)
	for _, p := range list {
		copy(want[p.remote:], src[p.local:][:p.n])
	}
	target.Table().Observe()
	if !bytes.Equal(mem, want) {
		t.Errorf("%d pieces of %d bytes: the target's memory differs", len(list), list[0].n)
	}
}

// most is the engine's own limit of a batch.
func most(version string) int {
	if version == "0.3.13.post1" {
		return 2000
	}
	return 4096 // it opens a socket for each
}

// The engine writes into our target and reads it back.
func TestEngineToKvasir(t *testing.T) {
	eachEngine(t, func(t *testing.T, python string) {
		e := startEngine(t, python, room)
		target, mem := listen(t, transfer.TargetOptions{})
		cases := 0
		for i, s := range shapes {
			if s.n > most(e.Version) {
				continue
			}
			cases++
			seed := uint64(i + 1)
			list, src := s.pieces(), pattern(room, seed)
			clear(mem)
			e.fill(seed)
			if rc := e.run("write", target.Name(), testBase, list); rc != 0 {
				t.Fatalf("%+v: write returned %d", s, rc)
			}
			settle(t, target, s.size*s.n)
			checkTarget(t, target, mem, src, list)
			want := e.hash(list)
			e.fill(seed + 1000)
			if rc := e.run("read", target.Name(), testBase, list); rc != 0 {
				t.Fatalf("%+v: read returned %d", s, rc)
			}
			if got := e.hash(list); got != want || got != hashOf(src[:s.size*s.n]) {
				t.Errorf("%+v: bytes read differ", s)
			}
		}
		t.Logf("engine %s: %d cases, %+v", e.Version, cases, target.Stats())
	})
}

// settle waits for writes without acknowledgements, which the engine reports
// done when they have left it.
func settle(t *testing.T, target *transfer.Target, n int) {
	t.Helper()
	settled[target] += int64(n)
	for end := time.Now().Add(60 * time.Second); target.Stats().BytesIn < settled[target]; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d of %d bytes arrived", target.Stats().BytesIn, settled[target])
		}
	}
}

var settled = map[*transfer.Target]int64{} // bytes written so far

// We write into the engine's memory and read it back.
func TestKvasirToEngine(t *testing.T) {
	eachEngine(t, func(t *testing.T, python string) {
		e := startEngine(t, python, room)
		c := transfer.New(transfer.Options{})
		defer c.Close()
		for i, s := range shapes {
			list, src := s.pieces(), pattern(s.size*s.n, uint64(i+1))
			e.fill(uint64(i + 2000))
			var out, back []transfer.Entry
			var remote []piece
			dst := make([]byte, len(src))
			for _, p := range list {
				out = append(out, transfer.Entry{Local: src[p.local:][:p.n], Remote: e.Base + p.remote})
				back = append(back, transfer.Entry{Local: dst[p.local:][:p.n], Remote: e.Base + p.remote})
				remote = append(remote, piece{p.remote, 0, p.n})
			}
			if err := c.Write(limited(t), e.Segment, out); err != nil {
				t.Fatalf("%+v: %v", s, err)
			}
			if e.hash(remote) != hashOf(src) {
				t.Errorf("%+v: the engine's memory differs", s)
			}
			whole := pattern(room, uint64(i+2000)) // what must not have changed
			for _, p := range list {
				copy(whole[p.remote:], src[p.local:][:p.n])
			}
			if e.hash([]piece{{0, 0, room}}) != hashOf(whole) {
				t.Errorf("%+v: bytes beside the pieces changed", s)
			}
			if err := c.Read(limited(t), e.Segment, back); err != nil {
				t.Fatalf("%+v: %v", s, err)
			}
			if !bytes.Equal(src, dst) {
				t.Errorf("%+v: bytes read differ", s)
			}
		}
		t.Logf("engine %s: %d cases, %+v", e.Version, len(shapes), c.Stats())
	})
}

// Both directions over IPv6.
func TestIPv6(t *testing.T) {
	eachEngine(t, func(t *testing.T, python string) {
		target, mem := listen(t, transfer.TargetOptions{Host: "::1"})
		e := startEngineAt(t, python, "::1", room, "MC_USE_IPV6=1")
		if e.Version == "0.3.7.post2" {
			t.Skip("its data port is IPv4 only")
		}
		list, src := shape{64 << 10, 64, true}.pieces(), pattern(room, 9)
		e.fill(9)
		if rc := e.run("write", target.Name(), testBase, list); rc != 0 {
			t.Fatal(rc)
		}
		checkTarget(t, target, mem, src, list)
		c := transfer.New(transfer.Options{})
		defer c.Close()
		dst := make([]byte, 1<<20)
		if err := c.Read(limited(t), e.Segment, []transfer.Entry{{Local: dst, Remote: e.Base}}); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(dst, src[:1<<20]) {
			t.Error("bytes read differ")
		}
	})
}
