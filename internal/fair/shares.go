// SPDX-License-Identifier: Apache-2.0

package fair

// Amount is what an owner has: a number of things, and their total size.
type Amount struct {
	Count int
	Size  int64
}

// Shares counts what each owner (a user or an address) has. Each owner may have half of what the others leave, so that no owner keeps
// the others out. Its zero value is empty.
type Shares struct {
	of  map[string]Amount
	all Amount
}

// Add adds `more` to what the owner `who` has. Negative numbers give something back.
func (b *Shares) Add(who string, more Amount) {
	if b.of == nil {
		b.of = make(map[string]Amount)
	}
	own := b.of[who]
	own.Count, own.Size = own.Count+more.Count, own.Size+more.Size
	b.all.Count, b.all.Size = b.all.Count+more.Count, b.all.Size+more.Size
	if b.of[who] = own; own == (Amount{}) {
		delete(b.of, who)
	}
}

// Of returns what the owner `who` has.
func (b *Shares) Of(who string) Amount { return b.of[who] }

// All returns what all owners have together.
func (b *Shares) All() Amount { return b.all }

// Empty reports whether no owner has anything.
func (b *Shares) Empty() bool { return b.all == (Amount{}) && len(b.of) == 0 }

// MayCount reports whether the owner `who` may get one more thing, where `limit` is how many things all owners together may have. An owner
// may always have one thing as long as the limit is not reached.
func (b *Shares) MayCount(who string, limit int) bool {
	own := b.of[who].Count
	return b.all.Count < limit && own < max(1, (limit-(b.all.Count-own))/2)
}

// MaySize reports whether the owner `who` may get things of `size` more, where `limit` is the total size that all owners together may have.
func (b *Shares) MaySize(who string, size, limit int64) bool {
	own := b.of[who].Size
	return b.all.Size+size <= limit && own+size <= (limit-(b.all.Size-own))/2
}

// May reports whether the owner `who` may get one more thing of that size, where `limit` is what all owners together may have. An owner may
// always have one thing if it fits in beside those of the others. If no owner has anything, one thing of any size is allowed.
func (b *Shares) May(who string, size int64, limit Amount) bool {
	return b.MayCount(who, limit.Count) && (b.all.Count == 0 || b.all.Size+size <= limit.Size) &&
		(b.of[who].Count == 0 || b.MaySize(who, size, limit.Size))
}

// AwaitedShares is a Shares with a channel on which to wait until an owner has given something back. The zero value is empty.
type AwaitedShares struct {
	Shares
	next chan struct{} // closed by the next call of Ended; nil: no goroutine waits
}

// Next returns a channel that the next call of Ended closes.
func (a *AwaitedShares) Next() chan struct{} {
	if a.next == nil {
		a.next = make(chan struct{})
	}
	return a.next
}

// Ended wakes the goroutines that wait on the channel of Next. Call it when an owner has given something back.
func (a *AwaitedShares) Ended() {
	if a.next != nil {
		close(a.next)
		a.next = nil
	}
}
