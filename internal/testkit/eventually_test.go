// SPDX-License-Identifier: Apache-2.0

package testkit

import (
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

// failing is a testing.TB that notes how it failed.
type failing struct {
	testing.TB
	text string
}

func (f *failing) Helper() {}

func (f *failing) Fatalf(format string, args ...any) {
	f.text = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// Eventually returns as soon as the condition holds, and fails with its name after two minutes.
func TestEventually(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := func(holdsAfter, wantTime time.Duration, wantText string) {
			t.Helper()
			began, returned := time.Now(), false
			tb := &failing{}
			done := make(chan struct{})
			go func() {
				defer close(done)
				Eventually(tb, "the server is up", func() bool { return time.Since(began) >= holdsAfter })
				returned = true
			}()
			<-done
			if took := time.Since(began); took < wantTime || took > wantTime+4*time.Millisecond || tb.text != wantText || returned != (wantText == "") {
				t.Errorf("took %v, returned %v, text %q", took, returned, tb.text)
			}
		}
		f(0, 0, "")
		f(time.Second, time.Second, "")
		f(time.Hour, 2*time.Minute, "not so within 2m0s: the server is up")
	})
}
