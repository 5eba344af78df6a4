// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/kv/event"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// fsTier is a directory as vLLM's fs tier fills it.
type fsTier struct {
	t    *testing.T
	root string
}

func newFSTier(t *testing.T) *fsTier {
	d := &fsTier{t, t.TempDir()}
	d.write("org_model_0123456789ab/config.json", `{"model_name":"org/model","blocks_per_file":4}`)
	return d
}

func (d *fsTier) write(name, text string) {
	d.t.Helper()
	path := filepath.Join(d.root, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path+".tmp", []byte(text), 0o644), os.Rename(path+".tmp", path)); err != nil {
		d.t.Fatal(err)
	}
}

// file returns the name of a row's file, and its hash.
func (d *fsTier) file(i int) (name string, hash [32]byte) {
	hash = sha256.Sum256(fmt.Append(nil, i))
	digits := hex.EncodeToString(hash[:])
	return filepath.Join("org_model_0123456789ab_r0", digits[:3], digits[3:5]+"_g2", digits+".bin"), hash
}

// eventReader collects from events without tokens which rows of a model exist, by group and hash.
type eventReader struct {
	t      *testing.T
	medium string
	live   chan []byte
	has    map[string]bool
}

func rowName(group int, hash []byte) string { return fmt.Sprintf("%d %x", group, hash) }

func readEvents(t *testing.T, endpoint, topic, medium string) *eventReader {
	t.Helper()
	r := &eventReader{t: t, medium: medium, live: make(chan []byte, 1<<12), has: map[string]bool{}}
	sub := zmtp.NewSub(endpoint, zmtp.DealerOptions{Handler: func(m zmtp.Message) {
		if string(m[0]) == topic {
			r.live <- bytes.Clone(m[2])
		}
	}})
	_ = sub.Subscribe("kv@")
	if err := sub.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Close() })
	return r
}

func (r *eventReader) take() {
	for {
		select {
		case payload := <-r.live:
			r.apply(payload)
		default:
			return
		}
	}
}

func (r *eventReader) apply(payload []byte) {
	batch, err := event.Decode(payload)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, e := range batch.Events {
		if e.Kind == event.Cleared {
			clear(r.has)
			continue
		}
		if len(e.Hashes) != 1 || e.Medium != r.medium || e.BlockTokens != 0 || len(e.Tokens) > 0 || e.Parent != nil {
			r.t.Fatalf("%+v", e)
		}
		name := rowName(e.Group, e.Hashes[0])
		if r.has[name] == (e.Kind == event.Stored) {
			r.t.Errorf("%v of %s, which was so before", e.Kind, name)
		}
		if r.has[name] = true; e.Kind == event.Removed {
			delete(r.has, name)
		}
	}
}

// A keeper publishes the rows that its directory gets and loses, in vLLM's form without tokens. Subscribers get them, and so do late ones
// through the replay socket, and those that subscribed before the keeper was killed.
func TestKeeperPublishesItsFiles(t *testing.T) {
	d, sockets := newFSTier(t), t.TempDir()
	endpoint, replay := "ipc://"+sockets+"/events", "ipc://"+sockets+"/replay"
	port := testkit.FreePort(t)
	start := func(more ...string) *exec.Cmd {
		t.Helper()
		c := command(append([]string{
			"keeper", d.root, "--ttl", "1h", "--http-port", fmt.Sprint(port), "--kv-events", endpoint, "--kv-events-replay", replay,
			"--kv-events-topic", "kv@here@{model}",
		}, more...)...)
		stderr, err := c.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		said := make(chan string, 1)
		t.Cleanup(func() {
			if c.ProcessState == nil {
				if t.Failed() {
					t.Log(figures(port))
				}
				_ = c.Process.Kill()
				_ = c.Wait()
			}
			if t.Failed() {
				t.Logf("%v: %s", c.ProcessState, <-said)
			}
		})
		lines := bufio.NewScanner(stderr)
		for lines.Scan() && !strings.Contains(lines.Text(), "the keeper watches") {
		}
		go func() {
			var all strings.Builder
			for lines.Scan() {
				all.WriteString(lines.Text() + "\n")
			}
			said <- all.String()
		}()
		return c
	}
	put := func(i int) { name, _ := d.file(i); d.write(name, "row") }
	drop := func(i int) {
		name, _ := d.file(i)
		if err := os.Remove(filepath.Join(d.root, name)); err != nil {
			t.Fatal(err)
		}
	}
	knows := func(r *eventReader, bytes int, rows ...int) {
		t.Helper()
		want := map[string]bool{}
		for _, i := range rows {
			_, hash := d.file(i)
			want[rowName(2, hash[32-bytes:])] = true
		}
		testkit.Eventually(t, fmt.Sprintf("the reader knows %v", rows), func() bool { r.take(); return maps.Equal(r.has, want) })
	}
	const topic = "kv@here@org/model"

	put(1)
	k := start()
	first := readEvents(t, endpoint, topic, event.Storage)
	knows(first, 8, 1)
	put(2)
	put(3)
	knows(first, 8, 1, 2, 3)
	drop(1)
	knows(first, 8, 2, 3)
	late := readEvents(t, endpoint, topic, event.Storage)
	knows(late, 8, 2, 3)
	missed := &eventReader{t: t, medium: event.Storage, has: map[string]bool{}}
	for _, m := range replayed(t, replay) {
		if string(m[1]) == topic {
			missed.apply(m[3])
		}
	}
	if !maps.Equal(missed.has, late.has) {
		t.Errorf("the replay socket tells of %d rows", len(missed.has))
	}
	_, page := fetch(t, fmt.Sprintf("http://127.0.0.1:%d/metrics", port))
	for _, figure := range []string{"kvasir_kv_event_subscribers 2", "kvasir_keeper_unannounced_total 0"} {
		if !strings.Contains(page, figure) {
			t.Errorf("no %s", figure)
		}
	}

	_ = k.Process.Kill()
	_ = k.Wait()
	drop(2)
	put(4)
	start("--kv-events-hashes", "bytes")
	knows(first, 32, 3, 4)
	knows(late, 32, 3, 4)
	drop(3)
	drop(4)
	knows(late, 32)
}

// figures returns the page of a keeper, or why there is none.
func figures(port int) string {
	client := http.Client{Timeout: 10 * time.Second}
	res, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", port))
	if err != nil {
		return err.Error()
	}
	defer res.Body.Close()
	page, err := io.ReadAll(res.Body)
	if err != nil {
		return err.Error()
	}
	return string(page)
}

// replayed asks a replay socket for all messages.
func replayed(t *testing.T, endpoint string) (out []zmtp.Message) {
	t.Helper()
	answers, up := make(chan zmtp.Message, 1<<12), make(chan struct{}, 16)
	dealer := zmtp.NewDealer(endpoint, zmtp.DealerOptions{
		Handler: func(m zmtp.Message) {
			var own zmtp.Message
			for _, f := range m {
				own = append(own, bytes.Clone(f))
			}
			answers <- own
		},
		OnState: func(is bool, _ error) {
			if is {
				up <- struct{}{}
			}
		},
	})
	if err := dealer.Start(); err != nil {
		t.Fatal(err)
	}
	defer dealer.Close()
	<-up
	if err := dealer.Send(nil, make([]byte, 8)); err != nil {
		t.Fatal(err)
	}
	for {
		select {
		case m := <-answers:
			if len(m) != 4 || bytes.Equal(m[2], bytes.Repeat([]byte{0xff}, 8)) {
				return out
			}
			out = append(out, m)
		case <-time.After(60 * time.Second):
			t.Fatal("the replay has no end")
		}
	}
}

// Flags that exclude each other are refused in one line, and so is a port without access control.
func TestKeeperEventFlags(t *testing.T) {
	d, tokens := newFSTier(t), filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, fmt.Appendf(nil, "a %x read\n", sha256.Sum256(nil)), 0o600); err != nil {
		t.Fatal(err)
	}
	f := func(want string, args ...string) {
		t.Helper()
		if code, _, errs := run(t, append([]string{"keeper", d.root, "--ttl", "1h"}, args...)...); code == 0 || !strings.Contains(errs, want) {
			t.Errorf("%v: exit %d, %s", args, code, errs)
		}
	}
	f("--kv-events-replay is of no use without --kv-events", "--kv-events-replay", "tcp://127.0.0.1:5558")
	f("the listener events (--kv-events tcp://0.0.0.0:5557) would let everyone who reaches it read which blocks the directories have", "--kv-events", "tcp://0.0.0.0:5557")
	f("--kv-events", "--kv-events", "here")
	f("--zmq-auth events=… is of no use without --kv-events", "--zmq-auth", "events=plain", "--token-file", tokens)
	f("the one ZMQ listener of a keeper is events", "--zmq-auth", "zmq=plain", "--token-file", tokens)
	f("--zmq-auth events=plain needs --token-file", "--kv-events", "tcp://127.0.0.1:0", "--zmq-auth", "events=plain")
}
