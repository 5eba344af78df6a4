// SPDX-License-Identifier: Apache-2.0

package connector

import "fmt"

// Code says which rule an Error comes from.
type Code uint8

// The codes of an Error. Errors with a code up to CodeGroups carry the message of vLLM's connector.
const (
	CodeUnknown Code = iota + 1 // no tracker for the request
	CodeHit                     // a hit that is not whole chunks
	CodeHashes                  // fewer block hashes than hit blocks
	CodeGroups                  // KV cache groups that the release, or the engine, does not have
	CodeOptions                 // sizes that do not fit; vLLM has no message for it
	CodeBlocks                  // fewer blocks than are to be loaded; vLLM has no message for it
)

// Error is a refusal. Its text is that of vLLM's connector, letter by letter, where the connector
// has one. Class is the name of the Python exception.
type Error struct {
	Code  Code
	Class string
	Text  string
}

// Error returns the text, and the class of an exception without one.
func (e *Error) Error() string {
	if e.Text == "" {
		return e.Class
	}
	return e.Text
}

// Is reports whether target is an Error of the same code, so that callers can
// write errors.Is(err, connector.ErrGroups).
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

const (
	assertion    = "AssertionError"
	runtimeError = "RuntimeError"
	valueError   = "ValueError" // the class of refusals that vLLM's connector does not have
)

// Refusals that callers may branch on.
var (
	ErrUnknown = &Error{CodeUnknown, assertion, "no tracker for the request"} // only its code is compared
	ErrHit     = &Error{CodeHit, assertion, ""}
	ErrHashes  = &Error{CodeHashes, assertion, "The number of block hashes should be greater than or equal to the number of LMCache hit blocks. "}
	ErrGroups  = &Error{CodeGroups, runtimeError, "LMCacheMPConnector only works without hybrid kv cache manager. Please pass --disable-hybrid-kv-cache-manager when starting vllm"}
	ErrBlocks  = &Error{CodeBlocks, valueError, "fewer blocks than are to be loaded"} // only its code is compared
)

func unknown(id string) *Error {
	return &Error{CodeUnknown, assertion, "Request tracker for request_id " + id + " not found. "}
}

func optionsf(format string, args ...any) *Error {
	return &Error{CodeOptions, valueError, fmt.Sprintf(format, args...)}
}
