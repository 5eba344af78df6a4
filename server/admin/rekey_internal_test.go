// SPDX-License-Identifier: Apache-2.0

package admin

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// deaf is a client that takes nothing: writes fail once their deadline is over.
type deaf struct {
	*httptest.ResponseRecorder
	deadline time.Time
}

func (d *deaf) SetWriteDeadline(at time.Time) error { d.deadline = at; return nil }

func (d *deaf) Write([]byte) (int, error) { return 0, errors.New("i/o timeout") }

// A client that takes nothing of the answer of a rekey has a deadline for each line, and ends the rekey; one that cannot be flushed does not.
func TestRekeyEndsForAClientThatTakesNothing(t *testing.T) {
	left := 0
	d := &deaf{ResponseRecorder: httptest.NewRecorder()}
	a := &rekeyAnswer{w: d, answer: http.NewResponseController(d), leave: func() { left++ }}
	a.writeLine(rekeyLine{Status: "running"})
	if until := time.Until(d.deadline); left != 1 || until <= 0 || until > rekeyWrite {
		t.Errorf("left %d times, the deadline is in %v", left, until)
	}
	left = 0
	plain := struct{ http.ResponseWriter }{httptest.NewRecorder()}
	a = &rekeyAnswer{w: plain, answer: http.NewResponseController(plain), leave: func() { left++ }}
	if a.writeLine(rekeyLine{Status: "running"}); left != 0 {
		t.Error("a writer that cannot be flushed ends the rekey")
	}
}
