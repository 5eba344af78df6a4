// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"encoding/json"
	"fmt"
	"net/http"
)

// ServeHTTP answers D as a bootstrap server does. GET /query lists the relay's own engines, one for each P engine. GET
// /kept?engine=relay-ID&transfer=T says whether the KV of transfer T is in memory, or is being loaded. GET /healthz says whether P's
// bootstrap server answers. While that server does not answer, /query repeats the last directory if KeepAcrossRestarts is set.
// ServeHTTP refuses web pages, and host names that are not the relay's.
func (r *Relay) ServeHTTP(w http.ResponseWriter, req *http.Request) { r.web.ServeHTTP(w, req) }

func (r *Relay) serveHTTP(w http.ResponseWriter, req *http.Request) {
	answer := func(status int, body []byte) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write(body) // a client that went away needs no answer
	}
	detail := func(status int, text string) {
		body, _ := json.Marshal(map[string]string{"detail": text})
		answer(status, body)
	}
	switch {
	case req.URL.Path != "/query" && req.URL.Path != "/kept" && req.URL.Path != "/healthz" && req.URL.Path != "/healthcheck":
		detail(http.StatusNotFound, "Not Found")
	case req.Method != http.MethodGet:
		w.Header().Set("Allow", "GET")
		detail(http.StatusMethodNotAllowed, "Method Not Allowed")
	case req.URL.Path == "/kept":
		q := req.URL.Query()
		answer(http.StatusOK, fmt.Appendf(nil, `{"kept":%t}`, r.hasTransfer(q.Get("engine"), q.Get("transfer"))))
	default:
		text, err := r.directory(req.Context())
		if err != nil && req.URL.Path == "/query" && r.o.KeepAcrossRestarts {
			text, err = r.lastDirectory(err)
		}
		switch {
		case err != nil:
			detail(http.StatusServiceUnavailable, err.Error())
		case req.URL.Path == "/query":
			answer(http.StatusOK, text)
		default:
			answer(http.StatusOK, []byte(`{"status":"ok"}`))
		}
	}
}
