// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvasir-kv/kvasir/internal/auth"
	"github.com/kvasir-kv/kvasir/internal/metrics"
	"github.com/kvasir-kv/kvasir/internal/takeover"
	"github.com/kvasir-kv/kvasir/lmcache"
	"github.com/kvasir-kv/kvasir/zmtp"
)

// zmqAuthFlags say how clients of the ZMQ listeners prove who they are.
type zmqAuthFlags struct {
	ZMQAuth      []string `name:"zmq-auth" sep:"none" help:"How clients of a ZMQ listener prove who they are, for zmq or events. curve: by a key of --curve-clients, and everything is encrypted; plain: by a token of --token-file, whose name is the user, in clear text. The clients of LMCache can do neither: on zmq this is for Kvasir's own. Repeatable." placeholder:"LISTENER=curve|plain" group:"Access"`
	CurveKey     string   `name:"curve-key" help:"File with this server's secret key for --zmq-auth LISTENER=curve; kvasir curve-key makes one." placeholder:"FILE" group:"Access"`
	CurveClients string   `name:"curve-clients" help:"File with NAME PUBLIC-KEY on each line: the clients that --zmq-auth LISTENER=curve lets in. Read again when it changes." placeholder:"FILE" group:"Access"`
}

// zmqListeners are the listeners that --zmq-auth can name, each with the scope that a client's token must have.
var zmqListeners = map[string]auth.Scope{"zmq": auth.Write, "events": auth.Read}

// methods returns the mechanism of each listener for which --zmq-auth names one.
func (f *zmqAuthFlags) methods() (map[string]string, error) {
	out := map[string]string{}
	for _, text := range f.ZMQAuth {
		listener, method, _ := strings.Cut(text, "=")
		_, known := zmqListeners[listener]
		if !known || method != "curve" && method != "plain" {
			return nil, usagef("--zmq-auth %.60s: it is LISTENER=curve or LISTENER=plain, for the listeners events and zmq", text)
		}
		if before := out[listener]; before != "" && before != method {
			return nil, usagef("--zmq-auth: %s has curve and plain: a listener has one", listener)
		}
		out[listener] = method
	}
	return out, nil
}

// asks reports whether a listener demands that its clients prove who they are. Invalid flags are reported elsewhere.
func (f *zmqAuthFlags) asks(listener string) bool {
	m, _ := f.methods()
	return m[listener] != ""
}

// zmqAuth holds what zmqAuthFlags name, after open has read it.
type zmqAuth struct {
	of      map[string]zmtp.Authentication
	refused map[string]*zmqRefusals // by listener
	clients *zmtp.CurveClients
	self    lmcache.ClientOptions // options with which this process connects to its own listener zmq
}

// open reads the files. tokens are those of --token-file; nil: there are none.
func (f *zmqAuthFlags) open(log *slog.Logger, tokens *auth.Tokens) (*zmqAuth, error) {
	methods, err := f.methods()
	if err != nil {
		return nil, err
	}
	a := &zmqAuth{of: map[string]zmtp.Authentication{}, refused: map[string]*zmqRefusals{}}
	var server *zmtp.CurveServer
	curve := slices.Contains(slices.Collect(maps.Values(methods)), "curve")
	switch {
	case curve && (f.CurveKey == "" || f.CurveClients == ""):
		return nil, usagef("--zmq-auth with curve needs --curve-key and --curve-clients")
	case !curve && (f.CurveKey != "" || f.CurveClients != ""):
		return nil, usagef("--curve-key and --curve-clients are of no use without --zmq-auth LISTENER=curve")
	case curve:
		if server, err = f.openCurve(a); err != nil {
			return nil, err
		}
	}
	for listener, method := range methods {
		r := &zmqRefusals{listener: listener, log: log}
		a.refused[listener] = r
		if method == "curve" {
			a.of[listener] = zmtp.Authentication{Curve: server, Refused: r.note}
			continue
		}
		if tokens == nil {
			return nil, usagef("--zmq-auth %s=plain needs --token-file", listener)
		}
		a.of[listener] = zmtp.Authentication{Plain: a.checkTokens(tokens, zmqListeners[listener]), Refused: r.note}
	}
	return a, nil
}

// zmqRefusals counts the clients of a listener that did not prove who they are. It logs at most one of them a minute.
type zmqRefusals struct {
	listener string
	log      *slog.Logger
	n        atomic.Uint64
	logged   atomic.Int64 // unix ns
}

func (r *zmqRefusals) note(from net.Addr, err error) {
	total := r.n.Add(1)
	now, last := time.Now().UnixNano(), r.logged.Load()
	if now-last >= int64(time.Minute) && r.logged.CompareAndSwap(last, now) {
		r.log.Warn("a client was refused: it did not prove who it is (--zmq-auth)", "listener", r.listener, "from", from, "err", err, "refused_in_all", total)
	}
}

// addMetrics adds the figures of the ZMQ listeners: clients refused because of their network, and because of their credentials.
func (a *zmqAuth) addMetrics(r *metrics.Registry, networks map[string]*auth.Networks) {
	for listener := range zmqListeners {
		a.addListener(r, listener, networks[listener])
	}
}

// addListener adds the figures of one ZMQ listener.
func (a *zmqAuth) addListener(r *metrics.Registry, listener string, networks *auth.Networks) {
	metrics.AddWith(r, map[string]string{"listener": listener}, func() auth.NetworkStats {
		s := networks.Stats()
		if of := a.refused[listener]; of != nil {
			s.Refused["credential"] = of.n.Load()
		}
		return s
	})
}

// selfName is the name under which a process connects to its own listener.
const selfName = "kvasir readyz"

func (f *zmqAuthFlags) openCurve(a *zmqAuth) (*zmtp.CurveServer, error) {
	secret, err := zmtp.ReadKeyFile(f.CurveKey)
	if err != nil {
		return nil, fmt.Errorf("--curve-key: %w", err)
	}
	if a.clients, err = zmtp.OpenCurveClients(f.CurveClients); err != nil {
		return nil, fmt.Errorf("--curve-clients: %w", err)
	}
	self := zmtp.NewKey()
	own := self.Public()
	a.self.Curve = &zmtp.CurveClient{Secret: self, Server: secret.Public()}
	return &zmtp.CurveServer{Secret: secret, Client: func(public zmtp.Key) (string, bool) {
		if public == own {
			return selfName, true
		}
		return a.clients.Find(public)
	}}, nil
}

// checkTokens returns a function that checks a user and a password: the password must be a token with the needed scope, and the user
// its name.
func (a *zmqAuth) checkTokens(tokens *auth.Tokens, need auth.Scope) func(user, password string) bool {
	if a.self.Plain == nil {
		a.self.Plain = &zmtp.PlainClient{User: selfName, Password: rand.Text()}
	}
	own := a.self.Plain.Password
	return func(user, password string) bool {
		if user == selfName {
			return subtle.ConstantTimeCompare([]byte(password), []byte(own)) == 1
		}
		t := tokens.Find(password, time.Now())
		return t != nil && t.Name == user && t.Scope >= need
	}
}

// ready returns the options with which this process connects to its own listener zmq.
func (a *zmqAuth) ready() (o lmcache.ClientOptions) {
	switch own := a.of["zmq"]; {
	case own.Curve != nil:
		o.Curve = a.self.Curve
	case own.Plain != nil:
		o.Plain = a.self.Plain
	}
	return o
}

// watch reads the file of clients again whenever it changes, until the caller calls stop.
func (a *zmqAuth) watch(log *slog.Logger) (stop func()) {
	if a.clients == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { a.clients.Watch(ctx, log) })
	return func() { cancel(); wg.Wait() }
}

// check returns an error if --zmq-auth or one of its files cannot be used. events is the value of --kv-events.
func (f *zmqAuthFlags) check(tokenFile, events string) error {
	var tokens *auth.Tokens
	if tokenFile != "" {
		var err error
		if tokens, err = auth.OpenTokens(tokenFile); err != nil {
			return nil // it is reported with the other flags about access
		}
	}
	_, err := f.open(slog.New(slog.DiscardHandler), tokens)
	if f.asks("events") && events == "" {
		err = errors.Join(err, usagef("--zmq-auth events=… is of no use without --kv-events"))
	}
	return err
}

// warnClearText warns about listeners beyond loopback where tokens cross the network unencrypted.
func (f *zmqAuthFlags) warnClearText(log *slog.Logger, all []exposure) {
	methods, _ := f.methods() // they were checked
	for _, x := range all {
		if methods[x.listener] == "plain" && !isLoopback(takeover.WithoutBrackets(x.host)) {
			log.Warn("tokens and everything else pass a listener in clear text: --zmq-auth LISTENER=curve encrypts", "listener", x.listener, "address", x.at)
		}
	}
}

// zmqClientFlags say how a command proves to a ZMQ server who it is.
type zmqClientFlags struct {
	CurveKey    string `name:"curve-key" help:"File with this client's secret key, for a kvasir server with --zmq-auth zmq=curve; kvasir curve-key makes one." placeholder:"FILE" group:"Access"`
	CurveServer string `name:"curve-server" help:"The server's public key, as kvasir curve-key printed it." placeholder:"KEY" group:"Access"`
	ZMQUser     string `name:"zmq-user" help:"Name of the token in KVASIR_TOKEN, for a kvasir server with --zmq-auth zmq=plain." placeholder:"NAME" group:"Access"`
}

// options returns the client options that the flags set.
func (f *zmqClientFlags) options() (o lmcache.ClientOptions, err error) {
	switch {
	case (f.CurveKey == "") != (f.CurveServer == ""):
		return o, usagef("--curve-key and --curve-server go together")
	case f.CurveKey != "" && f.ZMQUser != "":
		return o, usagef("--curve-key and --zmq-user: a client has one of them")
	case f.CurveKey != "":
		c := &zmtp.CurveClient{}
		if c.Secret, err = zmtp.ReadKeyFile(f.CurveKey); err != nil {
			return o, fmt.Errorf("--curve-key: %w", err)
		}
		if c.Server, err = zmtp.ParseKey(f.CurveServer); err != nil {
			return o, usagef("--curve-server: %v", err)
		}
		o.Curve = c
	case f.ZMQUser != "":
		token := os.Getenv("KVASIR_TOKEN")
		if token == "" {
			return o, usagef("--zmq-user needs the token in KVASIR_TOKEN")
		}
		o.Plain = &zmtp.PlainClient{User: f.ZMQUser, Password: token}
	}
	return o, nil
}

// curveKeyCmd creates a key.
type curveKeyCmd struct {
	File   string `arg:"" help:"File for the secret key; it must not be there." type:"path"`
	Name   string `help:"Also print the line NAME PUBLIC-KEY for --curve-clients." placeholder:"NAME"`
	Public bool   `help:"Make nothing: print the public key of a file that is there."`
}

// Help returns the text that kvasir curve-key --help shows. It implements kong's detailed help.
func (curveKeyCmd) Help() string {
	return `Makes a secret key of ZeroMQ's CURVE in a file that its user alone may read, and prints the public key.
The file is a certificate as pyzmq reads it (zmq.auth.load_certificate).

Examples:
  kvasir curve-key server.key                                # prints the server's public key, for its clients
  kvasir curve-key router.key --name router | tail -n 1 >> clients
  kvasir server --kv-events tcp://127.0.0.1:5557 --zmq-auth events=curve --curve-key server.key --curve-clients clients
  kvasir curve-key server.key --public`
}

// Run creates the key and prints its public key.
func (c *curveKeyCmd) Run(e *env) error {
	if strings.ContainsFunc(c.Name, func(r rune) bool { return r <= ' ' }) || strings.HasPrefix(c.Name, "#") {
		return usagef("--name is one word, which does not begin with #")
	}
	secret := newCurveKey()
	if c.Public {
		var err error
		if secret, err = zmtp.ReadKeyFile(c.File); err != nil {
			return err
		}
	} else if err := writeNew(c.File, zmtp.FormatKeyFile(secret)); err != nil {
		return err
	}
	public := secret.Public().Z85()
	if _, err := fmt.Fprintln(e.stdout, public); err != nil || c.Name == "" {
		return err
	}
	_, err := fmt.Fprintf(e.stdout, "%s %s\n", c.Name, public)
	return err
}

// newCurveKey creates a key whose public key does not begin with "-": otherwise --curve-server KEY would take it for a flag.
func newCurveKey() zmtp.Key {
	for {
		if secret := zmtp.NewKey(); !strings.HasPrefix(secret.Public().Z85(), "-") {
			return secret
		}
	}
}

// writeNew writes a file with a secret. The file must not exist.
func writeNew(path, text string) (err error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}
