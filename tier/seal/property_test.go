// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
)

// hurriedPlace moves objects in parts, in random order, and sometimes begins a read again.
type hurriedPlace struct {
	*tier.Memory
	r *rand.Rand
}

func (hurriedPlace) Flows() {}

// parts divides n bytes into parts, in random order.
func (p hurriedPlace) parts(n int64) (out [][2]int64) {
	for from := int64(0); from < n; {
		to := min(n, from+1+p.r.Int64N(2*pieceBytes))
		out = append(out, [2]int64{from, to})
		from = to
	}
	p.r.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

func (p hurriedPlace) Write(ctx context.Context, k kv.Key, m tier.Meta, src []byte) error {
	var was [1]tier.Meta
	if err := p.Stat(ctx, []kv.Key{k}, was[:]); err != nil || m.Lasts(was[0]) {
		return err
	}
	if m.Unseals(was[0]) {
		return tier.ErrNotKept
	}
	for _, part := range p.parts(m.Len) {
		if err := tier.FlowOf(ctx).Wants(part[0], part[1]); err != nil {
			return err
		}
	}
	return p.Memory.Write(ctx, k, m, src)
}

func (p hurriedPlace) Read(ctx context.Context, k kv.Key, dst []byte) (tier.Meta, error) {
	stored := make([]byte, len(dst))
	m, err := p.Memory.Read(ctx, k, stored)
	if err != nil {
		return m, err
	}
	f := tier.FlowOf(ctx)
	for again := p.r.IntN(4) / 3; again >= 0; again-- {
		f.Starts(m)
		for _, part := range p.parts(m.Len) {
			copy(dst[part[0]:part[1]], stored[part[0]:part[1]])
			f.Has(part[0], part[1])
			if again > 0 && p.r.IntN(3) == 0 {
				break // the connection is lost
			}
		}
	}
	return m, nil
}

// Servers with different keys, and one without, write, read, delete and encrypt anew. An attacker who can write to the place changes,
// exchanges, cuts and puts back its objects. If a server with keys reads an object, that was written under its name, with the checksum that
// the read returns.
func TestWhatIsReadWasWrittenUnderItsName(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	r := rand.New(rand.NewPCG(seed, 1))
	place := hurriedPlace{tier.NewMemory(64 << 20), r}
	text := func(c string) string { return strings.Repeat(c, 32) }
	var servers []*Tier
	for _, keys := range []string{text("a1"), text("a2") + "," + text("a1"), text("a1") + "," + text("a2"), text("a3"), ""} {
		k, err := OpenKeys(t.Context(), Source{Text: keys})
		if err != nil {
			t.Fatal(err)
		}
		servers = append(servers, New(place, k, Options{}).Sealed())
	}
	sizes := []int{1, 100, pieceBytes, pieceBytes + 1, 5*pieceBytes - 7}
	name := func(i int) kv.Key { return kv.Key{Namespace: kv.Namespace{byte(i % 2)}, Chunk: kv.Hash{byte(i)}} }
	content := func(i, variant int) []byte {
		b := bytes.Repeat([]byte{byte(i), byte(variant), 7}, sizes[i%len(sizes)]/3+1)
		return b[:sizes[i%len(sizes)]]
	}
	type put struct {
		m tier.Meta
		b []byte
	}
	var kept []put // objects that the attacker has copied
	raw := func(k kv.Key) (p put, ok bool) {
		var m [1]tier.Meta
		if err := place.Stat(t.Context(), []kv.Key{k}, m[:]); err != nil || m[0].Len == 0 {
			return p, false
		}
		p.b = make([]byte, m[0].Len)
		var err error
		p.m, err = place.Memory.Read(t.Context(), k, p.b)
		return p, err == nil
	}
	opened := 0
	for range 4000 {
		i, s := r.IntN(10), r.IntN(len(servers))
		k, x := name(i), servers[s]
		switch r.IntN(12) {
		case 0, 1, 2:
			b := content(i, r.IntN(2))
			if err := x.Write(t.Context(), k, tier.Meta{Len: int64(len(b)), Sum: xxh3.Hash(b)}, b); err != nil && !errors.Is(err, tier.ErrNotKept) {
				t.Fatalf("write by %d: %v", s, err)
			}
		case 3:
			if err := x.Delete(t.Context(), []kv.Key{k}); err != nil {
				t.Fatal(err)
			}
		case 4:
			if _, err := x.Rekey(t.Context(), func(context.Context, int64) error { return nil }, func(RekeyStats) {}); err != nil && !errors.Is(err, ErrNoKeys) {
				t.Fatal(err)
			}
		case 5: // the attacker changes an object of the place
			p, ok := raw(k)
			if !ok {
				continue
			}
			kept = append(kept, p)
			p.b = bytes.Clone(p.b)
			switch r.IntN(4) {
			case 0:
				p.b[r.IntN(len(p.b))] ^= 1 << r.IntN(8)
			case 1:
				p.b = p.b[:1+r.IntN(len(p.b))]
				p.m.Len = int64(len(p.b))
			case 2:
				p.m.Seal ^= uint16(r.IntN(1 << 16))
			case 3:
				p.m.Sum ^= 1 << r.IntN(64)
			}
			_ = place.Memory.Write(t.Context(), k, p.m, p.b)
		case 6: // or puts back an earlier object, under its name or another one
			if len(kept) > 0 {
				p := kept[r.IntN(len(kept))]
				_ = place.Memory.Write(t.Context(), k, p.m, p.b)
			}
		default:
			if len(x.keys.ring().list) == 0 {
				continue // callers compare plain objects with their checksums
			}
			dst := make([]byte, sizes[i%len(sizes)])
			m, err := x.Read(t.Context(), k, dst)
			if _, corrupt := errors.AsType[*tier.CorruptError](err); corrupt || errors.Is(err, tier.ErrMissing) {
				continue
			}
			if err != nil {
				t.Fatalf("read by %d: %v", s, err)
			}
			opened++
			if !bytes.Equal(dst, content(i, 0)) && !bytes.Equal(dst, content(i, 1)) || m.Sum != xxh3.Hash(dst) || m.Len != int64(len(dst)) {
				t.Fatalf("server %d read %+v of object %d, which nobody wrote", s, m, i)
			}
		}
	}
	if opened < 100 {
		t.Errorf("only %d reads found something", opened)
	}
}
