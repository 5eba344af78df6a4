// SPDX-License-Identifier: Apache-2.0

package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake/relay"
	"github.com/kvasir-kv/kvasir/mooncake/wire"
)

// Transfers lists each transfer by itself, the last one first: two of one id, of which one came from memory, one that the
// relay refused, and one that P did not send in time. A pull without blocks is not listed. Bytes are counted on both hops.
func TestTransfers(t *testing.T) {
	w := newWorld(t, relay.Options{Timeout: 5 * time.Second})
	w.sender.Offer("p", "x", [][]int{{3, 4, 5}, {10, 11, 12, 13}})
	for _, id := range []string{"x", "x#2"} {
		if err := w.pull(id, []int{0, 1, 2}, []int{7, 8, 9, 20}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.pull("x#3!", []int{0, 1, 2}, []int{1, 2, 3, 4, 5}); err == nil {
		t.Fatal("more than is kept")
	}
	if err := w.pull("never", []int{1}, nil); err == nil {
		t.Fatal("P knows it not")
	}
	w.sender.Offer("p2", "y", [][]int{{1}, {2}})
	if failed, err := w.receiver.Pull(t.Context(), w.source(), map[string]wire.Wanted{"nothing": {TransferID: "y"}}); err != nil || len(failed) > 0 {
		t.Fatal(failed, err)
	}
	list := w.relay.Transfers()
	if len(list) != 4 {
		t.Fatalf("%d: %+v", len(list), list)
	}
	const bytes = 2 * (3 + 4) * payload // two layers of each group
	for i, want := range []struct {
		id, source  string
		state       transferlog.State
		why         string
		blocks      int
		bytes, rate bool
	}{
		{"never", "", transferlog.Expired, "pull from", 1, false, false},
		{"x#3!", "", transferlog.Failed, "not in memory any more", 8, false, false},
		{"x#2", "memory", transferlog.Done, "", 7, true, true},
		{"x", "P", transferlog.Done, "", 7, true, true},
	} {
		got := &list[i]
		if got.ID != want.id || got.Source != want.source || got.State != want.state || !strings.Contains(got.Why, want.why) || (got.Why == "") != (want.why == "") || got.Blocks != want.blocks {
			t.Errorf("%d: %+v", i, got)
		}
		if got.Request != "d-"+want.id || got.From != "e1 at 127.0.0.1" || got.To != w.target.Name() || got.Rank != "" {
			t.Errorf("%d: %+v", i, got)
		}
		if want.bytes && got.Bytes != bytes || want.rate != (got.Rate > 0) {
			t.Errorf("%d: %d bytes, %f GB/s", i, got.Bytes, got.Rate)
		}
	}
	of := func(i int) (what []string) {
		for _, s := range list[i].Steps {
			what = append(what, s.What)
			if s.State == transferlog.Sending && s.Bytes != bytes {
				t.Errorf("%d: %d bytes of %s", i, s.Bytes, s.What)
			}
		}
		return what
	}
	if got := strings.Join(of(3), ", "); got != "waits for P, P sends, relay sends to D" {
		t.Errorf("from P: %s", got)
	}
	if got := strings.Join(of(2), ", "); got != "waits for P, relay sends to D" {
		t.Errorf("from memory: %s", got)
	}
}

// Transfers lists a transfer that waits for P. When D goes away, the transfer ends and names that as the reason.
func TestTransfersInProgress(t *testing.T) {
	w := newWorld(t, relay.Options{})
	w.sender.Expect("p", "x")
	if err := w.receiver.Start(w.source(), map[string]wire.Wanted{"d": {TransferID: "x", Blocks: [][]int{{1}, {2}}}}); err != nil {
		t.Fatal(err)
	}
	state := func(want transferlog.State, why string) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			if list := w.relay.Transfers(); len(list) == 1 && list[0].State == want && list[0].Why == why {
				return
			} else if time.Now().After(end) {
				t.Fatalf("%+v", list)
			}
		}
	}
	state(transferlog.Computing, "")
	w.receiver.Abort("d")
	state(transferlog.Failed, "D gave it up")
}
