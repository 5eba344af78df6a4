// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"io"
	"testing"
	"time"
)

// A large body that comes slowly, less than the low water mark within the progress
// timeout, arrives; a small one behind it is answered at once; one that stops is cut.
func TestSlowBodyIsNotStalled(t *testing.T) {
	const n, small, wait = 1 << 20, 100, time.Second
	target, mem := listen(t, n+small, TargetOptions{ProgressTimeout: wait})
	c := dialData(t, target)
	c.SetDeadline(time.Now().Add(60 * time.Second)) // a hang fails
	acked := func() {
		t.Helper()
		b := make([]byte, statusBytes)
		if _, err := io.ReadFull(c, b); err != nil || !bytes.Equal(b, okFrame[:]) {
			t.Fatal(b, err)
		}
	}
	body := pattern(n+small, 1)
	for range 2 {
		c.Write(header{n, testBase, opWrite | opAcked}.appendTo(nil))
		at := n - lowWater
		c.Write(body[:at])
		for begin := time.Now(); time.Since(begin) < 3*wait; time.Sleep(wait / 20) {
			c.Write(body[at : at+1000])
			at += 1000
		}
		c.Write(body[at:n])
		acked()
		c.Write(append(header{small, testBase + n, opWrite | opAcked}.appendTo(nil), body[n:]...))
		acked()
		if !bytes.Equal(mem, body) {
			t.Fatal("other bytes arrived")
		}
		clear(mem)
	}
	c.Write(header{n, testBase, opWrite | opAcked}.appendTo(nil))
	c.Write(body[:n-1000])
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Fatal("an answer to half a body")
	}
	if s := target.Stats(); s.Broken != 1 {
		t.Fatalf("%+v", s)
	}
}
