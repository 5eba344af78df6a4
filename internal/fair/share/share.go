// Package share divides what is limited among users and addresses: each may have half of
// what the others leave, so that none of them keeps the others out.
package share

// Amount is what somebody has: a number of things, and how large they are together.
type Amount struct {
	Count int
	Size  int64
}

// Books know what each user or address has. Their zero value is empty.
type Books struct {
	of  map[string]Amount
	all Amount
}

// Add notes that who has more; negative numbers are what was given back.
func (b *Books) Add(who string, more Amount) {
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
func (b *Books) Of(who string) Amount { return b.of[who] }

// All returns what all have together.
func (b *Books) All() Amount { return b.all }

// Empty reports whether nobody has anything.
func (b *Books) Empty() bool { return b.all == (Amount{}) && len(b.of) == 0 }

// MayCount reports whether who may have one more thing, of limit in all. One at a time it
// may have as long as the limit is not reached.
func (b *Books) MayCount(who string, limit int) bool {
	own := b.of[who].Count
	return b.all.Count < limit && own < max(1, (limit-(b.all.Count-own))/2)
}

// MaySize reports whether who may have size more, of limit in all.
func (b *Books) MaySize(who string, size, limit int64) bool {
	own := b.of[who].Size
	return b.all.Size+size <= limit && own+size <= (limit-(b.all.Size-own))/2
}

// May reports whether who may have one thing more, of such a size, of limit in all. One thing at a time
// it may have if it has room beside the others', and anybody if nobody has any, however large.
func (b *Books) May(who string, size int64, limit Amount) bool {
	return b.MayCount(who, limit.Count) && (b.all.Count == 0 || b.all.Size+size <= limit.Size) &&
		(b.of[who].Count == 0 || b.MaySize(who, size, limit.Size))
}

// Awaited are Books of which somebody may wait for the next thing to end. Their zero value
// is empty.
type Awaited struct {
	Books
	next chan struct{} // closed with the next end; nil while nobody waits
}

// Next returns what is closed at the next end.
func (a *Awaited) Next() chan struct{} {
	if a.next == nil {
		a.next = make(chan struct{})
	}
	return a.next
}

// Ended wakes those who wait.
func (a *Awaited) Ended() {
	if a.next != nil {
		close(a.next)
		a.next = nil
	}
}
