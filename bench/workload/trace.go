// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// ErrTrace means that a file has another format.
var ErrTrace = errors.New("workload: bad trace")

// Limits on a file.
const (
	maxTraceLine   = 4 << 20
	maxInputTokens = 1 << 21
	maxRequests    = 1 << 24
	maxTraceBlocks = 1 << 27 // hash ids of all requests: 1 GiB
	maxShareGPT    = 4 << 30 // bytes
	maxText        = 1 << 20 // bytes of a prompt
)

// TraceOptions say how a trace is written. The zero value is Mooncake's format: JSON lines
// {timestamp in ms, input_length, output_length, hash_ids of 512-token blocks}. The other
// fields are those of vLLM's dataset timed_trace.
type TraceOptions struct {
	Max         int     // requests; 0: all
	BlockTokens int     // of a hash id; default 512
	Seconds     float64 // a unit of the timestamp; default 0.001

	// Names of the keys; defaults timestamp, input_length, output_length, hash_ids.
	Timestamp, InputLength, OutputLength, HashIDs string

	maxBlocks   int // default maxTraceBlocks
	maxRequests int // default maxRequests
}

func (o *TraceOptions) defaults() error {
	set := func(s *string, name string) {
		if *s == "" {
			*s = name
		}
	}
	set(&o.Timestamp, "timestamp")
	set(&o.InputLength, "input_length")
	set(&o.OutputLength, "output_length")
	set(&o.HashIDs, "hash_ids")
	if o.BlockTokens == 0 {
		o.BlockTokens = 512
	}
	if o.maxBlocks == 0 {
		o.maxBlocks = maxTraceBlocks
	}
	if o.maxRequests == 0 {
		o.maxRequests = maxRequests
	}
	if o.Seconds == 0 {
		o.Seconds = 0.001
	}
	if o.BlockTokens < 1 || o.BlockTokens > maxInputTokens || !(o.Seconds > 0) || math.IsInf(o.Seconds, 0) || o.Max < 0 {
		return fmt.Errorf("%w: blocks of %d tokens, timestamps of %v s", ErrTrace, o.BlockTokens, o.Seconds)
	}
	return nil
}

// ReadTrace reads the requests of a trace, in the order of the file. Errors wrap ErrTrace and
// name the line.
func ReadTrace(r io.Reader, o TraceOptions) ([]Request, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	var out []Request
	s := bufio.NewScanner(r)
	s.Buffer(nil, maxTraceLine)
	line, blocks := 1, 0
	for ; s.Scan(); line++ {
		text := bytes.TrimSpace(s.Bytes())
		if len(text) == 0 {
			continue
		}
		if o.Max > 0 && len(out) == o.Max {
			return out, nil
		}
		if len(out) == o.maxRequests {
			return nil, fmt.Errorf("%w: line %d: the trace has more than %d requests: play fewer requests of it", ErrTrace, line, o.maxRequests)
		}
		q, err := o.parse(text)
		if err != nil {
			return nil, fmt.Errorf("%w: line %d: %w", ErrTrace, line, err)
		}
		if blocks += len(q.Blocks); blocks > o.maxBlocks {
			return nil, fmt.Errorf("%w: line %d: the trace has more than %d %s: play fewer requests of it", ErrTrace, line, o.maxBlocks, o.HashIDs)
		}
		q.Conversation = len(out)
		out = append(out, q)
	}
	if err := s.Err(); errors.Is(err, bufio.ErrTooLong) {
		return nil, fmt.Errorf("%w: line %d is longer than %d bytes", ErrTrace, line, maxTraceLine)
	} else if err != nil {
		return nil, fmt.Errorf("%w: line %d: %w", ErrTrace, line, err)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: no requests", ErrTrace)
	}
	return out, nil
}

func (o *TraceOptions) parse(line []byte) (q Request, err error) {
	var m map[string]json.RawMessage
	if json.Unmarshal(line, &m) != nil || m == nil {
		return q, fmt.Errorf("%s is no JSON object", cut(line))
	}
	q.BlockTokens = o.BlockTokens
	var stamp float64
	read := func(key string, to any, must bool, want string) {
		raw, ok := m[key]
		switch {
		case err != nil || !ok && !must:
		case !ok:
			err = fmt.Errorf("%s is missing", key)
		default:
			if json.Unmarshal(raw, to) != nil || must && string(raw) == "null" {
				err = fmt.Errorf("%s is %s, %s is expected", key, cut(raw), want)
			}
		}
	}
	read(o.Timestamp, &stamp, false, "a number")
	read(o.InputLength, &q.Input, true, "a whole number")
	read(o.OutputLength, &q.Output, false, "a whole number")
	read(o.HashIDs, &q.Blocks, true, "a list of whole numbers")
	if err != nil {
		return q, err
	}
	if at := stamp * o.Seconds; !(at >= 0 && at < float64(math.MaxInt64)/1e9) {
		return q, fmt.Errorf("%s %v is no time from 0 to 292 years", o.Timestamp, stamp)
	}
	q.Arrival = time.Duration(stamp * o.Seconds * float64(time.Second))
	if q.Input < 1 || q.Input > maxInputTokens {
		return q, fmt.Errorf("%s %d is outside 1 to %d", o.InputLength, q.Input, maxInputTokens)
	}
	if n := (q.Input + o.BlockTokens - 1) / o.BlockTokens; len(q.Blocks) != n {
		return q, fmt.Errorf("%d %s for %s %d: %d of %d tokens are expected", len(q.Blocks), o.HashIDs, o.InputLength, q.Input, n, o.BlockTokens)
	}
	if q.Output < 0 || q.Output > maxInputTokens {
		return q, fmt.Errorf("%s %d is outside 0 to %d", o.OutputLength, q.Output, maxInputTokens)
	}
	return q, nil
}

// cut returns the beginning of some JSON for a message.
func cut(raw []byte) string {
	if raw = bytes.TrimSpace(raw); utf8.Valid(raw) && len(raw) <= 40 && !bytes.ContainsFunc(raw, unicode.IsControl) {
		return string(raw)
	}
	return fmt.Sprintf("%.40q ...", raw)
}

// ReadShareGPT reads conversations in ShareGPT's JSON: an array of {conversations: [{from,
// value}]}. As in vllm bench serve, a request is the first turn of each conversation that has
// two, its output is as long as the second, and very short and very long ones are left out.
// Lengths are estimated at 4 bytes a token unless count is given.
func ReadShareGPT(r io.Reader, max int, count func(text string) int) ([]Request, error) {
	if count == nil {
		count = func(text string) int { return (len(text) + 3) / 4 }
	}
	dec := json.NewDecoder(io.LimitReader(r, maxShareGPT))
	if t, err := dec.Token(); err != nil || t != json.Delim('[') {
		return nil, fmt.Errorf("%w: a JSON array of conversations is wanted", ErrTrace)
	}
	var out []Request
	for n := 1; dec.More() && (max <= 0 || len(out) < max); n++ {
		var c struct {
			Conversations []struct{ From, Value string }
		}
		if err := dec.Decode(&c); err != nil {
			return nil, fmt.Errorf("%w: conversation %d, byte %d: %w", ErrTrace, n, dec.InputOffset(), options.JSONWords(err))
		}
		if len(c.Conversations) < 2 || len(c.Conversations[0].Value) > maxText {
			continue
		}
		q := Request{Text: c.Conversations[0].Value, Input: count(c.Conversations[0].Value), Output: count(c.Conversations[1].Value), Conversation: len(out)}
		if q.Input < 4 || q.Output < 4 || q.Input > 1024 || q.Input+q.Output > 2048 || strings.TrimSpace(q.Text) == "" {
			continue
		}
		out = append(out, q)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: no conversation with two turns of usual length", ErrTrace)
	}
	return out, nil
}
