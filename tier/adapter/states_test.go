// SPDX-License-Identifier: Apache-2.0

package adapter_test

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv"
	"github.com/kvasir-kv/kvasir/mooncake/store/storetest"
	"github.com/kvasir-kv/kvasir/tier"
	"github.com/kvasir-kv/kvasir/tier/adapter"
	"github.com/kvasir-kv/kvasir/tier/disk"
	"github.com/kvasir-kv/kvasir/tier/tiertest"
)

// stateTier is one tier as a server has it, and its log.
type stateTier struct {
	t     *testing.T
	set   adapter.Set
	names *tier.Names
	log   lockedLog
}

// lockedLog is what a tier logs, also in the background.
type lockedLog struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lockedLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lockedLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// openState opens a tier: the JSON of an adapter, or with an empty text the disk of d.
func openState(t *testing.T, text string, d disk.Options) *stateTier {
	t.Helper()
	x := &stateTier{t: t, names: tier.NewNames()}
	o := adapter.Options{Names: x.names, Log: slog.New(slog.NewTextHandler(&x.log, nil)), Disk: d}
	if text != "" {
		a, err := adapter.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		o.Adapters = []adapter.Adapter{a}
	}
	var err error
	if x.set, err = adapter.Open(o); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = x.set.Tier.Close() })
	x.names.Add(tiertest.Key(0).Namespace, "org/model", nil)
	return x
}

// wants offers objects until the tier is in the state, and checks it.
func (x *stateTier) wants(state tier.State, err string) {
	x.t.Helper()
	one := x.set.Each[0]
	for i := 0; i < 12 && one.Condition().State != state; i++ {
		b, m := tiertest.Object(i, 5000)
		_ = one.Write(x.t.Context(), tiertest.Key(i), m, b)
	}
	x.check(state, err)
}

func (x *stateTier) check(state tier.State, text string) {
	x.t.Helper()
	one := x.set.Each[0]
	got := one.Condition()
	if got.State != state || got.Since.IsZero() || !strings.Contains(got.Err, text) {
		x.t.Errorf("%+v, want %s with %q", got, state, text)
	}
	for s, n := range one.Stats().States {
		if (n == 1) != (s == string(state)) {
			x.t.Errorf("the gauge of %s is %d, the state is %s", s, n, state)
		}
	}
	said := 0
	for line := range strings.Lines(x.log.String()) {
		if strings.Contains(line, "the state of a tier changed") && strings.Contains(line, "level=WARN") {
			said++
			if !strings.Contains(line, "tier="+one.Name()+" ") || !strings.Contains(line, "state="+string(state)+" ") {
				x.t.Errorf("the log has %s", line)
			}
		}
	}
	if said != 1 {
		x.t.Errorf("%d warnings:\n%s", said, x.log.String())
	}
}

// Each row of the table of states in docs/operate/tiers.md, made with the tier itself: its condition, its gauge and one
// warning.
func TestStatesOfTiers(t *testing.T) {
	made := map[string]bool{"disk unreachable": true} // in the tests of the disk
	row := func(name string, f func(t *testing.T)) {
		fields := strings.Fields(name)
		made[fields[0]+" "+fields[1]] = true
		t.Run(name, f)
	}

	diskOf := func(t *testing.T, o disk.Options) *stateTier {
		o.Dirs, o.FirstTouch = []disk.Dir{{Path: t.TempDir(), Bytes: 256 << 20}}, true
		x := openState(t, "", o)
		<-x.set.Disk.Opened()
		return x
	}
	row("disk full", func(t *testing.T) { diskOf(t, disk.Options{MinFree: 1 << 60}).wants(tier.Full, "no room") })
	row("disk over_budget", func(t *testing.T) {
		diskOf(t, disk.Options{MinFree: 1, WriteBudget: 1}).wants(tier.OverBudget, "budget")
	})

	for _, kind := range []string{"fs", "fs_native"} {
		text := func(t *testing.T, more string) (string, string) {
			dir := t.TempDir()
			return fmt.Sprintf(`{"type":%q,"base_path":%q%s}`, kind, dir, more), dir
		}
		row(kind+" unreachable", func(t *testing.T) {
			json, dir := text(t, "")
			x := openState(t, json, disk.Options{})
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			x.wants(tier.Unreachable, "no such file or directory")
		})
		row(kind+" full", func(t *testing.T) {
			json, _ := text(t, `,"min_free_gb":1000000`)
			openState(t, json, disk.Options{}).wants(tier.Full, "would be free")
		})
		row(kind+" full by its limit", func(t *testing.T) {
			json, _ := text(t, `,"max_capacity_gb":0.00001`)
			x := openState(t, json, disk.Options{})
			testkit.Eventually(t, "the files are counted", func() bool {
				b, m := tiertest.Object(1, 20_000)
				return !errors.Is(x.set.Each[0].Write(t.Context(), tiertest.Key(99), m, b), tier.ErrResting)
			})
			x.wants(tier.Full, "limit")
		})
		row(kind+" read_only", func(t *testing.T) {
			dir := "/sys" // a file system in which no user makes files
			if f, err := os.Create(filepath.Join(dir, "kvasir-test")); err == nil {
				f.Close()
				os.Remove(f.Name())
				t.Skip("this machine has no file system in which no user makes files: ", dir, " took one")
			}
			openState(t, fmt.Sprintf(`{"type":%q,"base_path":%q}`, kind, dir), disk.Options{}).wants(tier.ReadOnly, "")
		})
		row(kind+" nameless", func(t *testing.T) {
			json, _ := text(t, "")
			x := openState(t, json, disk.Options{})
			x.names.Add(kv.Namespace{7}, "", nil)
			x.offer(kv.Namespace{7})
			x.check(tier.Nameless, "model")
		})
	}

	for _, kind := range []string{"redis", "resp", "valkey"} {
		at := func(t *testing.T, refuses string) *stateTier {
			l := fakeRedis(t, refuses)
			return openState(t, fmt.Sprintf(`{"type":%q,"host":"127.0.0.1","port":%d}`, kind, l.Addr().(*net.TCPAddr).Port), disk.Options{})
		}
		row(kind+" full", func(t *testing.T) {
			at(t, "OOM command not allowed when used memory > 'maxmemory'.").wants(tier.Full, "OOM")
		})
		row(kind+" read_only", func(t *testing.T) {
			at(t, "READONLY You can't write against a read only replica.").wants(tier.ReadOnly, "READONLY")
		})
		row(kind+" unreachable", func(t *testing.T) {
			openState(t, fmt.Sprintf(`{"type":%q,"host":"127.0.0.1","port":%d}`, kind, testkit.FreePort(t)), disk.Options{}).wants(tier.Unreachable, "refused")
		})
		if kind != "redis" {
			row(kind+" nameless", func(t *testing.T) {
				x := at(t, "")
				x.names.Add(kv.Namespace{7}, "", nil)
				x.offer(kv.Namespace{7})
				x.check(tier.Nameless, "model")
			})
		}
	}

	for _, kind := range []string{"s3_native", "s3"} {
		at := func(t *testing.T, status int, code, more string) *stateTier {
			web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				switch {
				case r.Method == http.MethodPut && code != "":
					w.WriteHeader(status)
					fmt.Fprintf(w, "<Error><Code>%s</Code></Error>", code)
				case r.Method == http.MethodPut:
				default:
					w.WriteHeader(http.StatusNotFound)
				}
			}))
			t.Cleanup(web.Close)
			return openState(t, fmt.Sprintf(`{"type":%q,"s3_endpoint":%q,"s3_bucket":"kv","aws_access_key_id":"i","aws_secret_access_key":"s"%s}`, kind, web.URL, more), disk.Options{})
		}
		row(kind+" full", func(t *testing.T) {
			at(t, http.StatusInsufficientStorage, "XMinioStorageFull", "").wants(tier.Full, "XMinioStorageFull")
		})
		row(kind+" read_only", func(t *testing.T) {
			at(t, http.StatusForbidden, "AccessDenied", "").wants(tier.ReadOnly, "AccessDenied")
		})
		row(kind+" over_budget", func(t *testing.T) { at(t, 0, "", `,"s3_puts_per_hour":1`).wants(tier.OverBudget, "PUTs") })
		row(kind+" unreachable", func(t *testing.T) {
			text := fmt.Sprintf(`{"type":%q,"s3_endpoint":"http://127.0.0.1:%d","s3_bucket":"kv","aws_access_key_id":"i","aws_secret_access_key":"s","request_timeout":60}`, kind, testkit.FreePort(t))
			openState(t, text, disk.Options{}).wants(tier.Unreachable, "refused")
		})
		if kind == "s3" {
			row(kind+" nameless", func(t *testing.T) {
				x := at(t, 0, "", "")
				x.names.Add(kv.Namespace{7}, "", nil)
				x.offer(kv.Namespace{7})
				x.check(tier.Nameless, "model")
			})
		}
	}

	mooncake := func(t *testing.T, addr string) *stateTier {
		return openState(t, fmt.Sprintf(`{"type":"mooncake_store","master_server_addr":%q}`, addr), disk.Options{})
	}
	row("mooncake_store full", func(t *testing.T) { mooncake(t, storetest.New(t).Addr).wants(tier.Full, "") })
	row("mooncake_store unreachable", func(t *testing.T) {
		mooncake(t, "127.0.0.1:"+strconv.Itoa(testkit.FreePort(t))).wants(tier.Unreachable, "refused")
	})
	row("mooncake_store nameless", func(t *testing.T) {
		x := mooncake(t, storetest.New(t).Addr)
		x.names.Add(kv.Namespace{7}, "", nil)
		x.offer(kv.Namespace{7})
		x.check(tier.Nameless, "model")
	})
	if want := tableOfStates(t); !maps.Equal(made, want) {
		t.Errorf("made were %v, the page has %v", slices.Sorted(maps.Keys(made)), slices.Sorted(maps.Keys(want)))
	}
}

// tableOfStates returns which states each tier can have by docs/operate/tiers.md.
func tableOfStates(t *testing.T) map[string]bool {
	t.Helper()
	text, err := os.ReadFile("../../docs/operate/tiers.md")
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "\n| tier | unreachable |")
	table, _, _ = strings.Cut("| tier | unreachable |"+table, "\n\n")
	lines := strings.Split(table, "\n")
	states := strings.Split(lines[0], "|")
	out := map[string]bool{}
	for _, line := range lines[2:] {
		cells := strings.Split(line, "|")
		for i := 2; i < len(cells)-1; i++ {
			if strings.TrimSpace(cells[i]) != "–" {
				out[strings.Trim(cells[1], " `")+" "+strings.TrimSpace(states[i])] = true
			}
		}
	}
	return out
}

// offer offers an object of a namespace.
func (x *stateTier) offer(ns kv.Namespace) {
	b, m := tiertest.Object(1, 5000)
	k := tiertest.Key(1)
	k.Namespace = ns
	_ = x.set.Each[0].Write(x.t.Context(), k, m, b)
}

// fakeRedis is an empty Redis that refuses writes with an error; empty: takes them.
func fakeRedis(t *testing.T, refuses string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for in := bufio.NewReader(c); ; {
					command, err := readCommand(in)
					if err != nil {
						return
					}
					answer := "+OK\r\n"
					switch strings.ToUpper(command[0]) {
					case "SET":
						if refuses != "" {
							answer = "-" + refuses + "\r\n"
						}
					case "INFO":
						text := "used_memory:1000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n"
						answer = fmt.Sprintf("$%d\r\n%s\r\n", len(text), text)
					case "GETRANGE":
						answer = "$0\r\n\r\n"
					case "GET":
						answer = "$-1\r\n"
					case "STRLEN", "EXISTS", "DBSIZE", "UNLINK":
						answer = ":0\r\n"
					}
					if _, err := io.WriteString(c, answer); err != nil {
						return
					}
				}
			}()
		}
	}()
	return l
}

// readCommand reads one command of a client.
func readCommand(in *bufio.Reader) (command []string, err error) {
	number := func() (int, error) {
		line, err := in.ReadString('\n')
		if err != nil {
			return 0, err
		}
		return strconv.Atoi(strings.TrimSpace(line[1:]))
	}
	n, err := number()
	for ; n > 0 && err == nil; n-- {
		var size int
		if size, err = number(); err != nil {
			return nil, err
		}
		b := make([]byte, size+2)
		if _, err = io.ReadFull(in, b); err == nil {
			command = append(command, string(b[:size]))
		}
	}
	return command, err
}
