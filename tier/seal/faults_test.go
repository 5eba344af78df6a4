// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/internal/shm"
	"github.com/kvasir-kv/kvasir/tier"
)

// A caller may wait for a piece that another goroutine encrypts. If the memory of that piece is gone, the caller gets the error, and does
// not wait forever.
func TestFaultEndsTheWaitForAPiece(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "seg")
		seg, err := shm.Create(path, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		defer seg.Close()
		if err := os.Truncate(path, 4096); err != nil {
			t.Fatal(err)
		}
		s := newSealing(oneKey(1), make([]byte, sealedBytes(1<<20)), seg.Bytes(0, 1<<20), &testName, 1, 0)
		s.mu.begun, s.mu.taken = true, s.pieces // another goroutine has taken the last piece that was left
		waited := make(chan error, 1)
		go func() { waited <- s.need(0, headerBytes+1) }()
		synctest.Wait()
		s.mu.Lock()
		s.mu.taken = s.pieces - 1
		s.oneLocked()
		s.mu.Unlock()
		if err := <-waited; !errors.Is(err, shm.ErrFault) {
			t.Errorf("need: %v", err)
		}
	})
}

// A server without keys serves plain objects. Encrypted objects are misses: it never serves encrypted bytes.
func TestWithoutKeysEncryptedObjectsAreMisses(t *testing.T) {
	place := tier.NewMemory(1 << 20)
	keys, err := OpenKeys(t.Context(), Source{Text: strings.Repeat("ab", 32)})
	if err != nil {
		t.Fatal(err)
	}
	src := bytes.Repeat([]byte{7}, 100)
	m := tier.Meta{Len: int64(len(src)), Sum: xxh3.Hash(src)}
	encrypted, clear := testName, testName
	clear.Rank++
	if err := New(place, keys, Options{}).Write(t.Context(), encrypted, m, src); err != nil {
		t.Fatal(err)
	}
	if err := place.Write(t.Context(), clear, m, src); err != nil {
		t.Fatal(err)
	}
	x := New(place, nil, Options{}).Sealed()
	for round := range 2 {
		for _, n := range []int64{m.Len, sealedBytes(m.Len)} {
			dst := make([]byte, n)
			if got, err := x.Read(t.Context(), encrypted, dst); !errors.Is(err, tier.ErrMissing) || got != (tier.Meta{}) {
				t.Errorf("Read of an encrypted object into %d bytes: %+v, %v", n, got, err)
			}
			if got, _, err := x.ReadSummed(t.Context(), encrypted, dst); !errors.Is(err, tier.ErrMissing) || got != (tier.Meta{}) {
				t.Errorf("ReadSummed of an encrypted object into %d bytes: %+v, %v", n, got, err)
			}
		}
		dst := make([]byte, m.Len)
		if got, err := x.Read(t.Context(), clear, dst); err != nil || got.Len != m.Len || !bytes.Equal(dst, src) {
			t.Errorf("Read of a plain object: %+v, %v", got, err)
		}
		if got, sum, err := x.ReadSummed(t.Context(), clear, dst); err != nil || got.Len != m.Len || sum != m.Sum {
			t.Errorf("ReadSummed of a plain object: %+v, %x, %v", got, sum, err)
		}
		if n := x.Stats().Misses["missing_key"]; n != uint64(4*(round+1)) {
			t.Errorf("%v misses for want of a key", x.Stats().Misses)
		}
	}
}
