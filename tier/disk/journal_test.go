// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"syscall"
	"testing"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// A failure while the journal is replaced loses nothing: objects that are deleted afterwards stay deleted, or Delete returns
// an error.
func TestJournalThatWasReplacedInPart(t *testing.T) {
	const objects, left = 100, 40
	for _, fails := range []string{"sync names", "open", "rename", "write"} {
		m, c := newMemFiles(1, 1<<30), newClock()
		o := Options{SegmentBytes: 256 << 10, MinFree: 1, FirstTouch: true}
		d := openMem(t, o, 64<<20, c, m)
		v := d.volumes[0]
		v.mu.Lock()
		v.checked = 1 << 60 // no checkpoint comes first
		v.mu.Unlock()
		var keys []kv.Key
		for i := range objects + left {
			put(t, d, i, 100)
			keys = append(keys, tiertest.Key(i))
		}
		if err := errors.Join(d.Flush(t.Context()), d.Delete(t.Context(), keys[:objects])); err != nil {
			t.Fatal(err)
		}
		if err := v.evictEmpty(); err != nil { // the records of the journal are of no use then
			t.Fatal(err)
		}
		v.journal.turn <- struct{}{}
		v.journal.off = 32 * block // as after thousands of them
		<-v.journal.turn
		failed, renamed := false, false
		m.mu.Lock()
		m.fail = func(deed, name string) error {
			ours := name == goneName || name == goneName+newSuffix || renamed && name == ""
			if deed == fails && ours && !failed {
				failed = true
				return syscall.EMFILE
			}
			renamed = renamed || deed == "rename" && ours
			return nil
		}
		m.mu.Unlock()
		if err := v.compact(); !errors.Is(err, syscall.EMFILE) {
			t.Errorf("%s: %v", fails, err)
		}
		for i := objects; i < objects+left; i += 2 {
			if err := d.Delete(t.Context(), []kv.Key{keys[i]}); err != nil {
				t.Fatalf("%s: delete: %v", fails, err)
			}
		}
		m = m.kill()
		_ = d.Close() // of files that are dead
		m.dead = false
		d = openMem(t, o, 64<<20, c, m)
		for i := objects; i < objects+left; i++ {
			if err := get(t, d, i, 100, 0); (err == nil) != (i%2 == 1) || err != nil && !errors.Is(err, tier.ErrMissing) {
				t.Errorf("%s: object %d, deleted: %v: %v", fails, i, i%2 == 0, err)
			}
		}
		closeDisk(t, d)
	}
}
