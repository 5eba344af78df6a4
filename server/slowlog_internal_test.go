// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

type name string

func (n name) String() string { return string(n) }

// The slowest requests are remembered, in bounded memory, and forgotten when they are old.
func TestSlowLog(t *testing.T) {
	synctest.Test(t, testSlowLog)
}

func testSlowLog(t *testing.T) {
	const n = maxSlowRequests
	l, now := newSlowLog(time.Millisecond), time.Now()
	add := func(id string, took time.Duration) {
		l.Note(name("lookup"), []byte(id), time.Now().Add(-took), time.Now())
	}
	add("fast", time.Millisecond-1)
	if got := l.Latest(now); got == nil || len(got) != 0 {
		t.Errorf("what is fast is remembered: %+v", got)
	}
	for i := range 2 * n {
		add(fmt.Sprint(i), time.Duration(1+(i*7)%(2*n))*time.Millisecond)
	}
	got := l.Latest(now)
	for i, r := range got {
		if want := (time.Duration(2*n-i) * time.Millisecond).Seconds(); r.Seconds != want || r.Operation != "lookup" || r.At != "2000-01-01T00:00:00Z" {
			t.Errorf("place %d: %+v, want %v", i, r, want)
		}
	}
	add("not slow enough", n*time.Millisecond)
	add(strings.Repeat("x", 10*maxSlowID), time.Hour)
	if got := l.Latest(now); len(got) != n || got[0].Seconds != 3600 || len(got[0].Request) != maxSlowID || got[n-1].Request == "not slow enough" {
		t.Errorf("%d are remembered: %+v", len(got), got)
	}
	time.Sleep(10*time.Minute + 1)
	now = time.Now()
	if got := l.Latest(now); len(got) != 0 {
		t.Errorf("what is old is remembered: %+v", got)
	}
	add("new", time.Millisecond)
	if got := l.Latest(now); len(got) != 1 || got[0].Request != "new" {
		t.Errorf("what is new is not: %+v", got)
	}
}
