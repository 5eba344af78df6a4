// Package sim plays workloads against a server with simulated workers: real
// bytes through real shared memory over the real protocol, no model.
package sim

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
)

// Request is one prompt of a workload.
type Request struct {
	Arrival int64 // ms from the start
	Tokens  []uint32
}

// BlockTokens is the prefix block of trace files: one hash id per 512 tokens.
const BlockTokens = 512

// vocabulary of generated tokens, a common size
const vocabulary = 151936

// Chats makes a workload of conversations: every conversation begins with one of
// a few system prompts, and each turn sends the whole conversation so far and a
// new part. Turns of many conversations interleave. The same seed gives the same
// workload.
func Chats(requests int, seed uint64) []Request {
	rnd := rand.New(rand.NewPCG(seed, 1))
	const systems, open = 3, 12
	next := int64(systems)
	chats := make([][]int64, open) // block ids so far
	out := make([]Request, 0, requests)
	for len(out) < requests {
		i := rnd.IntN(open)
		if len(chats[i]) == 0 || len(chats[i]) > 16 {
			system := int64(rnd.IntN(systems))
			chats[i] = []int64{system, system + 1000003, system + 2000003}
		}
		for range 1 + rnd.IntN(3) {
			next++
			chats[i] = append(chats[i], 5000000+next)
		}
		n := len(chats[i]) * BlockTokens
		out = append(out, Request{Arrival: int64(len(out)), Tokens: tokensOf(chats[i], n-rnd.IntN(BlockTokens/2))})
	}
	return out
}

// tokensOf makes n tokens of prefix blocks: equal ids give equal tokens.
func tokensOf(ids []int64, n int) []uint32 {
	out := make([]uint32, 0, n)
	for _, id := range ids {
		rnd := rand.New(rand.NewPCG(uint64(id), 2))
		for range min(BlockTokens, n-len(out)) {
			out = append(out, rnd.Uint32N(vocabulary))
		}
	}
	return out
}

// traceLine is one request of a trace file.
type traceLine struct {
	Timestamp   int64   `json:"timestamp"`
	InputLength int     `json:"input_length"`
	HashIDs     []int64 `json:"hash_ids"`
}

// ErrTrace means that a trace file has another format.
var ErrTrace = errors.New("sim: bad trace")

// Limits on a line of a trace.
const (
	maxTraceLine   = 4 << 20
	maxInputTokens = 1 << 21
)

// ReadTrace reads at most max requests (0: all) of a trace in the format of the
// Mooncake release: JSON lines {timestamp ms, input_length tokens, hash_ids of
// its 512-token blocks}, the last block partial. Errors wrap ErrTrace and name
// the line.
func ReadTrace(r io.Reader, max int) ([]Request, error) {
	var out []Request
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxTraceLine)
	for line := 1; s.Scan(); line++ {
		if len(s.Bytes()) == 0 {
			continue
		}
		if max > 0 && len(out) == max {
			return out, nil
		}
		var t traceLine
		if err := json.Unmarshal(s.Bytes(), &t); err != nil {
			return nil, fmt.Errorf("%w: line %d: %w", ErrTrace, line, err)
		}
		blocks := (t.InputLength + BlockTokens - 1) / BlockTokens
		if t.InputLength < 1 || t.InputLength > maxInputTokens || len(t.HashIDs) != blocks {
			return nil, fmt.Errorf("%w: line %d: %d hash_ids for input_length %d", ErrTrace, line, len(t.HashIDs), t.InputLength)
		}
		out = append(out, Request{Arrival: t.Timestamp, Tokens: tokensOf(t.HashIDs, t.InputLength)})
	}
	if err := s.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTrace, err)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: no requests", ErrTrace)
	}
	return out, nil
}
