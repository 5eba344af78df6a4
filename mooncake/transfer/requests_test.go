// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"testing"
	"time"
)

// Requests of writes and of reads count.
func TestRequestsOfWritesAndReadsCount(t *testing.T) {
	target, _ := listen(t, 1<<16, TargetOptions{})
	c := client(t, Options{})
	list := []Entry{{make([]byte, 8), testBase}, {make([]byte, 8), testBase + 4096}}
	for i, call := range []func() error{
		func() error { return c.Write(timeout(t, time.Minute), target.Name(), list) },
		func() error { return c.Read(timeout(t, time.Minute), target.Name(), list) },
	} {
		if err := call(); err != nil {
			t.Fatal(err)
		}
		if n := c.Stats().Requests; n != int64(2*(i+1)) {
			t.Errorf("%d requests after call %d of two each", n, i+1)
		}
	}
}
