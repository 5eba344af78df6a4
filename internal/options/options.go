// SPDX-License-Identifier: Apache-2.0

// Package options collects all errors in the fields of an Options struct, each with the field's name, so that a command can name the
// flag. It also has helpers for values that people write: sizes, the nearest known name, errors in JSON.
package options

import (
	"errors"
	"fmt"
	"time"
)

// Error means that one field cannot be used.
type Error struct {
	Field string // of the struct
	Text  string // what is wrong, without the field
}

// Error returns the field and the text.
func (e *Error) Error() string { return e.Field + " " + e.Text }

// Checks collects Errors. The zero value is empty.
type Checks struct{ errs []error }

// That adds an Error about the field unless ok is true.
func (c *Checks) That(ok bool, field, format string, args ...any) {
	if !ok {
		c.errs = append(c.errs, &Error{field, fmt.Sprintf(format, args...)})
	}
}

// Within adds an Error unless v lies in [least, most].
func Within[T int | int64 | float64 | time.Duration](c *Checks, field string, v, least, most T) {
	c.That(v >= least && v <= most, field, "%v is outside %v to %v", v, least, most)
}

// Err returns all Errors, joined; nil if there are none.
func (c *Checks) Err() error { return errors.Join(c.errs...) }

// Each calls f with each Error in err.
func Each(err error, f func(*Error)) {
	if e, ok := err.(*Error); ok {
		f(e)
		return
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, e := range joined.Unwrap() {
			Each(e, f)
		}
	}
}
