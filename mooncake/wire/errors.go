// SPDX-License-Identifier: Apache-2.0

package wire

import "fmt"

// Code says which rule an Error comes from.
type Code uint8

// The codes of an Error. Those up to CodeShape are refusals of the original and
// carry its message; the text of the others is ours.
const (
	CodeRole     Code = iota + 1 // the role never sends, or never receives
	CodeMissing                  // kv_transfer_params lack a key
	CodeGroups                   // another number of KV cache groups
	CodeShape                    // a pull that does not fit the requests found, or has more blocks than they
	CodeInvalid                  // kv_transfer_params are not usable, or do not parse
	CodeTransfer                 // no transfer_id
	CodeBusy                     // the request id or transfer id is in use
	CodeFull                     // too many transfers at once
	CodeOptions                  // options that do not fit
	CodeUnknown                  // no such transfer
	CodeRange                    // an address or block id out of range
)

// Error is a refusal. Text is the original's, letter by letter, where it has one,
// and Class the Python exception's name; Detail says what was refused.
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

// Is reports whether target is an Error of the same code, so that callers can
// write errors.Is(err, wire.ErrRole).
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// Refusals that callers may branch on; only their codes are compared.
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
	ClassValue     = "ValueError" // also the class of refusals that are ours alone
)

// Asserted is a failed assertion of the original, which has no text.
func Asserted(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Class: classAssertion, Detail: fmt.Sprintf(format, args...)}
}

// Refusef is a refusal of our own.
func Refusef(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Class: ClassValue, Detail: fmt.Sprintf(format, args...)}
}
