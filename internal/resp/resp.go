// SPDX-License-Identifier: Apache-2.0

// Package resp implements RESP 2, the protocol of Redis and Valkey, for one connection.
//
// Values move between the caller's memory and the socket without a copy in between. A length in a server's answer is checked against a
// limit before memory is allocated for it. A reply that does not fit its command breaks the connection: nothing more is read from it.
package resp

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/kvasir-kv/kvasir/internal/rawio"
)

// Limits of a server's answers, without values. An answer beyond one of them is an ErrProtocol, and breaks the connection.
const (
	bufferBytes = 16 << 10 // buffer of a connection; no line may be longer
	maxText     = 4 << 20  // sum of the texts of an answer, in bytes
	maxItems    = 1 << 17  // items of a list, together with those of the lists in it
	maxDepth    = 8        // lists in one another
)

// ErrProtocol means that a server's answer is not RESP, or is not of the kind that the command expects.
var ErrProtocol = errors.New("resp: unexpected answer")

// ErrNil means that the server has no value for the command.
var ErrNil = errors.New("resp: the server has no value")

// Error is a server's refusal of one command. The connection can still be used.
type Error struct{ Text string }

func (e *Error) Error() string { return "the server says: " + e.Text }

// Code returns the first word of the text, such as MOVED or OOM.
func (e *Error) Code() string {
	code, _, _ := strings.Cut(e.Text, " ")
	return code
}

// Conn is one connection. Only one goroutine at a time may use it.
type Conn struct {
	nc      net.Conn
	r       *bufio.Reader
	out     []byte // commands that were not sent yet
	pending int    // commands whose replies have not been read
	inside  int64  // bytes of the current value that have not been read, with its end
	asking  bool   // send ASKING before each command
	err     error  // once set, the connection cannot be used any more
}

// New returns a Conn over nc, an open connection.
func New(nc net.Conn) *Conn { return &Conn{nc: nc, r: bufio.NewReaderSize(nc, bufferBytes)} }

// Close closes the connection.
func (c *Conn) Close() error { return c.nc.Close() }

// SetDeadline sets the time at which everything that waits for the server ends. It may be called while another goroutine waits.
func (c *Conn) SetDeadline(t time.Time) error { return c.nc.SetDeadline(t) }

// Reusable reports whether all commands have been answered and all answers read.
func (c *Conn) Reusable() bool {
	return c.err == nil && c.pending == 0 && c.inside == 0 && len(c.out) == 0 && c.r.Buffered() == 0
}

func (c *Conn) fail(err error) error {
	if c.err == nil {
		c.err = err
	}
	return c.err
}

func (c *Conn) wrong(format string, args ...any) error {
	return c.fail(fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...)))
}

// Asking sets whether, from now on, ASKING is sent before each command and its answer is read. A server of a cluster requires that of a
// client that another server has redirected to it for a slot that is moving. Call it only when no reply is pending.
func (c *Conn) Asking(on bool) { c.asking = on }

// ask adds ASKING before a command, if Asking is on.
func (c *Conn) ask() {
	if c.asking {
		c.out = appendText(appendHeader(c.out, '*', 1), "ASKING")
	}
}

// Command adds a command to those that Flush sends.
func (c *Conn) Command(args ...string) {
	c.ask()
	c.out = appendHeader(c.out, '*', int64(len(args)))
	for _, a := range args {
		c.out = appendText(c.out, a)
	}
	c.pending++
}

func appendHeader(b []byte, kind byte, n int64) []byte {
	return append(strconv.AppendInt(append(b, kind), n, 10), '\r', '\n')
}

func appendText(b []byte, s string) []byte {
	return append(append(appendHeader(b, '$', int64(len(s))), s...), '\r', '\n')
}

// Flush sends the commands that Command has added.
func (c *Conn) Flush() error {
	if c.err != nil || len(c.out) == 0 {
		return c.err
	}
	_, err := c.nc.Write(c.out)
	c.out = c.out[:0]
	if err != nil {
		return c.fail(fmt.Errorf("send: %w", err))
	}
	return nil
}

// Send sends the commands that Command has added, and then a command that has a value between its arguments `before` and `after`. The value
// is the concatenation of parts. Send does not copy parts, and does not read them after it has returned.
func (c *Conn) Send(before []string, parts [][]byte, after ...string) error {
	return c.SendWhen(before, parts, nil, after...)
}

// SendWhen does what Send does, but calls ready before it reads each part; nil means that all parts are ready. An error of ready breaks
// the connection, because a part of the command has been sent.
func (c *Conn) SendWhen(before []string, parts [][]byte, ready func(part int) error, after ...string) error {
	if c.err != nil {
		return c.err
	}
	n := int64(0)
	for _, p := range parts {
		n += int64(len(p))
	}
	c.ask()
	c.out = appendHeader(c.out, '*', int64(len(before)+1+len(after)))
	for _, a := range before {
		c.out = appendText(c.out, a)
	}
	c.out = appendHeader(c.out, '$', n)
	tail := []byte("\r\n")
	for _, a := range after {
		tail = appendText(tail, a)
	}
	c.pending++
	var buffers net.Buffers
	var err error
	if buffers = append(buffers, c.out); ready == nil {
		buffers = append(buffers, parts...)
	} else {
		for i := range parts {
			if err = ready(i); err != nil {
				break
			}
			buffers = append(buffers, parts[i])
			if _, err = rawio.WriteBuffers(c.nc, &buffers); err != nil {
				break
			}
			buffers = nil
		}
	}
	if err == nil {
		buffers = append(buffers, tail)
		_, err = rawio.WriteBuffers(c.nc, &buffers)
	}
	c.out = c.out[:0]
	if err != nil {
		return c.fail(fmt.Errorf("send: %w", err))
	}
	return nil
}

// line reads a line and returns it without its end. The result is valid until the next read.
func (c *Conn) line() ([]byte, error) {
	b, err := c.r.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull):
		return nil, c.wrong("a line of more than %d bytes", bufferBytes)
	case err != nil:
		return nil, c.fail(fmt.Errorf("receive: %w", unexpected(err)))
	case len(b) < 3 || b[len(b)-2] != '\r':
		return nil, c.wrong("the line %.20q is too short or does not end with \\r\\n", b)
	}
	return b[:len(b)-2], nil
}

// unexpected turns io.EOF into io.ErrUnexpectedEOF, because the connection must not end here.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// number returns the number after the first byte of a line. It must be at least `least`.
func (c *Conn) number(line []byte, least int64) (int64, error) {
	n, err := strconv.ParseInt(string(line[1:]), 10, 64)
	if err != nil || n < least {
		return 0, c.wrong("the line %.40q has no number, or one that is too small", line)
	}
	return n, nil
}

// begin checks that a reply may be read now, and reads the answers to ASKING that come before it.
func (c *Conn) begin() error {
	if c.err != nil {
		return c.err
	}
	if c.pending == 0 || c.inside > 0 {
		panic("BUG: resp: a reply is read without a command before it")
	}
	if err := c.Flush(); err != nil || !c.asking {
		return err
	}
	line, err := c.line()
	if err == nil && string(line) != "+OK" {
		err = c.wrong("the answer to ASKING is %.40q, not +OK", line)
	}
	return err
}

// Reply is one answer that was not read with Value.
type Reply struct {
	Kind byte // '+' and '$': Text; ':': Int; '*': List; '_': nothing
	Text string
	Int  int64
	List []Reply
}

// Reply reads the next answer. The error is an *Error, or one that breaks the connection.
func (c *Conn) Reply() (Reply, error) {
	if err := c.begin(); err != nil {
		return Reply{}, err
	}
	r, err := c.reply(0, &replyBudget{maxItems, maxText})
	if c.err == nil {
		c.pending--
	}
	return r, err
}

// replyBudget is how much a reply may still contain.
type replyBudget struct {
	items int
	text  int64 // bytes
}

// takes subtracts n bytes of text from the budget. It returns false if there is no room for them.
func (r *replyBudget) takes(n int64) bool {
	if n > r.text {
		return false
	}
	r.text -= n
	return true
}

func (c *Conn) reply(depth int, left *replyBudget) (r Reply, _ error) {
	if left.items--; left.items < 0 || depth > maxDepth {
		return r, c.wrong("a list of more than %d answers, or %d lists in one another", maxItems, maxDepth)
	}
	line, err := c.line()
	if err != nil {
		return r, err
	}
	switch r.Kind = line[0]; r.Kind {
	case '+':
		if !left.takes(int64(len(line))) {
			return r, c.wrong("texts of more than %d bytes", maxText)
		}
		r.Text = string(line[1:])
		return r, nil
	case '-':
		return r, &Error{string(line[1:])}
	case ':':
		r.Int, err = c.number(line, -1<<63)
		return r, err
	case '$':
		n, err := c.number(line, -1)
		if err != nil || n < 0 {
			r.Kind = '_'
			return r, err
		}
		if !left.takes(n) {
			return r, c.wrong("a text of %d bytes, where the texts of an answer may have %d in all", n, maxText)
		}
		return c.text(r, n)
	case '*':
		n, err := c.number(line, -1)
		if err != nil || n < 0 {
			r.Kind = '_'
			return r, err
		}
		for range n {
			item, err := c.reply(depth+1, left)
			if c.err != nil {
				return r, c.err
			}
			if err != nil { // a refusal inside a list
				return r, c.wrong("a list with an error: %v", err)
			}
			r.List = append(r.List, item)
		}
		return r, nil
	}
	return r, c.wrong("%.20q", line)
}

func (c *Conn) text(r Reply, n int64) (Reply, error) {
	var b strings.Builder
	if _, err := io.CopyN(&b, c.r, n); err != nil {
		return r, c.fail(fmt.Errorf("receive: %w", unexpected(err)))
	}
	r.Text = b.String()
	return r, c.end()
}

// end reads the end mark of a value.
func (c *Conn) end() error {
	var b [2]byte
	if _, err := io.ReadFull(c.r, b[:]); err != nil {
		return c.fail(fmt.Errorf("receive: %w", unexpected(err)))
	}
	if string(b[:]) != "\r\n" {
		return c.wrong("a value ends with %q instead of \\r\\n", b)
	}
	return nil
}

// OK reads an answer that must mean success. ErrNil means that a condition of the command was not met.
func (c *Conn) OK() error {
	switch r, err := c.Reply(); {
	case err != nil:
		return err
	case r.Kind == '_':
		return ErrNil
	case r.Kind != '+' || r.Text != "OK":
		return c.wrong("%c%.20q instead of OK", r.Kind, r.Text)
	}
	return nil
}

// Int reads an answer that must be a number of at least 0.
func (c *Conn) Int() (int64, error) {
	r, err := c.Reply()
	switch {
	case err != nil:
		return 0, err
	case r.Kind != ':' || r.Int < 0:
		return 0, c.wrong("%c%.20q %d instead of a number", r.Kind, r.Text, r.Int)
	}
	return r.Int, nil
}

// Value reads the length, in bytes, of the value that comes next. The caller must then read the whole value with Fill or Read, or close
// the connection. The error is ErrNil, an *Error, or one that breaks the connection.
func (c *Conn) Value() (int64, error) {
	if err := c.begin(); err != nil {
		return 0, err
	}
	line, err := c.line()
	if err != nil {
		return 0, err
	}
	switch line[0] {
	case '-':
		c.pending--
		return 0, &Error{string(line[1:])}
	case '$':
		n, err := c.number(line, -1)
		if err != nil {
			return 0, err
		}
		if n > 1<<62 {
			return 0, c.wrong("a value of %d bytes is impossible", n)
		}
		c.pending--
		if n < 0 {
			return 0, ErrNil
		}
		c.inside = n + 2
		if n == 0 {
			return 0, c.finish()
		}
		return n, nil
	}
	return 0, c.wrong("%.20q instead of a value", line)
}

// Read reads the next bytes of a value. After the last byte it returns io.EOF.
func (c *Conn) Read(p []byte) (int, error) {
	if c.err != nil {
		return 0, c.err
	}
	if c.inside == 0 {
		return 0, io.EOF
	}
	n, err := c.r.Read(p[:min(int64(len(p)), c.inside-2)])
	c.inside -= int64(n)
	switch {
	case err != nil:
		return n, c.fail(fmt.Errorf("receive: %w", unexpected(err)))
	case c.inside == 2:
		return n, c.finish()
	}
	return n, nil
}

// Fill fills dst with the next bytes of a value. It does not write to dst after it has returned.
func (c *Conn) Fill(dst []byte) error {
	if c.err == nil && int64(len(dst))+2 > c.inside {
		panic("BUG: resp: more is read than the value has")
	}
	_, err := io.ReadFull(c, dst)
	return err
}

func (c *Conn) finish() error {
	err := c.end()
	if err == nil {
		c.inside = 0
	}
	return err
}

// Do sends a command and reads its answer.
func (c *Conn) Do(args ...string) (Reply, error) {
	c.Command(args...)
	return c.Reply()
}
