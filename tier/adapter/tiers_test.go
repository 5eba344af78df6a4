// SPDX-License-Identifier: Apache-2.0

package adapter_test

import (
	"bytes"
	"errors"
	"log/slog"
	"maps"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// What LMCache's command lines say means the same here.
func TestParse(t *testing.T) {
	f := func(text string, want adapter.Adapter) {
		t.Helper()
		got, err := adapter.Parse(text)
		ignored := strings.Join(got.Ignored, " ")
		got.Ignored = nil
		wantIgnored := strings.Join(want.Ignored, " ")
		want.Ignored = nil
		if err != nil || got.Type != want.Type || !equal(got, want) || ignored != wantIgnored {
			t.Errorf("%s: %+v without %s, %v", text, got, ignored, err)
		}
	}
	f(`{"type":"fs","base_path":"/d"}`, adapter.Adapter{Type: "fs", Path: "/d"})
	f(`{"type":"fs","base_path":"/d","relative_tmp_dir":"t","read_ahead_size":null,"use_odirect":true,"shared":true}`,
		adapter.Adapter{Type: "fs", Path: "/d", TempDir: "t", Direct: true, Ignored: []string{"read_ahead_size", "shared"}})
	f(`{"type":"fs_native","base_path":"/d","use_odirect":true,"num_workers":8,"max_capacity_gb":4}`,
		adapter.Adapter{Type: "fs_native", Path: "/d", Direct: true, Pad: true, Calls: 8, LimitGB: 4})
	f(`{"type":"fs_native","base_path":"/d","use_odirect":true,"pad":false}`, adapter.Adapter{Type: "fs_native", Path: "/d", Direct: true})
	f(`{"type":"fs","base_path":"/d","max_capacity_gb":10,"eviction":{"eviction_policy":"LRU","trigger_watermark":0.9}}`,
		adapter.Adapter{Type: "fs", Path: "/d", LimitGB: 10, EvictAt: 0.9, Evict: 0.2})
	f(`{"type":"fs","base_path":"/d","max_capacity_gb":10,"eviction":{"eviction_policy":"noop"}}`, adapter.Adapter{Type: "fs", Path: "/d", LimitGB: 10, Evict: 0.2})
}

func equal(a, b adapter.Adapter) bool {
	return a.Path == b.Path && a.TempDir == b.TempDir && a.Direct == b.Direct && a.Pad == b.Pad && a.LimitGB == b.LimitGB && a.MinFreeGB == b.MinFreeGB &&
		a.Calls == b.Calls && a.Bytes == b.Bytes && a.EvictAt == b.EvictAt && a.Evict == b.Evict
}

// An error names the option that cannot be used, and the one that was probably meant.
func TestParseRefuses(t *testing.T) {
	f := func(text string, want ...string) {
		t.Helper()
		_, err := adapter.Parse(text)
		for _, w := range want {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %v, want %s", text, err, w)
			}
		}
	}
	f(`fs`, "no JSON object")
	f(`null`, "no JSON object")
	f(`[]`, "no JSON object")
	f(`{}`, "no \"type\"")
	f(`{"type":"fss","base_path":"/d"}`, `did you mean "fs"?`)
	f(`{"type":"fs_nativ"}`, `did you mean "fs_native"?`)
	f(`{"type":3}`, `"type": 3 is no string`)
	f(`{"type":"fs"}`, `"base_path", the directory, is missing`)
	f(`{"type":"fs","base_path":"/d","use_odrect":true,"bas_path":1}`, `"use_odrect" is unknown, did you mean "use_odirect"?`, `"bas_path" is unknown, did you mean "base_path"?`)
	f(`{"type":"fs","base_path":"/d","use_odirect":"yes"}`, `"use_odirect": "yes" is no true or false`)
	f(`{"type":"fs","base_path":"/d","max_capacity_gb":-1}`, `"max_capacity_gb": -1 is outside`)
	f(`{"type":"fs","base_path":"/d","num_workers":4}`, `"num_workers" is unknown`)
	f(`{"type":"fs","base_path":"/d","eviction":{"eviction_policy":"LRU"}}`, `needs "max_capacity_gb"`)
	f(`{"type":"fs","base_path":"/d","max_capacity_gb":1,"eviction":{"triger_watermark":0.5}}`, `did you mean "trigger_watermark"?`)
	f(`{"type":"fs","base_path":"/d","serde":{"type":"x"}}`, `"serde"`)
	if _, err := adapter.Parse(`{"type":"hf3fs"}`); !errors.Is(err, adapter.ErrNotServed) {
		t.Error(err)
	}
}

// Two directories are one tier: written to both, read from the first one that has it.
// Each has its own name and figures.
func TestOpenTwo(t *testing.T) {
	dir, names := t.TempDir(), tier.NewNames()
	names.Add(tiertest.Key(1).Namespace, "m", nil)
	both := adapter.Options{Names: names, Adapters: []adapter.Adapter{{Type: "fs", Path: filepath.Join(dir, "a")}, {Type: "fs", Path: filepath.Join(dir, "b")}}}
	s, err := adapter.Open(both)
	if err != nil {
		t.Fatal(err)
	}
	b, m := tiertest.Object(1, 5000)
	if err := s.Tier.Write(t.Context(), tiertest.Key(1), m, b); err != nil {
		t.Fatal(err)
	}
	metas := make([]tier.Meta, 1)
	if err := s.Tier.Stat(t.Context(), []kv.Key{tiertest.Key(1)}, metas); err != nil || !metas[0].Fits(5000) {
		t.Errorf("%+v, %v", metas, err)
	}
	if err := s.Tier.Close(); err != nil {
		t.Fatal(err)
	}
	if s.Each[0].Name() != "fs" || s.Each[1].Name() != "fs-2" || s.Each[0].Stats().Writes != 1 || s.Each[1].Stats().Writes != 1 || s.Each[0].Stats().Hits != 1 || s.Each[1].Stats().Hits != 0 {
		t.Errorf("%+v\n%+v", s.Each[0].Stats(), s.Each[1].Stats())
	}
	other := both
	other.Adapters = both.Adapters[:1]
	one, err := adapter.Open(other)
	if err != nil || one.Place == s.Place || one.Tier.Close() != nil {
		t.Errorf("%q and %q, %v", one.Place, s.Place, err)
	}
	both.Adapters[1].Path = "/dev/null/x"
	if _, err := adapter.Open(both); err == nil {
		t.Error("a directory below a file was opened")
	}
	if s, err := adapter.Open(adapter.Options{}); err != nil || s.Tier != nil {
		t.Errorf("no adapter: %+v, %v", s, err)
	}
}

// A disk says at the start how much it may take, and warns when its file system has less room than that.
func TestDisksSayTheirRoom(t *testing.T) {
	for _, c := range []struct {
		bytes, free int64
		want        string
	}{
		{64 << 20, 1, "level=INFO msg=\"chunks are kept on disk\""},
		{1 << 50, 1, "level=WARN msg=\"the disk has less room than --disk-gb"},
		{64 << 20, 1 << 50, "room_bytes=0 min_free_bytes=1125899906842624"},
	} {
		var said bytes.Buffer
		log := slog.New(slog.NewTextHandler(&said, nil))
		s, err := adapter.Open(adapter.Options{Log: log, Disk: disk.Options{Dirs: []disk.Dir{{Path: t.TempDir(), Bytes: c.bytes}}, MinFree: c.free}})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Tier.Close(); err != nil {
			t.Error(err)
		}
		if !strings.Contains(said.String(), c.want) {
			t.Errorf("%+v: it says %q", c, said.String())
		}
	}
}

// A tier behind a network remembers a missing object for a second, or for the time of the option.
func TestAbsence(t *testing.T) {
	f := func(text string, want time.Duration) {
		t.Helper()
		if a, err := adapter.Parse(text); err != nil || a.Absence.For != want {
			t.Errorf("%s: %v, %v", text, a.Absence, err)
		}
	}
	f(`{"type":"redis","host":"h","port":1}`, time.Second)
	f(`{"type":"resp","host":"h","port":1,"absent_seconds":0}`, 0)
	f(`{"type":"s3_native","s3_bucket":"b","absent_seconds":2.5}`, 2500*time.Millisecond)
	f(`{"type":"mooncake_store"}`, time.Second)
	f(`{"type":"fs","base_path":"/x"}`, 0)
	for _, wrong := range []string{`{"type":"redis","host":"h","port":1,"absent_seconds":-1}`, `{"type":"s3","s3_bucket":"b","absent_seconds":4000}`, `{"type":"fs","base_path":"/x","absent_seconds":1}`} {
		if _, err := adapter.Parse(wrong); err == nil || !strings.Contains(err.Error(), "absent_seconds") {
			t.Errorf("%s: %v", wrong, err)
		}
	}
}

// Each adapter's number in Changes is known by its name, after those of the disks.
func TestNumbersOfTiers(t *testing.T) {
	o := adapter.Options{Log: slog.New(slog.DiscardHandler)}
	for range 2 {
		a, err := adapter.Parse(`{"type":"fs","base_path":"` + t.TempDir() + `"}`)
		if err != nil {
			t.Fatal(err)
		}
		o.Adapters = append(o.Adapters, a)
	}
	o.Changes, o.Names = tier.NewChanges(), tier.NewNames()
	o.Disk.Dirs = []disk.Dir{{Path: t.TempDir(), Bytes: 256 << 20}, {Path: t.TempDir(), Bytes: 256 << 20}}
	set, err := adapter.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	defer set.Tier.Close()
	if want := map[string]uint8{"fs": 3, "fs-2": 4}; !maps.Equal(set.Numbers, want) {
		t.Errorf("%v, want %v", set.Numbers, want)
	}
	if set.ReadFiles != 250*time.Millisecond {
		t.Errorf("generations in directories that servers share are read every %v", set.ReadFiles)
	}
}
