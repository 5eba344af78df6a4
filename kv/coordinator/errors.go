// SPDX-License-Identifier: Apache-2.0

package coordinator

import "fmt"

// Code says which rule an Error comes from.
type Code uint8

// The codes of an Error. Errors with a code up to CodeIndex have vLLM's message.
const (
	CodeHashUnit       Code = iota + 1 // a block size is no multiple of the hash unit
	CodeScheduler                      // the scheduler block is no multiple of the hash unit
	CodeSchedulerGroup                 // the scheduler block is no multiple of a group's block
	CodeNoManager                      // the release knows no manager for the kind
	CodeZero                           // division by a size of zero
	CodeCross                          // lookup of a cross-attention group
	CodeChunkEagle                     // lookup of a chunked group with an EAGLE drop
	CodeChunkAlign                     // lookup of a chunked group whose block is not the alignment
	CodeUnaligned                      // a mask was requested for a length that is no multiple of the alignment
	CodeIndex                          // a lookup beyond the last hash unit
	CodeNegative                       // a negative length; vLLM has no such message
	CodeLimit                          // beyond what this package accepts; vLLM has no such message
	CodeRelease                        // the release cannot answer this question; vLLM has no such message
	CodeLayout                         // a layout or vector text that does not parse; vLLM has no such message
)

// Error is a refusal. Where vLLM has a message for it, Text is that message, letter by
// letter, and Class is the name of the Python exception.
type Error struct {
	Code  Code
	Class string
	Text  string
}

func (e *Error) Error() string { return e.Text }

// Is reports whether target is an Error of the same code, so that callers can
// write errors.Is(err, coordinator.ErrCross).
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

const (
	assertion      = "AssertionError"
	notImplemented = "NotImplementedError"
	zeroDivision   = "ZeroDivisionError"
	indexError     = "IndexError"
	valueError     = "ValueError" // the class of refusals that vLLM does not have
)

// Refusals at lookup. A Coordinator without a Release answers the first three with a hit of
// no tokens, whose Reason is the refusal.
var (
	ErrCross      = &Error{CodeCross, notImplemented, "CrossAttentionManager does not support caching"}
	ErrChunkEagle = &Error{CodeChunkEagle, assertion, "Hybrid KV cache is not supported for eagle + chunked local attention."}
	ErrChunkAlign = &Error{CodeChunkAlign, assertion, "KV cache groups with different block sizes are not compatible with chunked local attention now"}
	ErrIndex      = &Error{CodeIndex, indexError, "list index out of range"}
	ErrRelease    = &Error{CodeRelease, valueError, "vLLM 0.23.0 has no lookup mask, start or prompt length"}
)

var (
	errHashUnit       = &Error{CodeHashUnit, assertion, "block_size must be divisible by hash_block_size"}
	errSchedulerGroup = &Error{CodeSchedulerGroup, assertion, "scheduler_block_size must be a multiple of each group's block_size"}
	errZero           = &Error{CodeZero, zeroDivision, "integer modulo by zero"}
)

func limitf(format string, args ...any) *Error {
	return &Error{CodeLimit, valueError, fmt.Sprintf(format, args...)}
}

func layoutf(format string, args ...any) *Error {
	return &Error{CodeLayout, valueError, fmt.Sprintf(format, args...)}
}
