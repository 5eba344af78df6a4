// SPDX-License-Identifier: Apache-2.0

package tier_test

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"testing/iotest"

	"github.com/zeebo/xxh3"

	"github.com/kvasir-kv/kvasir/tier"
)

// An object that is filled at once, in stripes, byte by byte or a second time has the checksum of its bytes. A
// connection that ends early is an error.
func TestSummed(t *testing.T) {
	want := make([]byte, 300<<10)
	for i := range want {
		want[i] = byte(i ^ i>>9)
	}
	meta := tier.Meta{Len: int64(len(want)), Sum: xxh3.Hash(want)}
	f := func(what string, fill func(s *tier.Summer, dst []byte) error) {
		t.Helper()
		dst := make([]byte, len(want))
		m, sum, err := tier.Summed(dst, func(s *tier.Summer) (tier.Meta, error) { return meta, fill(s, dst) })
		if err != nil || m != meta || sum != xxh3.Hash(want) || !bytes.Equal(dst, want) {
			t.Errorf("%s: %+v, checksum %x, %v; want %+v", what, m, sum, err, meta)
		}
	}
	all := func(s *tier.Summer, dst []byte) error { return s.Fill(bytes.NewReader(want), dst, 0) }
	stripes := func(s *tier.Summer, dst []byte) (err error) {
		for from := 0; from < len(want) && err == nil; from += 70_000 {
			to := min(len(want), from+70_000)
			err = s.Fill(bytes.NewReader(want[from:to]), dst[from:to], int64(from))
		}
		return err
	}
	f("at once", all)
	f("in stripes", stripes)
	f("byte by byte", func(s *tier.Summer, dst []byte) error {
		return s.Fill(iotest.OneByteReader(bytes.NewReader(want)), dst, 0)
	})
	f("without a Summer", func(_ *tier.Summer, dst []byte) error { return (*tier.Summer)(nil).Fill(bytes.NewReader(want), dst, 0) })
	for _, n := range []int{0, 1, 100, 128 << 10, 200 << 10, len(want) - 1} {
		f("again, after it ended early", func(s *tier.Summer, dst []byte) error {
			if err := s.Fill(bytes.NewReader(want[:n]), dst, 0); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("%d bytes: %v", n, err)
			}
			return all(s, dst)
		})
		f("again, after other bytes", func(s *tier.Summer, dst []byte) error {
			if err := s.Fill(bytes.NewReader(bytes.Repeat([]byte("x"), n)), dst[:n], 0); err != nil {
				t.Error(err)
			}
			return stripes(s, dst)
		})
	}
	if _, _, err := tier.Summed(nil, func(*tier.Summer) (tier.Meta, error) { return meta, tier.ErrMissing }); !errors.Is(err, tier.ErrMissing) {
		t.Error(err)
	}
}
