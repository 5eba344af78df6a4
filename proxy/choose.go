// SPDX-License-Identifier: Apache-2.0

package proxy

// How the engines of a request are chosen: P and D, D alone, or an engine that does both.

import "slices"

// chooseOnlyLocked chooses the engine b, for a request that no other engine can answer. Its results are those of chooseLocked.
func (f *fleet) chooseOnlyLocked(b *backend) (c choice, how availability, of role) {
	switch {
	case !slices.Contains(f.mu.all, b) || !b.well.Load():
		return c, unwell, b.role
	case b.inFlight >= f.o.MaxPerEngine:
		return c, full, b.role
	}
	return choice{engine: b}, ready, b.role
}

// pickPrefillLocked returns the prefill engine p for the request w, with its rank `who`, among those that match like. lacks is how many
// bytes of the prompt p has not seen. how is ready, or says why no engine can take the request. If how is ready but p is nil, D may
// compute the prompt itself (Options.DecodeAlone).
func (f *fleet) pickPrefillLocked(w *needs, like fit) (p *backend, who rank, lacks int, how availability) {
	p, lacks, how = f.pickLocked(prefill, w, like)
	if how == ready && p.registered() {
		ok := false
		if who, ok = p.nextRank(); !ok {
			how = unwell
		}
	}
	if how <= doubtful && f.o.DecodeAlone && like.kind != sglangKind {
		p, how = nil, ready
	}
	return p, who, lacks, how
}

// chooseLocked chooses the engines for a request; takeLocked then takes the places. how is ready, or says why there is no choice; then
// `of` is the role of the engines that are missing, for the text of the refusal.
func (f *fleet) chooseLocked(w *needs) (c choice, how availability, of role) {
	switch {
	case w.only != nil:
		return f.chooseOnlyLocked(w.only)
	case w.noRoom, w.ready:
		return f.chooseOfLocked(w, fit{kind: vllmKind})
	}
	c, how, of = f.chooseOfLocked(w, fit{})
	if how == ready || !f.rooms.Load() || w.kind != anyKind {
		return c, how, of
	}
	for _, k := range []kind{vllmKind, sglangKind} { // the chosen D has no matching P; a D of the other kind may have one
		if c2, how2, of2 := f.chooseOfLocked(w, fit{kind: k}); how2 > how {
			c, how, of = c2, how2, of2
		}
	}
	return c, how, of
}

// chooseOfLocked does what chooseLocked does, but takes only D's that match like, and engines that do both.
func (f *fleet) chooseOfLocked(w *needs, like fit) (c choice, how availability, of role) {
	d, dLacks, dHow := f.pickLocked(decode, w, like)
	if dHow == absent {
		e, lacks, how := f.pickLocked(both, w, fit{})
		return choice{engine: e, lacks: [2]int{lacks}}, how, both
	}
	needs := !w.ready && !w.alone // whether the request needs P
	if d != nil {
		like = d.fit()
	}
	switch {
	case dHow != ready:
	case w.ready:
		return choice{engine: d}, ready, decode
	case needs && like.kind == vllmKind:
		if lacks, by := f.missingBytes(w, dLacks); lacks < f.o.SkipPrefill {
			return choice{engine: d, lacks: [2]int{lacks}, spared: by}, ready, decode
		}
	}
	var p *backend // nil: D computes the prompt itself
	pLacks, pHow, who := 0, ready, rank{}
	if needs {
		p, who, pLacks, pHow = f.pickPrefillLocked(w, like)
	}
	switch how := min(dHow, pHow); {
	case how == ready && p != nil:
		return choice{engine: d, prefill: p, rank: who, lacks: [2]int{0, pLacks}}, ready, decode
	case how == ready:
		c := choice{engine: d, lacks: [2]int{dLacks}}
		if w.many {
			c.spared = bySequences
		}
		return c, ready, decode
	case how <= doubtful:
		e, lacks, eHow := f.pickLocked(both, w, fit{})
		if eHow == ready {
			return choice{engine: e, lacks: [2]int{lacks}}, ready, both
		}
		of = decode
		if pHow <= dHow {
			of = prefill
		}
		if pHow == absent && eHow == absent && dHow > unwell {
			return choice{}, absent, prefill
		}
		return choice{}, max(how, eHow, unwell), of
	}
	return choice{}, full, decode
}

// missingBytes returns how many bytes of a prompt D would have to compute without P. lacks is how many bytes of it D itself does not have.
// The second result says why P may be spared: D lacks little itself (byDecode), or can load enough from the cache server (byStore).
func (f *fleet) missingBytes(w *needs, lacks int) (int, spared) {
	guess := 0
	for _, id := range f.store.ids() {
		if id != 0 {
			guess = max(guess, w.seenBy(id))
		}
	}
	least := min(lacks, w.bytes-w.stored.correct(guess))
	if least < f.o.SkipPrefill && lacks >= f.o.SkipPrefill {
		return least, byStore
	}
	return least, byDecode
}
