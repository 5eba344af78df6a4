// SPDX-License-Identifier: Apache-2.0

package tier_test

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	tiertool "github.com/kvasir-kv/kvasir/cmd/kvasir/internal/tier"
	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/fs"
	"github.com/kvasir-kv/kvasir/tier/seal"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

func TestMain(m *testing.M) { testkit.Main(m) }

// open returns a directory in which objects 1 to 6 are: 1 to 3 of one model, 4 to 6 of
// another; 2 is torn, 3 has other bytes, 6 has no checksum.
func open(t *testing.T) (*fs.Dir, string, *tier.Names) {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Setxattr(dir, "user.kvasir.test", []byte{1}, 0); err != nil {
		t.Skip("no extended attributes: ", err)
	}
	names := tier.NewNames()
	d, err := fs.Open(fs.Options{Path: dir, Names: names})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	for i := 1; i <= 6; i++ {
		k, model := key(i)
		names.Add(k.Namespace, model, nil)
		b, m := tiertest.Object(i, 5000)
		if err := d.Write(t.Context(), k, m, b); err != nil {
			t.Fatal(err)
		}
		name, _ := fs.FileName(tier.Name{Model: model}, k)
		path := filepath.Join(dir, name)
		switch i {
		case 2:
			err = os.Truncate(path, 100)
		case 3:
			err = overwrite(path)
		case 6:
			err = unix.Removexattr(path, "user.kvasir.x3")
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return d, dir, names
}

func key(i int) (kv.Key, string) {
	k, model := tiertest.Key(i), "org/one"
	if i > 3 {
		k.Namespace[0], model = 9, "org/two"
	}
	return k, model
}

func overwrite(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte("other bytes"), 1000)
	return errors.Join(err, f.Close())
}

func TestList(t *testing.T) {
	d, _, _ := open(t)
	f := func(all bool, want ...string) {
		t.Helper()
		var out strings.Builder
		if err := tiertool.List(t.Context(), &out, d, all); err != nil {
			t.Fatal(err)
		}
		for _, w := range want {
			if !strings.Contains(strings.Join(strings.Fields(out.String()), " "), w) {
				t.Errorf("no %q in\n%s", w, &out)
			}
		}
	}
	f(false, "org/one - 01000000 0 of 0 2 1", "6 objects,", "1 without a checksum, 1 torn")
	f(true, "100 torn org-SEP-one@", "5000 none org-SEP-two@")
}

// Verify names torn and changed objects, and removes them when asked to. The rest stays.
func TestVerify(t *testing.T) {
	d, _, _ := open(t)
	var out strings.Builder
	if err := tiertool.Verify(t.Context(), &out, d, false); !errors.Is(err, tiertool.ErrDamaged) || !strings.Contains(out.String(), "3 objects are as they were written, 1 have no checksum, 2 are damaged, 0") {
		t.Errorf("%v: %s", err, &out)
	}
	out.Reset()
	if err := tiertool.Verify(t.Context(), &out, d, true); err != nil || !strings.Contains(out.String(), "2 of them were removed") {
		t.Errorf("%v: %s", err, &out)
	}
	out.Reset()
	if err := tiertool.Verify(t.Context(), &out, d, false); err != nil || !strings.Contains(out.String(), "3 objects are as they were written, 1 have no checksum, 0 are damaged") {
		t.Errorf("%v: %s", err, &out)
	}
}

// Only what was named is removed.
func TestDrop(t *testing.T) {
	f := func(filter tiertool.Filter, left int) {
		t.Helper()
		d, dir, _ := open(t)
		var out strings.Builder
		if err := tiertool.Drop(t.Context(), &out, d, filter); err != nil {
			t.Fatal(err)
		}
		if files, err := os.ReadDir(dir); err != nil || len(files) != left {
			t.Errorf("%+v: %d files are left, want %d: %s", filter, len(files), left, &out)
		}
	}
	f(tiertool.Filter{Model: "org/one"}, 3)
	f(tiertool.Filter{Model: "org/none"}, 6)
	f(tiertool.Filter{Model: "org"}, 6)
	f(tiertool.Filter{Torn: true}, 5)
	f(tiertool.Filter{}, 0)
	if err := tiertool.Drop(t.Context(), &strings.Builder{}, tier.NewMemory(1), tiertool.Filter{Model: "m"}); !errors.Is(err, tiertool.ErrNoModels) {
		t.Error(err)
	}
}

// Objects of a model's revisions and generations go with the model, in a directory and where a tier removes by names; those
// of other models stay.
func TestDropReachesRevisionsAndGenerations(t *testing.T) {
	d, _, names := open(t)
	for i, model := range []string{"m", "m~rev", "m~1.1786ab34cd56ef78", "m2"} {
		k := tiertest.Key(100 + i)
		k.Namespace[1] = byte(i + 1)
		names.Add(k.Namespace, model, nil)
		b, meta := tiertest.Object(i, 100)
		if err := d.Write(t.Context(), k, meta, b); err != nil {
			t.Fatal(err)
		}
	}
	var out strings.Builder
	for _, c := range []struct {
		x    tier.Tier
		want string
	}{{d, `{"removed":3,"bytes":300}`}, {emptied{d}, `{"removed":0}`}} {
		out.Reset()
		if err := tiertool.DropJSON(t.Context(), &out, c.x, tiertool.Filter{Model: "m"}); err != nil || strings.TrimSpace(out.String()) != c.want {
			t.Errorf("%v, %s, want %s", err, &out, c.want)
		}
	}
	for _, model := range []string{"m", "m2"} {
		out.Reset()
		want := map[string]string{"m": `{"removed":0}`, "m2": `{"removed":1}`}[model]
		if err := tiertool.DropJSON(t.Context(), &out, emptied{d}, tiertool.Filter{Model: model}); err != nil || strings.TrimSpace(out.String()) != want {
			t.Errorf("%s: %v, %s, want %s", model, err, &out, want)
		}
	}
}

// emptied hides that its tier is a directory, so that Drop removes by the names of models, as in other tiers.
type emptied struct{ *fs.Dir }

// Copy copies intact objects under the same names, and leaves out the others.
func TestCopy(t *testing.T) {
	d, _, names := open(t)
	to, err := fs.Open(fs.Options{Path: filepath.Join(t.TempDir(), "new"), Names: names})
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	var out strings.Builder
	if err := tiertool.Copy(t.Context(), tiertool.CopyText(&out), d, to, names); err != nil || !strings.Contains(out.String(), "copied 3 objects") ||
		!strings.Contains(out.String(), "2 torn or without a checksum, 1 damaged") {
		t.Errorf("%v: %s", err, &out)
	}
	for i, want := range map[int]bool{1: true, 2: false, 3: false, 4: true, 5: true, 6: false} {
		k, _ := key(i)
		_, err := to.Read(t.Context(), k, make([]byte, 5000))
		if (err == nil) != want {
			t.Errorf("object %d: %v", i, err)
		}
	}
	memory := tier.NewMemory(1 << 20)
	if err := tiertool.Copy(t.Context(), tiertool.CopyText(&out), to, memory, names); err != nil {
		t.Error(err)
	}
	if err := tiertool.Verify(t.Context(), &out, memory, false); err != nil {
		t.Error(err)
	}
}

// A copy into a directory with a limit waits until the directory has counted its existing objects.
func TestCopyIntoALimit(t *testing.T) {
	const n = 50
	dir, names := t.TempDir(), tier.NewNames()
	k, model := key(1)
	names.Add(k.Namespace, model, nil)
	from := tier.NewMemory(1 << 20)
	for i := range n {
		b, m := tiertest.Object(i, 1000)
		if err := from.Write(t.Context(), tiertest.Key(i), m, b); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20_000 { // what takes a while to be counted
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("%d.data", i)), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	to, err := fs.Open(fs.Options{Path: dir, Names: names, Limit: 1 << 30})
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	var out strings.Builder
	if err := tiertool.Copy(t.Context(), tiertool.CopyText(&out), from, to, names); err != nil || !strings.Contains(out.String(), "copied 50 objects") {
		t.Errorf("%v: %s", err, &out)
	}
}

// A disk that no server uses is shown, checked and copied like any other place.
func TestDisk(t *testing.T) {
	dir, to := filepath.Join(t.TempDir(), "disk"), filepath.Join(t.TempDir(), "copy")
	d, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: dir, Bytes: 256 << 20}}, FirstTouch: true})
	if err != nil {
		t.Fatal(err)
	}
	<-d.Opened()
	for i := range 5 {
		b, m := tiertest.Object(i, 100_000)
		if err := d.Write(t.Context(), tiertest.Key(i), m, b); err != nil {
			t.Fatal(err)
		}
	}
	log := slog.New(slog.DiscardHandler)
	nothing := func(tier.Tier) error { return nil }
	if err := tiertool.With("disk:"+dir, seal.Source{}, log, nothing); !errors.Is(err, disk.ErrInUse) && !strings.Contains(err.Error(), "in use") {
		t.Errorf("while somebody has it: %v", err)
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := tiertool.With("disk:"+dir, seal.Source{}, log, func(x tier.Tier) error {
		return errors.Join(tiertool.List(t.Context(), &out, x, false), tiertool.Verify(t.Context(), &out, x, false))
	}); err != nil || !strings.Contains(out.String(), "5 objects, ") || !strings.Contains(out.String(), "5 objects are as they were written") {
		t.Errorf("%v: %s", err, &out)
	}
	if err := tiertool.CopyBetween(t.Context(), tiertool.CopyText(&out), log, seal.Source{}, "disk:"+dir, "disk:"+to); err == nil {
		t.Error("a disk without a limit was made")
	}
	if err := tiertool.With("disk:"+dir, seal.Source{}, log, func(x tier.Tier) error { return tiertool.Drop(t.Context(), &out, x, tiertool.Filter{}) }); err != nil {
		t.Error(err)
	}
	if files, err := filepath.Glob(filepath.Join(dir, "*.seg")); err != nil || len(files) > 0 {
		t.Errorf("nothing is left, in %v, %v", files, err)
	}
	out.Reset()
	if err := tiertool.With("disk:"+dir, seal.Source{}, log, func(x tier.Tier) error { return tiertool.List(t.Context(), &out, x, true) }); err != nil || !strings.Contains(out.String(), "\n0 objects, ") {
		t.Errorf("%v: %s", err, &out)
	}
	empty := t.TempDir() // where a disk is to be mounted, perhaps
	for _, text := range []string{"disk:" + to, "disk:" + empty, "fs:" + to, "fss:/x", "{"} {
		if err := tiertool.With(text, seal.Source{}, log, nothing); err == nil {
			t.Errorf("%s was opened", text)
		}
	}
	if files, err := os.ReadDir(empty); err != nil || len(files) > 0 {
		t.Errorf("an empty directory was made a disk: %v, %v", files, err)
	}
}

// Looking at a disk changes nothing there. It evicts nothing to keep space free, also where the server kept less space free than
// the default of a disk, or where no space is free at all.
func TestLookingAtADiskEvictsNothing(t *testing.T) {
	testkit.SmallFS(t, 32<<20, func(t *testing.T, dir string) {
		const objects, n = 80, 100_000
		path := filepath.Join(dir, "disk")
		d, err := disk.Open(disk.Options{Dirs: []disk.Dir{{Path: path, Bytes: 16 << 20}}, SegmentBytes: 1 << 20, MinFree: 1, FirstTouch: true})
		if err != nil {
			t.Fatal(err)
		}
		for i := range objects {
			b, m := tiertest.Object(i, n)
			if err := d.Write(t.Context(), tiertest.Key(i), m, b); err != nil {
				t.Fatal(err)
			}
		}
		if err := d.Close(); err != nil {
			t.Fatal(err)
		}
		for _, free := range []int64{512 << 10, 0} {
			other := filepath.Join(dir, "other")
			testkit.FillFS(t, dir, other, free)
			var out strings.Builder
			if err := tiertool.With("disk:"+path, seal.Source{}, slog.New(slog.DiscardHandler), func(x tier.Tier) error {
				time.Sleep(3 * time.Second) // a disk looks at what is free once a second
				return tiertool.List(t.Context(), &out, x, false)
			}); err != nil || !strings.Contains(out.String(), "\n80 objects, ") {
				t.Errorf("%d bytes are free: %v: %s", free, err, &out)
			}
			if err := os.Remove(other); err != nil {
				t.Fatal(err)
			}
		}
	})
}
