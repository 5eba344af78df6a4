// SPDX-License-Identifier: Apache-2.0

package fair

// Amount is the use of one owner: a number of things, and their size together.
type Amount struct {
	Count int
	Size  int64
}

// Shares counts what each owner, a user or an address, has. Each may have half of what the others leave, so that none of them keeps the
// others out. Its zero value is empty.
type Shares struct {
	of  map[string]Amount
	all Amount
}

// Add records that who has more; negative numbers give something back.
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

// Of returns what who has.
func (b *Shares) Of(who string) Amount { return b.of[who] }

// All returns what all have together.
func (b *Shares) All() Amount { return b.all }

// Empty reports whether no owner has anything.
func (b *Shares) Empty() bool { return b.all == (Amount{}) && len(b.of) == 0 }

// MayCount reports whether who may have one more thing, if all owners together may have limit. An owner may always have
// one thing as long as the limit is not reached.
func (b *Shares) MayCount(who string, limit int) bool {
	own := b.of[who].Count
	return b.all.Count < limit && own < max(1, (limit-(b.all.Count-own))/2)
}

// MaySize reports whether who may have size more, if all owners together may have limit.
func (b *Shares) MaySize(who string, size, limit int64) bool {
	own := b.of[who].Size
	return b.all.Size+size <= limit && own+size <= (limit-(b.all.Size-own))/2
}

// May reports whether who may have one more thing of a size, if all owners together may have limit. An owner may always have
// one thing if it fits beside those of the others. If no owner has a thing, one of any size is allowed.
func (b *Shares) May(who string, size int64, limit Amount) bool {
	return b.MayCount(who, limit.Count) && (b.all.Count == 0 || b.all.Size+size <= limit.Size) &&
		(b.of[who].Count == 0 || b.MaySize(who, size, limit.Size))
}

// AwaitedShares are Shares with a channel to wait until an owner gives something back. The zero value
// is empty.
type AwaitedShares struct {
	Shares
	next chan struct{} // closed by the next call of Ended; nil without waiters
}

// Next returns a channel that the next call of Ended closes.
func (a *AwaitedShares) Next() chan struct{} {
	if a.next == nil {
		a.next = make(chan struct{})
	}
	return a.next
}

// Ended wakes the goroutines that wait for Next.
func (a *AwaitedShares) Ended() {
	if a.next != nil {
		close(a.next)
		a.next = nil
	}
}
