// SPDX-License-Identifier: Apache-2.0

package cli_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvasir-kv/kvasir/internal/testkit"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// makeKey runs kvasir curve-key, and returns the key of the file and the line for --curve-clients.
func makeKey(t *testing.T, path, name string) (secret zmtp.Key, line string) {
	t.Helper()
	out := strings.Split(must(t, "curve-key", path, "--name", name), "\n")
	secret, err := zmtp.ReadKeyFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 || out[0] != secret.Public().Z85() || out[1] != name+" "+out[0] {
		t.Fatalf("%v, %q", err, out)
	}
	return secret, out[1]
}

// Flags of --zmq-auth that exclude each other are refused, and unusable files by name. No secret is printed.
func TestZMQAuthFlags(t *testing.T) {
	dir := t.TempDir()
	key, clients, public, empty := filepath.Join(dir, "key"), filepath.Join(dir, "clients"), filepath.Join(dir, "public"), filepath.Join(dir, "empty")
	secret, line := makeKey(t, key, "ann")
	for path, text := range map[string]string{clients: "# clients\n" + line + "\n", public: zmtp.FormatKeyFile(secret), empty: ""} {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	events := []string{"--kv-events", "tcp://127.0.0.1:5557"}
	f := func(want string, args ...string) {
		t.Helper()
		code, out, errs := run(t, append(append([]string{"server"}, args...), "--check-config")...)
		if code == 0 || !strings.Contains(errs, want) || strings.Contains(out+errs, secret.Z85()) {
			t.Errorf("%v: %d, %s", args, code, errs)
		}
	}
	f("it is LISTENER=curve or LISTENER=plain", "--zmq-auth", "http=curve")
	f("it is LISTENER=curve or LISTENER=plain", "--zmq-auth", "events")
	f("events has curve and plain", "--zmq-auth", "events=curve", "--zmq-auth", "events=plain")
	f("needs --curve-key and --curve-clients", append(events, "--zmq-auth", "events=curve", "--curve-key", key)...)
	f("of no use without --zmq-auth", "--curve-key", key)
	f("of no use without --kv-events", "--zmq-auth", "events=curve", "--curve-key", key, "--curve-clients", clients)
	f("events=plain needs --token-file", append(events, "--zmq-auth", "events=plain")...)
	f("--curve-key: "+public+": every user of this machine", append(events, "--zmq-auth", "events=curve", "--curve-key", public, "--curve-clients", clients)...)
	f("--curve-key: "+clients, append(events, "--zmq-auth", "events=curve", "--curve-key", clients, "--curve-clients", clients)...)
	f("--curve-clients: "+empty, append(events, "--zmq-auth", "events=curve", "--curve-key", key, "--curve-clients", empty)...)
	f("--curve-clients: "+key+": line 2 is not NAME PUBLIC-KEY", append(events, "--zmq-auth", "events=curve", "--curve-key", key, "--curve-clients", key)...)
	f("--zmq-auth events=curve", "--kv-events", "tcp://0.0.0.0:5557") // the refusal of an open listener names it
	must(t, append(append([]string{"server"}, events...), "--zmq-auth", "events=curve", "--zmq-auth", "zmq=curve", "--curve-key", key, "--curve-clients", clients, "--check-config")...)
	must(t, "server", "--kv-events", "tcp://0.0.0.0:5557", "--zmq-auth", "events=curve", "--curve-key", key, "--curve-clients", clients, "--check-config")
	if code, _, errs := run(t, "curve-key", key); code == 0 || !strings.Contains(errs, key) {
		t.Errorf("a key file is written over: %d, %s", code, errs)
	}
	if got := strings.TrimSpace(must(t, "curve-key", key, "--public")); got != secret.Public().Z85() {
		t.Errorf("--public prints %s", got)
	}
}

// stored stores 2 chunks as an engine does, and returns an error where the server refuses this client.
func stored(t *testing.T, port int, o lmcache.ClientOptions) error {
	t.Helper()
	c, err := lmcache.OpenClient(fmt.Sprintf("127.0.0.1:%d", port), o)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = c.RegisterEngineDriven(ctx, &lmcache.EngineDriven{InstanceID: 7, Model: "m", WorldSize: 1, BlockSize: 16, Layers: 1, Hidden: 8, DType: "float16"})
	if err != nil {
		return err
	}
	k := &lmcache.Key{Model: "m", WorldSize: 1, Tokens: make([]uint32, 32), End: 32, RequestID: "r", Readers: 1}
	if p, err := c.PrepareStore(ctx, k, 7, nil); err != nil || len(p.Slots) != 2 {
		return fmt.Errorf("%d places, %w", len(p.Slots), err)
	}
	_, err = c.CommitStore(ctx, k, 7)
	return err
}

// With --zmq-auth only clients that prove their identity can store chunks and read events. The server reports ready, and a client that is
// added to the file can connect without a restart.
func TestZMQAuth(t *testing.T) {
	dir := t.TempDir()
	clients := filepath.Join(dir, "clients")
	server, _ := makeKey(t, filepath.Join(dir, "server"), "server")
	ann, line := makeKey(t, filepath.Join(dir, "ann"), "ann")
	bob, bobs := makeKey(t, filepath.Join(dir, "bob"), "bob")
	if err := os.WriteFile(clients, []byte(line+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	tokens := filepath.Join(dir, "tokens")
	writer := strings.TrimSpace(must(t, "token", "writer", "--scope", "write", "--file", tokens))
	reader := strings.TrimSpace(must(t, "token", "reader", "--file", tokens))
	as := func(secret zmtp.Key) lmcache.ClientOptions {
		return lmcache.ClientOptions{Curve: &zmtp.CurveClient{Secret: secret, Server: server.Public()}}
	}
	named := func(user, password string) lmcache.ClientOptions {
		return lmcache.ClientOptions{Plain: &zmtp.PlainClient{User: user, Password: password}}
	}
	start := func(method string) (port, web, events int) {
		t.Helper()
		port, web, events = testkit.FreePort(t), testkit.FreePort(t), testkit.FreePort(t)
		t.Cleanup(func() { must(t, "server", "--port", fmt.Sprint(port), "--drop") })
		args := []string{
			"server", "--port", fmt.Sprint(port), "--http-port", fmt.Sprint(web), "--l1-size-gb", "8MiB", "--chunk-size", "16", "--token-file", tokens,
			"--kv-events", fmt.Sprintf("tcp://127.0.0.1:%d", events), "--zmq-auth", "zmq=" + method, "--zmq-auth", "events=" + method,
		}
		if method == "curve" {
			args = append(args, "--curve-key", filepath.Join(dir, "server"), "--curve-clients", clients)
		}
		startAndLog(t, "serving HTTP", args...)
		testkit.Eventually(t, "the server is ready", func() bool {
			r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/readyz", web))
			if err != nil {
				return false
			}
			defer r.Body.Close()
			return r.StatusCode == http.StatusOK
		})
		return port, web, events
	}
	// reads reports whether a subscriber with these options gets an event.
	reads := func(events int, o lmcache.ClientOptions) bool {
		up, ended := make(chan bool, 1), make(chan bool, 1)
		signal := func(c chan bool) {
			select {
			case c <- true:
			default:
			}
		}
		s := zmtp.NewSub(fmt.Sprintf("tcp://127.0.0.1:%d", events), zmtp.DealerOptions{
			Curve: o.Curve, Plain: o.Plain, Handler: func(zmtp.Message) { signal(up) },
			OnState: func(connected bool, _ error) {
				if !connected {
					signal(ended)
				}
			},
		})
		defer s.Close()
		if err := errors.Join(s.Subscribe(""), s.Start()); err != nil {
			t.Fatal(err)
		}
		select {
		case <-up:
			return true
		case <-ended:
			return false
		}
	}
	port, _, events := start("curve")
	if err := stored(t, port, as(ann)); err != nil {
		t.Errorf("ann: %v", err)
	}
	for who, o := range map[string]lmcache.ClientOptions{"bob": as(bob), "nobody": {}, "a token": named("writer", writer)} {
		if stored(t, port, o) == nil || reads(events, o) {
			t.Errorf("%s gets in", who)
		}
	}
	if !reads(events, as(ann)) {
		t.Error("ann reads no events")
	}
	if err := os.WriteFile(clients, []byte(line+"\n"+bobs+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "bob, who was added, gets in", func() bool { return reads(events, as(bob)) })

	other := testkit.FreePort(t)
	t.Cleanup(func() { must(t, "server", "--port", fmt.Sprint(other), "--drop") })
	startAndLog(t, "in clear text", "server", "--port", fmt.Sprint(other), "--http-port", "0", "--l1-size-gb", "8MiB", "--token-file", tokens,
		"--kv-events", "tcp://0.0.0.0:0", "--zmq-auth", "events=plain")
	port, _, events = start("plain")
	if err := stored(t, port, named("writer", writer)); err != nil {
		t.Errorf("writer: %v", err)
	}
	for who, o := range map[string]lmcache.ClientOptions{"reader": named("reader", reader), "another name": named("reader", writer), "ann": as(ann), "nobody": {}} {
		if stored(t, port, o) == nil {
			t.Errorf("%s stores", who)
		}
	}
	if !reads(events, named("reader", reader)) || reads(events, named("reader", "x")) || reads(events, lmcache.ClientOptions{}) {
		t.Error("events are read by a token of scope read alone")
	}
}

// A simulated engine proves its identity to a server and registers there. Flags that exclude each other are refused.
func TestEngineWithKey(t *testing.T) {
	dir := t.TempDir()
	clients := filepath.Join(dir, "clients")
	server, _ := makeKey(t, filepath.Join(dir, "server"), "server")
	_, line := makeKey(t, filepath.Join(dir, "ann"), "ann")
	if err := os.WriteFile(clients, []byte(line+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	port := testkit.FreePort(t)
	t.Cleanup(func() { must(t, "server", "--port", fmt.Sprint(port), "--drop") })
	startAndLog(t, "serving HTTP", "server", "--port", fmt.Sprint(port), "--http-port", "0", "--l1-size-gb", "64MiB", "--chunk-size", "16",
		"--zmq-auth", "zmq=curve", "--curve-key", filepath.Join(dir, "server"), "--curve-clients", clients)
	config := fmt.Sprintf(`{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":{"lmcache.mp.server_urls":"tcp://127.0.0.1:%d"}}`, port)
	for _, args := range [][]string{{"--curve-key", filepath.Join(dir, "ann")}, {"--curve-server", server.Public().Z85()}, {"--curve-key", filepath.Join(dir, "ann"), "--curve-server", "x"}, {"--zmq-user", "ann"}} {
		if code, _, errs := run(t, append([]string{"engine", "--port", "0", "--kv-transfer-config", config}, args...)...); code == 0 || !strings.Contains(errs, "--curve") && !strings.Contains(errs, "KVASIR_TOKEN") {
			t.Errorf("%v: %d, %s", args, code, errs)
		}
	}
	startAndLog(t, "the engine serves", "engine", "--port", "0", "--kv-transfer-config", config, "--curve-key", filepath.Join(dir, "ann"), "--curve-server", server.Public().Z85())
}
