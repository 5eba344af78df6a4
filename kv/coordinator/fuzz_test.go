// SPDX-License-Identifier: Apache-2.0

package coordinator_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"testing"

	"github.com/kvasir-kv/kvasir/kv/coordinator"
)

// FuzzParseLayout: no text makes the parser panic, errors are typed, and a parsed layout can be
// written as JSON and parsed again. Any layout that New accepts answers lookups.
func FuzzParseLayout(f *testing.F) {
	for _, text := range []string{
		"full,bs=16 swa,bs=16,win=1024",
		"full,bs=64,heads=8 swa,bs=16,win=17,extra=3,eagle hash=16 sched=128 ret=64 eagle partial",
		"uniform,of=swa,bs=16,win=9 mamba,bs=32,mode=none chunk,bs=16,chunk=64 cross,bs=16",
		`{"g":[{"t":"uniform","bs":8,"of":{"t":"swa","win":4}},{"t":"mla","bs":8,"eagle":1}],"sched":8,"hash":8,"eagle":0,"ret":0}`,
		`{"g":[{"t":"full","bs":-1}],"sched":0,"hash":0}`,
		"full,bs=9223372036854775807 swa,bs=2147483647,win=2147483648",
		"", "{", "full", "swa,bs=16", "hash=16",
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		l, err := coordinator.ParseLayout(text)
		if err != nil {
			if _, ok := errors.AsType[*coordinator.Error](err); !ok {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		data, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		again, err := coordinator.ParseLayout(string(data))
		if err != nil || !reflect.DeepEqual(again, l) && len(l.Groups)+len(again.Groups) > 0 {
			t.Fatalf("%+v written as %s reads as %+v, %v", l, data, again, err)
		}
		for _, o := range []coordinator.Options{{}, {Release: coordinator.VLLM023}, {Release: coordinator.VLLM033}} {
			tryLayout(t, l, o)
		}
	})
}

func tryLayout(t *testing.T, l coordinator.Layout, o coordinator.Options) {
	c, err := coordinator.New(l, o)
	if err != nil {
		if _, ok := errors.AsType[*coordinator.Error](err); !ok {
			t.Fatalf("untyped error %v", err)
		}
		return
	}
	var r coordinator.Result
	runs := coordinator.NewRuns(c)
	for g := range l.Groups {
		runs.Add(g, 0, 5)
		runs.Add(g, 7, 40)
	}
	tokens := c.AlignLookupLength(32 * l.HashUnit)
	_ = c.Hit(&r, runs, coordinator.Query{Units: 32, MaxTokens: tokens})
	_, _ = c.LoadMask(nil, 32, tokens)
	_, _ = c.StoreMask(nil, coordinator.StoreQuery{Tokens: tokens})
	_, _ = c.LookupMask(nil, tokens)
}

// FuzzCases: each case that a vector file can hold is decided and drawn, or refused.
func FuzzCases(f *testing.F) {
	f.Add([]byte(`{"vllm":"0.33.0","features":{"lookup_mask":true},"cases":[{"id":"a","cfg":{"g":[{"t":"full","bs":16}],"sched":16,"hash":16,"eagle":0},"n":9,"prompt":150,"ex":[[0,4,6,2]]}]}`))
	f.Add([]byte(`{"features":{"concat_keys":true},"cases":[{"cfg":{"g":[{"t":"swa","bs":16,"win":40},{"t":"mamba","bs":32}],"sched":32,"hash":8,"partial":1},"n":1000,"prompt":8000,"ex":[[0,1000],[3,1]]}]}`))
	f.Add([]byte(`{"cases":[{"cfg":{"g":[],"sched":1,"hash":1},"n":281474976710656,"prompt":1,"ex":[]}]}`))
	f.Add([]byte(`{"cases":[{"ex":[[1]]}]}`))
	f.Add([]byte(`[]`))
	f.Fuzz(func(t *testing.T, data []byte) {
		v, err := parseVectors(data)
		if err != nil {
			return
		}
		for i := range v.Cases[:min(len(v.Cases), 4)] {
			c := &v.Cases[i]
			if c.Prompt > 1<<12 || c.Units > 1<<12 {
				c.Prompt, c.Units = 1<<12, 1<<12
			}
			_ = c.explain(io.Discard, v.Release, false)
		}
	})
}

// A group of presence sets fed by arbitrary runs agree with each other.
func FuzzSets(f *testing.F) {
	f.Add([]byte{0, 5, 3, 4, 1, 0, 9}, uint16(12))
	f.Add(bytes.Repeat([]byte{1, 2}, 40), uint16(100))
	f.Fuzz(func(t *testing.T, data []byte, limit uint16) {
		c := mustNew(t, "full,bs=16 swa,bs=16,win=49 swa,bs=16,win=49,heads=1 mamba,bs=32 hash=16", coordinator.Options{})
		held := map[[2]int]bool{}
		runs := coordinator.NewRuns(c)
		at := 0
		for i, b := range data {
			g, n := i%4, int(b)%9
			runs.AddUnits(g, at, at+n)
			for u := at; u < at+n; u++ {
				held[[2]int{g, u}] = true
			}
			at = (at + int(b)) % 256
		}
		has := func(g, u int) bool { return held[[2]int{g, u}] }
		q := coordinator.Query{Units: 256, MaxTokens: min(int(limit), 256*16)}
		want := -1
		remote := coordinator.NewRemote(c, coordinator.RemoteOptions{Batch: 5})
		remote.Reset(&fakeStore{has: has})
		for i, p := range []coordinator.Presence{runs, coordinator.Scan(has), remote} {
			var r coordinator.Result
			if err := c.Hit(&r, p, q); err != nil {
				t.Fatal(err)
			}
			if want >= 0 && r.Tokens != want {
				t.Fatalf("set %d: hit %d, others %d", i, r.Tokens, want)
			}
			want = r.Tokens
		}
	})
}
