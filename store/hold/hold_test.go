// SPDX-License-Identifier: Apache-2.0

package hold_test

import (
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/kv/object"
	"github.com/kvasir-kv/kvasir/store/hold"
)

const life = time.Minute

var start = time.Unix(1e9, 0)

// of is a hold of one slot, of a store of an instance of a user.
func of(instance int64, by, request string, slot uint32) *hold.Hold {
	return &hold.Hold{
		Transfer:  hold.Transfer{Instance: instance, By: by, Shard: object.Shard{World: 1}, To: 1, Last: kv.Hash{1}},
		RequestID: request, Slots: []uint32{slot}, Bytes: 10, Staged: 16, Deadline: start.Add(life),
	}
}

// TestOfTwoPreparesOfOneNameNoneEndsBeforeTheLastCommit has two worker threads store the
// same range for the same request: which of them a commit means nobody knows.
func TestOfTwoPreparesOfOneNameNoneEndsBeforeTheLastCommit(t *testing.T) {
	table := hold.NewTable(life, 16)
	one, two := of(1, "a", "r", 1), of(1, "a", "r", 2)
	table.Add(one)
	table.Add(two)
	if ended, found, late := table.Commit(one.Transfer, []byte("r")); len(ended) != 0 || !found || late {
		t.Fatalf("the first of two commits ends %d, found %v, late %v", len(ended), found, late)
	}
	if ended, _, _ := table.Commit(one.Transfer, []byte("r")); len(ended) != 2 || ended[0] != one || ended[1] != two {
		t.Fatalf("the second of two commits ends %v", ended)
	}
	if _, found, _ := table.Commit(one.Transfer, []byte("r")); found || !table.Empty() {
		t.Error("a third commit means nothing")
	}
}

// TestCommitAfterRefusedPrepareIsAbsorbed has a refused load and a granted one of the same name: the
// commit of the first must not end the second.
func TestCommitAfterRefusedPrepareIsAbsorbed(t *testing.T) {
	table := hold.NewTable(life, 16)
	granted := of(1, "a", "r", 1)
	granted.Transfer.Load = true
	table.Owe(granted.Transfer, []byte("r"), start)
	table.Add(granted)
	if ended, _, _ := table.Commit(granted.Transfer, []byte("r")); len(ended) != 0 {
		t.Fatal("the commit of the refused load ended the granted one")
	}
	if ended, _, _ := table.Commit(granted.Transfer, []byte("r")); len(ended) != 2 || !table.Empty() {
		t.Errorf("both commits came, %d ended", len(ended))
	}
}

// TestOnlyADetachedWorkersTransfersArePutInQuarantine shows two workers: the commit of the
// one that is gone is late, the other's is not.
func TestOnlyADetachedWorkersTransfersArePutInQuarantine(t *testing.T) {
	table := hold.NewTable(life, 16)
	gone, stays := of(1, "a", "r", 1), of(2, "a", "r", 2)
	table.Add(gone)
	table.Add(stays)
	if got := table.Orphans(1, start.Add(life/2)); len(got) != 1 || got[0] != gone {
		t.Fatalf("orphans: %v", got)
	}
	if table.EndQuarantine(2, start) != 0 {
		t.Error("a worker that lives has no quarantine to end")
	}
	if st := table.Stats(); st.Transfers != 2 || st.Quarantined != 1 {
		t.Errorf("%+v", st)
	}
	if ended := table.Expire(start.Add(life), false); len(ended) != 1 || ended[0].Slots[0] != 2 {
		t.Fatalf("the quarantine begins with the worker's end: %v", ended)
	}
	if _, found, late := table.Commit(gone.Transfer, []byte("r")); !found || !late {
		t.Errorf("the commit of a detached worker: found %v, late %v", found, late)
	}
	if _, found, late := table.Commit(stays.Transfer, []byte("r")); !found || !late {
		t.Errorf("a commit after its time: found %v, late %v", found, late)
	}
	if !table.Empty() {
		t.Errorf("left: %+v", table)
	}
}

// TestNoCommitMeansACopyOfThisProcess begins one under the name of a worker's transfer.
func TestNoCommitMeansACopyOfThisProcess(t *testing.T) {
	table := hold.NewTable(life, 16)
	own, workers := of(1, "a", "r", 1), of(1, "a", "r", 2)
	name := workers.Transfer
	table.AddOwn(own)
	table.Add(workers)
	if ended, _, _ := table.Commit(name, []byte("r")); len(ended) != 1 || ended[0] != workers {
		t.Fatalf("the commit ends %v", ended)
	}
	table.Orphans(1, start)
	if ended := table.Expire(start.Add(1000*life), false); len(ended) != 0 || !table.Keeps(own) {
		t.Error("a copy of this process ends when that says so")
	}
	table.Remove(own)
	if !table.Empty() {
		t.Errorf("left: %+v", table)
	}
}

// TestACommitOfTheEarlierLifePublishesNothingOfThisOne restarts: the same transfer is
// begun again, and the first commit may be that of the earlier server's.
func TestACommitOfTheEarlierLifePublishesNothingOfThisOne(t *testing.T) {
	table := hold.NewTable(life, 16)
	again, other := of(1, "a", "r", 2), of(1, "a", "s", 3)
	former := &hold.Hold{Slots: []uint32{1}, Deadline: start.Add(life)}
	table.AddFormer(former, again.Transfer.Name([]byte("r")))
	table.Add(again)
	table.Add(other)
	if ended, _, _ := table.Commit(other.Transfer, []byte("s")); len(ended) != 1 {
		t.Error("a transfer of another request is no concern of the earlier server's")
	}
	if ended, found, _ := table.Commit(again.Transfer, []byte("r")); !found || len(ended) != 0 {
		t.Fatalf("the first commit ends %v", ended)
	}
	if ended, _, _ := table.Commit(again.Transfer, []byte("r")); len(ended) != 2 {
		t.Fatalf("the second commit ends %v", ended)
	}
	if ended := table.Expire(start.Add(life), false); len(ended) != 1 || ended[0].Slots[0] != 1 || !table.Empty() {
		t.Errorf("the earlier server's slots end with their quarantine: %v", ended)
	}
}

// TestStagedBytesCountByWorkerAndUser counts what is on its way, and what is held.
func TestStagedBytesCountByWorkerAndUser(t *testing.T) {
	table := hold.NewTable(life, 4)
	one, two, other := of(1, "a", "r", 1), of(2, "a", "r", 2), of(3, "b", "r", 3)
	table.Add(one)
	table.Add(other)
	table.Count(&two.Transfer, 5)
	if worker, by := table.StagedBy(&two.Transfer); worker != 5 || by != 21 {
		t.Errorf("a worker has %d, its user %d", worker, by)
	}
	table.Count(&two.Transfer, -5)
	table.Add(two)
	if table.MayBegin("a") || !table.MayBegin("c") {
		t.Error("of 4 transfers a has its half of what others leave, and c has none")
	}
	for _, h := range table.InProgress() {
		table.Remove(h)
	}
	if !table.Empty() {
		t.Errorf("left: %+v", table)
	}
}
