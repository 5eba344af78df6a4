// SPDX-License-Identifier: Apache-2.0

package transfer

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"
	"time"
)

// A large body that comes slowly, less than the low water mark within the progress
// timeout, arrives; a small one behind it is answered at once; one that stops is cut.
func TestSlowBodyIsNotStalled(t *testing.T) {
	const wait = time.Second
	for try := 1; ; try++ {
		pause, err := sendSlowBodies(t, wait)
		if err == nil {
			return
		}
		if pause < wait/2 || try == 5 || errors.Is(err, os.ErrDeadlineExceeded) { // a late machine pauses for longer than the target allows
			t.Fatalf("with pauses of at most %v: %v", pause, err)
		}
		t.Logf("a pause of %v: %v", pause, err)
	}
}

// sendSlowBodies returns the longest pause between two of its writes, or before an answer, with what went wrong.
func sendSlowBodies(t *testing.T, wait time.Duration) (pause time.Duration, _ error) {
	const n, small = 1 << 20, 100
	target, mem := listen(t, n+small, TargetOptions{ProgressTimeout: wait})
	defer target.Close()
	c := dialData(t, target)
	defer c.Close()
	c.SetDeadline(time.Now().Add(60 * time.Second)) // a hang fails
	last := time.Now()
	moved := func() {
		now := time.Now()
		pause, last = max(pause, now.Sub(last)), now
	}
	send := func(b []byte) {
		c.Write(b) // a failure shows in the answer
		moved()
	}
	acked := func() error {
		defer moved()
		b := make([]byte, statusBytes)
		if _, err := io.ReadFull(c, b); err != nil || !bytes.Equal(b, okFrame[:]) {
			return fmt.Errorf("the answer is %x, %w", b, err)
		}
		return nil
	}
	body := pattern(n+small, 1)
	for range 2 {
		send(header{n, testBase, opWrite | opAcked}.appendTo(nil))
		at := n - lowWater
		send(body[:at])
		for begin := time.Now(); time.Since(begin) < 3*wait; time.Sleep(wait / 20) {
			send(body[at : at+1000])
			at += 1000
		}
		send(body[at:n])
		if err := acked(); err != nil {
			return pause, err
		}
		send(append(header{small, testBase + n, opWrite | opAcked}.appendTo(nil), body[n:]...))
		if err := acked(); err != nil {
			return pause, err
		}
		if !bytes.Equal(mem, body) {
			t.Fatal("other bytes arrived")
		}
		clear(mem)
	}
	send(header{n, testBase, opWrite | opAcked}.appendTo(nil))
	send(body[:n-1000])
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Fatal("an answer to half a body")
	}
	if s := target.Stats(); s.Broken != 1 {
		t.Fatalf("%+v", s)
	}
	return pause, nil
}
