// SPDX-License-Identifier: Apache-2.0

package evict_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/kvasir-kv/kvasir/store/evict"
)

// What holds for every policy, whatever it thinks of the slots: a victim is in the policy and idle,
// there is one as long as any slot is idle, and Ascend names each idle slot once. A policy of leaves
// names no slot that another one continues while there is an idle leaf.
func TestEveryPolicyKeepsTheRules(t *testing.T) {
	for _, name := range evict.Names {
		t.Run(name, func(t *testing.T) {
			rapid.Check(t, func(r *rapid.T) {
				p, err := evict.New(name, rapid.Int64Range(1, 200).Draw(r, "capacity"))
				if err != nil {
					r.Fatal(err)
				}
				rules(r, p, name == "leaf-lru" || name == "leaf-hazard")
			})
		})
	}
}

func rules(r *rapid.T, p evict.Policy, leaves bool) {
	type slotOf struct{ id, parent uint64 }
	in, busy, at := map[uint32]slotOf{}, map[uint32]bool{}, map[uint64]uint32{}
	isLeaf := func(s uint32) bool {
		for _, o := range in {
			if o.parent == in[s].id {
				return false
			}
		}
		return true
	}
	remove := func(s uint32) {
		p.Remove(s)
		delete(at, in[s].id)
		delete(in, s)
		delete(busy, s)
	}
	for range rapid.IntRange(1, 200).Draw(r, "steps") {
		s := rapid.Uint32Range(0, 25).Draw(r, "slot")
		_, there := in[s]
		switch op := rapid.SampledFrom([]string{"prompt", "prompt", "use", "use", "remove", "busy", "idle", "evict", "evict", "stranger"}).Draw(r, "op"); {
		case op == "prompt":
			// Blocks of a prompt: block d of family f is 10 f + d, what it continues is the one before.
			family, depth := rapid.Uint64Range(1, 4).Draw(r, "family"), rapid.Uint64Range(1, 6).Draw(r, "length")
			free := uint32(0)
			for d := depth; d >= 1; d-- {
				id := 10*family + d
				if _, ok := at[id]; ok {
					p.Use(at[id])
					continue
				}
				for _, taken := in[free]; taken; _, taken = in[free] {
					free++
				}
				parent := id - 1
				if d == 1 {
					parent = 0
				}
				in[free], at[id] = slotOf{id, parent}, free
				p.Add(free, id, parent, 1)
			}
		case op == "use":
			if !busy[s] {
				p.Use(s)
			}
		case op == "remove" && leaves && there && !isLeaf(s): // the store evicts what the policy names
		case op == "remove":
			remove(s)
		case op == "stranger":
			p.Use(1000)
			p.Remove(1000)
		case op == "busy" && there:
			busy[s] = true
		case op == "idle" && busy[s]:
			delete(busy, s)
			p.Use(s)
		case op == "evict":
			v, ok := victim(p, func(s uint32) bool { return busy[s] })
			idleLeaf := false
			for s := range in {
				idleLeaf = idleLeaf || !busy[s] && isLeaf(s)
			}
			if ok != (len(busy) < len(in)) {
				r.Fatalf("Victim: %v with %d of %d slots busy", ok, len(busy), len(in))
			}
			if !ok {
				continue
			}
			if _, there := in[v]; !there || busy[v] {
				r.Fatalf("Victim names slot %d: in the policy %v, busy %v", v, there, busy[v])
			}
			if leaves && idleLeaf && !isLeaf(v) {
				r.Fatalf("Victim names %v, which is continued, and there is an idle leaf: %v", in[v], in)
			}
			if leaves && !isLeaf(v) {
				continue // what continues it would be of no use; the rules of leaves end there
			}
			remove(v)
		}
	}
	named := map[uint32]bool{}
	p.Ascend(func(s uint32) bool {
		if _, there := in[s]; !there || named[s] {
			r.Fatalf("Ascend names slot %d: in the policy %v, before %v", s, there, named[s])
		}
		named[s] = true
		return true
	})
	for s := range in {
		if !busy[s] && !named[s] {
			r.Fatalf("Ascend does not name slot %d", s)
		}
	}
}

// ask plays prompts against a policy of so many slots, as a store does, and returns the hits.
func ask(t *testing.T, p evict.Policy, slots int, prompts [][]uint64) (hits int) {
	t.Helper()
	at, holds, used := map[uint64]uint32{}, make([]uint64, slots), make([]int, slots)
	next := 0
	for now, prompt := range prompts {
		for _, id := range prompt {
			s, ok := at[id]
			if !ok {
				break
			}
			hits++
			used[s] = now + 1
		}
		isNew := map[uint64]bool{}
		for _, id := range prompt {
			if _, ok := at[id]; ok {
				continue
			}
			s := uint32(next)
			if next < slots {
				next++
			} else {
				v, ok := victim(p, func(s uint32) bool { return used[s] == now+1 })
				if !ok {
					t.Fatal("nothing to evict")
				}
				p.Remove(v)
				delete(at, holds[v])
				s = v
			}
			at[id], holds[s], used[s], isNew[id] = s, id, now+1, true
		}
		for i := len(prompt) - 1; i >= 0; i-- {
			if id := prompt[i]; isNew[id] {
				parent := uint64(0)
				if i > 0 {
					parent = prompt[i-1]
				}
				p.Add(at[id], id, parent, 1)
			} else {
				p.Use(at[id])
			}
		}
	}
	return hits
}

// Conversations that go on, among prompts that come once and are long: leaf-hazard learns which are
// which, and has more of what comes again than an LRU; with prompts that all come again alike, it has
// not less. Twice with other numbers, after another: what was learnt of the first is no burden.
func TestLeafHazardLearns(t *testing.T) {
	const slots, rounds = 300, 600
	mixed := func(family uint64) (prompts [][]uint64) {
		id := family << 32
		chats := make([][]uint64, 20)
		for round := range rounds {
			c := &chats[round%len(chats)]
			if round%200 < len(chats) {
				*c = nil
			}
			id++
			*c = append(*c, id)
			prompts = append(prompts, append([]uint64(nil), *c...))
			var once []uint64
			for range 30 {
				id++
				once = append(once, id)
			}
			prompts = append(prompts, once)
		}
		return prompts
	}
	lru, hazard := evict.NewLRU(), evict.NewLeafHazard()
	all := append(mixed(1), mixed(2)...)
	if l, h := ask(t, lru, slots, all), ask(t, hazard, slots, all); h < 2*l || h < 1000 {
		t.Errorf("leaf-hazard has %d, an LRU %d", h, l)
	}
	var alike [][]uint64
	for round := range uint64(2000) {
		alike = append(alike, []uint64{1 + round%29*10, 2 + round%29*10, 3 + round%29*10})
	}
	if l, h := ask(t, evict.NewLRU(), 60, alike), ask(t, evict.NewLeafHazard(), 60, alike); h < l || h < 2000 {
		t.Errorf("of a loop leaf-hazard has %d, an LRU %d; 3500 are possible", h, l)
	}
}

// Documents that new questions are asked about, two at a time, among documents that come once: no prompt is ever continued, so
// what is learned comes from where prompts part. An LRU has the second question of each pair.
func TestLeafHazardLearnsForks(t *testing.T) {
	var prompts [][]uint64
	next := uint64(1 << 32)
	for round := range uint64(3000) {
		document := round / 4 % 20 * 100
		if round%2 == 0 {
			document = 1<<40 + round*100
		}
		var prompt []uint64
		for block := range uint64(10) {
			prompt = append(prompt, document+block+1)
		}
		next++
		prompts = append(prompts, append(prompt, next))
	}
	const slots = 300
	l, h := ask(t, evict.NewLRU(), slots, prompts), ask(t, evict.NewLeafHazard(), slots, prompts)
	if t.Logf("leaf-hazard has %d, an LRU %d", h, l); l != 7500 || h < 11000 {
		t.Errorf("leaf-hazard has %d, an LRU %d", h, l)
	}
}

// A prompt of more slots than settle links at once stays one prompt: its tail goes first.
func TestALongPromptGoesTailFirst(t *testing.T) {
	const blocks = 3000
	for _, name := range []string{"leaf-lru", "leaf-hazard"} {
		p, err := evict.New(name, blocks)
		if err != nil {
			t.Fatal(err)
		}
		for i := uint32(blocks); i > 0; i-- {
			p.Add(i, uint64(i), uint64(i-1), 1)
		}
		for want := uint32(blocks); want > 0; want-- {
			v, ok := victim(p, func(uint32) bool { return false })
			if !ok || v != want {
				t.Fatalf("%s: Victim = %d, %v, want %d", name, v, ok, want)
			}
			p.Remove(v)
		}
	}
}
