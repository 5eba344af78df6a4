// SPDX-License-Identifier: Apache-2.0

package redis

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/resp"
)

// answers is a connection over which a server sends a text.
type answers struct {
	net.Conn
	*strings.Reader
}

func (a answers) Read(b []byte) (int, error)  { return a.Reader.Read(b) }
func (a answers) Write(b []byte) (int, error) { return len(b), nil }
func (a answers) SetDeadline(time.Time) error { return nil }
func (a answers) Close() error                { return nil }

// Answers of a hostile server: invalid slots and invalid ports are an error, and its memory is never below zero.
func FuzzServerAnswers(f *testing.F) {
	f.Add("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:7000\r\n")
	f.Add("*1\r\n*3\r\n:0\r\n:99999\r\n*2\r\n$1\r\n?\r\n:70000\r\n")
	f.Add("*2\r\n" + strings.Repeat("*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:7000\r\n", 2))
	f.Add("*1\r\n*3\r\n:5\r\n:4\r\n*2\r\n$0\r\n\r\n:1\r\n")
	f.Add("$60\r\nused_memory:-5\r\nmaxmemory:9999999999999999999\r\nmaxmemory_po\r\n:3\r\n")
	f.Add("-NOPERM no\r\n:3\r\n")
	f.Fuzz(func(t *testing.T, text string) {
		conn := func() *resp.Conn { return resp.New(answers{Reader: strings.NewReader(text)}) }
		if r, err := conn().Do("CLUSTER", "SLOTS"); err == nil {
			ranges, err := parseSlots(r, "host:1")
			if err == nil && len(ranges) == 0 {
				t.Error("a cluster without slots")
			}
			total := 0
			for _, s := range ranges {
				if total += s.last - s.first + 1; total > slots {
					t.Errorf("%d slots of %d", total, slots)
				}
				if _, port, err := net.SplitHostPort(s.addr); s.first < 0 || s.last < s.first || s.last >= slots || err != nil || port == "0" {
					t.Errorf("%+v", s)
				}
			}
		}
		if u, _ := askUsage(conn()); u.used < 0 || u.limit < 0 {
			t.Errorf("%+v", u)
		}
	})
}
