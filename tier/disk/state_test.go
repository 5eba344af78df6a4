// SPDX-License-Identifier: Apache-2.0

package disk

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// A drive whose reads fail makes the tier unreachable: one warning, and its gauge.
func TestFailingDriveIsUnreachable(t *testing.T) {
	m, c := newMemFiles(1, 1<<30), newClock()
	d := openMem(t, Options{SegmentBytes: minSegment, MinFree: 1, FirstTouch: true}, 16<<20, c, m)
	for i := range 6 {
		put(t, d, i, 9000)
	}
	if err := d.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	m.fail = func(deed, _ string) error {
		if deed == "read" {
			return errors.New("input/output error")
		}
		return nil
	}
	m.mu.Unlock()
	var log strings.Builder
	one := tier.Counted(d, "disk")
	one.Watch(slog.New(slog.NewTextHandler(&log, nil)))
	for i := range 6 {
		_, _ = one.Read(t.Context(), tiertest.Key(i), make([]byte, 9000))
	}
	if got := one.Condition(); got.State != tier.Unreachable || !strings.Contains(got.Err, "input/output error") || one.Stats().States["unreachable"] != 1 {
		t.Errorf("%+v", got)
	}
	if n := strings.Count(log.String(), "the state of a tier changed"); n != 1 {
		t.Errorf("%d warnings:\n%s", n, log.String())
	}
	m.mu.Lock()
	m.fail = nil
	m.mu.Unlock()
	closeDisk(t, d)
}
