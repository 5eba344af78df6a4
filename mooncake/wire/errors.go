// SPDX-License-Identifier: Apache-2.0

package wire

import "fmt"

// Code says which rule an Error comes from.
type Code uint8

// The codes of an Error. vLLM also makes the refusals up to CodeShape, and these carry vLLM's text; the text of the others is ours.
const (
	CodeRole     Code = iota + 1 // the engine's role never sends, or never receives
	CodeMissing                  // kv_transfer_params lack a key
	CodeGroups                   // the number of KV cache groups differs
	CodeShape                    // a pull does not fit the requests it names, or asks for more blocks than they have
	CodeInvalid                  // kv_transfer_params cannot be used or parsed
	CodeTransfer                 // transfer_id is missing
	CodeBusy                     // the request id or transfer id is in use
	CodeFull                     // too many transfers at a time
	CodeOptions                  // options that do not fit
	CodeUnknown                  // the transfer is not known
	CodeRange                    // an address or a block id is out of range
)

// Error is a refusal. Text is vLLM's text, letter by letter, if vLLM has one, and Class is the name of the Python exception. Detail
// says what was refused.
type Error struct {
	Code   Code
	Class  string
	Text   string
	Detail string
}

func (e *Error) Error() string {
	switch {
	case e.Detail == "":
		return "mooncake: " + e.Text
	case e.Text == "":
		return "mooncake: " + e.Detail
	}
	return "mooncake: " + e.Text + " (" + e.Detail + ")"
}

// Is reports whether target is an Error with the same code, so that errors.Is(err, wire.ErrRole) works.
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// Refusals on which callers may branch with errors.Is; it compares only their codes.
var (
	ErrRole    = &Error{Code: CodeRole, Detail: "not in this role"}
	ErrMissing = &Error{Code: CodeMissing, Detail: "kv_transfer_params lack a key"}
	ErrGroups  = &Error{Code: CodeGroups, Detail: "another number of KV cache groups"}
	ErrShape   = &Error{Code: CodeShape, Detail: "the pull does not fit its requests"}
	ErrInvalid = &Error{Code: CodeInvalid, Detail: "invalid kv_transfer_params"}
	ErrBusy    = &Error{Code: CodeBusy, Detail: "already in transfer"}
	ErrFull    = &Error{Code: CodeFull, Detail: "too many transfers"}
	ErrUnknown = &Error{Code: CodeUnknown, Detail: "unknown transfer"}
	ErrRange   = &Error{Code: CodeRange, Detail: "out of range"}
)

// The Python exceptions of refusals.
const (
	classAssertion = "AssertionError"
	ClassKey       = "KeyError"
	ClassValue     = "ValueError" // also the class of refusals that vLLM does not have
)

// Asserted returns the Error of an assertion that fails in vLLM, too; it has no Text.
func Asserted(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Class: classAssertion, Detail: fmt.Sprintf(format, args...)}
}

// Refusef returns an Error that vLLM does not have.
func Refusef(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Class: ClassValue, Detail: fmt.Sprintf(format, args...)}
}
