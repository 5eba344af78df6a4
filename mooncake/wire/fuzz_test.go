// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"errors"
	"testing"
)

// pullSeeds are seeds: one message of each form.
func pullSeeds() [][]byte {
	p := &Pull{
		Host: "10.0.0.9", Port: 15001, TPSize: 2, TPRank: 1, PPSize: 2, LayoutID: 7, DeadlineMillis: 100,
		Wanted: map[string]Wanted{"a": {"x", [][]int{{1, 2}, {}}}, "b": {"y", nil}},
		Regions: []Region{
			{"l.0", 0, 1 << 40, 4096, 2048, 0, []int{0}, 0}, {"l.1", 1, 1<<40 + 2048, 4096, 2048, SharedGroup, []int{0, 1}, 2048},
		},
	}
	return [][]byte{AppendPull(nil, p, 0), AppendPull(nil, p, 16), AppendPull(nil, p, 20), AppendPull(nil, p, 31), {0x80}, nil}
}

// What decodes is within limits and encodes to a message that means the same.
func FuzzPull(f *testing.F) {
	for _, b := range pullSeeds() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := DecodePull(b, 0)
		if err != nil {
			if !errors.Is(err, ErrMessage) {
				t.Fatalf("%v is not an ErrMessage", err)
			}
			return
		}
		if p.TPSize < 1 || p.TPRank < 0 || p.PPSize < 1 {
			t.Fatalf("out of range: %+v", p)
		}
		again, err := DecodePull(AppendPull(nil, p, 0), 0)
		if err != nil || normal(again) != normal(p) {
			t.Fatalf("%v\n%s\n%s", err, normal(p), normal(again))
		}
	})
}

func FuzzReply(f *testing.F) {
	for _, y := range []Reply{
		{},
		{Status: StatusError, Message: "no"},
		{Status: StatusContinue, OK: []string{"a"}, Failed: []string{}, LayoutID: 9},
		{Status: StatusContinue, Kvasir: true, Unknown: []string{"a"}, Known: []string{"b"}},
	} {
		f.Add(AppendReply(nil, &y))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		y, err := DecodeReply(b, 0)
		if err != nil {
			if !errors.Is(err, ErrMessage) {
				t.Fatalf("%v is not an ErrMessage", err)
			}
			return
		}
		out := AppendReply(nil, y)
		again, err := DecodeReply(out, 0)
		if err != nil || !bytes.Equal(AppendReply(nil, again), out) {
			t.Fatalf("%v: %+v", err, y)
		}
	})
}

func FuzzPull013(f *testing.F) {
	f.Add(AppendPull013(nil, &Pull013{"10.0.0.9", 15001, []string{"a"}, []uint64{1 << 40}, [][]int{{1, 2, 4}}}))
	f.Add([]byte{0x80})
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := DecodePull013(b)
		if err != nil {
			if !errors.Is(err, ErrMessage) {
				t.Fatalf("%v is not an ErrMessage", err)
			}
			return
		}
		out := AppendPull013(nil, p)
		if again, err := DecodePull013(out); err != nil || !bytes.Equal(AppendPull013(nil, again), out) {
			t.Fatalf("%v: %+v", err, p)
		}
	})
}
