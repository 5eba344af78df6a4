// SPDX-License-Identifier: Apache-2.0

package resp_test

import (
	"bytes"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/resp"
)

// said is a connection on which a server has sent some bytes, and then closed it. It keeps the
// bytes that are sent to the server.
type said struct {
	net.Conn
	r    io.Reader
	sent bytes.Buffer
}

func (s *said) Read(b []byte) (int, error)  { return s.r.Read(b) }
func (s *said) Write(b []byte) (int, error) { return s.sent.Write(b) }
func (s *said) SetDeadline(time.Time) error { return nil }
func (s *said) Close() error                { return nil }
func conn(text string) (*resp.Conn, *said) {
	s := &said{r: strings.NewReader(text)}
	return resp.New(s), s
}

func ask(text string) (*resp.Conn, resp.Reply, error) {
	c, _ := conn(text)
	r, err := c.Do("X")
	return c, r, err
}

// The bytes that are sent are those that the description of the protocol shows.
func TestCommands(t *testing.T) {
	c, s := conn("+OK\r\n+OK\r\n")
	c.Command("SELECT", "3")
	if err := c.OK(); err != nil {
		t.Fatal(err)
	}
	if err := c.Send([]string{"SET", "näme"}, [][]byte{[]byte("he"), []byte("ad")}, "EX", "60"); err != nil {
		t.Fatal(err)
	}
	if c.Reusable() {
		t.Error("it can be used again before the answer was read")
	}
	if err := c.OK(); err != nil || !c.Reusable() {
		t.Error(err)
	}
	if want := "*2\r\n$6\r\nSELECT\r\n$1\r\n3\r\n*5\r\n$3\r\nSET\r\n$5\r\nnäme\r\n$4\r\nhead\r\n$2\r\nEX\r\n$2\r\n60\r\n"; s.sent.String() != want {
		t.Errorf("%q", s.sent.String())
	}
}

// After Asking(true), ASKING goes before each command, because a slot is being moved to the server. The answer to ASKING
// does not count as the command's.
func TestAsking(t *testing.T) {
	c, s := conn("+OK\r\n:1\r\n+OK\r\n$2\r\nab\r\n+OK\r\n-ERR no\r\n+OK\r\n+OK\r\n:7\r\n")
	c.Asking(true)
	c.Command("STRLEN", "a")
	c.Command("GET", "b")
	if n, err := c.Int(); n != 1 || err != nil {
		t.Error(n, err)
	}
	b := make([]byte, 2)
	if n, err := c.Value(); n != 2 || err != nil || c.Fill(b) != nil || string(b) != "ab" {
		t.Errorf("%d, %v, %q", n, err, b)
	}
	if _, err := c.Do("X"); err == nil || err.Error() != "the server says: ERR no" {
		t.Error(err)
	}
	if err := c.Send([]string{"SET", "c"}, [][]byte{[]byte("v")}); err != nil || c.OK() != nil {
		t.Error(err)
	}
	c.Asking(false)
	if r, err := c.Do("DBSIZE"); r.Int != 7 || err != nil || !c.Reusable() {
		t.Errorf("%+v, %v", r, err)
	}
	if sent := s.sent.String(); strings.Count(sent, "*1\r\n$6\r\nASKING\r\n*") != 4 || !strings.HasSuffix(sent, "v\r\n*1\r\n$6\r\nDBSIZE\r\n") {
		t.Errorf("%q", sent)
	}
	c, _ = conn("-ERR This instance has cluster support disabled\r\n+OK\r\n")
	c.Asking(true)
	if _, err := c.Do("X"); !errors.Is(err, resp.ErrProtocol) || c.Reusable() {
		t.Error(err)
	}
}

func TestReplies(t *testing.T) {
	f := func(text string, kind byte, value string, n int64, items int) {
		t.Helper()
		c, r, err := ask(text)
		if err != nil || r.Kind != kind || r.Text != value || r.Int != n || len(r.List) != items || !c.Reusable() {
			t.Errorf("%q: %+v, %v", text, r, err)
		}
	}
	f("+OK\r\n", '+', "OK", 0, 0)
	f(":-12\r\n", ':', "", -12, 0)
	f("$5\r\na\r\nbc\r\n", '$', "a\r\nbc", 0, 0)
	f("$0\r\n\r\n", '$', "", 0, 0)
	f("$-1\r\n", '_', "", 0, 0)
	f("*-1\r\n", '_', "", 0, 0)
	f("*3\r\n:1\r\n*1\r\n+x\r\n$-1\r\n", '*', "", 0, 3)
}

// A refusal ends the command, and an answer outside the protocol ends the connection. Neither
// allocates memory for bytes that were only announced.
func TestBadReplies(t *testing.T) {
	c, _, err := ask("-MOVED 1 a:2\r\n")
	if e, ok := errors.AsType[*resp.Error](err); !ok || e.Code() != "MOVED" || !c.Reusable() {
		t.Errorf("refusal: %v", err)
	}
	for _, text := range []string{
		"", "+OK", "+OK\n", "\r\n", "x\r\n", ":x\r\n", ":\r\n", "$-2\r\n", "$99999999999999999999\r\n", "$9223372036854775807\r\n", "$3\r\nabcde", "$3\r\nab",
		"*-2\r\n", "*1000000000\r\n", "*9223372036854775807\r\n:1\r\n", "*2\r\n-ERR\r\n:1\r\n", strings.Repeat("*1\r\n", 100), strings.Repeat("x", 1<<20), "%1\r\n+a\r\n+b\r\n",
	} {
		c, r, err := ask(text)
		if err == nil || c.Reusable() {
			t.Errorf("%.30q: %+v", text, r)
		}
		if _, again := c.Do("X"); again == nil {
			t.Errorf("%.30q: the connection goes on", text)
		}
	}
}

// blanks is a reader of so many spaces, as a server may send them.
type blanks int64

func (b *blanks) Read(p []byte) (int, error) {
	n := min(len(p), int(*b))
	for i := range n {
		p[i] = ' '
	}
	*b -= blanks(n)
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

// The texts of a list have a common bound, not one each. So a server that sends one after the other does not fill the
// memory.
func TestTextsOfAListAreBounded(t *testing.T) {
	const texts, size = 64, 4 << 20
	parts := []io.Reader{strings.NewReader("*64\r\n")}
	for range texts {
		b := blanks(size)
		parts = append(parts, strings.NewReader("$4194304\r\n"), &b, strings.NewReader("\r\n"))
	}
	c := resp.New(&said{r: io.MultiReader(parts...)})
	if r, err := c.Do("X"); !errors.Is(err, resp.ErrProtocol) || c.Reusable() {
		total := 0
		for _, item := range r.List {
			total += len(item.Text)
		}
		t.Errorf("%d bytes were kept of one answer, %v", total, err)
	}
}

// Lists have a bound on their items and on their depth, also if a server sends on and on.
func TestListsAreBounded(t *testing.T) {
	for what, text := range map[string]string{"items": "*1000000000\r\n" + strings.Repeat(":1\r\n", 1<<18), "lists in lists": strings.Repeat("*1\r\n", 1000) + ":1\r\n"} {
		if c, _, err := ask(text); !errors.Is(err, resp.ErrProtocol) || c.Reusable() {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestValues(t *testing.T) {
	data := make([]byte, 100<<10)
	_, _ = rand.Read(data)
	c, _ := conn("$102400\r\n" + string(data) + "\r\n$-1\r\n-OOM\r\n$0\r\n\r\n")
	for range 4 {
		c.Command("GET", "x")
	}
	n, err := c.Value()
	if err != nil || n != 100<<10 {
		t.Fatal(n, err)
	}
	got := make([]byte, n)
	if err := errors.Join(c.Fill(got[:7]), c.Fill(got[7:50000])); err != nil || c.Reusable() {
		t.Error(err)
	}
	if err := c.Fill(got[50000:]); err != nil || !bytes.Equal(got, data) {
		t.Error("other bytes", err)
	}
	if _, err := c.Value(); !errors.Is(err, resp.ErrNil) {
		t.Error(err)
	}
	if _, err := c.Value(); err == nil || err.Error() != "the server says: OOM" {
		t.Error(err)
	}
	if n, err := c.Value(); n != 0 || err != nil || !c.Reusable() {
		t.Error(n, err)
	}
}

// FuzzConn reads arbitrary bytes of a server, as an answer and as a value: nothing panics, and
// the result is a part of these bytes.
func FuzzConn(f *testing.F) {
	for _, seed := range []string{"+OK\r\n:1\r\n", "$3\r\nabc\r\n", "*2\r\n$1\r\na\r\n:3\r\n", "-ERR x\r\n$-1\r\n", "*1\r\n*1\r\n*1\r\n", "$9223372036854775807\r\n"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, _ := conn(text)
		for {
			r, err := c.Do("X")
			if r.Kind == '$' && err == nil && !strings.Contains(text, r.Text) {
				t.Fatalf("%q of %q", r.Text, text)
			}
			if err != nil && !c.Reusable() {
				break
			}
			if _, ok := errors.AsType[*resp.Error](err); err != nil && !ok {
				t.Fatal(err)
			}
		}
		c, _ = conn(text)
		c.Command("GET", "x")
		n, err := c.Value()
		if err != nil || n > int64(len(text)) {
			return
		}
		b := make([]byte, n)
		if n > 0 && c.Fill(b) == nil && !strings.Contains(text, string(b)) {
			t.Fatalf("%q of %q", b, text)
		}
	})
}

// SendWhen sends a part once it is ready, with the bytes of Send. A part that never becomes ready ends the connection, since a part of the
// command was sent.
func TestPartsThatBecomeReady(t *testing.T) {
	parts := [][]byte{[]byte("he"), []byte("ad")}
	whole, w := conn("+OK\r\n")
	if err := whole.Send([]string{"SET", "a"}, parts, "NX"); err != nil {
		t.Fatal(err)
	}
	c, s := conn("+OK\r\n")
	var asked []int
	if err := c.SendWhen([]string{"SET", "a"}, parts, func(i int) error {
		asked = append(asked, i)
		if i == 1 && !strings.HasSuffix(s.sent.String(), "he") {
			t.Errorf("before the second part %q was sent", s.sent.String())
		}
		return nil
	}, "NX"); err != nil {
		t.Fatal(err)
	}
	if err := c.OK(); err != nil || !c.Reusable() || len(asked) != 2 || s.sent.String() != w.sent.String() {
		t.Errorf("%v, %v, %q, want %q", err, asked, s.sent.String(), w.sent.String())
	}
	gone := errors.New("gone")
	c, _ = conn("+OK\r\n")
	err := c.SendWhen([]string{"SET", "a"}, parts, func(i int) error {
		if i == 1 {
			return gone
		}
		return nil
	})
	if !errors.Is(err, gone) || c.Reusable() {
		t.Errorf("%v, reusable: %v", err, c.Reusable())
	}
}
