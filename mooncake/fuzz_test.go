package mooncake

import (
	"bytes"
	"errors"
	"testing"
)

// fuzzPulls are seeds: one message of each form.
func fuzzPulls() [][]byte {
	p := &Pull{
		Host: "10.0.0.9", Port: 15001, TPSize: 2, TPRank: 1, PPSize: 2, LayoutID: 7, DeadlineMillis: 100,
		Wanted: map[string]Wanted{"a": {"x", [][]int{{1, 2}, {}}}, "b": {"y", nil}},
		Regions: []Region{
			{"l.0", 0, 1 << 40, 4096, 2048, 0, []int{0}, 0}, {"l.1", 1, 1<<40 + 2048, 4096, 2048, SharedGroup, []int{0, 1}, 2048},
		},
	}
	return [][]byte{AppendPull(nil, p, 0), AppendPull(nil, p, 16), AppendPull(nil, p, 20), AppendPull(nil, p, 31), {0x80}, nil}
}

// What decodes is within limits, encodes to a message that means the same, and can
// be planned for without a panic.
func FuzzPull(f *testing.F) {
	for _, b := range fuzzPulls() {
		f.Add(b)
	}
	own := testCache(2, 8, 64)
	own.Regions[0].Layer, own.Regions[1].Layer = "l.0", "l.1"
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
		for tp := 1; tp <= 4; tp *= 2 {
			self := Peer{TPSize: tp, PPSize: 1}
			plan, err := PlanPush(own, self, Peer{p.TPRank, p.TPSize, p.PPSize}, p.Regions)
			if err != nil {
				continue
			}
			for _, w := range p.Wanted {
				list, err := plan.Append(nil, [][]int{{1, 2, 3}}, w.Blocks)
				for _, d := range list {
					if d.Len == 0 || err == nil && d.Len > 1<<20 {
						t.Fatalf("descriptor %+v", d)
					}
				}
			}
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

func FuzzPullV1(f *testing.F) {
	f.Add(AppendPullV1(nil, &PullV1{"10.0.0.9", 15001, []string{"a"}, []uint64{1 << 40}, [][]int{{1, 2, 4}}}))
	f.Add([]byte{0x80})
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := DecodePullV1(b)
		if err != nil {
			if !errors.Is(err, ErrMessage) {
				t.Fatalf("%v is not an ErrMessage", err)
			}
			return
		}
		out := AppendPullV1(nil, p)
		if again, err := DecodePullV1(out); err != nil || !bytes.Equal(AppendPullV1(nil, again), out) {
			t.Fatalf("%v: %+v", err, p)
		}
		own := OwnV1{Bases: []uint64{1 << 40, 1 << 41}, BlockBytes: 4096}
		_, _ = own.Plan(nil, p, make([][]int, len(p.Requests)))
	})
}
