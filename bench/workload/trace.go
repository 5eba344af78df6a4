// SPDX-License-Identifier: Apache-2.0

package workload

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/kvasir-kv/kvasir/internal/options"
)

// ErrTrace means that a file does not have the expected format.
var ErrTrace = errors.New("workload: bad trace")

// Limits of a file. Beyond the first four it is ErrTrace.
const (
	maxTraceLine   = 4 << 20 // bytes
	maxInputTokens = 1 << 21 // tokens of a prompt, of an output, and of a block
	maxRequests    = 1 << 24
	maxTraceBlocks = 1 << 27 // hash ids of all requests, or words of the prompts of all sessions: 1 GiB
	maxShareGPT    = 4 << 30 // bytes; the rest is not read
	maxText        = 1 << 20 // bytes of a prompt; conversations with a longer one are left out
)

// TraceOptions describes the format of a trace. The zero value is Mooncake's format: JSON lines {timestamp in ms, input_length,
// output_length, hash_ids of 512-token blocks}. The other fields are those of vLLM's dataset timed_trace.
type TraceOptions struct {
	Max         int     // most requests to read; 0: all
	BlockTokens int     // tokens per hash id; default 512
	Seconds     float64 // unit of the timestamp in seconds; default 0.001

	// Names of the keys; defaults are timestamp, input_length, output_length, hash_ids.
	Timestamp, InputLength, OutputLength, HashIDs string

	Format    Format
	TokenTime time.Duration // time per generated token, to estimate when a turn of a session ends; default 0, for Load and Stream 20 ms

	maxBlocks    int // default maxTraceBlocks
	maxRequests  int // default maxRequests
	maxSessions  int // default maxSessions
	window       int // default windowRequests
	windowBlocks int // default windowBlocks
}

// Format says how the lines of a trace are read.
type Format string

// The formats. With FormatAuto, a line with a key that only AIPerf has is read as AIPerf's, any other as Mooncake's.
const (
	FormatAuto Format = ""
	// FormatMooncake means that hash_ids cover all tokens of input_length; a line with more or fewer hash ids is an error.
	FormatMooncake Format = "mooncake"
	// FormatTimed is vLLM's dataset timed_trace (vLLM 0.32.0 and 0.33.0, TimedTrace in benchmarks/datasets). All keys but hash_ids are
	// required, and a prompt ends with its last hash id. More hash ids than input_length has blocks, which vLLM ignores, are an error.
	FormatTimed Format = "timed"
	// FormatAIPerf has sessions (AIPerf 0.13.0, its dataset type mooncake_trace). A line gives a prompt by input_length with or without
	// hash_ids, by text_input, by messages, or by payload. Later turns of a session continue the earlier ones, except with messages and
	// payload, which are whole prompts. Tokens after the last hash id, and answers, are tokens that no other session has. Text counts
	// as one token for four bytes.
	FormatAIPerf Format = "aiperf"
)

// Formats lists the names of the formats.
var Formats = []Format{FormatMooncake, FormatTimed, FormatAIPerf}

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
	number := func(v *int, to int) {
		if *v == 0 {
			*v = to
		}
	}
	number(&o.maxSessions, maxSessions)
	number(&o.window, windowRequests)
	number(&o.windowBlocks, windowBlocks)
	if o.Seconds == 0 {
		o.Seconds = 0.001
	}
	if o.Format != FormatAuto && !slices.Contains(Formats, o.Format) {
		return fmt.Errorf("%w: the format %q is unknown, want one of %v", ErrTrace, o.Format, Formats)
	}
	switch {
	case o.BlockTokens < 1 || o.BlockTokens > maxInputTokens:
		return fmt.Errorf("%w: blocks of %d tokens, 1 to %d are possible", ErrTrace, o.BlockTokens, maxInputTokens)
	case !(o.Seconds > 0) || math.IsInf(o.Seconds, 0):
		return fmt.Errorf("%w: the unit of timestamps is %v s, it must be above 0", ErrTrace, o.Seconds)
	case o.Max < 0:
		return fmt.Errorf("%w: %d requests at most, it must not be below 0", ErrTrace, o.Max)
	}
	return nil
}

// ReadTrace reads the requests of a trace and returns them in the order of the file. Errors wrap ErrTrace and name the line.
func ReadTrace(r io.Reader, o TraceOptions) ([]Request, error) {
	t, err := NewReader(r, o)
	if err != nil {
		return nil, err
	}
	var out []Request
	for blocks := 0; ; {
		q, err := t.Next()
		switch blocks += len(q.Blocks); {
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return nil, err
		case len(out) == t.o.maxRequests:
			return nil, fmt.Errorf("%w: line %d: the trace has more than %d requests: play fewer requests of it", ErrTrace, t.line, t.o.maxRequests)
		case blocks > t.o.maxBlocks:
			return nil, fmt.Errorf("%w: line %d: the trace has more than %d %s: play fewer requests of it", ErrTrace, t.line, t.o.maxBlocks, t.o.HashIDs)
		}
		out = append(out, q)
	}
}

// parse parses a line in Mooncake's or vLLM's format.
func (o *TraceOptions) parse(m map[string]json.RawMessage) (q Request, err error) {
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
	timed := o.Format == FormatTimed
	read(o.Timestamp, &stamp, timed, "a number")
	read(o.InputLength, &q.Input, true, "a whole number")
	read(o.OutputLength, &q.Output, timed, "a whole number")
	read(o.HashIDs, &q.Blocks, true, "a list of whole numbers")
	if err != nil {
		return q, err
	}
	if at := stamp * o.Seconds; !(at >= 0 && at < maxSeconds) {
		return q, fmt.Errorf("%s %v is no time from 0 to 292 years", o.Timestamp, stamp)
	}
	q.Arrival = time.Duration(stamp * o.Seconds * float64(time.Second))
	if q.Input < 1 || q.Input > maxInputTokens {
		return q, fmt.Errorf("%s %d is outside 1 to %d", o.InputLength, q.Input, maxInputTokens)
	}
	n := (q.Input + o.BlockTokens - 1) / o.BlockTokens
	switch have := len(q.Blocks); {
	case timed && have > 0 && have < n:
		q.Input = have * o.BlockTokens
	case have != n:
		return q, fmt.Errorf("%d %s for %s %d: %d of %d tokens are expected", have, o.HashIDs, o.InputLength, q.Input, n, o.BlockTokens)
	}
	if q.Output < 0 || q.Output > maxInputTokens {
		return q, fmt.Errorf("%s %d is outside 0 to %d", o.OutputLength, q.Output, maxInputTokens)
	}
	return q, nil
}

// cut returns the beginning of some JSON, for an error message.
func cut(raw []byte) string {
	if raw = bytes.TrimSpace(raw); utf8.Valid(raw) && len(raw) <= 40 && !bytes.ContainsFunc(raw, unicode.IsControl) {
		return string(raw)
	}
	return fmt.Sprintf("%.40q ...", raw)
}

// ReadShareGPT reads conversations in the JSON of ShareGPT: an array of {conversations: [{from, value}]}. As in vllm bench serve, each
// conversation with at least two turns gives a request: the first turn is the prompt, and the output is as long as the second turn;
// very short and very long ones are left out. count returns the number of tokens of a text; nil: one token for 4 bytes.
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
