// SPDX-License-Identifier: Apache-2.0

package status

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/kvasir-kv/kvasir/internal/httpserver"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// maxAnswer is how many bytes of an answer are read. A longer answer is cut, and cannot be decoded.
const maxAnswer = 64 << 20

// Asker sends requests to the HTTP interfaces of servers.
type Asker struct {
	token  string // empty: no token is sent
	client http.Client

	hourOf  string    // the server whose last hour was fetched
	askedAt time.Time // when that server was last asked for its points
}

// AccessFlags are the flags with the credentials that a server may demand of its clients.
type AccessFlags struct {
	Token string `name:"token" help:"Token of the server's --token-file; best as KVASIR_TOKEN, since other users see command lines." placeholder:"TOKEN" group:"Access"`
	CA    string `name:"tls-ca" help:"Authorities (PEM) of a server at https, instead of the system's. Also KVASIR_TLS_CA." placeholder:"FILE" group:"Access"`
	Cert  string `name:"tls-cert" help:"Certificate (PEM) to show to the server. Also KVASIR_TLS_CERT." placeholder:"FILE" group:"Access"`
	Key   string `name:"tls-key" help:"Its key (PEM). Also KVASIR_TLS_KEY." placeholder:"FILE" group:"Access"`
}

// asker returns an Asker with the token and certificate of the flags, or of the environment if a flag is not set.
func (f *AccessFlags) asker() (*Asker, error) {
	a := &Asker{token: cmp.Or(f.Token, os.Getenv("KVASIR_TOKEN"))}
	if a.token == "" {
		keys, err := admin.ReadKeys(nil, os.Getenv)
		if err != nil {
			return nil, err
		}
		if len(keys) > 0 {
			a.token = keys[0]
		}
	}
	files := httpserver.ClientFiles{
		CA: cmp.Or(f.CA, os.Getenv("KVASIR_TLS_CA")), Cert: cmp.Or(f.Cert, os.Getenv("KVASIR_TLS_CERT")), Key: cmp.Or(f.Key, os.Getenv("KVASIR_TLS_KEY")),
	}
	own, err := files.TLS()
	if err != nil {
		return nil, fmt.Errorf("--tls-ca, --tls-cert, --tls-key: %w", err)
	}
	if own != nil {
		t := http.DefaultTransport.(*http.Transport).Clone()
		t.TLSClientConfig = own
		a.client.Transport = t
	}
	a.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return a, nil
}

// get sends a GET request to the URL `at` and returns the body of the answer. The error says in one line what to check.
func (a *Asker) get(ctx context.Context, at string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return nil, err
	}
	return a.do(r)
}

// do sends a request and returns the body of the answer. If the server refuses the request, the error says why, in the server's own
// words if it gave any.
func (a *Asker) do(r *http.Request) (body []byte, err error) {
	err = a.stream(r, func(answer io.Reader) (err error) {
		body, err = io.ReadAll(io.LimitReader(answer, maxAnswer))
		return err
	})
	return body, err
}

// stream sends a request as do does, but passes the body of the answer to the function `take`, which reads it as it comes.
func (a *Asker) stream(r *http.Request, take func(io.Reader) error) error {
	at := r.URL.String()
	if a.token != "" {
		r.Header.Set("Authorization", "Bearer "+a.token)
	}
	answer, err := a.client.Do(r)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("nothing listens at %s: is the server running, and is that its --http-port? kvasir pool ls shows who serves a pool", at)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("%s does not answer in time: see the server's log", at)
	case err != nil:
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode == http.StatusOK {
		return take(answer.Body)
	}
	body, err := io.ReadAll(io.LimitReader(answer.Body, maxAnswer))
	switch {
	case err != nil:
		return err
	case answer.StatusCode == http.StatusUnauthorized:
		return fmt.Errorf("%s: the server asks for a token: set KVASIR_TOKEN (kvasir token makes one), or LMCACHE_API_KEY for an API key; or it does not take requests from this address (--allow-from)", at)
	case answer.StatusCode == http.StatusForbidden && detailOf(body) != "": // the token lacks the right for this request
		return fmt.Errorf("%s: %s", at, printable(detailOf(body)))
	case answer.StatusCode == http.StatusForbidden:
		return fmt.Errorf("%s: the server does not know this name of its machine: use its address, or start it with --allow-host", at)
	}
	var refusal struct{ Error string }
	if json.Unmarshal(body, &refusal) == nil && refusal.Error != "" {
		return errors.New(printable(refusal.Error))
	}
	return fmt.Errorf("%s: %s: is that a kvasir server?", at, printable(answer.Status))
}

// detailOf returns the detail in a refusal that the server sends if the client lacks a right. It is empty for any other refusal.
func detailOf(body []byte) string {
	var refusal struct{ Detail string }
	if json.Unmarshal(body, &refusal) != nil {
		return ""
	}
	return refusal.Detail
}

// Asker returns an Asker with the token and certificate of the flags, or of the environment if a flag is not set.
func (f *AccessFlags) Asker() (*Asker, error) { return f.asker() }

// Ask sends a request and returns the body of the answer. A body that is not nil is sent as JSON.
func (a *Asker) Ask(ctx context.Context, method, url string, body any) ([]byte, error) {
	var content io.Reader
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		content = bytes.NewReader(text)
	}
	r, err := http.NewRequestWithContext(ctx, method, url, content)
	if err != nil {
		return nil, err
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	return a.do(r)
}
