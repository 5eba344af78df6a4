// SPDX-License-Identifier: Apache-2.0

package store_test

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"os"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/store"
	"github.com/kvasir-kv/kvasir/store/hold"
	"github.com/kvasir-kv/kvasir/store/lease"
	"github.com/kvasir-kv/kvasir/tier"
)

// turn is a request of a trace: the full blocks of its prompt, then those that its answer completed.
type turn struct {
	at      time.Duration
	prompt  int
	blocks  []int64
	answers bool // a later prompt of the trace begins with blocks
}

// readTurns reads a trace in Mooncake's format, which names the blocks of prompts only. The next prompt that begins with
// all full blocks of a request, at least two, and is as long as prompt and answer is taken for the conversation's next
// one: its blocks are the answer's. Other answers get names of their own.
func readTurns(t *testing.T, path string) (turns []turn) {
	t.Helper()
	const tokens = 512
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	type line struct {
		At     int64   `json:"timestamp"`
		Input  int     `json:"input_length"`
		Output int     `json:"output_length"`
		Blocks []int64 `json:"hash_ids"`
	}
	var lines []line
	for in := json.NewDecoder(bufio.NewReader(file)); in.More(); {
		var l line
		if err := in.Decode(&l); err != nil {
			t.Fatal(err)
		}
		l.Blocks = l.Blocks[:min(len(l.Blocks), l.Input/tokens)]
		lines = append(lines, l)
	}
	having := map[int64][]int{} // requests by each of their blocks, which names all blocks before it, too
	for i, l := range lines {
		for _, b := range l.Blocks {
			having[b] = append(having[b], i)
		}
	}
	own := int64(1 << 40)
	for i, l := range lines {
		n, all := len(l.Blocks), (l.Input+l.Output)/tokens
		u := turn{at: time.Duration(l.At) * time.Millisecond, prompt: n, blocks: l.Blocks[:n:n]}
		if n >= 2 && all > n {
			for _, next := range having[l.Blocks[n-1]] {
				if next > i && lines[next].Input >= l.Input+l.Output {
					u.blocks, u.answers = lines[next].Blocks[:all:all], true
					break
				}
			}
		}
		for len(u.blocks) < all {
			u.blocks, own = append(u.blocks, own), own+1
		}
		turns = append(turns, u)
	}
	return turns
}

// TestAnswersOnTrace plays the trace KVASIR_TRACE on a pool of a tenth of its blocks over a tier, and prints how much of
// the prompts hits and how much is written below with each policy for answers.
func TestAnswersOnTrace(t *testing.T) {
	path := os.Getenv("KVASIR_TRACE")
	if path == "" {
		t.Skip("KVASIR_TRACE names no trace")
	}
	turns := readTurns(t, path)
	blocks, answers, continued := map[int64]bool{}, 0, 0
	for _, u := range turns {
		for i, b := range u.blocks {
			if i >= u.prompt && !blocks[b] {
				answers++
			}
			blocks[b] = true
		}
		if u.answers {
			continued++
		}
	}
	t.Logf("%d requests, %d blocks, %d of them first in an answer; %d answers are in a later prompt", len(turns), len(blocks), answers, continued)
	f := func(name string, policy store.AnswerPolicy, tierBlocks int) {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t, t.TempDir(), len(blocks)/10, store.Options{WriteAnswers: policy, Below: nil})
			defer func() { b.release(); b.stop() }()
			b.memory, b.policy = tier.NewMemory(int64(tierBlocks)*chunkBytes), "leaf-hazard"
			b.restart()
			end := b.run()
			defer end()
			hits, all := 0, 0
			began := time.Now()
			for _, u := range turns {
				time.Sleep(u.at - time.Since(began))
				hits += b.play(t, u)
				all += u.prompt
			}
			time.Sleep(time.Minute)
			got := b.store.Stats()
			t.Logf("tier of %d blocks, answers %-4s: %.2f %% of the prompts' blocks hit, %d blocks written below, %d read from there",
				tierBlocks, name, 100*float64(hits)/float64(all), got.WrittenChunks, got.BelowChunks)
		})
	}
	for _, size := range []int{len(blocks), len(blocks) * 3 / 10} {
		f("yes", store.AnswersAsPrompts, size)
		f("hit", store.AnswersAfterHit, size)
		f("no", store.AnswersNever, size)
	}
}

// play has an engine serve one request, and returns how many blocks of its prompt hit.
func (b *bench) play(t *testing.T, u turn) int {
	t.Helper()
	hashes := make([]kv.Hash, len(u.blocks))
	for i, name := range u.blocks {
		binary.LittleEndian.PutUint64(hashes[i][:], uint64(name)*0x9e3779b97f4a7c15)
		binary.LittleEndian.PutUint64(hashes[i][8:], uint64(name))
	}
	id, owner := []byte("r"), lease.Owner{}
	b.store.NotePrompt(id, owner, u.prompt)
	hit := 0
	if u.prompt > 0 {
		got := b.store.Lookup(id, one, store.Hashed(hashes[:u.prompt]), 1)
		if got.State == store.Pending {
			got = b.store.Await(t.Context(), id, owner)
		}
		hit = got.Hit
	}
	if hit > 0 {
		tr, p := transfer(1, hashes, 0, hit, true), store.Transfer{}
		_ = b.store.BeginLoad(id, tr, hashes, &p)
		b.store.CommitLoad(tr, id)
	}
	store1 := func(from, to int) {
		if from >= to {
			return
		}
		tr, p := hold.Transfer{Instance: 1, Shard: one, From: from, To: to, Last: hashes[to-1]}, store.Transfer{}
		if got, err := b.store.BeginStore(tr, id, hashes, &p); err != nil || got.NoRoom > 0 {
			t.Logf("%+v, %v", got, err)
		}
		if len(p.Offsets) > 0 {
			b.store.CommitStore(tr, id, hashes, true)
		}
	}
	store1(hit, u.prompt)
	store1(u.prompt, len(u.blocks))
	b.store.EndSession(id, owner)
	return hit
}
