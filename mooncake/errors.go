package mooncake

import "fmt"

// Code says which rule an Error comes from.
type Code uint8

// The codes of an Error. Those up to CodeEngine are refusals of the original and
// carry its message; the text of the others is ours.
const (
	CodeRole     Code = iota + 1 // the role never sends, or never receives
	CodeMissing                  // kv_transfer_params lack a key
	CodeGroups                   // another number of KV cache groups
	CodeShape                    // a pull that does not fit the requests found, or has more blocks than they
	CodeEngine                   // the transfer engine refused the batch
	CodeInvalid                  // kv_transfer_params are not usable
	CodeTransfer                 // no transfer_id
	CodeParams                   // kv_transfer_params that do not parse
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
// write errors.Is(err, mooncake.ErrRole).
func (e *Error) Is(target error) bool {
	t, ok := target.(*Error)
	return ok && t.Code == e.Code
}

// Refusals that callers may branch on; only their codes are compared.
var (
	ErrRole     = &Error{Code: CodeRole, Detail: "not in this role"}
	ErrMissing  = &Error{Code: CodeMissing, Detail: "kv_transfer_params lack a key"}
	ErrGroups   = &Error{Code: CodeGroups, Detail: "another number of KV cache groups"}
	ErrShape    = &Error{Code: CodeShape, Detail: "the pull does not fit its requests"}
	ErrEngine   = &Error{Code: CodeEngine, Detail: "the transfer engine failed"}
	ErrInvalid  = &Error{Code: CodeInvalid, Detail: "invalid kv_transfer_params"}
	ErrTransfer = &Error{Code: CodeTransfer, Detail: "no transfer_id"}
	ErrParams   = &Error{Code: CodeParams, Detail: "kv_transfer_params do not parse"}
	ErrBusy     = &Error{Code: CodeBusy, Detail: "already in transfer"}
	ErrFull     = &Error{Code: CodeFull, Detail: "too many transfers"}
	ErrUnknown  = &Error{Code: CodeUnknown, Detail: "unknown transfer"}
	ErrRange    = &Error{Code: CodeRange, Detail: "out of range"}
)

const (
	assertion    = "AssertionError"
	keyError     = "KeyError"
	runtimeError = "RuntimeError"
	valueError   = "ValueError" // also the class of refusals that are ours alone
)

// asserted is a failed assertion of the original, which has no text.
func asserted(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Class: assertion, Detail: fmt.Sprintf(format, args...)}
}

// refusef is a refusal of our own.
func refusef(c Code, format string, args ...any) *Error {
	return &Error{Code: c, Class: valueError, Detail: fmt.Sprintf(format, args...)}
}
